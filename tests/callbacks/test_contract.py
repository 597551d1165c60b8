"""What every callback that trainkit ships must do."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trainkit.callbacks
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_model
from trainkit import Callback
from trainkit.callbacks import (
    Checkpoint,
    EarlyStopping,
    Evaluation,
    JSONLLogger,
    LRMonitor,
    MainProcess,
    NaNGuard,
    ProgressBar,
    Summary,
    TensorBoardLogger,
    TimeLimit,
    default_callbacks,
)

MAKE: dict[str, Callable[[], Callback]] = {
    "Checkpoint": lambda: Checkpoint(every_n_steps=3),
    "EarlyStopping": lambda: EarlyStopping("eval/loss", patience=100, mode="min"),
    "Evaluation": lambda: Evaluation(["accuracy"], every_n_steps=3),
    "JSONLLogger": JSONLLogger,
    "LRMonitor": LRMonitor,
    "MainProcess": lambda: MainProcess(JSONLLogger()),
    "NaNGuard": NaNGuard,
    "ProgressBar": ProgressBar,
    "Summary": Summary,
    "TensorBoardLogger": TensorBoardLogger,
    "TimeLimit": lambda: TimeLimit(60),
}
FUNCTIONS = {"main_process_only"}

every_callback = pytest.mark.parametrize("name", sorted(MAKE))


def test_every_callback_is_under_contract() -> None:
    assert {*MAKE, *FUNCTIONS} == set(trainkit.callbacks.__all__)


def test_the_default_is_a_bar_and_a_summary() -> None:
    assert [callback.name for callback in default_callbacks()] == ["ProgressBar", "Summary"]


@every_callback
def test_two_fits_with_one_callback_are_alike(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=[MAKE[name]()], output_dir=tmp_path, log_every_n_steps=3)
    first = fit(trainer)
    trainer.output_dir = tmp_path / "second"
    second = fit(trainer)
    moved = dataclasses.replace(second, output_dir=first.output_dir, checkpoint=first.checkpoint)
    assert first == moved
    assert first.step == 8


@every_callback
def test_the_state_comes_back(name: str, tmp_path: Path) -> None:
    used, fresh = MAKE[name](), MAKE[name]()
    fit(make_trainer(callbacks=[used], output_dir=tmp_path))
    state = copy.deepcopy(used.state_dict())
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state


def _weights(rank: int, name: str | None, folder: Path) -> list[Tensor]:
    callbacks = [] if name is None else [MAKE[name]()]
    trainer = make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=3)
    model = toy_model()
    fit(trainer, model=model)
    trainer.close()
    return [p.detach() for p in model.parameters()]


@every_callback
def test_training_on_two_processes_is_as_without_it(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _weights, name, tmp_path)
    plain, _ = run_ranks(2, _weights, None, tmp_path)
    assert all(map(torch.equal, first, plain))
    assert all(map(torch.equal, first, second))
