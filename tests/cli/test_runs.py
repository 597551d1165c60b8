"""`trainkit runs ls` says of every run below a folder what it came to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch

from tests.cli.test_checkpoint import NO_TORCH, ROOT
from tests.helpers.callbacks import FailsAt
from tests.helpers.toys import fit, make_trainer
from tests.report.logs import event, line, write_run
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation, JSONLLogger
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.listing import committed
from trainkit.cli.main import main
from trainkit.inspect.report.records import read_runs
from trainkit.inspect.report.sweep import metrics
from trainkit.metrics import FunctionMetric


def _ls(*arguments: object) -> int:
    return main(["runs", "ls", *(str(argument) for argument in arguments)])


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert _ls(*arguments, "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def _write(folder: Path, start: float, metrics: list[dict[str, float]], **more: Any) -> Path:
    """Write a run with these evaluations, each after one step, that ended well."""
    lines = [line(step, kind="eval", **values) for step, values in enumerate(metrics, 1)]
    higher = {"eval/accuracy": True, "eval/loss": False}
    evaluations = range(1, len(lines) + 1)
    events = [
        event("start", 0, {"setup": 1.0}, time=start, **more),
        *(event("evaluation", step, {}, higher_is_better=higher) for step in evaluations),
        event("end", len(lines), {"setup": 1.0, "train": 60.0}, reason="max_steps", error=None),
    ]
    return write_run(folder, lines, events)


def test_real_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    usual: dict[str, Any] = {"output_dir": folder / "x", "new_run": True, "max_epochs": 3}
    logs = [JSONLLogger(), Evaluation(["accuracy"])]
    result = fit(make_trainer(callbacks=[*logs, Checkpoint()], **usual))
    stopping = EarlyStopping("eval/loss", patience=1, mode="min", min_delta=100.0)
    fit(make_trainer(callbacks=[*logs, stopping], **usual))
    with pytest.raises(ZeroDivisionError):
        fit(
            make_trainer(
                callbacks=[JSONLLogger(), FailsAt(1, ZeroDivisionError())], output_dir=folder / "y"
            )
        )
    fit(make_trainer(callbacks=[Checkpoint()], output_dir=folder / "z"))
    capsys.readouterr()

    found = _json(capsys, folder)
    assert [(Path(run["run"]).name, run["state"], run["step"]) for run in found] == [
        *[(f"{time.strftime('%Y-%m-%d')}_1", "finished", 24)],
        *[(f"{time.strftime('%Y-%m-%d')}_2", "stopped", 16), ("y", "failed", 1)],
        ("z", "unknown", 8),
    ]
    first = found[0]
    for name, value in result.best_metrics.items():
        assert first["best"][name]["value"] == value
        assert first["best"][name]["step"] in (8, 16, 24)
    assert first["last"]["eval/loss"] == result.metrics["eval/loss"]
    assert first["best"]["eval/accuracy"]["higher_is_better"]
    assert 0 < first["seconds"] < 600
    assert abs(first["started"] - time.time()) < 600
    assert found[2]["ending"] == "ZeroDivisionError"
    assert found[3]["best"]["eval/loss"]["step"] == 8

    assert _ls(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *["RUN", "STATE", "eval/accuracy", "eval/loss", "STEP", "SECONDS", "STARTED"]
    ]
    assert "stopped: eval/loss has not improved for ... " in lines[2]
    assert "failed: ZeroDivisionError" in lines[3]
    assert all(str(folder / "x") in line for line in lines[1:3])


def test_the_best_comes_first_whichever_end_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"a": (0.5, 2.0), "b": (0.9, "NaN"), "c": (0.7, 1.0)}
    for start, (name, (accuracy, loss)) in enumerate(values.items()):
        given = {"lr": 10.0**-start, "model": {"width": 4}}
        metrics: Any = [{"eval/accuracy": accuracy, "eval/loss": loss}]
        _write(tmp_path / name, 1e9 - start, metrics, hparams=given)
    write_run(tmp_path / "d", [line(1, loss=1.0)], [event("start", 0, {}, time=2e9)])

    def order(*arguments: str) -> str:
        return "".join(run["run"][-1] for run in _json(capsys, tmp_path, *arguments))

    assert order() == "cbad"
    assert order("--reverse") == "dabc"
    assert order("--sort", "eval/accuracy") == "bcad"
    assert order("--sort", "eval/accuracy", "--reverse") == "acbd"
    assert order("--sort", "eval/loss") == "cabd"  # NaN is no best value
    assert order("--sort", "lr") == "cbad"
    _ls(tmp_path, "--sort", "eval/loss")
    lines = capsys.readouterr().out.splitlines()
    titles = ["eval/loss", "eval/accuracy", "STEP", "SECONDS", "STARTED", "lr"]
    assert lines[0].split()[2:] == titles
    assert lines[1].split()[1:6] == ["finished", "1", "0.7", "1", "1"]
    assert lines[1].split()[-1] == "0.01"


def distance(predictions: torch.Tensor, references: torch.Tensor) -> float:
    return float((predictions - references).abs().float().mean())


@pytest.mark.parametrize("has_log", [True, False])
def test_the_best_is_what_keep_best_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_log: bool
) -> None:
    best = Checkpoint(keep_best=("eval/distance", "max"), keep_last=None)
    callbacks = [Evaluation([FunctionMetric(distance), "accuracy"]), best]
    result = fit(
        make_trainer(
            callbacks=[*callbacks, *[JSONLLogger()] * has_log], output_dir=tmp_path, max_epochs=3
        )
    )
    capsys.readouterr()
    (found,) = _json(capsys, tmp_path)
    seen = [entry.manifest.metrics["eval/distance"] for entry in committed(tmp_path / CHECKPOINTS)]
    assert min(seen) < max(seen) == found["best"]["eval/distance"]["value"]
    assert found["keep_best"] == "eval/distance"
    assert result.best_metrics["eval/distance"] == max(seen)
    _ls(tmp_path)
    assert capsys.readouterr().out.split()[2] == "eval/distance"
    if has_log:
        first = metrics(read_runs([tmp_path]))[0]
        assert (first["name"], first["is_low"]) == ("eval/distance", False)


def test_a_metric_of_unknown_worth_and_hyperparameters_named_like_columns_can_be_sorted_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start, mine in enumerate((2.0, 1.0)):
        _write(tmp_path / f"{start}", 1e9, [{"eval/mine": mine}], hparams={"step": 7 - start})
    found = _json(capsys, tmp_path, "--sort", "eval/mine")
    assert [run["last"]["eval/mine"] for run in found] == [1.0, 2.0]
    assert [run["hparams"]["step"] for run in found] == [6, 7]
    _ls(tmp_path, "--sort", "eval/mine")
    lines = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert lines[0][2:4] == ["eval/mine", "STEP"]
    assert lines[0][-1] == "hparams.step"
    assert [row[2] for row in lines[1:]] == ["1", "2"]
    assert [row[-1] for row in lines[1:]] == ["6", "7"]


def test_a_name_that_no_run_has_is_told_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "a", 1e9, [{"eval/accuracy": 1.0}])
    assert _ls(tmp_path, "--sort", "acuracy") == 1
    assert "Did you mean `eval/accuracy`?" in capsys.readouterr().err
    assert _ls(tmp_path, "--sort", "?") == 1
    assert "There is eval/accuracy, run, state, " in capsys.readouterr().err


def test_torn_and_foreign_files_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _write(tmp_path / "a", 1e9, [{"eval/loss": 1.0}])
    events = run / "metrics.events.jsonl"
    content = events.read_text().splitlines()
    content[1] = content[1][:30]
    events.write_text("\n".join(content) + '\n{"kind": "lo')
    assert _ls(tmp_path) == 0
    told = capsys.readouterr()
    assert "finished" in told.out
    assert told.err == f"trainkit: `{events}`: line 2 was left out (no JSON).\n"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text("dear diary\n")
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    assert _ls(tmp_path) == 1
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert "left out: `" in told.err
    assert "holds no checkpoint that is complete" in told.err


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_without_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert _ls(tmp_path / name) == 1
    assert "Pass a folder in which runs have their `output_dir`" in capsys.readouterr().err


def test_only_the_own_machine_is_asked_who_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"host": gethostname(), "pid": os.getpid()}
    starts = {
        "ours": (time.time(), here, "running"),
        "reused": (time.time() - 1e6, here, "killed"),  # another process had the number then
        "other": (time.time(), here | {"host": "elsewhere"}, "running or killed"),
        "older": (time.time(), None, "running or killed"),
    }
    for name, (start, started, _) in starts.items():
        write_run(tmp_path / name, [], [event("start", 0, {}, time=start, started=started)])
    found = {Path(run["run"]).name: run["state"] for run in _json(capsys, tmp_path)}
    assert found == {name: state for name, (*_, state) in starts.items()}


HANGS = """
import sys, time
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback
from trainkit.callbacks import JSONLLogger

class Hangs(Callback):
    def on_step_end(self, run, result):
        print("began", flush=True)
        time.sleep(600)

fit(make_trainer(callbacks=[JSONLLogger(), Hangs()], output_dir=sys.argv[1]))
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_a_run_that_is_killed_was_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "began\n"
            assert _json(capsys, tmp_path)[0]["state"] == "running"
        finally:
            child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its entry is still there
        assert _json(capsys, tmp_path)[0]["state"] == "killed"
    assert _json(capsys, tmp_path)[0]["state"] == "killed"


def test_it_needs_no_torch(tmp_path: Path) -> None:
    _write(tmp_path / "a", 1e9, [{"eval/loss": 1.0}])
    command = [sys.executable, "-c", NO_TORCH, "runs", "ls", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
