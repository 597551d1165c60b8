"""`make bench`: what it counts, and what it makes of the figures; the list of `mutants`."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import mutants
from benchmarks.compare import __main__ as command
from benchmarks.compare.meter import Meter, Mode
from benchmarks.compare.peers import raw
from benchmarks.compare.rows import Row, difference, ratios
from benchmarks.compare.table import Table
from benchmarks.compare.training import Training
from benchmarks.compare.workload import Outcome
from benchmarks.compare.workloads import WORKLOADS

TINY = Training(name="tiny", about="tiny", batch_size=1, steps=64)


def test_each_fault_of_the_mutants_fits_the_code() -> None:
    assert mutants.misfits(mutants.read()[0]) == []


@pytest.mark.e2e
def test_the_tests_that_must_notice_a_fault_are_there() -> None:
    named = sorted({test for _, tests in mutants.read()[1] for test in tests})
    assert [test for test in named if not Path(test.partition("::")[0]).exists()] == []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += [test for test in named if "::" in test]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ratios_are_paired_within_the_round() -> None:
    # The machine was three times as slow in the second round; the ratio does not see it.
    row = Row(workload="w", peer="p", seconds=[2.0, 6.0, 2.2])
    row.ratios = ratios(row.seconds, [1.0, 3.0, 1.0])
    assert row.ratios == [2.0, 2.0, 2.2]
    assert row.ratio == 2.0


def test_a_product_is_compared_as_a_share_of_the_largest_element() -> None:
    expected = torch.tensor([0.001, -4.0])
    assert difference(expected.clone(), expected) == 0
    assert difference(torch.tensor([0.001, -4.4]), expected) == pytest.approx(0.1)
    assert difference(torch.zeros(3), expected) == float("inf")
    assert not difference(torch.tensor([float("nan"), 1.0]), expected) <= 1


def test_the_table_marks_the_best_framework_and_what_is_wrong() -> None:
    def row(peer: str, ratio: float, **more: object) -> Row:
        measured = Row(workload="tiny", peer=peer, seconds=[ratio], ratios=[ratio], calls=100.0)
        for name, value in more.items():
            setattr(measured, name, value)
        return measured

    rows = [
        row("raw", 1.0),
        row("first", 1.5, difference=0.0),
        row("wrong", 2.0, difference=0.5),
        Row(workload="tiny", peer="absent", missing="not installed"),
    ]
    stream = io.StringIO()
    table = Table(stream)
    table.show(TINY, rows)
    table.close(rows)
    text = stream.getvalue()
    assert "★ first" in text
    assert "equal" in text
    assert "not installed" in text
    assert "FAIL tiny, wrong: product differs by 5.0e-01" in text
    assert [row.is_wrong for row in rows] == [False, False, True, False]


def test_names_of_workloads_are_unique() -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(set(names)) == len(names)


def test_reads_of_a_tensor_are_counted_and_those_of_indices_are_not() -> None:
    loss, index = torch.tensor(1.5), torch.tensor(2)
    with Meter("syncs") as meter:
        meter.stamp()
        values = [loss.item(), float(loss), f"{loss:.1f}", index.item(), bool(loss > 1)]
        meter.stamp()
    assert values == [1.5, 1.5, "1.5", 2, True]
    assert meter.stamps[1].syncs - meter.stamps[0].syncs == 3
    loss.item()
    assert len(meter.stamps) == 2


def test_what_is_counted_is_a_step_without_the_set_up() -> None:
    def run(mode: Mode, steps: int) -> Outcome:
        task = Training(name="counted", about="", batch_size=1, steps=steps)
        with Meter(mode) as meter:
            return task.measure(raw.training, meter)

    before = sys.getprofile()
    short, long = run("calls", 50).calls, run("calls", 100).calls
    assert short is not None
    assert long == pytest.approx(short, abs=4)  # the end of an epoch is shared out over its steps
    assert run("syncs", 50).syncs == 0
    assert sys.getprofile() is before


@pytest.mark.slow
def test_a_comparison_runs_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["compare", "--workloads", "ddp", "--peers", "trainkit", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*line, "--output", str(tmp_path)])
    assert command.main() == 0
    text = capsys.readouterr().out
    assert "★ trainkit" in text
    assert "All products are those of raw" in text
    assert (tmp_path / "compare.png").stat().st_size > 0
    results = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["results"]
    assert [row["peer"] for row in results] == ["raw", "trainkit"]
    assert results[1]["difference"] <= results[1]["bound"]
