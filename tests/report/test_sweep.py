"""Many runs on one page: what is best, what was varied, and over which axis."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report.logs import event, line, write_run
from trainkit.basics.run_files import LeftOut
from trainkit.inspect.report import RunLog, read_run, read_runs
from trainkit.inspect.report.curves import charts_of
from trainkit.inspect.report.page import make_page
from trainkit.inspect.report.sweep import axes, metrics, varied


def _runs(folder: Path, *lines: list[dict[str, Any]]) -> list[RunLog]:
    for index, each in enumerate(lines):
        write_run(folder / str(index), each)
    return read_runs([folder])


def _sweep(folder: Path, count: int, steps: int = 40) -> list[RunLog]:
    """Write runs of a search over learning rates; the best value is that of run 3."""
    for index in range(count):
        hparams = {"lr": 10.0 ** -(1 + index % 5), "net": {"depth": 2 + index % 3}, "epochs": 3}
        start = event("start", 0, {"setup": 1.0}, time=0.0, hparams=hparams, started={"pid": index})
        top = 0.9 - abs(index - 3) / 1000
        lines = [
            line(step, loss=1 / step + index, **{"eval/accuracy": top - 1 / step})
            for step in range(1, steps + 1)
        ]
        flat = [line(step, flat=0.3123 + step * 1e-9) for step in range(1, steps + 1)]
        logs = [event("log", steps, {"setup": 1.0, "train": 60.0 + index})]
        write_run(folder / f"run-{index:03}", [*lines, *flat], [start, *logs])
    return read_runs([folder])


def test_the_best_value_and_its_step_are_exact_and_skip_what_is_not_finite(tmp_path: Path) -> None:
    lines = [line(1, loss=0.51234567), line(2, loss="NaN"), line(3, loss="-Infinity")]
    lines += [line(4, loss=0.25), line(5, loss=0.25), line(6, loss=0.3)]
    (found,) = metrics(_runs(tmp_path, lines, [line(1, loss="NaN")], [line(1, **{"time/x": 1.0})]))
    assert found == {
        **{"name": "loss", "is_low": True},
        "low": [(0.25, 4), None, None],  # the first of equal ones
        "high": [(0.51234567, 1), None, None],
        "last": [(0.3, 6), ("NaN", 1), None],
    }


def test_runs_are_judged_by_an_evaluation_that_most_of_them_have(tmp_path: Path) -> None:
    common, rare = {"loss": 1.0, "eval/word_acc": 2.0}, {"loss": 1.0, "eval/rare": 3.0}
    runs = _runs(tmp_path, [line(1, **common)], [line(1, **common)], [line(1, **rare)])
    found = metrics(runs)
    assert [each["name"] for each in found] == ["eval/word_acc", "loss", "eval/rare"]
    assert [each["is_low"] for each in found] == [False, True, False]


def test_runs_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("2026-11-23_10", "2026-11-23_9", "b", "2026-11-22_11"):
        write_run(tmp_path / name, [line(1, loss=1.0)])
    names = ["2026-11-22_11", "2026-11-23_9", "2026-11-23_10", "b"]
    assert [run.name for run in read_runs([tmp_path])] == names


def test_what_is_better_is_what_the_runs_say_and_else_guessed(tmp_path: Path) -> None:
    names = ("eval/recall_error", "eval/score", "eval/mse", "eval/f1")
    said = {"eval/recall_error": True, "eval/score": False, "eval/f1": True}
    for name, known in (("a", {}), ("b", said), ("c", "torn")):
        events = [
            event("start", 0, {"setup": 1.0}, time=0.0),
            event("evaluation", 1, {"setup": 1.0}, higher_is_better=known),
        ]
        write_run(tmp_path / name, [line(1, **dict.fromkeys(names, 1.0))], events)
    found = {each["name"]: each["is_low"] for each in metrics(read_runs([tmp_path]))}
    assert found == dict(zip(names, [False, True, True, False], strict=True))


def test_nested_hyperparameters_that_differ_are_what_was_varied(tmp_path: Path) -> None:
    rows = varied(_sweep(tmp_path, 7))
    assert [row.name for row in rows] == ["lr", "net.depth"]
    assert rows[1].values == [2, 3, 4, 2, 3, 4, 2]


def test_without_hyperparameters_settings_are_what_was_varied(tmp_path: Path) -> None:
    for index in range(3):
        config = {"seed": index, "max_steps": 5, "log_every_n_steps": index}  # one repeats another
        facts = {"config": config, "optimizer": {"lr": 1.00000001 + index}}
        start = event("start", 0, {"setup": 1.0}, time=0.0, **facts, started={"pid": index})
        write_run(tmp_path / str(index), [], [start])
    runs = read_runs([tmp_path])
    assert [row.name for row in varied(runs)] == ["lr", "seed"]
    assert "pid" not in make_page(runs)
    assert ">pid<" in make_page(runs[:1])


def test_hyperparameters_of_a_loop_of_ones_own_stand_beside_its_metrics(tmp_path: Path) -> None:
    for name, text in (("a", '{"lr": 0.1, "net": {"depth": 2}}'), ("b", '{"lr": 0.2'), ("c", "[]")):
        write_run(tmp_path / name, [line(1, loss=1.0)])
        (tmp_path / name / "metrics.hparams.json").write_text(text)
    with pytest.warns(LeftOut) as told:
        rows = varied(read_runs([tmp_path]))
    assert [str(each.message).rpartition(":")[2] for each in told] == [
        " it was left out (no JSON).",
        " it was left out (no JSON object).",
    ]
    assert {row.name: row.values for row in rows} == {
        "lr": [0.1, None, None],
        "net.depth": [2, None, None],
    }


def test_a_setting_that_few_runs_have_differs(tmp_path: Path) -> None:
    for name, hparams in (("a", {"lr": 1.0, "x": None}), ("b", {"lr": True}), ("c", "no mapping")):
        events = [event("start", 0, {"setup": 1.0}, time=0.0, hparams=hparams)]
        write_run(tmp_path / name, [], events)
    rows = varied(read_runs([tmp_path]))
    assert [(row.name, row.values) for row in rows] == [
        ("lr", [1.0, "yes", None]),
        ("x", ["none", None, None]),
    ]


def test_time_goes_on_over_a_resume_and_epochs_follow_the_samples(tmp_path: Path) -> None:
    facts = {"run": {"samples per epoch": 16}}
    events = [
        event("start", 0, {"setup": 1.0}, time=0.0, **facts),
        event("log", 4, {"setup": 1.0, "train": 8.0}),
        event("log", 8, {"setup": 1.0, "train": 16.0}),  # lost
        event("start", 4, {"setup": 2.0}, time=99.0, **facts),
        event("log", 8, {"setup": 2.0, "train": 8.0}),
    ]
    found = axes(read_run(write_run(tmp_path, [], events)), 100)
    assert found["time"] == [(0, 1.0), (4, 9.0), (8, 27.0), (8, 27.0)]
    assert [value for _, value in found["epoch"]] == [0.0, 1.0, 2.0, 2.0]


def test_without_events_the_clock_of_the_lines_tells_the_time(tmp_path: Path) -> None:
    lines = [{"step": s, "time/seconds": t} for s, t in ((1, 1.0), (2, 2.0), (3, 0.5), (4, 1.5))]
    found = axes(read_run(write_run(tmp_path, lines)), 100)
    assert found == {"time": [(1, 1.0), (2, 2.0), (3, 2.5), (4, 3.5), (4, 3.5)]}
    assert axes(read_run(write_run(tmp_path / "bare", [{"step": 1, "loss": 1.0}])), 9) == {}


def test_the_bar_shows_the_running_time(tmp_path: Path) -> None:
    events = [
        event("start", 0, {"setup": 0.5}, time=100.5),
        event("log", 4, {"setup": 0.5, "train": 1.5}),
        event("start", 4, {"setup": 2.0}, time=144.0),  # nothing ran for 40 s before
    ]
    page = make_page([read_run(write_run(tmp_path, [], events))])
    assert "<b>4.0 s</b> running time; 40 s more lay between the sessions" in page
    shares = [float(share) for share in re.findall(r'style="flex:([\d.]+)"', page)]
    assert sum(shares) == pytest.approx(1)
    assert shares == [0.375, 0.625]


def test_close_values_are_not_drawn_as_one(tmp_path: Path) -> None:
    lines = [line(step, loss=1234.5 + step * 1e-6) for step in range(5)]
    (chart,) = charts_of([read_run(write_run(tmp_path, lines))])
    assert len({value for _, value in chart.series[0].points}) == 5


def test_two_hundred_runs_fit_into_a_page(tmp_path: Path) -> None:
    runs = _sweep(tmp_path, 200, steps=60)
    page = make_page(runs)
    assert len(page) < 4e6
    assert "<title>200 runs" in page
    assert page.count("<tr>") < 1000  # a line for each run, not a column


@pytest.mark.e2e
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_the_page_of_a_search(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(make_page(_sweep(tmp_path / "runs", 12)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options = [*flags, "--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        ["chromium", *options, "--dump-dom", "--window-size=1200,6000", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    drawn = done.stdout.split("<main>")[1]
    table = re.search(r'<table class="runs">.*?</table>', drawn, re.DOTALL)
    assert table is not None
    rows = re.findall(r'<tr(?: class="(chosen)")?>(.*?)</tr>', table[0].split("<tbody>")[1])
    assert [bool(chosen) for chosen, _ in rows] == [True] * 8 + [False] * 4
    assert "run-003" in rows[0][1]
    assert "0.875" in rows[0][1]  # its best accuracy
    flat = re.search(r'aria-label="flat".*?</svg>', drawn, re.DOTALL)
    assert flat is not None
    ticks = re.findall(r'text-anchor="end">([^<]+)<', flat[0])
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)
