"""`trainkit test` finds that all is well where it is, and says what is wrong where it is not."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.launcher import run
from tests.helpers.ranks import run_ranks


@pytest.mark.e2e
def test_all_is_well_here(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: fp16\n")
    output = run("test", "--config_file", "job.yaml", folder=tmp_path)
    assert output.count("ok      ") == 5
    assert "fp16" in output
    assert "FAILED" not in output


def checked(rank: int, damage: str) -> tuple[int, str]:
    """Run the checks with something broken on process 1."""
    from trainkit import Accelerator
    from trainkit.cli import checks

    right_sum = Accelerator.reduce

    def wrong_sum(self: Any, tensor: Any) -> Any:
        return right_sum(self, tensor) + 1

    def drifting(dtype: torch.dtype, **settings: Any) -> list[torch.Tensor]:
        return [torch.full((3,), float(rank), dtype=dtype)]

    if damage == "sum" and rank == 1:
        vars_of: Any = Accelerator
        vars_of.reduce = wrong_sum
    if damage == "weights":
        checks._fit = drifting
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = checks.main()
    return code, printed.getvalue()


def test_a_wrong_collective_is_named() -> None:
    (code, printed), (other, _) = run_ranks(2, checked, "sum")
    assert (code, other) == (1, 1)
    failed = printed.split("FAILED  ")[1]
    assert failed.startswith("collectives")
    assert "On process 1: These are wrong: sum on cpu." in failed.splitlines()[1]


def test_different_weights_are_named() -> None:
    (code, printed), _ = run_ranks(2, checked, "weights")
    assert code == 1
    assert "FAILED  precision" in printed
    assert "FAILED  training" in printed
    assert "ok      collectives" in printed
