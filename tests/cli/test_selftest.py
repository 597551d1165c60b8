"""`trainkit test` finds that all is well where it is, and says what is wrong where it is not."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.launcher import run
from tests.helpers.ranks import run_ranks
from trainkit.basics.device import accelerator_count
from trainkit.cli import gpu_page as gpu
from trainkit.cli.main import main as cli
from trainkit.testing import speed


@pytest.mark.e2e
def test_all_is_well_here(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: fp16\n")
    output = run("test", "--config_file", "job.yaml", folder=tmp_path)
    assert output.count("ok      ") == 5
    assert "fp16" in output
    assert "FAILED" not in output


def checked(rank: int, damage: str) -> tuple[int, str]:
    """Run the checks with something broken on process 1."""
    from trainkit import Communicator
    from trainkit.testing import job

    right_sum = Communicator.reduce

    def wrong_sum(self: Any, tensor: Any) -> Any:
        return right_sum(self, tensor) + 1

    right_fit = job._fit

    def drifting(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {name: weight + rank for name, weight in right_fit(*arguments, **options).items()}

    if damage == "sum" and rank == 1:
        vars_of: Any = Communicator
        vars_of.reduce = wrong_sum
    if damage == "weights":
        job._fit = drifting
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = job.check_job()
    return code, printed.getvalue()


@pytest.mark.e2e
def test_a_wrong_collective_is_named() -> None:
    (code, printed), (other, _) = run_ranks(2, checked, "sum")
    assert (code, other) == (1, 1)
    failed = printed.split("FAILED  ")[1]
    assert failed.startswith("collectives")
    assert "On process 1: These are wrong: sum on cpu." in failed.splitlines()[1]


@pytest.mark.e2e
def test_different_weights_are_named() -> None:
    (code, printed), _ = run_ranks(2, checked, "weights")
    assert code == 1
    assert "FAILED  precision" in printed
    assert "FAILED  training" in printed
    assert "ok      collectives" in printed


@pytest.mark.slow
def test_what_is_promised_of_equal_numbers_holds_here(tmp_path: Path) -> None:
    output = run("test", "--determinism", "--cpu", folder=tmp_path)
    assert "All that was tried holds." in output
    assert output.count(" ok") >= 13


def left(rank: int, folder: Path, part: str, damage: str = "") -> None:
    """Train as one process of a start does, in the second round with something else."""
    from trainkit.testing import job, task

    module: Any = job
    module._COMPILE = {"backend": "eager"}
    right, trained = task.loaders, vars(task)

    def other_data(batch_size: int, dtype: torch.dtype) -> Any:
        train, evaluation = right(batch_size, dtype)
        train.dataset.tensors[0].add_(1e-6 * rank)
        return train, evaluation

    if damage == "data of process 1":
        trained["loaders"] = other_data
    if damage == "compiler":
        module._COMPILE = {"backend": fails}
    job.leave_results(folder, part, 2)


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("there is no compiler")


def rows(folder: Path, *starts: tuple[int, str, str]) -> dict[str, tuple[str, bool | None]]:
    from trainkit.testing.job import findings

    for size, part, damage in starts:
        run_ranks(size, left, folder, part, damage)
    return {what: (text, holds) for _, what, _, text, holds in findings(folder)}


@pytest.mark.e2e
def test_trainings_agree_as_promised(tmp_path: Path) -> None:
    found = rows(tmp_path, *((size, part, "") for size in (1, 2) for part in ("first", "again")))
    assert all(holds for _, holds in found.values()), found
    assert len(found) == 15
    bits = [name for name, (text, _) in found.items() if text == "equal bits"]
    assert {"1 process: the same run twice", "2 processes, fsdp: the same run twice"} <= {*bits}
    assert found["1 and 2 processes"][0].startswith("apart by ")


@pytest.mark.e2e
def test_a_broken_promise_is_named_and_a_missing_compiler_said(tmp_path: Path) -> None:
    starts = (1, "first", "compiler"), (2, "first", ""), (2, "again", "data of process 1")
    found = rows(tmp_path, *starts)
    broken = {name for name, (_, holds) in found.items() if holds is False}
    assert broken == {
        f"2 processes, {strategy}: {what}"
        for strategy in ("ddp", "fsdp")
        for what in ("the same run twice", "a run that was stopped and resumed")
    }
    text, holds = found["1 process: compiled or not"]
    assert holds is None
    assert text.startswith("not tried: ")


@pytest.mark.skipif(accelerator_count() > 0, reason="there is an accelerator")
def test_where_there_is_no_accelerator_a_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert cli(["test", "--gpu", "--output", str(page)]) == 1
    assert "can use no accelerator of this machine" in capsys.readouterr().err
    assert not page.exists()


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = "import time; print('begun', flush=True); time.sleep(3000)"
    outcome, _ = gpu._run([sys.executable, "-c", program], 0.5)
    assert outcome == "not done after 0 s: time was up"
    outcome, output = gpu._run([sys.executable, "-c", "print(1); raise SystemExit(3)"], 600.0)
    assert (outcome, output) == ("FAILED (exit code 3)", "1\n")


def test_speed_is_told_beside_a_loop_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, small in {"_TOKENS": 4, "_BATCH": 2, "_WIDTH": 16}.items():
        monkeypatch.setattr(speed, name, small)
    speed.main((1, 2), rounds=1)
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0] for row in rows] == ["fp32", "bf16", "fp16"]
    assert all(re.search(r"ms by trainkit, ratio \d+\.\d+ \(in 1 rounds ", row) for row in rows)
