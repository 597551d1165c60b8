"""All parts import, and models are trained and saved, where few packages are installed.

The environments are real: a Python of their own that sees nothing but links to some packages of
this one and to what those require.
"""

import os
import subprocess
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "safetensors", "tqdm")

pytestmark = pytest.mark.e2e

EVERYTHING = """
import importlib, pkgutil, sys
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit

ABSENT = ("datasets", "evaluate", "matplotlib", "numpy", "pandas", "pyarrow", "sklearn",
          "tensorboard", "transformers", "wandb", "xxhash", "yaml")
assert not [name for name in ABSENT if find_spec(name)]
modules = [each.name for each in pkgutil.walk_packages(trainkit.__path__, "trainkit.")]
for name in modules:
    if not name.endswith(("__main__", "sitecustomize")):  # which are programs
        importlib.import_module(name)
print(len(modules))

from trainkit import Accelerator, Trainer, TrainkitError, load_checkpoint_in_model, set_seed
from trainkit.callbacks import (
    EMA, Checkpoint, EarlyStopping, Evaluation, JSONLLogger, ProgressBar, TensorBoardLogger
)
from trainkit.metrics import load

set_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 2)
loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
model = nn.Linear(4, 2)
trainer = Trainer(max_steps=8, output_dir="run", callbacks=[
    Evaluation(["accuracy", "f1"], every_n_steps=4), EMA(), ProgressBar(), JSONLLogger(),
    EarlyStopping("eval/loss", patience=5, mode="min"),
])
result = trainer.fit(
    model, (loader, loader), optimizer=partial(torch.optim.AdamW, lr=0.1), lr_scheduler="cosine",
    loss_fn=nn.CrossEntropyLoss(),
)
assert result.step == 8 and {"eval/loss", "eval/accuracy", "eval/f1"} <= set(result.metrics), result
trainer.save_model("exported")
again = nn.Linear(4, 2)
load_checkpoint_in_model(again, "exported")
assert torch.equal(again.weight, model.weight)

accelerator = Accelerator()
sgd = torch.optim.SGD(again.parameters(), 0.1)
own, optimizer, batches = accelerator.prepare(again, sgd, loader)
for x, y in batches:
    accelerator.backward(nn.functional.cross_entropy(own(x), y))
    optimizer.step()
    accelerator.gather_for_metrics((own(x).argmax(-1), y))

def said(package, call, *words):
    try:
        call()
    except TrainkitError as error:
        text = str(error)
        assert f"needs the package `{package}`, which is not installed" in text, text
        assert f"Run `pip install {package}`" in text and all(word in text for word in words), text
    else:
        raise AssertionError(package)

said("evaluate", lambda: load("blue"), "There is no metric 'blue'")
said("tensorboard", TensorBoardLogger, "`TensorBoardLogger`", "or use `JSONLLogger`")
said("xxhash", Checkpoint, "`Checkpoint`")
said("xxhash", lambda: accelerator.save_state("state"))
said("pyyaml", lambda: importlib.import_module("trainkit.launch.config_file").write("c.yaml", {}))
tracked = Accelerator(log_with="tensorboard", project_dir="tracked")
said("tensorboard", lambda: tracked.init_trackers("it"), "or log with jsonl")
"""

SAVED = """
import sys
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.callbacks import Checkpoint

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 2)

def fit(folder, steps, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    trainer = Trainer(max_steps=steps, output_dir=folder, callbacks=[Checkpoint(every_n_steps=2)])
    trainer.fit(
        model, DataLoader(data, batch_size=2, shuffle=True), loss_fn=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.1), **options,
    )
    return model.state_dict()

whole = fit("whole", 8)
fit("halves", 4)
halves = fit("halves", 8, resume="must", schedule="rescale")
assert all(torch.equal(whole[name], halves[name]) for name in whole)
assert "numpy" not in sys.modules
print("equal")
"""


def _required(names: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """Yield some packages and all that they require."""
    wanted, seen = [*names], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        package = metadata.distribution(name)
        yield package
        needed = map(Requirement, package.requires or ())
        wanted += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _environment(folder: Path, *packages: str) -> Path:
    """Make an environment with trainkit and some packages; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "trainkit").symlink_to(ROOT / "trainkit")
    for package in _required(packages):
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(package.locate_file(name))))
    return folder / "bin" / "python"


def _run(python: Path, *arguments: str) -> str:
    ended = _ended(python, *arguments)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def _ended(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments],
        cwd=python.parents[2],
        env={**env, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_all_modules_and_a_training_with_torch_safetensors_and_tqdm_only(tmp_path: Path) -> None:
    (tmp_path / "everything.py").write_text(EVERYTHING, encoding="utf-8")
    output = _run(_environment(tmp_path / "bare", *PACKAGES), "everything.py")
    assert int(output.split()[0]) > 200  # modules


def test_where_torch_is_missing_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    says = "run `pip install torch safetensors tqdm typing_extensions` (of torch,"
    python = _environment(tmp_path / "bare")
    version = _run(python, "-c", "import trainkit; print(trainkit.__version__)")
    commands = (["--version"], ["env"], ["launch", "train.py"], ["test", "--gpu"])
    programs = ("from trainkit import Trainer", "from trainkit.callbacks import EMA")
    for arguments in [*(["-m", "trainkit.cli", *each] for each in commands),
                      *(["-c", program] for program in programs)]:  # fmt: skip
        ended = _ended(python, *arguments)
        assert ended.returncode == 1, ended.stdout
        last = ended.stderr.splitlines()[-1]
        assert says in last, ended.stderr
        assert "-c" in arguments or ended.stderr.count("\n") == 1, ended.stderr
    assert version.strip()


def test_a_resume_of_two_processes_needs_only_xxhash_besides(tmp_path: Path) -> None:
    (tmp_path / "saved.py").write_text(SAVED, encoding="utf-8")
    python = _environment(tmp_path / "bare", *PACKAGES, "xxhash")
    launch = ("-m", "trainkit.cli", "launch", "--num_processes", "2", "--cpu", "saved.py")
    assert "equal" in _run(python, *launch)
