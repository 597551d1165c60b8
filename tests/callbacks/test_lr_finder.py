"""Tests of the search for a learning rate, which leaves no trace."""

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from tests.data import streams
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_loaders
from trainkit import Callback, ConfigError, Run, StepResult, Trainer
from trainkit.callbacks import EMA, BatchSizeFinder, Checkpoint, LRFinder


class Noisy(nn.Module):
    """Draws random numbers, and has buffers and a counter that each forward moves."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.forwards = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        self.seen += len(inputs)
        noise = random.random() + numpy.random.random()
        hidden = self.dropout(torch.tanh(self.norm(self.first(inputs)) + 1e-3 * noise))
        return self.last(hidden)  # type: ignore[no-any-return]


class Trail(Callback):
    """Keeps the samples, the rate and the loss of each step, and what is drawn after the last."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.steps.append(batch[0].clone())

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += [run.optimizer.param_groups[0]["lr"], result.loss.clone()]

    def on_fit_end(self, run: Run) -> None:
        self.steps += [random.random(), numpy.random.random(), torch.rand(2)]


def train(*finders: Callback, loader: Any = None, **settings: Any) -> tuple[Any, Trainer]:
    """Return all that a training did and came to."""
    model, trail = Noisy(), Trail()
    options = {"optimizer": settings.pop("optimizer", partial(AdamW, lr=0.01, weight_decay=0.1))}
    options["lr_scheduler"] = settings.pop("lr_scheduler", "cosine")
    trainer = make_trainer(
        callbacks=[*finders, trail], **{"max_epochs": 2, "max_grad_norm": 1.0} | settings
    )
    result = fit(trainer, loader or DataLoader(toy_dataset(30), 4, shuffle=True), model, **options)
    run = trainer.run
    assert run is not None
    states = [*model.state_dict().values(), *run.optimizer.state_dict()["state"].values()]
    end = [trail.steps, states, model.forwards, run.state.state_dict(), result.metrics]
    end += [run.precision.state_dict()]
    trainer.close()
    return end, trainer


def alike(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        first, second = [*first.items()], [*second.items()]
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def looking(**options: Any) -> LRFinder:
    return LRFinder(**{"num_steps": 20, "stop": False} | options)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "drop_last_window": True},
    "fp16": {"precision": "fp16"},
    "momentum": {"optimizer": partial(SGD, lr=0.1, momentum=0.9), "lr_scheduler": None},
    "rate in a tensor": {"optimizer": lambda p: AdamW(p, lr=torch.tensor(0.01))},
    "one step": {"max_epochs": None, "max_steps": 1},
    "batch size": {"loader": DataLoader(toy_dataset(30), 8), "more": [BatchSizeFinder()]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_after_it_is_that_without_it(kind: str) -> None:
    options = dict(KINDS[kind])
    more = options.pop("more", [])
    finder = looking()
    found, _ = train(*more, finder, **options)
    expected, _ = train(*more, **options)
    if more:  # whose trial is a forward too, inside of the search
        found[2] = expected[2]
    assert alike(found, expected)
    assert 2 < len(finder.rates) <= 20


LASTING = {"num_workers": 1, "persistent_workers": True}
STREAMS: list[tuple[str, dict[str, Any], int]] = []
STREAMS += [("Counting", {}, 4), ("Shuffling", {}, 30), ("Buffering", {}, 30), ("Walking", {}, 30)]
STREAMS += [("Stateless", {}, 30), ("Counting", LASTING, 30), ("Buffering", LASTING, 4)]


@pytest.mark.parametrize(("kind", "workers", "steps"), with_few(STREAMS[:3], STREAMS))
def test_streams_are_where_they_were(kind: str, workers: dict[str, Any], steps: int) -> None:
    seen = []
    for finders in ([], [looking(num_steps=steps)]):
        trail = Trail()
        trainer = make_trainer(callbacks=[*finders, trail], max_epochs=2)
        loader = DataLoader(getattr(streams, kind)(), 4, **workers)
        torch.manual_seed(0)
        model = nn.Linear(2, 1).double()
        fit(trainer, (loader, None), model, loss_fn=nn.MSELoss())
        seen.append(trail.steps)
    assert alike(*seen)


def test_rates_grow_and_the_loss_answers() -> None:
    finder = looking(min_lr=1e-5, max_lr=100.0, num_steps=60)
    train(finder, loader=(DataLoader(toy_dataset(512), 32, shuffle=True), None))
    ratios = [b / a for a, b in zip(finder.rates, finder.rates[1:], strict=False)]
    assert ratios == pytest.approx([(1e7) ** (1 / 59)] * len(ratios))
    assert finder.rates[0] == 1e-5
    assert len(finder.losses) == len(finder.rates)
    assert finder.suggestion is not None
    assert 1e-3 < finder.suggestion < 1


def test_a_loss_that_diverges_ends_the_search() -> None:
    finder = looking(min_lr=1e-3, max_lr=1e9, num_steps=100)
    train(finder, optimizer=partial(SGD, lr=0.1), max_grad_norm=None)
    assert len(finder.rates) < 100
    assert not math.isfinite(finder.losses[-1]) or finder.losses[-1] > finder.losses[0]


def test_groups_keep_their_ratio() -> None:
    seen: list[list[float]] = []
    notes = (seen,)  # a list by itself would be put back

    class Watches(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            assert self.run is not None
            notes[0].append([group["lr"] for group in self.run.optimizer.param_groups])
            return super().training_step(model, batch)

    model = Noisy()
    groups: list[dict[str, Any]] = [
        {"params": model.first.parameters()},
        {"params": model.last.parameters(), "lr": 0.02},
    ]
    finder = looking(num_steps=5, stop=True)
    trainer = Watches(max_epochs=1, callbacks=[finder])
    optimizer = SGD(groups, lr=0.2)
    fit(trainer, toy_loaders()[0], model, optimizer=optimizer)
    assert [rates[0] for rates in seen] == finder.rates
    assert [rates[1] for rates in seen] == [pytest.approx(0.1 * rate) for rate in finder.rates]
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.02]


def test_the_run_ends_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    finder = LRFinder(num_steps=30)
    trainer = make_trainer(callbacks=[finder, Checkpoint(), EMA(0.9)], output_dir=tmp_path)
    result = fit(trainer, model=model)
    assert (result.step, result.stop_reason, result.checkpoint) == (0, "LRFinder", None)
    assert result.metrics == {}
    assert alike(before, model.state_dict())
    said = capsys.readouterr().out
    assert f"LRFinder tried {len(finder.rates)} learning rates: the loss " in said
    assert (tmp_path / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    finder.plot(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text().lstrip().startswith("<?xml")


def test_a_second_fit_looks_anew_and_a_resume_does_not(tmp_path: Path) -> None:
    finder = looking(num_steps=3)
    options: dict[str, Any] = {"output_dir": tmp_path, "max_steps": 3}
    fit(make_trainer(callbacks=[finder, Checkpoint()], **options))
    first = list(finder.losses)
    finder.losses = []
    trainer = make_trainer(callbacks=[finder, Checkpoint()], **options | {"max_steps": 5})
    fit(trainer, resume="must", schedule="keep")
    assert finder.losses == []
    fit(make_trainer(callbacks=[finder]))
    assert finder.losses == first


def test_an_error_in_the_search_leaves_the_weights() -> None:
    class Fails(Trainer):
        steps = 0

        def training_step(self, model: nn.Module, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise ArithmeticError("mine")
            return super().training_step(model, batch)

    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArithmeticError, match="mine"):
        fit(Fails(max_epochs=1, callbacks=[looking()]), model=model)
    assert alike(before, model.state_dict())


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="`min_lr` must be above 0 and below `max_lr`"):
        LRFinder(min_lr=1.0, max_lr=0.1)
    with pytest.raises(ConfigError, match="`num_steps` must be a whole number from 2 on"):
        LRFinder(num_steps=1)
    batches = iter([toy_dataset()[:4], toy_dataset()[4:8]])
    with pytest.raises(ConfigError, match="can be read twice"):
        fit(make_trainer(callbacks=[LRFinder()]), batches)


def on_rank(rank: int, strategy: str, with_finder: bool) -> Any:
    finders = [looking()] if with_finder else []
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    trail = Trail()
    trainer = make_trainer(callbacks=[*finders, trail], max_epochs=2, strategy=strategy)
    fit(trainer, DataLoader(toy_dataset(30), 4, shuffle=True), model, lr_scheduler="cosine")
    trainer.close()
    losses = finders[0].losses if finders else []
    return trail.steps, losses


@pytest.mark.parametrize("strategy", with_few([], ["ddp", "fsdp"]))
def test_several_processes(strategy: str) -> None:
    found = run_ranks(2, on_rank, strategy, True)
    expected = run_ranks(2, on_rank, strategy, False)
    assert [alike(one[0], other[0]) for one, other in zip(found, expected, strict=True)] == [
        True
    ] * 2
    assert found[0][1] == found[1][1] != []
