"""Evaluation: every sample once, equal on any number of processes, and nothing is disturbed."""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.toys import fit
from trainkit import Callback, ConfigError, DataError, Run, Trainer
from trainkit.basics import rng
from trainkit.callbacks import Evaluation
from trainkit.data import presharded

torchmetrics = late("torchmetrics")

CLASSES = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, CLASSES))


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (samples,), generator=generator))


def wrong(predictions: Tensor, references: Tensor) -> dict[str, float]:
    return {"wrong": float((predictions != references).sum()), "seen": float(len(references))}


def bootstrapped(predictions: Tensor, references: Tensor) -> float:
    drawn = torch.randint(0, len(references), (len(references),))
    return float((predictions[drawn] == references[drawn]).sum()) + random.random()


class Classifier(Trainer):
    loss_fn = staticmethod(nn.functional.cross_entropy)


def evaluate(rank: int, samples: int, batch_size: int) -> dict[str, float]:
    trainer = Classifier(max_steps=1, callbacks=[])
    metrics = [
        "accuracy",
        wrong,
        torchmetrics.classification.MulticlassConfusionMatrix(CLASSES),
    ]
    loaders = {
        "a": DataLoader(make_data(samples), batch_size=batch_size),
        "b": DataLoader(make_data(5), batch_size=2),
    }
    return trainer.evaluate(make_model(), loaders, metrics=metrics)


def evaluate_by_chance(rank: int) -> tuple[dict[str, float], list[float]]:
    found: list[float] = []
    loader = DataLoader(make_data(32), batch_size=4)

    class Looks(Callback):
        def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
            found.append(metrics["eval/bootstrapped"])

    trainer = Classifier(max_epochs=3, callbacks=[Looks(), Evaluation([bootstrapped])])
    trainer.fit(make_model(), (loader, loader), optimizer=partial(SGD, lr=0.1))
    random.seed(rank)
    torch.manual_seed(rank)
    return trainer.evaluate(make_model(), loader, metrics=[bootstrapped]), found


def test_a_metric_that_draws_is_one_figure_of_all_processes() -> None:
    first, *others = run_ranks(3, evaluate_by_chance)
    assert len(first[1]) == 3
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 3])
def test_metrics_are_equal_on_one_process_and_on_several(size: int) -> None:
    cases = [(33, 4), (1, 2), (7, 3)]
    for results in run_ranks(size, in_turn, evaluate, cases):
        for case, result in zip(cases, results, strict=True):
            expected = evaluate(0, *case)
            assert expected["eval/a/seen"] == case[0]
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                if name.endswith("loss"):
                    assert result[name] == pytest.approx(value, rel=1e-6)
                else:
                    assert result[name] == value


def evaluate_nothing(rank: int) -> None:
    trainer = Classifier(max_steps=1, callbacks=[])
    short, used_up = DataLoader(make_data(1), 2, drop_last=True), iter(DataLoader(make_data(1)))
    next(used_up)
    for data in (DataLoader(make_data(0)), short, presharded(used_up)):
        with pytest.raises(DataError, match=r"'b', of a .* gave no batch: .* `drop_last`"):
            trainer.evaluate(make_model(), {"a": DataLoader(make_data(1)), "b": data})


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_without_a_batch_is_an_error(size: int) -> None:
    run_ranks(size, evaluate_nothing)


def predict(rank: int, samples: int, shuffle: bool) -> Tensor:
    class Echo(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"predictions": batch[0]}

    loader = DataLoader(make_data(samples), batch_size=2, shuffle=shuffle)
    with pytest.warns(match="this loader draws") if shuffle else nullcontext():
        result = Echo(max_steps=1, callbacks=[]).predict(make_model(), loader)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("size", [1, 3])
def test_predict_gives_each_sample_once_in_order(size: int) -> None:
    lengths = (1, 5, 70)
    for results in run_ranks(size, in_turn, predict, [(samples, False) for samples in lengths]):
        for samples, result in zip(lengths, results, strict=True):
            assert torch.equal(result, make_data(samples).tensors[0])


def test_outputs_may_lie_where_the_next_forward_writes() -> None:
    """As those of a graph do that the device replays."""

    class Replays(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            outputs[: len(batch[0])] = batch[0]
            return {"predictions": outputs[: len(batch[0])]}

    data = make_data(5)
    outputs = torch.empty(2, *data.tensors[0].shape[1:])
    found = Replays(max_steps=1, callbacks=[]).predict(make_model(), DataLoader(data, 2))
    assert torch.equal(found, data.tensors[0])


@pytest.mark.e2e
def test_predict_follows_a_shuffled_loader() -> None:
    (expected,) = run_ranks(1, predict, 9, True)
    assert all(torch.equal(result, expected) for result in run_ranks(2, predict, 9, True))


class Odd(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        name = f"of process {self.processes.process_index}"
        return {name: float(len(batch[0])), "mean": batch[0].mean(), "each": batch[0][:, 0]}


def evaluate_odd(rank: int) -> dict[str, float]:
    loader = DataLoader(make_data(7), batch_size=2)
    return Odd(max_steps=1, callbacks=[]).evaluate(make_model(), loader)


@pytest.mark.e2e
def test_keys_may_differ_between_processes() -> None:
    first, second = run_ranks(2, evaluate_odd)
    inputs = make_data(7).tensors[0]
    assert first == second
    assert first["eval/of process 0"] == 2.0
    assert first["eval/of process 1"] == pytest.approx((2 * 2 + 1 * 1) / 3)
    assert first["eval/mean"] == pytest.approx(float(inputs.mean()))
    assert first["eval/each"] == pytest.approx(float(inputs[:, 0].mean()))


def states() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()


class Noisy(Classifier):
    fails = False
    draws = 0

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        assert not model.training
        assert not torch.is_grad_enabled()
        self.draws += 1
        random.random(), np.random.rand(), torch.rand(1)
        if self.fails:
            raise RuntimeError("boom")
        return super().evaluation_step(model, batch)


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_disturbs_nothing(fails: bool) -> None:
    trainer, model = Noisy(max_steps=1, callbacks=[]), make_model()
    trainer.fails = fails
    model[1].eval()  # the user froze it
    before, buffers = rng.save_host(), [buffer.clone() for buffer in model.buffers()]
    loader = DataLoader(make_data(9), batch_size=2, shuffle=True)
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.evaluate(model, loader)
    else:
        trainer.evaluate(model, loader)
    found = states()
    rng.restore_host(before)
    for _ in range(trainer.draws):  # nothing else has drawn
        random.random(), np.random.rand(), torch.rand(1)
    assert states() == found
    assert torch.is_grad_enabled()
    assert [part.training for part in model] == [True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def train(evaluated: bool, rank: int = 0) -> list[Tensor]:
    class Asks(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            if evaluated:
                run.request_evaluation()

    model = make_model()
    fit(
        Trainer(max_epochs=2, callbacks=[Asks()], gradient_accumulation_steps=2),
        (DataLoader(make_data(20), batch_size=4, shuffle=True), DataLoader(make_data(9), 2)),
        model,
        loss_fn=nn.functional.cross_entropy,
    )
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_is_the_same_with_and_without_evaluations() -> None:
    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_epochs_end_with_an_evaluation_unless_a_callback_schedules_it() -> None:
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
            seen.append(metrics)

    result = fit(
        Trainer(max_epochs=2, callbacks=[Watch()]),
        {"train": DataLoader(make_data(6), 2), "eval": {"x": DataLoader(make_data(4), 2)}},
        make_model(),
        loss_fn=nn.functional.cross_entropy,
    )
    assert [list(metrics) for metrics in seen] == [["eval/x/loss"]] * 2
    assert result.metrics == seen[-1]
    assert result.best_metrics["eval/x/loss"] == min(metrics["eval/x/loss"] for metrics in seen)


def test_outputs_that_fit_no_sample_are_refused() -> None:
    class Bad(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"figures": torch.zeros(17)}

    with pytest.raises(DataError, match=r"`figures` as shape \(17,\), but the batch has 2"):
        Bad(max_steps=1, callbacks=[]).evaluate(make_model(), DataLoader(make_data(4), 2))


def test_a_metric_name_that_does_not_exist_is_refused() -> None:
    trainer = Classifier(max_steps=1, callbacks=[])
    with pytest.raises(ConfigError, match="accuracy"):
        trainer.evaluate(make_model(), DataLoader(make_data(4), 2), metrics=["acuracy"])
