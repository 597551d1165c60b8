"""Bad input is refused before the first step, with words that say what to do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainkit import ConfigError, DataError, LRSchedule, Trainer


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))


def fit(
    *,
    model: Any = None,
    loaders: Any = None,
    trainer: Trainer | None = None,
    **options: Any,
) -> Any:
    trainer = trainer or Trainer(max_steps=2, callbacks=[])
    defaults: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1)}
    defaults["loss_fn"] = nn.functional.mse_loss
    options = defaults | options
    return trainer.fit(
        nn.Linear(3, 1) if model is None else model,
        DataLoader(data(), batch_size=2) if loaders is None else loaders,
        **options,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Neither `max_epochs` nor `max_steps` was given: give one"),
        ({"max_epochs": 1, "max_steps": 1}, r"Both `max_epochs` \(1\) and `max_steps` \(1\)"),
        ({"max_epochs": 0}, "`max_epochs` must be a whole number of at least 1, but is 0"),
        ({"max_epochs": True}, "`max_epochs` must be a whole number of at least 1, but is True"),
        ({"max_steps": "3"}, "`max_steps` must be a whole number of at least 1, but is '3'"),
        ({"max_steps": 1, "seed": -1}, "`seed` must be a whole number of at least 0, but is -1"),
        ({"max_steps": 1, "max_grad_norm": float("nan")}, "`max_grad_norm` must be a positive"),
        (
            {"max_steps": 1, "max_consecutive_skips": None},
            "`max_consecutive_skips` must be a whole number",
        ),
        ({"max_steps": 1, "deterministic": 1}, "`deterministic` must be True or False, but is 1"),
        ({"max_steps": 1, "strategy": "dpp"}, "is 'dpp'. Did you mean `ddp`"),
        ({"max_steps": 1, "precision": "BF-16"}, "Did you mean `bf16`"),
        ({"max_steps": 1, "precision": 16}, "`precision` must be one of"),
    ],
)
def test_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(callbacks=[], **options)


def test_all_problems_of_the_settings_are_in_one_error() -> None:
    with pytest.raises(ConfigError, match=r"`max_epochs`.*`gradient_accumulation_steps`.*`seed`"):
        Trainer(max_epochs=-1, gradient_accumulation_steps=0, seed=1.5)  # type: ignore[arg-type]


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.requires_grad_(False)


class ByEpoch(LambdaLR):
    """Is told the epoch, as schedulers of timm are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.step = lambda epoch=None: None  # type: ignore[method-assign]
        super().__init__(optimizer, lambda epoch: 1.0)
        self.step = lambda epoch, metric=None: None  # type: ignore[method-assign,assignment,misc]


FOREIGN = SGD(nn.Linear(3, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": Frozen()}, r"`Frozen` has no trainable parameters \(2 in all\)"),
        ({"model": "bert"}, "`model` must be a `torch.nn.Module`, but is 'str'"),
        ({"optimizer": None}, "No optimizer was given. Pass `optimizer=` to `fit`"),
        ({"optimizer": FOREIGN}, "2 of the 2 parameters of the optimizer are not parameters of"),
        ({"optimizer": lambda parameters: None}, "must return a `torch.optim.Optimizer`"),
        ({"lr_scheduler": LambdaLR(FOREIGN, lambda step: 1.0)}, "belongs to another optimizer"),
        ({"lr_scheduler": ReduceLROnPlateau}, "Plateau.step` needs an argument.*For a metric"),
        ({"lr_scheduler": ByEpoch}, "`ByEpoch.step` needs an argument.*for the epoch, call"),
        (
            {"lr_scheduler": lambda _: LRSchedule(ReduceLROnPlateau, metric="eval/loss")},  # type: ignore[arg-type]
            r"given a 'type'. Make it with the optimizer: `lr_scheduler=lambda optimizer:",
        ),
        ({"loaders": {"training": [], "eval": []}}, 'must have the key "train"'),
        ({"loaders": (1, 2, 3)}, r"must be `\(train, eval\)`, but has 3"),
        ({"loss_fn": nn.MSELoss(reduction="none")}, 'has `reduction="none"`.*`reduction="mean"`'),
        (
            {"loss_fn": lambda outputs, targets: (outputs - targets) ** 2},
            r"must be a scalar.*\(2, 1\).*`loss.mean\(\)`",
        ),
        ({"loss_fn": lambda outputs, targets: outputs.detach().mean()}, "The loss has no graph"),
        (
            {"loss_fn": lambda outputs, targets: 1.0},
            "must be a tensor with a graph, but is 'float'",
        ),
        ({"loss_fn": None}, "no `loss_fn` was given"),
        ({"resume": "atuo"}, "no folder of a checkpoint. Did you mean `auto`?"),
    ],
)
def test_arguments_of_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(**options)


def test_empty_data_set() -> None:
    with pytest.raises(ConfigError, match="empty"):
        fit(loaders=DataLoader(data(0), batch_size=2))


def test_distributed_sampler() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(data(), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match=r"DistributedSampler.*[Rr]emove"):
        fit(loaders=DataLoader(data(), batch_size=2, sampler=sampler))


def test_nothing_left_after_drop_last() -> None:
    with pytest.raises(ConfigError, match="0 training steps per epoch"):
        fit(loaders=DataLoader(data(3), batch_size=4, drop_last=True))
    trainer = Trainer(
        max_epochs=1, callbacks=[], gradient_accumulation_steps=9, drop_last_window=True
    )
    with pytest.raises(ConfigError, match="0 training steps per epoch"):
        fit(trainer=trainer)


class Broken(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 3:
            raise RuntimeError("cannot read the file")
        return torch.zeros(3), torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_names_sample_epoch_and_step(workers: int) -> None:
    with pytest.raises(RuntimeError, match="cannot read the file") as caught:
        fit(loaders=DataLoader(Broken(), batch_size=2, num_workers=workers))
    text = str(caught.value) + "\n".join(caught.value.__notes__)
    assert "sample 3" in text
    assert "epoch 0, after step 1" in text


def test_a_plateau_schedule_watches_a_figure_that_exists() -> None:
    with pytest.raises(ConfigError, match=r"watches 'eval/los'.*\['eval/loss'\]"):
        fit(
            loaders=(DataLoader(data(), batch_size=2), DataLoader(data(), batch_size=2)),
            lr_scheduler=lambda o: LRSchedule(ReduceLROnPlateau(o), metric="eval/los"),
        )


def test_metric_with_unequal_lengths() -> None:
    class Cuts(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            outputs = model(batch[0])
            return {"predictions": outputs[:1], "references": batch[1]}

    with pytest.raises(DataError, match="predictions"):
        Cuts(max_steps=1, callbacks=[]).evaluate(
            nn.Linear(3, 1), DataLoader(data(), batch_size=4), metrics=["mse"]
        )


def test_a_setting_that_is_set_on_the_trainer_is_warned_of() -> None:
    class Seeded(Trainer):
        def __init__(self, seed: int, **settings: Any) -> None:
            self.seed, self.max_grad_norm = seed, torch.ones(2)  # its own
            super().__init__(seed=seed, callbacks=[], **settings)

    trainer = Seeded(3, max_epochs=1)
    assert fit(trainer=trainer).step == 4
    trainer.max_epochs = 2  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="`trainer.max_epochs` is 2, but") as told:
        assert fit(trainer=trainer).step == 4
    assert [Path(each.filename) for each in told] == [Path(__file__)]
