"""A signal ends a run with one checkpoint and its own exit code; the resumed run is the same one.

rule 33. `benchmarks/kill.py --signals` has the long version.
"""

import signal
from pathlib import Path

import pytest

from tests.helpers.tiers import with_few
from tests.system.toys import Saving, Settings
from tests.system.trials import Signals, reference, survive_signals

NEVER = Saving(every_n_steps=None)
WORKERS = Settings(workers=2)
TWO = Settings(size=2, workers=2)

HOOKED = {
    "before the first step": (WORKERS, NEVER, Signals(place="on_fit_start", count=1, to_all=True)),
    "at an epoch's start": (Settings(), NEVER, Signals(place="on_epoch_start", count=2)),
    "during an evaluation": (
        Settings(workers=2, evaluation_workers=1, evaluate_every=None),
        NEVER,
        Signals(place="on_evaluation_batch_end", to_all=True),
    ),
    "between epochs": (WORKERS, NEVER, Signals(place="on_epoch_end", count=1, to_all=True)),
    "during a save": (Settings(), Saving(), Signals(place="save", count=2)),
    "during a background save": (
        Settings(),
        Saving(background=True),
        Signals(place="save", count=2),
    ),
    "in the last window": (
        Settings(),
        NEVER,
        Signals(place="on_gradients", count=45, signum=signal.SIGINT),
    ),
    "SIGINT": (WORKERS, NEVER, Signals(place="on_gradients", signum=signal.SIGINT, to_all=True)),
    "SIGUSR1": (WORKERS, NEVER, Signals(place="on_gradients", signum=signal.SIGUSR1, to_all=True)),
    "time limit": (Settings(), NEVER, Signals(place="time limit")),
    "twice": (WORKERS, NEVER, Signals(place="on_microbatch_start", again=True)),
    "to one of two": (TWO, NEVER, Signals(place="on_microbatch_start", rank=1)),
    "to two and their workers": (TWO, NEVER, Signals(place="on_microbatch_start", to_all=True)),
    "to one of two in an evaluation": (
        TWO,
        NEVER,
        Signals(place="on_evaluation_batch_end", rank=1, count=1),
    ),
    "to one of two in the last window": (
        TWO,
        NEVER,
        Signals(place="on_gradients", rank=1, count=24),
    ),
    "to one of two in a save": (TWO, Saving(), Signals(place="save", count=1)),
    "to two, in fp16": (
        Settings(size=2, precision="fp16", accumulation=3),
        NEVER,
        Signals(place="on_epoch_end", count=1, to_all=True),
    ),
}


@pytest.mark.parametrize("name", with_few(["to one of two"], HOOKED))
def test_a_signal_saves_once_and_the_resumed_run_is_the_same(name: str, tmp_path: Path) -> None:
    assert survive_signals(*HOOKED[name], tmp_path).problems == []


@pytest.mark.e2e
@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_a_signal_may_come_at_any_moment(fraction: float, tmp_path: Path) -> None:
    settings, saving = Settings(samples=60, workers=2), Saving(every_n_steps=2)
    seconds = reference(settings, tmp_path / "reference").seconds
    signals = Signals(to_all=True)
    report = survive_signals(settings, saving, signals, tmp_path, fraction * seconds)
    assert report.problems == []
