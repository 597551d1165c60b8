"""`run.log` inside an evaluation, the rehearsal of it, and records that lack the loss."""

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, toy_loaders, toy_model
from trainkit import Callback, ConfigError, DataError, LRSchedule, Run, Trainer
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation, JSONLLogger
from trainkit.types import Scalars, StepResult

torchmetrics = late("torchmetrics")


class Logs(Trainer):
    """Logs the mean of the first feature, and what it needs to be one on any processes."""

    loss_fn = staticmethod(nn.functional.cross_entropy)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        first = batch[0][:, 0]
        self.run.log({"first": first.mean()})
        self.run.log({"positive": first[first > 0].mean()}, weight=(first > 0).sum())
        self.run.log({"seen": len(first)}, reduce="sum")
        self.run.log({"most": first.max()}, reduce="max")
        return super().evaluation_step(model, batch)


class Watch(Callback):
    def __init__(self) -> None:
        self.logged: list[Scalars] = []
        self.evaluated: list[Scalars] = []

    def on_log(self, run: Run, values: Scalars) -> None:
        self.logged.append(values)

    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self.evaluated.append(metrics)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64).float()
    return TensorDataset(inputs, torch.randint(0, 2, (samples,), generator=generator))


class LogsSteps(Trainer):
    """Logs a figure of each micro-batch, from the step and from a hook, and one of each step."""

    class Hook(Callback):
        def on_microbatch_end(self, run: Run, batch: Any) -> None:
            run.log({"hook": batch[0][:, 0].mean()})

        def on_step_end(self, run: Run, result: StepResult) -> None:
            run.log({"step": run.state.step})

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        self.run.log({"first": batch[0][:, 0].mean()})
        self.run.log({"called": 1}, reduce="sum")
        return super().training_step(model, batch)


def log_steps(rank: int, batch_size: int, accumulation: int) -> Scalars:
    watch = Watch()
    trainer = LogsSteps(
        max_epochs=1,
        gradient_accumulation_steps=accumulation,
        callbacks=[watch, LogsSteps.Hook()],
        log_every_n_steps=2,
    )
    fit(trainer, DataLoader(data(11), batch_size))
    return watch.logged[0]


@pytest.mark.e2e
def test_figures_of_a_micro_batch_count_by_its_samples() -> None:
    ways = {(1, 6, 1): 2, (1, 2, 3): 6, (1, 3, 2): 4, (2, 3, 1): 4, (2, 1, 3): 11}
    for (size, batch_size, accumulation), calls in ways.items():
        for values in run_ranks(size, log_steps, batch_size, accumulation):
            first = data(11).tensors[0][:, 0].double().mean().item()
            assert values["first"] == pytest.approx(first, rel=1e-6)
            assert values["hook"] == pytest.approx(first, rel=1e-6)
            assert (values["step"], values["called"]) == (1.5, calls)


def evaluate_and_fit(rank: int) -> tuple[Scalars, Watch]:
    watch = Watch()
    loaders = {"a": DataLoader(data(11), 4), "b": DataLoader(data(1), 4)}
    trainer = Logs(max_epochs=1, callbacks=[watch], log_every_n_steps=1)
    before = trainer.evaluate(toy_model(), loaders)
    assert trainer.run is None
    fit(trainer, {"train": toy_loaders()[0], "eval": loaders})
    assert trainer.run is not None
    assert not trainer.run.logging.sums.state_dict()
    assert trainer.evaluate(trainer.run.module, loaders) == watch.evaluated[-1]
    return before, watch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_an_evaluation_logs_is_a_figure_of_it(size: int) -> None:
    first = data(11).tensors[0][:, 0].double()
    for before, watch in run_ranks(size, evaluate_and_fit):
        for figures in (before, *watch.evaluated):
            assert figures["eval/a/first"] == pytest.approx(float(first.mean()), rel=1e-6)
            positive = float(first[first > 0].mean())
            assert figures["eval/a/positive"] == pytest.approx(positive, rel=1e-6)
            assert figures["eval/a/seen"] == 11
            assert figures["eval/a/most"] == float(first.max())
            assert figures["eval/b/seen"] == 1
        assert len(watch.evaluated) == 1
        assert {name for record in watch.logged for name in record} == {"loss"}


def test_before_a_fit_the_run_of_an_evaluation_says_what_it_lacks() -> None:
    class Asks(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            assert self.run is not None
            assert len(self.run.gather_for_metrics(batch[1])) == len(batch[1])
            return {"step": self.run.state.step}

    with pytest.raises(AttributeError, match=r"`run.state` belongs to a `fit`"):
        Asks(max_steps=1, callbacks=[]).evaluate(toy_model(), toy_loaders()[1])


def test_a_figure_that_is_returned_and_logged_is_refused() -> None:
    class Twice(Logs):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            return {**super().evaluation_step(model, batch), "first": 1.0}

    with pytest.raises(DataError, match="Two metrics of an evaluation are called `first`"):
        Twice(max_steps=1, callbacks=[]).evaluate(toy_model(), toy_loaders()[1])


class Falls(Logs):
    """Logs a figure that gets better twice, then worse."""

    evaluations = -1  # the rehearsal is none

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        steps = self.run.state.epoch
        self.run.log({"soft": abs(2.0 - steps)})
        return {"predictions": model(batch[0])}


def test_callbacks_and_schedules_decide_by_it(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> LRSchedule:
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return LRSchedule(scheduler, metric="eval/soft")

    trainer = Falls(
        max_epochs=9,
        output_dir=tmp_path,
        callbacks=[
            EarlyStopping("eval/soft", patience=2, mode="min"),
            Checkpoint(keep_best=("eval/soft", "min"), keep_last=1),
        ],
    )
    result = fit(trainer, lr_scheduler=plateau)
    assert result.epoch == 4
    kept = sorted(int(p.name.rpartition("-")[2]) for p in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == [16, 32]  # two epochs, and the last
    assert trainer.run is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


class Counting(nn.Module):
    """Changes in every forward, even in evaluation mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("expanded", torch.zeros(()).expand(3))
        self.python_calls, self.shapes = 0, list[Any]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.calls = self.calls.clone()
        self.python_calls += 1
        self.shapes.append(inputs.shape)
        self.norm.train()
        outputs: Tensor = self.linear(self.norm(inputs))
        return outputs


def noisy(predictions: Tensor, references: Tensor) -> float:
    return random.random() + np.random.rand() + float(torch.rand(()))


class Rehearsed(Logs):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = Counting()
        self.seen = torchmetrics.MeanMetric()
        self.steps = 0
        self.shapes: dict[int, Any] = {}

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        self.shapes[self.steps] = batch[0].shape
        self.late = 1
        self.seen.update(batch[0].cpu())
        self.teacher(batch[0].cpu())
        random.random(), np.random.rand(), torch.rand(1)
        return super().evaluation_step(model, batch)


def state_of(trainer: Rehearsed, model: Counting) -> Any:
    numpy_state: Any = np.random.get_state()
    return (
        {name: value.tolist() for name, value in model.state_dict().items()},
        {name: value.tolist() for name, value in trainer.teacher.state_dict().items()},
        (model.python_calls, list(model.shapes), trainer.teacher.python_calls),
        (trainer.seen.mean_value.item(), trainer.seen.update_count, trainer.steps),
        (dict(trainer.shapes), hasattr(trainer, "late")),
        (random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_rehearsal_leaves_nothing_behind(fails: bool) -> None:
    metric = torchmetrics.classification.MulticlassAccuracy(2)
    states = []

    def fail(predictions: Tensor, references: Tensor) -> float:
        raise ConfigError("of no use")

    class See(Callback):
        def on_fit_start(self, run: Run) -> None:
            states.append(state_of(trainer, model))

        def on_epoch_start(self, run: Run) -> None:
            states.append(state_of(trainer, model))
            assert not run.logging.sums.state_dict()
            assert not metric.update_called

    metrics = [metric, noisy, *([fail] if fails else [])]
    model = Counting()
    trainer = Rehearsed(max_steps=1, callbacks=[Evaluation(metrics), See()])
    if fails:
        with pytest.raises(ConfigError, match="of no use"):
            fit(trainer, model=model)
        # Each training begins from its own streams.
        assert state_of(trainer, model)[:-1] == states[0][:-1]
        return
    fit(trainer, model=model)
    assert states[0] == states[1]
    assert trainer.steps == 4  # the one evaluation
    assert trainer.late


def test_an_evaluation_draws_nothing_from_the_streams_of_training() -> None:
    states = []

    class See(Callback):
        def on_evaluation_start(self, run: Run) -> None:
            states.append((random.getstate(), torch.get_rng_state().tolist()))

        def on_evaluation_end(self, run: Run, metrics: Any) -> None:
            self.on_evaluation_start(run)

    fit(Logs(max_steps=1, callbacks=[Evaluation([noisy]), See()]))
    assert states[0] == states[1]


class Gap(Callback):
    """Logs when no record of a step may follow any more."""

    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        run.log({"gap": metrics["eval/loss"]})


class Weightless(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1]), "weight": 1}


@pytest.mark.parametrize("every", [1, 3, 8])
def test_a_record_without_loss_reaches_loggers_only(every: int, tmp_path: Path) -> None:
    watch = Watch()
    callbacks = [Gap(), watch, JSONLLogger(tmp_path / "metrics.jsonl")]
    fit(Trainer(max_epochs=2, log_every_n_steps=every, callbacks=callbacks))
    assert all("loss" in values for values in watch.logged)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["gap"] for line in lines if "gap" in line]
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert gaps == pytest.approx(losses)


def test_what_is_logged_in_a_step_end_stays_a_figure_of_the_training() -> None:
    class Steps(Callback):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            run.log({"step": run.state.step})
            run.log({"weighted": run.state.step}, weight=run.state.step)

    watch = Watch()
    trainer = Trainer(max_steps=4, log_every_n_steps=2, callbacks=[Steps(), watch])
    fit(trainer, toy_loaders()[0], optimizer=partial(SGD, lr=0.1))
    assert [values["step"] for values in watch.logged] == [1.5, 3.5]
    assert [values["weighted"] for values in watch.logged] == [5 / 3, 25 / 7]


def test_a_mean_over_nothing_is_nan_and_is_no_reason_to_refuse_a_run() -> None:
    labels = torch.tensor([2, 2, 0, 1, 0, 2])  # all of the first batch are ignored
    loader = DataLoader(TensorDataset(torch.randn(6, 4), labels), batch_size=2)
    watch, metrics = Watch(), ["perplexity", "accuracy"]
    stopping = EarlyStopping("eval/perplexity", patience=9, mode="min")
    trainer = Trainer(
        max_epochs=1, log_every_n_steps=1, callbacks=[watch, Evaluation(metrics), stopping]
    )
    loss_fn = nn.CrossEntropyLoss(ignore_index=2)
    model = nn.Linear(4, 3)
    trainer.fit(model, (loader, loader), optimizer=partial(SGD, lr=0.1), loss_fn=loss_fn)
    assert [math.isnan(values["loss"]) for values in watch.logged] == [True, False, False]
    assert watch.evaluated[0].keys() == {"eval/loss", "eval/perplexity", "eval/accuracy"}
    assert math.isfinite(watch.evaluated[0]["eval/perplexity"])
    ignored = DataLoader(TensorDataset(torch.randn(2, 4), labels[:2]))
    assert math.isnan(trainer.evaluate(model, ignored, loss_fn=loss_fn)["eval/loss"])
