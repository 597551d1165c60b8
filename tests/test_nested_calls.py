"""`fit`, `evaluate` and `predict` of a trainer inside one another, on one process and on two."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.ranks import RanksError, in_turn, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_loaders, toy_model
from trainkit import Callback, ConfigError, DistributedError, Run, Trainer
from trainkit.callbacks import Checkpoint, MainProcess
from trainkit.training.callback import HOOKS, PARTIAL_HOOKS
from trainkit.watch.job_watch import JobWatch

EVERYWHERE = [name for name in HOOKS if name not in (*PARTIAL_HOOKS, "on_exception")]


def model_with_statistics() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def held_out() -> DataLoader[Any]:
    return DataLoader(toy_dataset(7, seed=5), batch_size=2)


class Asks(Callback):
    """Evaluates and predicts in every hook that all processes run."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.logged: list[Any] = []


def _asking(hook: str) -> Any:
    def ask(self: Asks, run: Run, *args: Any) -> None:
        trainer, sums = TRAINERS[0], run.logging.sums.state_dict()
        assert trainer.run is run
        mode = [part.training for part in run.module.modules()]
        figures = trainer.evaluate(run.module, held_out(), metrics=["accuracy"])
        predictions = trainer.predict(run.module, held_out(), outputs="classes")
        labels = toy_dataset(7, seed=5).tensors[1]
        assert figures["eval/accuracy"] == (predictions == labels).double().mean().item()
        assert figures["eval/twice"] == pytest.approx(2 * figures["eval/loss"])
        assert trainer.run is run
        assert sums == run.logging.sums.state_dict()
        assert mode == [part.training for part in run.module.modules()]
        self.asked[hook] = self.asked.get(hook, 0) + 1
        if hook == "on_log":
            self.logged.append(args[0])

    return ask


for _hook in EVERYWHERE:
    setattr(Asks, _hook, _asking(_hook))

TRAINERS: list[Trainer] = []


class Twice(Trainer):
    loss_fn = staticmethod(nn.functional.cross_entropy)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        outputs = dict(super().evaluation_step(model, batch))
        self.run.log({"twice": 2 * outputs["loss"]})
        return outputs


def train(rank: int, asks: bool, folder: Path) -> tuple[list[Tensor], Any]:
    callbacks: list[Callback] = [Checkpoint(every_n_steps=3), *([Asks()] if asks else [])]
    trainer = Twice(
        max_steps=7,
        callbacks=callbacks,
        gradient_accumulation_steps=2,
        log_every_n_steps=2,
        output_dir=folder,
    )
    TRAINERS[:] = [trainer]
    model = model_with_statistics()
    loaders = DataLoader(toy_dataset(27), batch_size=4, shuffle=True), held_out()
    result = fit(trainer, loaders, model)
    state = [value.clone() for value in model.state_dict().values()]
    return state, (callbacks[-1] if asks else None, result)


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_an_evaluation_inside_any_hook_disturbs_nothing(size: int, tmp_path: Path) -> None:
    plain = run_ranks(size, train, False, tmp_path / "plain")
    asking = run_ranks(size, train, True, tmp_path / "asking")
    for (expected, (_, result)), (state, (asks, same)) in zip(plain, asking, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, state, strict=True))
        assert result.metrics == same.metrics
        seldom = {"on_step_skipped", "on_checkpoint_loaded", "on_late_log"}
        assert set(asks.asked) == set(EVERYWHERE) - seldom
        assert all(set(values) == {"loss"} for values in asks.logged)


class InSteps(Twice):
    """Evaluates inside a training step, before its forward, and inside an evaluation step."""

    inside = False

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self._look()
        return super().training_step(model, batch)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        if not self.inside:
            self._look()
        return super().evaluation_step(model, batch)

    def _look(self) -> None:
        run, self.inside = self.run, True
        assert run is not None
        figures = self.evaluate(run.module, held_out())
        assert figures["eval/twice"] == pytest.approx(2 * figures["eval/loss"])
        assert self.run is run
        self.inside = False


def train_in_steps(rank: int, kind: type[Trainer], precision: str) -> Any:
    trainer = kind(max_steps=5, callbacks=[], precision=precision)  # type: ignore[arg-type]
    model = model_with_statistics()
    result = fit(trainer, (DataLoader(toy_dataset(27), 4), held_out()), model)
    return [value.clone() for value in model.state_dict().values()], result.metrics


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_inside_a_step_disturbs_nothing(size: int) -> None:
    cases = [(kind, precision) for precision in ("fp32", "bf16") for kind in (Twice, InSteps)]
    for results in run_ranks(size, in_turn, train_in_steps, cases):
        for (expected, metrics), (state, same) in (results[:2], results[2:]):
            assert all(torch.equal(a, b) for a, b in zip(expected, state, strict=True))
            assert metrics == same


def evaluate_statistics(rank: int) -> list[float]:
    """Return the loss by a nested evaluation, and by one of the run, at the same step."""
    found = []

    class Both(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            found.append(trainer.evaluate(run.module, held_out())["eval/loss"])
            run.request_evaluation(agreed=True)

        def on_evaluation_end(self, run: Run, metrics: Any) -> None:
            found.append(metrics["eval/loss"])

    trainer = Twice(max_steps=1, callbacks=[Both()])
    loaders = DataLoader(toy_dataset(8), batch_size=4), held_out()
    fit(trainer, loaders, model_with_statistics())
    return found


@pytest.mark.e2e
def test_on_two_processes_one_model_is_evaluated() -> None:
    for first, second in run_ranks(2, evaluate_statistics):
        assert first == second


class Nested(Callback):
    """Calls `fit` of its own trainer, and goes on."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def on_epoch_start(self, run: Run) -> None:
        self._try(run)

    def on_fit_end(self, run: Run) -> None:
        self._try(run)

    def _try(self, run: Run) -> None:
        trainer = TRAINERS[0]
        before = vars(trainer).copy()
        with pytest.raises(ConfigError, match=r"`fit` was called inside `fit` of the same trainer"):
            trainer.fit(toy_model(1), toy_loaders(), optimizer=partial(SGD, lr=9.0), loss_fn=wrong)
        assert vars(trainer) == before
        self.refused.append(run.phase)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum()


def fit_in_fit(rank: int) -> Any:
    nested = Nested()
    TRAINERS[:] = [Twice(max_epochs=1, callbacks=[nested])]
    first, second = toy_model(), toy_model()
    fit(TRAINERS[0], model=first)
    assert len(nested.refused) == 2
    fit(TRAINERS[0], model=second)  # afterwards it may
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_a_fit_inside_a_fit_is_refused_before_anything_happens(size: int) -> None:
    run_ranks(size, fit_in_fit)


def fit_another(rank: int) -> None:
    class Probe(Callback):
        def on_epoch_start(self, run: Run) -> None:
            other = Twice(max_steps=2, callbacks=[])
            watch = run.strategy.processes.watch
            assert watch is None or isinstance(watch, JobWatch)
            watched = None if watch is None else watch._this.run
            assert fit(other).step == 2
            assert trainer.run is run
            assert watch is None or watch._this.run is watched

    trainer = Twice(max_epochs=2, callbacks=[Probe()])
    assert fit(trainer).step > 2


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_another_trainer_may_fit_inside(size: int) -> None:
    run_ranks(size, fit_another)


def test_a_fit_inside_an_evaluation_is_refused() -> None:
    class Fits(Twice):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            return fit(self)

    trainer = Fits(max_steps=1, callbacks=[])
    with pytest.raises(ConfigError, match="inside `evaluate` of the same trainer"):
        trainer.evaluate(toy_model(), held_out())
    assert trainer.run is None


def test_a_step_that_evaluates_for_ever_is_refused() -> None:
    class Forever(Twice):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            return self.evaluate(model, held_out())

    with pytest.raises(ConfigError, match="`evaluate` inside `evaluate` inside `evaluate`"):
        Forever(max_steps=1, callbacks=[]).evaluate(toy_model(), held_out())


class Breaks(Callback):
    """Evaluates with what fails half-way, and goes on."""

    def on_step_end(self, run: Run, result: Any) -> None:
        trainer = TRAINERS[0]
        seen = []

        def fails(outputs: Tensor, targets: Tensor) -> Tensor:
            seen.append(outputs)
            if len(seen) == 2:
                raise KeyError("test")
            return outputs.sum()

        with pytest.raises(KeyError):
            trainer.evaluate(run.module, held_out(), loss_fn=fails)
        assert trainer.run is run
        assert run.module.training


class TwoWeights(SGD):
    """Evaluates at other weights than those of training, as schedule-free optimizers do."""

    def train(self) -> None:
        self._shift(-1.0)

    def eval(self) -> None:
        self._shift(1.0)

    @torch.no_grad()
    def _shift(self, by: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(by)


@pytest.mark.parametrize("optimizer", [SGD, TwoWeights])
def test_an_evaluation_that_fails_inside_leaves_the_training_as_it_was(optimizer: Any) -> None:
    models = []
    for callbacks in ([], [Breaks()]):
        TRAINERS[:] = [Trainer(max_steps=4, callbacks=callbacks)]
        models.append(toy_model())
        fit(TRAINERS[0], model=models[-1], optimizer=partial(optimizer, lr=0.1))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_loss_of_an_evaluation_is_that_of_no_later_call() -> None:
    trainer = Trainer(max_steps=1, callbacks=[])
    fit(trainer)
    expected = trainer.evaluate(toy_model(), held_out())
    assert trainer.evaluate(toy_model(), held_out(), loss_fn=wrong) != expected
    assert trainer.evaluate(toy_model(), held_out()) == expected


@pytest.mark.parametrize("hook", PARTIAL_HOOKS)
def test_where_not_all_processes_come_it_is_refused(hook: str) -> None:
    def ask(run: Run, *args: Any) -> None:
        trainer.predict(run.module, held_out())

    callback = Callback()
    setattr(callback, hook, ask)
    trainer = Twice(max_steps=1, callbacks=[callback])
    with pytest.raises(DistributedError, match=f"`predict` was called inside `{hook}`"):
        fit(trainer)


def test_on_the_main_process_alone_it_is_refused() -> None:
    trainer = Twice(max_steps=1, callbacks=[MainProcess(Asks())])
    TRAINERS[:] = [trainer]
    with pytest.raises(
        DistributedError, match=r"`evaluate` was called inside `Asks\.on_fit_start`"
    ):
        fit(trainer)


def evaluate_alone(rank: int, caller: int, call: str, hook: str) -> None:
    def ask(run: Run, *args: Any) -> None:
        if rank == caller:
            getattr(trainer, call)(run.module, held_out())

    callback = Callback()
    setattr(callback, hook, ask)
    trainer = Twice(max_steps=3, callbacks=[callback])
    fit(trainer)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("caller", "call", "hook"),
    [(0, "evaluate", "on_step_end"), (1, "predict", "on_step_end"), (0, "predict", "on_log")],
)
def test_behind_a_plain_if_it_is_refused_with_its_name(caller: int, call: str, hook: str) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, evaluate_alone, caller, call, hook)
    assert f"`{call}`" in caught.value.failures[caller]
    assert "Every process must call it" in caught.value.failures[caller]


def _one_regression(_: int) -> dict[str, float]:
    inputs = torch.arange(10.0).reshape(10, 1)
    loader = DataLoader(TensorDataset(inputs, 2 * inputs[:, 0] + 1), 3)

    def gap(predictions: torch.Tensor, references: torch.Tensor) -> float:
        return float((predictions - references).abs().mean())

    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 0.0)
    trainer = Trainer(max_epochs=1, callbacks=[], strategy="auto")
    loss_fn = nn.L1Loss()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(loss_fn(outputs.squeeze(1), targets))

    return trainer.evaluate(model, loader, metrics=[gap, "mae"], loss_fn=loss)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_column_of_predictions_meets_a_row_of_references(size: int) -> None:
    for figures in run_ranks(size, _one_regression):
        assert figures["eval/gap"] == pytest.approx(1.0)
        assert figures["eval/mae"] == pytest.approx(1.0)


def _other_loaders(rank: int) -> str:
    trainer = Trainer(max_epochs=1, callbacks=[])
    loader = DataLoader(toy_dataset(8), 2 + rank)
    with pytest.raises(ConfigError, match="The processes differ in the loader") as caught:
        trainer.predict(toy_model(), loader)
    with pytest.raises(ConfigError, match="The processes differ in the metrics"):
        trainer.evaluate(
            toy_model(), DataLoader(toy_dataset(8), 2), metrics=[["accuracy", "f1"][rank]]
        )
    return str(caught.value)


@pytest.mark.e2e
def test_processes_that_evaluate_other_data_are_told() -> None:
    first, second = run_ranks(2, _other_loaders)
    assert first == second


def test_a_prediction_takes_one_loader() -> None:
    loader = DataLoader(toy_dataset(8), 2)
    with pytest.raises(ConfigError, match="takes one loader"):
        Trainer(max_epochs=1, callbacks=[]).predict(toy_model(), {"a": loader})


def test_the_stream_of_a_training_under_way_is_not_evaluated() -> None:
    class Lines(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from map(toy_dataset(12).__getitem__, range(12))

    loader = DataLoader(Lines(), 4)

    class Looks(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            trainer.predict(run.module, loader)

    trainer = Trainer(max_epochs=1, callbacks=[Looks()])
    with pytest.raises(ConfigError, match="read the same `Lines`"):
        fit(trainer, {"train": loader})


def _closed_by_another(rank: int) -> str:
    first, second = make_trainer(), make_trainer()
    fit(second)
    second.close()
    with pytest.raises(DistributedError) as caught:
        first.evaluate(toy_model(), toy_loaders()[1])
    return str(caught.value)


@pytest.mark.e2e
def test_trainers_share_the_group_that_one_of_them_leaves() -> None:
    for said in run_ranks(2, _closed_by_another):
        assert "it has left by `close`" in said
