"""A standard stream that nobody reads any more ends no training, and changes no exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit import console

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys, torch
from functools import partial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Trainer
from trainkit.callbacks import JSONLLogger, ProgressBar, Summary

class Chatty(Callback):
    def on_step_end(self, run, result):
        print("x" * 5000, flush=run.state.step % 2)
        print("y" * 5000, file=sys.stderr)

data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
callbacks = [ProgressBar(), Summary(), JSONLLogger(), Chatty()]
trainer = Trainer(max_epochs=1, callbacks=callbacks, output_dir=sys.argv[1])
sgd = partial(torch.optim.SGD, lr=0.1)
result = trainer.fit(nn.Linear(4, 1), data, optimizer=sgd, loss_fn=nn.functional.mse_loss)
print("the end, which stays in the buffer until the interpreter ends")
sys.exit(result.step - 8)
"""
# What the shell does with the two streams, and which of them the run knows to be lost.
WAYS = {
    "2>&1 | head -c 1": {"stdout", "stderr"},
    ">&- 2>&- <&-": set(),  # closed from the start: Python itself writes nothing
    "> /dev/full": {"stdout"},
}


@pytest.mark.e2e
def test_a_closed_standard_stream_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = []
    for number, way in enumerate(WAYS):
        command = f"set -o pipefail; {sys.executable} train.py {number} {way}"
        started.append(
            subprocess.Popen(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for number, (way, process) in enumerate(zip(WAYS, started, strict=True)):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, (way, errors[-2000:])
        assert "Exception ignored" not in errors, way
        notes = errors.count("trainkit: stdout cannot be written to")
        assert notes == (WAYS[way] == {"stdout"}), way  # once, where there is a stderr
        lines = (tmp_path / str(number) / "metrics.events.jsonl").read_text().splitlines()
        assert set(json.loads(lines[-1])["lost"]) == WAYS[way], way


def test_a_stream_that_its_owner_closed_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    stream = os.fdopen(os.dup(1), "w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(console, "_lost", {})
        console.put("one", flush=True)
        stream.close()
        console.put("two", flush=True)
        assert list(console.lost()) == ["stdout"]
    out, errors = capfd.readouterr()
    assert out == "one\n"
    assert errors.count("stdout cannot be written to") == 1


def test_a_file_of_the_users_own_fails_as_it_did() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    file = os.fdopen(descriptor, "w")
    with pytest.raises(OSError, match="No space"):
        console.put("text", file=file, flush=True)
    with pytest.raises(OSError, match="No space"):
        file.close()


def test_what_an_encoding_lacks_is_still_an_error(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("w", encoding="ascii") as stream,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(UnicodeEncodeError):
            console.put("\u00e4")
