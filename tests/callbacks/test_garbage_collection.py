"""Tests of collecting garbage at chosen steps."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.callbacks import FailsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import GarbageCollection


class _Watches(Callback):
    """Notes at which step a collection ran, and makes garbage enough for Python to want one."""

    def __init__(self) -> None:
        self.collected: list[int] = []
        self.garbage: list[Any] = []
        self.step = 0

    def on_fit_start(self, run: Run) -> None:
        gc.callbacks.append(self._note)

    def on_step_start(self, run: Run) -> None:
        self.step = run.state.step + 1
        for _ in range(2000):  # more than the 700 at which Python collects by itself
            circle: list[Any] = []
            circle.append(circle)

    def on_fit_end(self, run: Run) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collected.append(self.step)


@pytest.fixture(autouse=True, params=[True, False], ids=["enabled", "disabled"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Let Python collect by itself, or not, before a fit."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_collects_at_its_steps_only_and_leaves_no_trace(enabled: bool) -> None:
    watches = _Watches()
    fit(make_trainer(callbacks=[watches, GarbageCollection(every_n_steps=3)], max_steps=8))
    assert watches.collected == [0, 3, 6]
    assert gc.isenabled() is enabled


def test_an_exception_leaves_no_trace(enabled: bool) -> None:
    with pytest.raises(ValueError, match="enough"):
        fit(make_trainer(callbacks=[GarbageCollection(3), _Watches(), FailsAt(4)], max_steps=8))
    assert gc.isenabled() is enabled


def test_a_fit_that_never_began_changes_nothing(enabled: bool) -> None:
    class Fails(Callback):
        def on_fit_start(self, run: Run) -> None:
            raise ValueError("at the start")

    with pytest.raises(ValueError, match="at the start"):
        fit(make_trainer(callbacks=[Fails(), GarbageCollection()]))
    assert gc.isenabled() is enabled


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_bad_arguments_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="`every_n_steps` must be a whole number from 1 on"):
        GarbageCollection(value)


def _collected(rank: int) -> list[int]:
    watches = _Watches()
    # Only one of them makes garbage of its own.
    watches.garbage = [] if rank else [[] for _ in range(10_000)]
    trainer = make_trainer(callbacks=[watches, GarbageCollection(every_n_steps=2)])
    fit(trainer)
    trainer.close()
    return watches.collected


@pytest.mark.e2e
def test_all_processes_collect_at_the_same_steps() -> None:
    assert run_ranks(2, _collected) == [[0, 2, 4]] * 2
