"""`notebook_launcher`, in a real notebook and outside of one."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit import Accelerator, notebook_launcher
from trainkit.distributed.group import SECRET
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.errors import ConfigError, DistributedError

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
import torch
from torch import nn
model = nn.Linear(64, 64)  # and used, as notebooks do before they launch
loss = model(torch.randn(512, 64)).pow(2).mean()
loss.backward()
model.zero_grad()
"""
TRAINING = """
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Accelerator, notebook_launcher

def train(rate):
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, 2))
    for (features,) in loader:
        accelerator.backward(net(features).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    print(f"process {accelerator.process_index} of {accelerator.num_processes} has trained")
    print(f"in {accelerator.mixed_precision}, beside {model.weight.shape}")

notebook_launcher(train, (0.1,), num_processes=2, mixed_precision="bf16")
"""
FAILURE = """
def fail():
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise ValueError("the second process is unwell")
    accelerator.wait_for_everyone()

notebook_launcher(fail, num_processes=2)
"""


def _executed(cells: list[str]) -> list[list[dict[str, Any]]]:
    """Return the outputs of the cells of a notebook, run headless."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    runner = client.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
    runner.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"})
    return [[dict(output) for output in cell.outputs] for cell in notebook.cells]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries
def test_a_notebook_sees_prints_and_tracebacks() -> None:
    model, training, failure = _executed([MODEL, TRAINING, FAILURE])
    assert model == []
    texts = [output["text"] for output in training if output["output_type"] == "stream"]
    printed = "".join(texts)
    for rank in (0, 1):
        assert f"process {rank} of 2 has trained" in printed
    assert printed.count("in bf16, beside torch.Size([64, 64])") == 2
    errors = [output for output in failure if output["output_type"] == "error"]
    assert [error["ename"] for error in errors] == ["DistributedError"]
    assert "Process 1 raised" in errors[0]["evalue"]
    assert 'raise ValueError("the second process is unwell")' in errors[0]["evalue"]


def _print_place(word: str) -> None:
    assert len(os.environ[SECRET]) == 32
    print(word, os.environ["RANK"], os.environ["WORLD_SIZE"])
    print("aside", file=sys.stderr)


def test_what_processes_print_comes_out_here(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(_print_place, ("here",), num_processes=3)
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["here 0 3", "here 1 3", "here 2 3"]
    assert captured.err == "aside\n" * 3


def test_one_process_runs_here() -> None:
    seen = []
    notebook_launcher(lambda: seen.append(os.getpid()), num_processes=1)
    assert seen == [os.getpid()]
    assert "TRAINKIT_MIXED_PRECISION" not in os.environ


def _die() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_process_that_dies_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(DistributedError, match="Process 1 ended without a word, exit code -9"):
        notebook_launcher(_die, num_processes=2)
    assert time.monotonic() - began < 300


def _raise_while_others_wait() -> None:
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        raise ValueError("mine")
    accelerator.gather(torch.ones(2))


def test_the_others_hear_why_a_process_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DistributedError, match=r"Process 1 raised:[\s\S]*ValueError: mine"):
        notebook_launcher(_raise_while_others_wait, num_processes=2)
    told = capsys.readouterr().err
    assert "ValueError: mine" in told
    assert "without a word" not in told


def _raise_after_who_follows() -> None:
    if os.environ["RANK"] == "0":
        os._exit(EXIT_OTHER_FAILED)
    time.sleep(0.5)
    raise ValueError("mine")


def test_who_raised_is_named_though_another_ends_earlier() -> None:
    with pytest.raises(DistributedError, match=r"Process 1 raised:[\s\S]*ValueError: mine"):
        notebook_launcher(_raise_after_who_follows, num_processes=2)


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`mixed_precision` must be one of"):
        notebook_launcher(print, num_processes=2, mixed_precision="fp32")
    with pytest.raises(ConfigError, match="`max_restarts=3` has no effect"):
        notebook_launcher(print, num_processes=2, max_restarts=3)
    with pytest.raises(ConfigError, match="no argument `number`"):
        notebook_launcher(print, number=2)
    monkeypatch.setattr("trainkit.accelerator.launcher.forbids_fork", lambda: True)
    with pytest.raises(ConfigError, match="Restart the kernel"):
        notebook_launcher(print, num_processes=2)
