"""Callbacks that act on all processes at once are on all of them, and set alike (rule 3)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import (
    EMA,
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    FreezeUntil,
    JSONLLogger,
    LRFinder,
    LRMonitor,
    MainProcess,
    NaNGuard,
    Predictions,
    ProgressBar,
    ReplicaCheck,
    Summary,
    Throughput,
)

LIST = "the callbacks that act on all processes at once: process 0: "


class Upload(Checkpoint):
    """What only one process does with a checkpoint."""

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        assert run.is_main_process


class Reduces(Callback):
    """A user's, whose hooks make a collective."""

    alike = ("every",)

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step % self.every == 0:
            run.processes.wait_for_everyone()


def early(mode: Any) -> EarlyStopping:
    return EarlyStopping("eval/loss", patience=3, mode=mode)


CASES: dict[str, tuple[Callable[[int], list[Callback]], str]] = {
    "every": (
        lambda rank: [Checkpoint(every_n_steps=2 + rank)],
        "`Checkpoint.every_n_steps`: process 0: 2; process 1: 3",
    ),
    "best": (
        lambda rank: [Checkpoint(keep_best=("eval/loss", ("min", "max")[rank]))],
        "`Checkpoint.policy.keep_best[1]`: process 0: 'min'; process 1: 'max'",
    ),
    "one": (lambda rank: [Checkpoint()] * rank, f"{LIST}[]; process 1: ['Checkpoint']"),
    "replicas": (
        lambda rank: [ReplicaCheck(every_n_steps=2)] * (1 - rank),
        f"{LIST}['ReplicaCheck']; process 1: []",
    ),
    "order": (
        lambda rank: [ReplicaCheck(every_n_steps=2), Reduces(1)][:: 1 - 2 * rank],
        f"{LIST}['ReplicaCheck', 'Reduces']; process 1: ['Reduces', 'ReplicaCheck']",
    ),
    "own": (lambda rank: [Reduces(1 + rank)], "`Reduces.every`: process 0: 1; process 1: 2"),
    "average": (lambda rank: [EMA()] * rank, f"{LIST}[]; process 1: ['EMA']"),
    "decay": (
        lambda rank: [EMA(decay=0.5 + rank / 4)],
        "`EMA.decay`: process 0: 0.5; process 1: 0.75",
    ),
    "evaluation": (
        lambda rank: [Evaluation(every_n_steps=2 + rank)],
        "`Evaluation.every_n_steps`: process 0: 2; process 1: 3",
    ),
    "mode": (
        lambda rank: [early(("min", "max")[rank])],
        "`EarlyStopping.mode`: process 0: 'min'; process 1: 'max'",
    ),
    "guard": (
        lambda rank: [NaNGuard(("raise", "skip")[rank])],
        "`NaNGuard.policy`: process 0: 'raise'; process 1: 'skip'",
    ),
    "freeze": (
        lambda rank: [FreezeUntil(step={"0": 2 + rank})],
        "`FreezeUntil.step.0`: process 0: 2; process 1: 3",
    ),
    "batch size": (lambda rank: [BatchSizeFinder()] * rank, f"{LIST}[]; process 1: ['Batch"),
    "rates": (lambda rank: [LRFinder()] * rank, f"{LIST}[]; process 1: ['LRFinder']"),
    "predictions": (
        lambda rank: [Predictions(every=1 + rank)],
        "`Predictions.every`: process 0: 1; process 1: 2",
    ),
}


def refuse(rank: int, folder: Path, names: list[str]) -> None:
    for name in names:
        callbacks, message = CASES[name]
        trainer = make_trainer(callbacks=callbacks(min(rank, 1)), output_dir=folder / name)
        with pytest.raises(ConfigError, match=re.escape(f"The processes differ in {message}")):
            fit(trainer)


@pytest.mark.parametrize("size", [2, 3])
def test_callbacks_that_differ_are_refused_before_the_first_step(size: int, tmp_path: Path) -> None:
    run_ranks(size, refuse, tmp_path, [*CASES])


def train(rank: int, folder: Path) -> None:
    main = rank == 0
    watching: list[Callback] = [JSONLLogger(), ProgressBar(), Summary()]
    fit(make_trainer(callbacks=watching if main else [], output_dir=folder / "loggers"))
    measuring: list[Callback] = [Throughput(), LRMonitor()]
    fit(make_trainer(callbacks=measuring if main else [], output_dir=folder / "values"))
    kind = Upload if main else Checkpoint
    fit(make_trainer(callbacks=[kind(every_minutes=1.0 + rank)], output_dir=folder / "saves"))
    callbacks = [Predictions(folder / str(rank) / "rows.jsonl"), MainProcess(Summary())]
    fit(make_trainer(callbacks=callbacks, output_dir=folder / "rows"))


@pytest.mark.e2e
def test_what_one_process_alone_may_have_is_trained_with(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path)
