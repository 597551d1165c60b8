"""The processes evaluate one model, or are told where they hold different ones (rule 22)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_model
from trainkit import Callback, DistributedError, Run
from trainkit.callbacks import EMA, ReplicaCheck
from trainkit.strategies import FSDP


def loader() -> DataLoader[Any]:
    return DataLoader(toy_dataset(16, seed=1), 4)


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(0.5)


class Edits(Callback):
    """Changes the weights on one process, in the middle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_epoch_end(self, run: Run) -> None:
        if self.rank == 1:
            edit(run.module)


def after_a_fit(rank: int) -> None:
    model, trainer = toy_model(), make_trainer()
    fit(trainer, model=model)
    assert trainer.evaluate(model, loader())
    if rank == 1:
        edit(model)
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss()}
    for call in (trainer.evaluate, trainer.test, trainer.predict):
        name = "evaluate" if call == trainer.test else call.__name__
        with pytest.raises(DistributedError, match=f"different models in `{name}`: .*`0.weight`"):
            call(model, loader(), **options)
    fresh = make_trainer()
    with pytest.raises(DistributedError, match="different models in `evaluate`"):
        fresh.evaluate(toy_model(seed=rank), loader(), **options)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert fresh.predict(lazy, loader()).shape == (16, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_one_process_changed_are_not_evaluated(size: int) -> None:
    run_ranks(size, after_a_fit)


def inside(rank: int) -> None:
    with pytest.raises(DistributedError, match=r"models after step 4: .*0\.weight"):
        fit(make_trainer(callbacks=[Edits(rank)]))
    with pytest.raises(DistributedError, match=r"models after step 2: .*0\.weight"):
        fit(make_trainer(callbacks=[Edits(rank)]), (loader(), None))
    fit(make_trainer(callbacks=[ReplicaCheck(at_checkpoints=False), Edits(rank)]))
    fit(make_trainer(callbacks=[EMA()]))
    trainer, model = make_trainer(strategy=FSDP(device="cpu"), callbacks=[EMA()]), toy_model()
    fit(trainer, model=model)
    assert trainer.evaluate(model, loader(), loss_fn=nn.CrossEntropyLoss())


@pytest.mark.e2e
def test_an_evaluation_in_a_fit_compares_the_weights() -> None:
    run_ranks(2, inside)


def buffers(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    trainer = make_trainer()
    fit(trainer, model=model)
    before = trainer.predict(model, loader())
    if rank == 1:
        torch.nn.init.constant_(model[1].running_mean, 5.0)  # type: ignore[arg-type]
    assert torch.equal(trainer.predict(model, loader()), before)


@pytest.mark.e2e
def test_buffers_that_one_process_changed_are_those_of_process_0() -> None:
    run_ranks(2, buffers)
