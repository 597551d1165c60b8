"""Schedules say their unit, fit the plan or are refused, and are there by name (rule 10)."""

import copy
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.callbacks import Rates, StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, CheckpointError, ConfigError, LRSchedule, Run, Trainer
from trainkit.callbacks import Checkpoint, Summary
from trainkit.training.lr_schedule import NamedLR
from trainkit.training.setup.schedule_check import describe

EPOCHS, UPDATES = 5, 40  # of the toys, unless told otherwise


def train(lr_scheduler: Any, *, rate: float = 0.1, **settings: Any) -> tuple[Trainer, list[float]]:
    """Train for 5 epochs of 8 updates; return the trainer and the rate of each update."""
    rates = Rates()
    names = ("warmup", "resume", "schedule")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    if "max_steps" not in settings:
        settings.setdefault("max_epochs", EPOCHS)
    callbacks = [rates, *settings.pop("callbacks", [])]
    trainer = make_trainer(callbacks=callbacks, **settings)
    optimizer = partial(SGD, lr=rate)
    fit(trainer, toy_loaders()[0], optimizer=optimizer, lr_scheduler=lr_scheduler, **arguments)
    return trainer, rates.seen


Make = Callable[[Optimizer], Any]
REFUSED: dict[str, tuple[Make, str]] = {
    "cosine of epochs": (lambda o: CosineAnnealingLR(o, EPOCHS), "`T_max=5`.*number of epochs"),
    "one cycle of epochs": (lambda o: OneCycleLR(o, 0.1, EPOCHS), "`total_steps=5`.*cannot go on"),
    "one cycle too short": (lambda o: OneCycleLR(o, 0.1, 39), "`total_steps=39`.*cannot go on"),
    "polynomial of epochs": (lambda o: PolynomialLR(o, EPOCHS), "number of epochs"),
    "linear of epochs": (lambda o: LinearLR(o, 1.0, 0.1, EPOCHS), "number of epochs"),
    "step of epochs": (lambda o: StepLR(o, 1), "`step_size=1`.*below a millionth"),
    "milestones of epochs": (lambda o: MultiStepLR(o, [1, 2, 3], 0.001), "below a millionth"),
    "exponential of epochs": (lambda o: ExponentialLR(o, 0.4), "below a millionth"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_the_first_step(case: str) -> None:
    make, message = REFUSED[case]
    seen: list[int] = []

    class Starts(Callback):
        def on_step_start(self, run: Run) -> None:
            seen.append(run.state.step)

    with pytest.raises(ConfigError, match=f"(?s){message}.*every=.epoch.*planned_steps") as caught:
        train(make, callbacks=[Starts()])
    assert not seen
    # The error names what overrules it: the end of the run, or the unit said aloud.
    if "total_steps" in message:
        length = int(message.partition("=")[2].partition("`")[0])
        assert f"`Trainer(max_steps={length})`" in str(caught.value)
        train(make, max_steps=length)
    else:
        assert '`LRSchedule(scheduler, every="step")`' in str(caught.value)
        train(lambda o: LRSchedule(make(o), every="step"))


NAMED: dict[str, tuple[Make, str]] = {
    "cosine too short": (lambda o: CosineAnnealingLR(o, 20), "ends long before"),
    "cosine too long": (lambda o: CosineAnnealingLR(o, 80), "over long before"),
    "one cycle of one of two processes": (lambda o: OneCycleLR(o, 0.1, 80), "over long before"),
    "gentle step of epochs": (lambda o: StepLR(o, 1, 0.9), "looks like a number of epochs"),
    "gentle milestones": (lambda o: MultiStepLR(o, [2, 4], 0.3), "looks like a number of epochs"),
    "never a step": (lambda o: StepLR(o, 60), "over long before"),
    "cosine of epochs, and the unit is said": (
        lambda o: LRSchedule(CosineAnnealingLR(o, EPOCHS), every="step"),
        "that is the number of epochs",
    ),
    "cosine of updates by epochs": (
        lambda o: LRSchedule(CosineAnnealingLR(o, UPDATES), every="epoch"),
        "5 epochs are planned: that is the number of updates",
    ),
    "gone early, and the unit is said": (lambda o: LRSchedule(StepLR(o, 1)), "below a millionth"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_is_strange_is_named_once(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = NAMED[case]
    trainer, _ = train(make)
    assert len(re.findall(message, capsys.readouterr().out)) == 1
    assert trainer.run is not None
    assert trainer.run.state.step == UPDATES


SILENT: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, UPDATES),
    "cosine, a little off": lambda o: CosineAnnealingLR(o, UPDATES + 2),
    "one cycle": lambda o: OneCycleLR(o, 0.1, UPDATES),
    "warm-up": lambda o: LinearLR(o, total_iters=EPOCHS),
    "lowered at first": lambda o: ConstantLR(o, total_iters=EPOCHS),
    "function": lambda o: LambdaLR(o, lambda step: 0.1**step),
    "parts": lambda o: SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 35)], [5]),
    "step": lambda o: StepLR(o, 15),
    "gentle": lambda o: ExponentialLR(o, 0.95),
    "by epochs": lambda o: LRSchedule(StepLR(o, 1), every="epoch"),
    "cosine by epochs": lambda o: LRSchedule(CosineAnnealingLR(o, EPOCHS), every="epoch"),
    "plateau": lambda o: LRSchedule(ReduceLROnPlateau(o), metric="eval/loss"),
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_of_a_schedule_that_fits(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(max_epochs=EPOCHS)
    fit(trainer, lr_scheduler=SILENT[case])
    assert capsys.readouterr().out == ""


class Stream(IterableDataset[Any]):
    """Eight samples, whose number nobody knows ahead."""

    def __iter__(self) -> Any:
        return iter([(torch.ones(4), 0)] * 8)


def test_a_schedule_without_an_end_by_epochs_over_a_stream_is_let_be() -> None:
    trainer = make_trainer(max_epochs=3)
    loaders = {"train": DataLoader(Stream())}
    fit(trainer, loaders, lr_scheduler=lambda o: LRSchedule(ExponentialLR(o, 0.5), every="epoch"))
    assert trainer.run is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_an_epoch_whose_windows_were_all_skipped_advances_a_schedule_without_a_warning() -> None:
    class Skips(Callback):
        def on_gradients(self, run: Run) -> None:
            if run.state.epoch == 0:
                run.request_skip("not now")

    trainer = make_trainer(max_epochs=2, callbacks=[Skips()])
    fit(trainer, lr_scheduler=lambda o: LRSchedule(StepLR(o, 1), every="epoch"))
    assert trainer.run is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def expected_rates(name: str, warmup: int, updates: int = UPDATES) -> list[float]:
    """Return the factors of each update, by another way than the schedule's."""
    rates = [(k + 1) / (warmup + 1) for k in range(warmup)]
    rest = updates - warmup
    flat = {"wsd": rest - math.ceil(updates / 5), "constant": rest}.get(name, 0)
    falling = [k / (rest - flat) for k in range(rest - flat)]
    if name == "cosine":
        return rates + [math.cos(math.pi * x / 2) ** 2 for x in falling]
    return rates + [1.0] * flat + [1 - x for x in falling]


@pytest.mark.parametrize("warmup", [0, 6, 0.1])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_schedules_by_name(name: str, warmup: float) -> None:
    _, rates = train(name, warmup=warmup, rate=1.0)
    steps = warmup if isinstance(warmup, int) else 4
    assert rates == pytest.approx(expected_rates(name, steps), abs=1e-12)
    assert min(rates) > 0  # no update is lost


@pytest.mark.parametrize(
    ("lr_scheduler", "arguments", "message"),
    [
        ("cosin", {}, r"'cosin'.*names are constant, linear, cosine, wsd"),
        ("cosine", {"warmup": 1.0}, r"fraction of the run"),
        ("cosine", {"warmup": 40}, r"fewer than the run has"),
        ("cosine", {"warmup": -1}, r"warmup=-1"),
        ("cosine", {"warmup": True}, r"`warmup` must be a number, but is True"),
        (None, {"warmup": 0.1}, r"`lr_scheduler=None` with `warmup=0.1` is no schedule by name"),
        (partial(StepLR, step_size=15), {"warmup": 5}, r"is no schedule by name"),
        (3, {}, r"a callable `optimizer -> LRScheduler` or a name, but is or returns a 'int'"),
    ],
)
def test_what_is_no_schedule_is_refused(
    lr_scheduler: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        train(lr_scheduler, **arguments)


def test_a_schedule_by_name_must_know_the_length_of_the_run() -> None:
    loader = {"train": DataLoader(Stream(), batch_size=2)}
    with pytest.raises(ConfigError, match=r"unknown number of updates.*max_steps"):
        fit(make_trainer(), loader, lr_scheduler="cosine")
    assert fit(make_trainer(max_steps=3), loader, lr_scheduler="cosine", warmup=1).step == 3
    assert fit(make_trainer(), loader, lr_scheduler="constant", warmup=2).step == 4


def said_of(lr_scheduler: Any, capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    train(lr_scheduler, callbacks=[Summary()], **settings)
    found = re.search(r"learning rate +(.*)", capsys.readouterr().out)
    assert found is not None
    return found[1]


def test_the_summary_prints_unit_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    said = partial(said_of, capsys=capsys)
    assert said("cosine", warmup=0.1) == (
        "cosine, warmup=0.1 every update: first 0.02, peak 0.1, last 0.00019"
    )
    assert said(lambda o: LRSchedule(StepLR(o, 2), every="epoch")) == (
        "StepLR every epoch: first 0.1, peak 0.1, last 0.001"
    )
    parts = said(lambda o: SequentialLR(o, [LinearLR(o, 0.1), CosineAnnealingLR(o, 35)], [5]))
    assert parts == "SequentialLR every update: first 0.01, peak 0.1, last 0.000201"
    assert said(lambda o: LambdaLR(o, lambda step: 0.5)) == "LambdaLR every update: 0.05"


def test_explain_prints_it_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, model = make_trainer(max_epochs=EPOCHS), toy_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.param_groups)
    trainer.explain(
        model,
        toy_loaders()[0],
        optimizer=optimizer,
        lr_scheduler=lambda o: OneCycleLR(o, 0.5, total_steps=trainer.planned_steps),
    )
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "learning rate OneCycleLR every update: first 0.02, peak 0.5, last 2e-06" in said
    for group, was in zip(optimizer.param_groups, before, strict=True):
        assert {**group, "params": None} == {**was, "params": None}
    with pytest.raises(TypeError, match="lr_schedular"):
        trainer.explain(model, toy_loaders()[0], optimizer=optimizer, lr_schedular="cosine")


def test_overrides_are_given_what_fit_was_and_know_the_planned_steps() -> None:
    class Own(Trainer):
        def configure_optimizer(self, model: nn.Module, optimizer: Any) -> Optimizer:
            assert optimizer.keywords == {"lr": 0.1}
            return super().configure_optimizer(model, partial(optimizer, momentum=0.5))

        def configure_lr_scheduler(self, optimizer: Optimizer, lr_scheduler: Any) -> Any:
            assert (optimizer.param_groups[0]["momentum"], self.planned_steps) == (0.5, UPDATES)
            return LRSchedule(lr_scheduler(optimizer))

    rates = Rates()
    trainer = Own(max_epochs=EPOCHS, callbacks=[rates])
    optimizer = partial(SGD, lr=0.1)
    fit(trainer, toy_loaders()[0], optimizer=optimizer, lr_scheduler="linear", warmup=1)
    assert rates.seen[:2] == pytest.approx([0.05, 0.1])
    assert 0 < rates.seen[-1] < 0.003


def test_an_override_that_does_not_take_what_fit_was_given_is_refused() -> None:
    class Own(Trainer):
        def configure_optimizer(self, model: nn.Module) -> Optimizer:  # type: ignore[override]
            return SGD(model.parameters(), lr=0.1)

    trainer = Own(max_epochs=1, callbacks=[])
    with pytest.raises(ConfigError, match=r"def configure_optimizer\(self, model, optimizer\)"):
        fit(trainer, toy_loaders()[0])


def test_a_description_has_no_side_effects_and_is_true_for_long_runs() -> None:
    makes: list[Make] = [
        lambda o: OneCycleLR(o, [1.0, 0.1, 0.01, 0.001], total_steps=100_003),
        lambda o: NamedLR(o, "cosine", 100_003, 7_777),
        lambda o: SequentialLR(o, [LinearLR(o, total_iters=7), CosineAnnealingLR(o, 99_996)], [7]),
    ]
    for make in makes:
        parameters = enumerate(toy_model().parameters())
        optimizer = AdamW([{"params": [p], "lr": 10.0**-i} for i, p in parameters])
        scheduler = make(optimizer)
        states = [copy.deepcopy(part.state_dict()) for part in (optimizer, scheduler)]
        states[1].pop("_schedulers", None)
        text = describe(LRSchedule(scheduler), 100_003, None)
        after = [part.state_dict() for part in (optimizer, scheduler)]
        after[1].pop("_schedulers", None)
        assert after == states
        assert "peak 0.001 to 1," in text


def test_a_resume_by_name_is_exact(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "warmup": 0.2}
    _, whole = train("wsd", warmup=0.2)
    _, first = train("wsd", callbacks=[StopsAt(17), Checkpoint()], **settings)
    with pytest.raises(CheckpointError, match=r"scheduler: 'wsd, warmup=0.2' in the checkpoint"):
        train("wsd", callbacks=[Checkpoint()], resume="must", **settings | {"warmup": 0.1})
    trainer, second = train("wsd", callbacks=[Checkpoint()], resume="must", **settings)
    assert first + second == whole
    assert trainer.run is not None


def test_a_changed_horizon_follows_or_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "resume": "auto", "warmup": 4}
    train("cosine", max_steps=16, callbacks=[Checkpoint(every_n_steps=8)], **settings)
    longer = {"max_steps": 32, "callbacks": [Checkpoint()], "resume": "must"}
    with pytest.raises(CheckpointError, match="the horizon changed"):
        train("cosine", **settings | longer)
    with pytest.raises(ConfigError, match=r"`total_steps=16`.*cannot go on.*schedule=.rescale"):
        train("cosine", schedule="keep", **settings | longer)
    _, rates = train("cosine", schedule="rescale", rate=1.0, **settings | longer)
    assert rates == pytest.approx(expected_rates("cosine", 4, 32)[16:], abs=1e-12)


def test_another_unit_is_another_schedule(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "callbacks": [Checkpoint()]}
    train(lambda o: LRSchedule(StepLR(o, 2), every="epoch"), **settings)
    with pytest.raises(CheckpointError, match="'every epoch' in the checkpoint, 'every step' now"):
        train(lambda o: StepLR(o, 20), resume="must", **settings)


def _by_name(rank: int, split: bool) -> list[float]:
    return train("linear", warmup=0.25, rate=1.0, split_batches=split)[1]


def test_a_schedule_by_name_counts_updates_on_two_processes() -> None:
    for split, updates in ((False, UPDATES // 2), (True, UPDATES)):
        expected = expected_rates("linear", updates // 4, updates)
        for rates in run_ranks(2, _by_name, split):
            assert rates == pytest.approx(expected, abs=1e-12)


def test_groups_keep_their_own_rates() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[1].parameters(), "lr": torch.tensor(0.1)},
    ]
    optimizer = SGD(groups, lr=0.1)
    fit(make_trainer(), toy_loaders()[0], model, optimizer=optimizer, lr_scheduler="cosine")
    low, high = (float(group["lr"]) for group in optimizer.param_groups)
    assert (low, high) == (0.0, 0.0)
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)


def test_the_evaluation_of_a_stop_does_not_advance_a_schedule_that_watches_figures(
    tmp_path: Path,
) -> None:
    def fit_with(*callbacks: Callback, **arguments: Any) -> dict[str, Any]:
        trainer = make_trainer(
            max_epochs=2, callbacks=[Checkpoint(), *callbacks], output_dir=tmp_path
        )
        model = toy_model()
        fit(
            trainer,
            toy_loaders(),
            model,
            optimizer=partial(SGD, lr=5.0),
            # No loss is ever good enough: each evaluation that counts halves the rate.
            lr_scheduler=lambda o: LRSchedule(
                ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=100.0), metric="eval/loss"
            ),
            **arguments,
        )
        assert trainer.run is not None
        return {"weights": model.state_dict(), "rate": trainer.run.optimizer.param_groups[0]["lr"]}

    whole = fit_with()
    shutil.rmtree(tmp_path)
    fit_with(StopsAt(5))
    resumed = fit_with(resume="must")
    assert resumed["rate"] == whole["rate"]
    assert all(torch.equal(resumed["weights"][k], v) for k, v in whole["weights"].items())
