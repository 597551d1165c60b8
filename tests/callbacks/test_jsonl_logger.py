"""Tests of the figures as lines of JSON."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.callbacks import Skips
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run, StepResult
from trainkit.callbacks import JSONLLogger
from trainkit.training.run_parts import TrainState


class _Resumed(Callback):
    """Starts where another run was."""

    def __init__(self, step: int, skipped_steps: int = 0) -> None:
        self.state = TrainState(step=step, skipped_steps=skipped_steps, samples_seen=4 * step)

    def on_fit_start(self, run: Run) -> None:
        run.state.load_state_dict(self.state.state_dict())


class _Strange(Callback):
    """Logs what is not a plain number, and a name that is taken."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.log({"up": math.inf, "down": -math.inf, "none": math.nan, "step": 7.0}, reduce="last")


def _strict(text: str) -> Any:
    raise AssertionError(f"{text} is not strict JSON")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_strict) for line in path.read_text().splitlines()]


def _run(folder: Path, *before: Callback, **settings: Any) -> list[dict[str, Any]]:
    callbacks = [*before, JSONLLogger()]
    fit(make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=2, **settings))
    return _lines(folder / "metrics.jsonl")


def test_each_line_says_where_the_run_is_and_the_figures(tmp_path: Path) -> None:
    lines = _run(tmp_path)
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", step) for step in (2, 4, 6, 8)],
        ("eval", 8),
    ]
    assert set(lines[0]) == {"step", "epoch", "samples", "kind", "loss", "time/seconds"}
    assert lines[0]["samples"] == 8
    assert lines[-1]["epoch"] == 1
    assert lines[-1]["eval/loss"] > 0


def test_what_is_not_finite_is_strict_json_and_reads_back(tmp_path: Path) -> None:
    first = _run(tmp_path, _Strange())[0]
    assert (float(first["up"]), float(first["down"])) == (math.inf, -math.inf)
    assert math.isnan(float(first["none"]))


def test_a_figure_cannot_take_the_place_of_a_counter(tmp_path: Path) -> None:
    first = _run(tmp_path, _Strange())[0]
    assert (first["step"], first["log/step"]) == (2, 7.0)


def test_skipped_windows_have_a_line(tmp_path: Path) -> None:
    skips = [line for line in _run(tmp_path, Skips(2)) if line["kind"] == "skip"]
    assert [(line["step"], line["skipped_steps"], line["samples"]) for line in skips] == [
        (2, 1, 12)
    ]


def test_a_resumed_run_cuts_what_came_after_its_step(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=8)
    lines = _run(tmp_path, _Resumed(4), max_steps=6)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6]
    assert not (tmp_path / "metrics.jsonl.1").exists()


def test_a_resumed_run_cuts_skips_that_it_has_not_seen(tmp_path: Path) -> None:
    _run(tmp_path, Skips(2), max_steps=4)
    lines = _run(tmp_path, _Resumed(2), max_steps=4)
    assert [line["kind"] for line in lines if line["step"] == 2] == ["train"]


def test_half_a_line_of_a_killed_run_goes(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "kin')
    steps = [line["step"] for line in _run(tmp_path, _Resumed(4), max_steps=6)]
    assert steps == [2, 4, 4, 6, 6]


def test_a_foreign_file_is_moved_away(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("dear diary\n")
    with pytest.warns(UserWarning, match=r"holds no line that `JSONLLogger` wrote. It was moved"):
        lines = _run(tmp_path, _Resumed(4), max_steps=6)
    assert (tmp_path / "metrics.jsonl.1").read_text() == "dear diary\n"
    assert [line["step"] for line in lines] == [6, 6]


def test_a_line_that_cannot_be_read_stays_and_stops_nothing(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=8)
    path, odd = tmp_path / "metrics.jsonl", ["dear diary", "[" * 50_000, '{"step": 1e999}']
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, *odd, rest[0], *odd, *rest[1:], ""]))
    fit(make_trainer(callbacks=[_Resumed(4), JSONLLogger()], output_dir=tmp_path, max_steps=6))
    kept = path.read_text().splitlines()
    assert kept[:8] == [first, *odd, rest[0], *odd]
    assert [json.loads(line)["step"] for line in kept[8:]] == [6, 6]


def test_a_new_run_keeps_the_file_of_the_old(tmp_path: Path) -> None:
    old = _run(tmp_path, max_steps=2)
    _run(tmp_path, max_steps=4)
    _run(tmp_path, max_steps=6)
    assert _lines(tmp_path / "metrics.jsonl.1") == old
    assert _lines(tmp_path / "metrics.jsonl.2")[-1]["step"] == 4


def test_each_line_is_in_the_file_once_written(tmp_path: Path) -> None:
    class Reader(Callback):
        def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
            self.seen = _lines(tmp_path / "metrics.jsonl")

    reader = Reader()
    fit(make_trainer(callbacks=[JSONLLogger(), reader], output_dir=tmp_path))
    assert reader.seen[-1]["kind"] == "eval"


def test_without_a_place_the_error_names_both_ways() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(output_dir=.*JSONLLogger\(path="):
        fit(make_trainer(callbacks=[JSONLLogger()]))
