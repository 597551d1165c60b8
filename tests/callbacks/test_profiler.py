"""Tests of recording a few steps; the traces are read as what they are, JSON."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.callbacks import FailsAt, Skips
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import Profiler


class _Watches(Callback):
    """Notes in which steps a profiler was on."""

    def __init__(self) -> None:
        self.on: list[bool] = []

    def on_gradients(self, run: Run) -> None:
        self.on.append(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _steps(path: Path) -> int:
    """Return how many steps a trace holds."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert "aten::linear" in names
    return len({name for name in names if name.startswith("ProfilerStep#")})


def _traces(folder: Path) -> dict[str, int]:
    return {
        path.name.removesuffix(".trace.json.gz"): _steps(path)
        for path in sorted(folder.glob("profile/*.trace.json.gz"))
    }


def _run(folder: Path, *others: Callback, max_steps: int = 16, **options: Any) -> None:
    callbacks = [Profiler(**options), *others]
    fit(make_trainer(callbacks=callbacks, output_dir=folder, max_steps=max_steps))


def test_it_records_its_steps_and_is_off_in_all_others(tmp_path: Path) -> None:
    watches = _Watches()
    _run(tmp_path, watches, Skips(1), wait=3, warmup=1, active=2, repeat=2)
    # By attempts 3 wait, 1 warms up, 2 are recorded, and again; one of the first was skipped.
    assert [number for number, on in enumerate(watches.on) if on] == [4, 5, 10, 11]
    assert _traces(tmp_path) == {"step-00000003-rank-0": 2, "step-00000009-rank-0": 2}
    table = (tmp_path / "profile" / "step-00000003-rank-0.txt").read_text()
    assert "aten::addmm" in table
    assert "Self CPU time total" in table


def test_from_the_first_step_on_and_without_a_table(tmp_path: Path) -> None:
    _run(tmp_path, wait=0, warmup=1, active=1, table_rows=0, record_shapes=True)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [
        "step-00000001-rank-0.trace.json.gz"
    ]
    assert _traces(tmp_path) == {"step-00000001-rank-0": 1}


@pytest.mark.parametrize("fails_at", [None, 4])
def test_an_early_end_keeps_the_steps_that_there_were(tmp_path: Path, fails_at: int | None) -> None:
    watches = _Watches()
    options: dict[str, Any] = {"wait": 1, "warmup": 1, "active": 20}
    if fails_at is None:
        _run(tmp_path, watches, max_steps=4, **options)
    else:
        with pytest.raises(ValueError, match="enough"):
            _run(tmp_path, watches, FailsAt(fails_at), **options)
    # The step in which it failed is there too; a last one that never began has nothing in it.
    assert list(_traces(tmp_path)) == ["step-00000002-rank-0"]
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert watches.on == [False, False, True, True]


def test_an_end_before_any_recording_writes_nothing(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=3, wait=2, warmup=5)
    assert _traces(tmp_path) == {}
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_without_a_place_the_error_names_both_ways() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(output_dir=.*Profiler\(directory="):
        fit(make_trainer(callbacks=[Profiler()]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wait": -1}, "`wait` must be a whole number from 0 on"),
        ({"warmup": 0}, "`warmup` must be a whole number from 1 on"),
        ({"active": 0}, "`active` must be a whole number from 1 on"),
        ({"repeat": 1.5}, "`repeat` must be a whole number from 1 on"),
        ({"record_shape": True}, "given 'record_shape', which `torch.profiler.profile` does not"),
        ({"schedule": None}, "given 'schedule'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profiler(**arguments)


def _recorded(rank: int, folder: Path) -> None:
    trainer = make_trainer(
        callbacks=[Profiler(wait=0, warmup=1, active=1)], output_dir=folder, max_steps=3
    )
    fit(trainer)
    trainer.close()


@pytest.mark.e2e
def test_each_process_writes_its_own(tmp_path: Path) -> None:
    run_ranks(2, _recorded, tmp_path)
    assert _traces(tmp_path) == {"step-00000001-rank-0": 1, "step-00000001-rank-1": 1}


def test_what_keeps_it_from_starting_ends_the_fit_and_nothing_else(tmp_path: Path) -> None:
    def name() -> str:
        raise ZeroDivisionError("no name for the trace")

    with pytest.raises(ZeroDivisionError, match="no name for the trace"):
        _run(tmp_path, custom_trace_id_callback=name)
    _run(tmp_path / "again", wait=0, warmup=1, active=1, repeat=2)
    assert len(_traces(tmp_path / "again")) == 2
