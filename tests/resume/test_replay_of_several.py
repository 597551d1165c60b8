"""A step of several optimizers on several loaders, made once more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.toys import FEATURES, toy_dataset
from trainkit import Alternating, Combined, Trainer
from trainkit.callbacks import Checkpoint


def mean(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Turns(Trainer):
    def training_step_first(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {name: mean(model.first(part[0])) for name, part in batch.items()}

    def training_step_second(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {name: mean(model.second(model.first(part[0]))) for name, part in batch.items()}


class Together(Trainer):
    def training_step(self, model: Any, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        self.run.optimize("first", mean(model.first(batch["a"][0])))
        self.run.optimize("second", mean(model.second(model.first(batch["b"][0]))))
        return {"rows": float(len(batch["a"][0]))}


@pytest.mark.parametrize("kind", [Turns, Together])
def test_it_is_bit_equal(kind: type[Trainer], tmp_path: Path) -> None:
    def train(call: str, **more: Any) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"first": nn.Linear(FEATURES, 4), "second": nn.Linear(4, 2)})
        data = toy_dataset()
        trainer = kind(
            max_epochs=2,
            output_dir=tmp_path,
            callbacks=[Checkpoint(every_n_steps=2, keep_last=None)],
            strategy="single",
        )
        both = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
        turns = Alternating(both, {"first": 2, "second": 1})
        return getattr(trainer, call)(
            model,
            Combined({"a": DataLoader(data, 4, shuffle=True), "b": DataLoader(data, 6)}, "min"),
            optimizer=turns if kind is Turns else both,
            **more,
        )

    train("fit")
    replayed = train("replay", step=5)
    assert replayed.is_equal
    assert replayed.step == 5
