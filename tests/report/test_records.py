"""What a run has written is read, whatever state it is in."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.helpers.toys import fit, make_trainer
from tests.report.logs import event, line, write_run
from trainkit import ConfigError
from trainkit.basics.run_files import LeftOut
from trainkit.callbacks import JSONLLogger
from trainkit.inspect.report import read_run, read_runs


def test_a_real_run_is_read(tmp_path: Path) -> None:
    fit(make_trainer(callbacks=[JSONLLogger()], output_dir=tmp_path, log_every_n_steps=2))
    run = read_run(tmp_path)
    assert [step for step, _ in run.curves["loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in run.curves["eval/loss"]] == [8]
    assert run.counters == {"step": 8, "epoch": 1, "samples": 32}
    assert run.sessions[0].ending == "max_epochs"
    assert run.facts["config"]["max_epochs"] == 1
    assert (run.facts["run"]["optimizer"], run.facts["run"]["window"]) == ("SGD", 4)


def test_a_run_without_a_log_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no `metrics.jsonl`.*JSONLLogger"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_run(tmp_path / "nowhere")


def test_a_folder_of_runs_stands_for_those_in_it(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/c"):
        write_run(tmp_path / name, [line(1, loss=1.0)])
    assert [run.name for run in read_runs([tmp_path])] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="given twice"):
        read_runs([tmp_path, tmp_path / "a"])


def test_a_run_that_wrote_nothing_yet_does_not_spoil_the_report_of_others(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [line(1, loss=1.0)])
    write_run(tmp_path / "b")
    assert [run.is_empty for run in read_runs([tmp_path])] == [False, True]
    with pytest.raises(ConfigError, match="holds no line"):
        read_runs([tmp_path / "b"])


@pytest.mark.parametrize("text", ["", "\n\n", "dear diary\n[1]\n"])
def test_a_log_with_nothing_in_it_is_an_error(tmp_path: Path, text: str) -> None:
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text)
    told = pytest.warns(LeftOut, match=r"line 1 was left out \(no JSON\), and 1 more")
    with (
        told if "diary" in text else nullcontext(),
        pytest.raises(ConfigError, match="holds no line that `JSONLLogger` wrote"),
    ):
        read_run(tmp_path)


def test_half_a_last_line_is_left_out_and_foreign_ones_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1, loss=1.0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('dear diary\n{"step": "two"}\n{"step": 2, "lo')
    with pytest.warns(LeftOut, match=r"line 2 was left out \(no JSON\), and 1 more"):
        run = read_run(tmp_path)
    assert run.curves == {"loss": [(1, 1.0)]}
    assert run.unreadable == 2


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [line(1, loss=1.0)])
    (tmp_path / "b").mkdir()
    with pytest.warns(LeftOut, match=r"Left out: `.*b` holds no `metrics.jsonl`"):
        assert [run.name for run in read_runs([tmp_path / "a", tmp_path / "b"])] == ["a"]
    with pytest.raises(ConfigError, match="does not exist"):
        read_runs([tmp_path / "a", tmp_path / "typo"])


def test_what_is_not_finite_is_read_as_such(tmp_path: Path) -> None:
    written = line(1, a="NaN", b="Infinity", c="-Infinity", d="a word", e=None, f=True)
    figures = read_run(write_run(tmp_path, [written])).curves
    assert math.isnan(figures["a"][0][1])
    assert (figures["b"], figures["c"]) == ([(1, math.inf)], [(1, -math.inf)])
    assert set(figures) == {"a", "b", "c"}


def test_the_log_of_a_loop_of_ones_own_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 3, "time/seconds": 0.1, "loss": 2.0}, {"step": None, "loss": 1}])
    assert read_run(tmp_path).curves == {"loss": [(3, 2.0)]}


def test_a_run_that_has_only_begun_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, events=[event("start", 0, {"setup": 1.0}, time=0.0)]))
    assert (run.curves, run.sessions[0].ending) == ({}, "under way or killed")


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / p, [line(1, loss=1.0)]) for p in ("a/run", "b/run", "c/other")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "other"]
    with pytest.raises(ConfigError, match="given twice"):
        read_runs([folders[0], folders[0] / "metrics.jsonl"])
