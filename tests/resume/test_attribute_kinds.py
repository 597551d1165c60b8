"""Attributes of many kinds come back, or are left alone, as a right program needs it (rule 22)."""

import argparse
import multiprocessing
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.toys import FEATURES, SAMPLES, fit, toy_dataset
from tests.resume import user_code
from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Checkpoint

STEPS, CUT = 12, 6


class Phase(Enum):
    WARM = 1
    MAIN = 2


class Stage:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Pair(NamedTuple):
    mean: float
    number: int


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0


@dataclass(slots=True)
class Slotted:
    number: int = 0


class Mapped(dict[str, Any]):
    """The kind of settings that many programs have."""

    __getattr__ = dict.__getitem__


class Closed:
    """Has no attribute that can be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not connected: {name}")


class Keeps(Trainer):
    """Changes values of many kinds, all of which its loss depends on."""

    class_number = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.counter, self.seen = Counter[int](), set[int]()
        self.by_name: Any = defaultdict(lambda: 0)
        self.ordered, self.pair = OrderedDict(a=1), Pair(0.0, 0)
        self.windows = {"loss": deque([0.0], maxlen=3)}
        self.latest = deque([0.0], maxlen=3)
        self.alias = self.latest
        self.slotted, self.names = Slotted(), SimpleNamespace(number=0)
        self.arguments, self.mapped = argparse.Namespace(number=0), Mapped(number=0)
        self.meters = [Stage(1.0) for _ in range(100)]
        self.nested = {"a": [Stage(1.0)]}
        self.history = [0.0] * 9_995
        self.delta = torch.zeros(FEATURES, requires_grad=True)
        self.hidden: Any = None
        self.phase, self.settings = Phase.WARM, DEFAULT
        self.stage = STAGES[0]
        self.closed = Closed()
        self.deep = _deep(3000)
        self.records = np.zeros(2, dtype=[("a", "i4")])  # which no checkpoint holds

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        hidden = 0 if self.hidden is None else self.hidden[1]["a"].detach().mean()
        outputs = model(batch[0] + self.delta + hidden)
        self.hidden = outputs, {"a": outputs.square()}  # with their graph
        loss = nn.functional.cross_entropy(outputs, batch[1])
        (gradient,) = torch.autograd.grad(loss, self.delta, retain_graph=True)
        self.delta = (self.delta + 0.01 * gradient).detach().requires_grad_()
        self.counter[1] += 1
        self.seen.add(len(self.seen))
        self.by_name["a"] += 1
        self.ordered["a"] += 1
        self.pair = Pair(0.9 * self.pair.mean + loss.item(), self.pair.number + 1)
        self.windows["loss"].append(loss.item())
        self.latest.append(loss.item())
        for each in (self.slotted, self.names, self.arguments):
            each.number += 1
        self.mapped["number"] += 1
        self.meters[99].scale *= 1.01
        self.nested["a"][0].scale *= 1.01
        self.history.extend([loss.item()] * 2)
        Keeps.class_number += 1
        self.phase = Phase.MAIN
        self.settings = replace(self.settings, temperature=self.settings.temperature * 1.1)
        if self.counter[1] in (2, 8):
            self.stage = STAGES[STAGES.index(self.stage) + 1]
        self.records["a"] += 1
        user_code.calls += 1
        self.deep.append(0)
        numbers = [
            self.counter[1] + len(self.seen) + self.by_name["a"] + self.ordered["a"],
            self.pair.mean + self.pair.number + max(self.windows["loss"]) + sum(self.alias),
            self.slotted.number + self.names.number + self.arguments.number,
            self.mapped["number"]
            + self.meters[99].scale
            + self.nested["a"][0].scale
            + self.history[-3],
            self.phase.value + self.settings.temperature + self.stage.scale,
            Keeps.class_number + user_code.factor() + user_code.calls + user_code.State.number,
        ]
        total: Tensor = loss + loss.detach() * 0.01 * sum(numbers) * loss
        return total


DEFAULT = Settings()
STAGES = [Stage(1.0), Stage(2.0), Stage(3.0)]


def _deep(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


def _train(
    folder: Path,
    trainer: type[Trainer] = Keeps,
    stop: int | None = None,
    loader: Any = None,
    callback: Any = None,
    **arguments: Any,
) -> tuple[list[float], Any]:
    """Return the losses from here on, and the trainer."""
    for stage, scale in zip(STAGES, (1.0, 2.0, 3.0), strict=True):
        stage.scale = scale
    object.__setattr__(DEFAULT, "temperature", 1.0)
    Keeps.class_number = user_code.calls = user_code.State.number = 0
    user_code.known = 1.0
    torch.manual_seed(0)
    losses: list[float] = []
    seen = On(Callback.on_step_end, lambda run, result: losses.append(float(result.loss)))
    seen.name = "losses"
    callbacks = [Checkpoint(every_n_steps=CUT), seen, StopsAt(stop), *(callback or ())]
    made = trainer(max_steps=STEPS, output_dir=folder, callbacks=callbacks)
    loader = DataLoader(toy_dataset(), 4) if loader is None else loader
    loss_fn = nn.CrossEntropyLoss() if trainer is Trainer else None
    fit(made, loader, nn.Linear(FEATURES, 2), loss_fn=loss_fn, **arguments)
    return losses, made


def test_values_of_many_kinds_come_back(tmp_path: Path) -> None:
    losses, whole = _train(tmp_path / "a")
    assert [stage.scale for stage in STAGES] == [1.0, 2.0, 3.0]
    _train(tmp_path / "b", stop=CUT)
    later, resumed = _train(tmp_path / "b", resume="must")
    assert later == losses[CUT:]
    assert resumed.phase is Phase.MAIN
    assert resumed.stage is STAGES[2]
    assert resumed.alias is resumed.latest
    assert resumed.pair == whole.pair
    assert [each.name for each in Phase] == ["WARM", "MAIN"]
    assert [stage.scale for stage in STAGES] == [1.0, 2.0, 3.0]
    assert DEFAULT.temperature == 1.0


class Noise:
    def __init__(self) -> None:
        self.scale = 1.0


class Levels(Dataset[Any]):
    """Samples that become harder, by what an object, a list and a shared number in it say."""

    def __init__(self) -> None:
        self.noise, self.read = Noise(), list[int]()
        self.level = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target = toy_dataset()[index]
        self.read.append(index)  # which tells what this process has read
        level: Any = self.level
        return inputs * (self.noise.scale + level.value), target


def test_objects_in_a_data_set_come_back_and_lists_do_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(folder: Path, **arguments: Any) -> list[float]:
        data = Levels()

        def harder(run: Run, *_: Any) -> None:
            data.noise.scale += 0.1
            level: Any = data.level
            level.value += 1

        callback = [On(Callback.on_step_end, harder)]
        loader = DataLoader(data, 8)
        losses, _ = _train(folder, Trainer, loader=loader, callback=callback, **arguments)
        assert len(data.read) == 8 * len(losses)
        return losses

    losses = train(tmp_path / "a")
    train(tmp_path / "b", stop=CUT)
    assert "are back as it left them" not in capfd.readouterr().out
    assert train(tmp_path / "b", resume="must") == losses[CUT:]
    assert (
        "are back as it left them: `data.level.value`, `data.noise.scale`."
        in capfd.readouterr().out
    )


class Planned(Trainer):
    """A schedule that is used up, something lazy, and a handle that no checkpoint holds."""

    milestones: tuple[int, ...] = (2, 4, 9)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.left = [*self.milestones]

    @cached_property
    def table(self) -> list[int]:
        return [10 * each for each in self.milestones]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.run is not None
        if self.run.state.step >= self.left[0]:
            self.left.pop(0)
        assert self.table[0] == 10 * self.milestones[0]
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Longer(Planned):
    milestones = (3, 4, 9, 20)


def test_a_list_that_is_given_anew_is_told_and_what_is_cached_is_made_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "`trainer.left` is given otherwise than when the saved run began"
    _train(tmp_path, Planned, stop=CUT)
    _train(tmp_path, Planned, resume="must", stop=CUT + 1)
    assert told not in capfd.readouterr().out
    anew = On(Callback.on_checkpoint_loaded, lambda run, path: trainers[0].left.append(30))
    trainers = list[Any]()

    class Noted(Longer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            trainers.append(self)

    _train(tmp_path, Noted, resume="must", callback=[anew])
    assert told in capfd.readouterr().out
    assert trainers[0].left == [30]
