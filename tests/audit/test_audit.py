"""The audit is awake: what is planted is found, in whatever process it runs."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.audit import LOG
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import datetime, os, pickle, socket, subprocess
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from trainkit import Trainer
from trainkit.data.fetch import _CollatedFetch as kind

DATA = pickle.dumps(datetime.timedelta(1))  # its class has to be looked up

class Rows(Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, index: torch.ones(2)

class Acting(Trainer):
    def training_step(self, model, batch):
        self.action()
        return model(batch).sum()

def under_trainkit(action, workers=0):
    trainer = Acting(max_steps=1, callbacks=[])
    trainer.action = action
    context = "fork" if workers else None
    trainer.fit(
        torch.nn.Linear(2, 1),
        DataLoader(Rows(), 2, num_workers=workers, multiprocessing_context=context),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )

def collate_in_a_worker(*_):
    assert get_worker_info() is not None
    pickle.loads(DATA)
    return torch.ones(2, 2)
"""

PLANTED = {
    "a pickle": ("under_trainkit(lambda: pickle.loads(DATA))", "pickle.find_class"),
    "a shell": ("under_trainkit(lambda: os.system('true'))", "os.system"),
    "a process": ("under_trainkit(lambda: subprocess.run(['true']))", "subprocess.Popen"),
    "a network": (
        "under_trainkit(lambda: socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9)))",
        "socket.connect",
    ),
    "torch's own pickle": (
        "torch.save({1: datetime.timedelta(1)}, 'x.pt')\n"
        "under_trainkit(lambda: torch.load('x.pt', weights_only=False))",
        "pickle.find_class",
    ),
    "a pickle in a worker": (
        "before, kind._collated = kind._collated, collate_in_a_worker\n"
        "under_trainkit(lambda: None, workers=1)\n"
        "kind._collated = before",
        "pickle.find_class",
    ),
}

HARMLESS = {
    "a pickle of the test's own": "pickle.loads(DATA)",
    "workers that are forked": "under_trainkit(lambda: None, workers=2)",
    "a socket of this machine": """
server = socket.create_server(("127.0.0.1", 0))
under_trainkit(lambda: socket.create_connection(server.getsockname()).close())
server.close()
""",
    "an import": "under_trainkit(lambda: __import__('wave'))",
}


@pytest.mark.e2e
def test_what_is_planted_in_a_subprocess_is_found_and_nothing_else(tmp_path: Path) -> None:
    parts = [PRELUDE]
    for name, code in ({n: code for n, (code, _) in PLANTED.items()} | HARMLESS).items():
        parts += [f"os.environ[{LOG!r}] = {str(tmp_path / name)!r}", code]
    script = tmp_path / "script.py"
    script.write_text("\n".join(parts))
    # Without the folder of the hook: every subprocess of the suite gets it all the same.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True)
    for name, (_, event) in PLANTED.items():
        found = (tmp_path / name).read_text().splitlines()
        assert [x for x in found if x.startswith(event) and "under trainkit/" in x], (name, found)
    assert not [name for name in HARMLESS if (tmp_path / name).exists()]


def plant(rank: int, log: str) -> None:
    from trainkit.checkpoint.format import strict_json

    os.environ[LOG] = log
    data = pickle.dumps(Path("x"))
    if rank == 1:
        strict_json._finite = lambda text: pickle.loads(data) and 1.0
    strict_json.parse(b"[1.5]")


def test_a_pickle_that_is_planted_in_rank_1_is_found(tmp_path: Path) -> None:
    log = tmp_path / "findings"
    run_ranks(2, plant, str(log))
    lines = log.read_text().splitlines()
    assert lines
    assert all("pickle.find_class" in line for line in lines)
    assert all("under trainkit/checkpoint/format/strict_json.py" in line for line in lines)


def send(rank: int, log: str) -> tuple[Any, Any]:
    import torch.distributed

    from trainkit import Accelerator

    os.environ[LOG] = log
    accelerator = Accelerator()
    mine = accelerator.gather_object([Path("x"), Path("z")])[0]
    theirs: list[Any] = [None, None]
    torch.distributed.all_gather_object(theirs, Path("y"))  # the test's own, not trainkit's
    return mine, theirs[1]


def test_objects_that_a_user_gathers_may_be_pickled(tmp_path: Path) -> None:
    log = tmp_path / "findings"
    assert run_ranks(2, send, str(log)) == [(Path("x"), Path("y"))] * 2
    assert not log.exists()


@pytest.mark.e2e
def test_a_session_with_a_finding_fails(tmp_path: Path) -> None:
    test = tmp_path / "test_planted.py"
    test.write_text(
        "import pickle\nfrom pathlib import Path\n"
        "from trainkit.checkpoint.format import strict_json\n\n"
        "def test_planted(monkeypatch):\n    data = pickle.dumps(Path('x'))\n"
        "    monkeypatch.setattr(strict_json, '_finite', lambda t: pickle.loads(data))\n"
        "    strict_json.parse(b'[1.5]')\n"
    )
    environment = {**os.environ, LOG: str(tmp_path / "findings")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
         "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(test)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 passed" in result.stdout, result.stdout
    assert result.returncode == 1
    assert "pickle.find_class" in result.stdout
