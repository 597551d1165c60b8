"""The scripts of examples/own_loop run on one process and on two, and agree."""

from pathlib import Path

import pytest
import torch

from tests.helpers.scripts import ROOT, run_forked, run_program, torchrun
from tests.helpers.tiers import with_few

SCRIPTS = ROOT / "examples" / "own_loop"


def _run(size: int, name: str, *arguments: str) -> str:
    """Run a script on some processes; return what the main one printed."""
    return run_forked(SCRIPTS / name, *arguments, size=size).output


def test_plain_ddp_and_the_accelerator_end_with_equal_weights(tmp_path: Path) -> None:
    states, printed = [], ""
    method = ["--init-method", f"file://{tmp_path}/rendezvous"]
    for name, more in (("plain_ddp.py", method), ("classification.py", [])):
        file = tmp_path / f"{name}.pt"
        printed = _run(2, name, "--save", str(file), *more)
        assert printed.startswith("weights ")
        states.append(torch.load(file, weights_only=True))
    plain, accelerated = states
    assert list(plain) == list(accelerated)
    assert all(torch.equal(plain[name], accelerated[name]) for name in plain)
    _, accuracy = printed.splitlines()
    assert accuracy.endswith("over 101 samples")
    assert float(accuracy.split()[1]) > 0.9


@pytest.mark.parametrize(("size", "precision"), [(1, "no"), (1, "fp16"), (2, "bf16")])
def test_accumulation_ends_with_every_window_applied(
    size: int, precision: str, tmp_path: Path
) -> None:
    options = ["--mixed-precision", precision, "--output-dir", str(tmp_path)]
    printed = _run(size, "accumulation.py", *options)
    steps = {1: 36, 2: 18}[size]  # 3 epochs of 48 or 24 micro-batches, in windows of 4
    assert f"after {steps} steps, 0 skipped" in printed
    assert len((tmp_path / "accumulation" / "metrics.jsonl").read_text().splitlines()) == steps
    assert list((tmp_path / "accumulation").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_a_stopped_training_ends_with_the_same_weights(size: int, tmp_path: Path) -> None:
    whole = _run(size, "resuming.py", "--output-dir", str(tmp_path / "whole"))
    stopped = str(tmp_path / "stopped")
    assert _run(size, "resuming.py", "--output-dir", stopped, "--stop-after", "17") == ""
    assert _run(size, "resuming.py", "--output-dir", stopped) == whole
    killed = tmp_path / "killed in its first save"
    (killed / "checkpoints" / "checkpoint_0" / ".tmp-0-0123456789ab").mkdir(parents=True)
    assert _run(size, "resuming.py", "--output-dir", str(killed)).endswith(whole)


@pytest.mark.e2e
def test_torchrun_starts_the_same_file() -> None:
    printed = run_program(*torchrun(2, SCRIPTS / "classification.py"))
    assert printed.count("weights ") == 1
