"""What follows an update is read after it; an evaluation without samples has no figures."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.data import streams
from tests.helpers.ranks import run_ranks
from trainkit import Callback, ConfigError, DataError, Run, Trainer
from trainkit.callbacks import Evaluation


class Policy(IterableDataset[Any]):
    """Samples that the model makes, with the number of updates that it had seen."""

    def __init__(self) -> None:
        self.updates = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.tensor([float(self.updates)]), torch.zeros(1)


class Tells(Callback):
    """Counts updates for the data set, and keeps what it yielded."""

    def __init__(self, data: Policy) -> None:
        self.data = data
        self.seen: list[tuple[int, float]] = []

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.seen += [(run.state.step, value) for value in batch[0].flatten().tolist()]

    def on_step_end(self, run: Run, result: Any) -> None:
        self.data.updates += 1


def _on_policy(rank: int, accumulation: int) -> list[tuple[int, float]]:
    data = Policy()
    tells = Tells(data)
    trainer = Trainer(max_steps=4, callbacks=[tells], gradient_accumulation_steps=accumulation)
    loader: Any = DataLoader(data, 2)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    trainer.fit(nn.Linear(1, 1), loader, optimizer=optimizer, loss_fn=nn.MSELoss())
    return tells.seen


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_samples_of_a_step_are_read_after_the_update_before_it(
    size: int, accumulation: int
) -> None:
    for seen in run_ranks(size, _on_policy, accumulation):
        assert len(seen) == 4 * accumulation * 2
        assert all(step == updates for step, updates in seen)


def _count(predictions: Tensor, references: Tensor) -> dict[str, float]:
    return {"count": float(len(predictions)), "sum": float(predictions.sum())}


class _Identity(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": batch[0][:, 0], "references": batch[0][:, 0]}


def _nothing_left(rank: int) -> Any:
    trainer = Trainer(max_steps=1, callbacks=[])
    loader: Any = DataLoader(streams.Stateless(3), 4, drop_last=True)
    model = nn.Linear(2, 1).double()
    with pytest.raises(DataError, match="of a `Stateless`, gave no batch"):
        trainer.evaluate(model, loader, metrics=[_count], loss_fn=nn.MSELoss())
    return trainer.predict(model, loader)


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_of_nothing_is_an_error(size: int) -> None:
    assert run_ranks(size, _nothing_left) == [[]] * size


def _fit(train: Any, evaluation: Any, **workers: Any) -> dict[str, float]:
    every = Evaluation(every_n_steps=2, metrics=[_count])
    trainer = _Identity(max_steps=5, callbacks=[every])
    loaders = DataLoader(train, 2, **workers), DataLoader(evaluation, 4, **workers)
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    result = trainer.fit(
        nn.Linear(2, 1).double(), loaders, optimizer=optimizer, loss_fn=nn.MSELoss()
    )
    return result.metrics


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_an_evaluation_reads_all_though_its_rehearsal_left_in_the_middle(
    workers: dict[str, Any],
) -> None:
    train, evaluation = streams.Counting(), streams.Counting(10)
    for _ in range(2):  # the first ends in the middle of an epoch, too
        metrics = _fit(train, evaluation, **workers)
        assert metrics == {"eval/count": 10.0, "eval/sum": 45.0}
        assert train.position == evaluation.position == 0


def test_one_stream_for_training_and_evaluation_is_refused() -> None:
    data = streams.Counting()
    with pytest.raises(ConfigError, match="Give each a data set of its own"):
        _fit(data, data)
