"""A standard stream that nobody reads any more ends no training, and changes no exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import override

from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, Run, StepResult
from trainkit.basics import console
from trainkit.callbacks import JSONLLogger, Summary
from trainkit.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, torch
from functools import partial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Trainer
from trainkit.callbacks import JSONLLogger, ProgressBar, Summary

class Chatty(Callback):
    def on_step_end(self, run, result):
        print("x" * 5000, flush=run.state.step % 2)
        print("y" * 5000, file=sys.stderr)

class OnlyWrites:
    def write(self, text):
        raise BrokenPipeError(32, "nobody reads")

if sys.argv[2:] == ["pipe"]:
    reader, writer = os.pipe()
    sys.stdout = os.fdopen(writer, "w")
    os.close(reader)
elif sys.argv[2:] == ["object"]:
    sys.stdout = sys.stderr = OnlyWrites()

data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
callbacks = [ProgressBar(), Summary(), JSONLLogger(), Chatty()]
trainer = Trainer(max_epochs=1, callbacks=callbacks, output_dir=sys.argv[1])
sgd = partial(torch.optim.SGD, lr=0.1)
result = trainer.fit(nn.Linear(4, 1), data, optimizer=sgd, loss_fn=nn.functional.mse_loss)
if sys.argv[2:] == ["object"]:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # which Python itself would flush
print("the end, which stays in the buffer until the interpreter ends")
sys.exit(result.step - 8)
"""
# What the shell does with the two streams, and which of them the run knows to be lost.
WAYS = {
    "2>&1 | head -c 1": {"stdout", "stderr"},
    ">&- 2>&- <&-": set(),  # closed from the start: Python itself writes nothing
    "> /dev/full": {"stdout"},
    "pipe": {"stdout"},  # what the program itself put in their place
    "object": {"stdout", "stderr"},
}


class Fails(Callback):
    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        raise type("\x1b[31mred", (Exception,), {})("red")


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
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, (way, errors[-2000:])
        assert "Exception ignored" not in errors, way
        notes = errors.count("trainkit: stdout cannot be written to")
        assert notes == ("stdout" in WAYS[way] and "head" not in way), way  # where it can be read
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


def test_what_a_terminal_would_obey_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b]0;title\x07\u202eruns"
    trainer = make_trainer(callbacks=[JSONLLogger(), Summary(), Fails()], output_dir=folder)
    with pytest.raises(Exception, match="red"):
        fit(trainer)
    assert main(["runs", "ls", str(tmp_path)]) == 0
    assert main(["checkpoint", "ls", str(folder)]) == 0
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    told = "".join(capsys.readouterr())
    assert told.count(r"\x1b[31mred") == 2
    assert told.count(r"\x1b]0;title\x07\u202eruns") >= 2
    assert not {"\x1b", "\x07", "\u202e"} & {*told}
