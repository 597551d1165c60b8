"""Checkpoints that refer to what is frozen, instead of holding it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.helpers.toys import fit, toy_loaders, toy_model
from trainkit import CheckpointError, ConfigError, Run, StepResult, Trainer
from trainkit.callbacks import EMA, Checkpoint, FreezeUntil
from trainkit.checkpoint import CheckpointStore
from trainkit.training.callback import Callback


def frozen_toy() -> nn.Module:
    model: Any = toy_model()
    model[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


def fit_toy(model: nn.Module, folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    trainer = Trainer(max_epochs=1, callbacks=[*callbacks], output_dir=folder)
    fit(trainer, model=model, **settings)
    return trainer


def saved_names(trainer: Trainer) -> set[str]:
    assert trainer.run is not None
    path = trainer.run.checkpoint
    assert path is not None
    return set(CheckpointStore(path.parent).open(path).layout("model"))


def test_what_the_optimizer_holds_is_saved_though_it_is_frozen_for_a_time(tmp_path: Path) -> None:
    waits = FreezeUntil(step={"0": 100})
    with pytest.raises(ConfigError, match='`Checkpoint\\(frozen="reference"\\)` leaves out'):
        fit_toy(toy_model(), tmp_path / "1", waits, Checkpoint(frozen="reference"))
    model = frozen_toy()
    trainer = fit_toy(model, tmp_path / "2", Checkpoint(frozen="reference"))
    assert saved_names(trainer) == {"2.weight", "2.bias"}
    trainer.save_checkpoint()


def test_a_frozen_parameter_that_something_changes_is_not_referred_to(tmp_path: Path) -> None:
    class Moves(Callback):
        @override
        @torch.no_grad()
        def on_step_end(self, run: Run, result: StepResult) -> None:
            run.module.get_parameter("0.bias").data.add_(1.0)

    with pytest.raises(CheckpointError, match=r"1 frozen parameters have changed.*`0\.bias`"):
        fit_toy(frozen_toy(), tmp_path, Moves(), Checkpoint(frozen="reference"))


def test_an_average_is_read_onto_the_same_base_alone(tmp_path: Path) -> None:
    model = frozen_toy()
    trainer = fit_toy(model, tmp_path, EMA(), Checkpoint(frozen="reference"))
    assert trainer.run is not None
    path = trainer.run.checkpoint
    assert path is not None
    again = frozen_toy()
    EMA.load(again, path)
    assert not again.get_parameter("2.bias").equal(frozen_toy().get_parameter("2.bias"))
    with pytest.raises(CheckpointError, match="refers to its base"):
        EMA.load(toy_model(seed=3), path)


def test_frozen_is_one_of_two_words() -> None:
    with pytest.raises(ConfigError, match='`frozen` must be "save" or "reference"'):
        Checkpoint(frozen="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_best_weights_are_loaded_onto_their_base(weights_only: bool, tmp_path: Path) -> None:
    model = frozen_toy()
    best_of: Any = ("eval/loss", "min", 1)
    saves = Checkpoint(keep_best=best_of, weights_only=weights_only, frozen="reference")
    trainer = Trainer(max_epochs=2, callbacks=[saves], output_dir=tmp_path)
    result = fit(trainer, model=model, restore_best=True)
    path = result.best_checkpoint
    assert path is not None
    assert path.parent.name == ("weights" if weights_only else "checkpoints")
    assert set(CheckpointStore(path.parent).open(path).layout("model")) == {"2.weight", "2.bias"}
    loader, loss = toy_loaders()[1], nn.CrossEntropyLoss()
    best = trainer.evaluate(model, loader, loss_fn=loss)
    assert trainer.evaluate(frozen_toy(), loader, loss_fn=loss, checkpoint="best") == best
    with pytest.raises(CheckpointError, match="refers to its base"):
        trainer.evaluate(toy_model(seed=3), loader, loss_fn=loss, checkpoint="best")
