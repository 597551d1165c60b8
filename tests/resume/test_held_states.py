"""Optimizers and the like that a step uses by itself come back with their states (rule 22)."""

import copy
import itertools
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.toys import FEATURES, fit, toy_dataset
from trainkit import Callback, CheckpointError, Run, StepResult, Trainer
from trainkit.callbacks import EMA, Checkpoint, MainProcess

STEPS, CUT = 12, 6


class WithHead(Trainer):
    """Trains a head beside the model by an optimizer and a scheduler of its own."""

    heads = 1
    centre = nn.BatchNorm1d(2, affine=False)  # of the class
    calls = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.head = nn.Linear(2, 2)
        groups = [{"params": [p]} for p in [*self.head.parameters()][: self.heads]]
        self.tools: dict[str, Any] = {"optimizer": torch.optim.Adam(groups, lr=0.05)}
        self.decay = StepLR(self.tools["optimizer"], 2, gamma=0.7)
        self.centre.reset_running_stats()
        type(self).calls = 0
        self.unused = torch.optim.Adam(self.head.parameters())
        self.of_run: list[Any] = []

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        optimizer = self.tools["optimizer"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(self.head(outputs.detach()), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self.decay.step()
        self.__class__.calls += 1
        self.centre(outputs.detach())
        outputs = outputs + self.head(outputs).detach() - self.centre.running_mean
        return nn.functional.cross_entropy(outputs, batch[1]) * self.calls


def _train(
    folder: Path,
    trainer: type[WithHead] = WithHead,
    stop: int | None = None,
    model: nn.Module | None = None,
    **arguments: Any,
) -> tuple[list[float], WithHead, set[str]]:
    """Return the losses from here on, the trainer, and the names of what its attributes save."""
    torch.manual_seed(0)
    losses: list[float] = []
    saved: set[str] = set()

    def note(run: Run) -> None:
        found = run.internals.attributes.state_dict()
        saved.update(f"{name}.{key}" for name, own in found.items() for key in own)

    seen = On(Callback.on_step_end, lambda run, result: losses.append(float(result.loss)))
    callbacks = [Checkpoint(every_n_steps=CUT), seen, On(Callback.on_fit_end, note), StopsAt(stop)]
    seen.name = "losses"
    made = trainer(max_steps=STEPS, output_dir=folder, callbacks=callbacks)

    def optimizer(parameters: Any) -> Any:
        made.of_run.append(torch.optim.Adam(parameters, lr=0.05))
        return made.of_run[0]

    def scheduler(optimizer: Any) -> Any:
        made.of_run.append(StepLR(optimizer, 3))
        return made.of_run[1]

    loader, model = DataLoader(toy_dataset(), 4), model or nn.Linear(FEATURES, 2)
    arguments |= {"optimizer": optimizer, "lr_scheduler": scheduler, "loss_fn": None}
    fit(made, loader, model, **arguments)
    return losses, made, saved


def test_what_a_step_trains_by_itself_is_trained_on(tmp_path: Path) -> None:
    losses, whole, saved = _train(tmp_path / "a")
    assert {"trainer.decay.state", "trainer.tools.optimizer.state"} <= saved
    assert not [name for name in saved if "of_run" in name or "unused" in name]
    _train(tmp_path / "b", stop=CUT)
    later, resumed, _ = _train(tmp_path / "b", resume="must")
    assert later == losses[CUT:]
    assert torch.equal(resumed.head.weight, whole.head.weight)
    assert resumed.decay.last_epoch == STEPS
    rates = [each.tools["optimizer"].param_groups[0]["lr"] for each in (resumed, whole)]
    assert rates[0] == rates[1] < 0.05


def test_a_state_that_does_not_fit_says_whose_it_is(tmp_path: Path) -> None:
    class WithMore(WithHead):
        heads = 2

    _train(tmp_path, stop=CUT)
    with pytest.raises(CheckpointError, match=r"`trainer\.tools\.optimizer` refused its state"):
        _train(tmp_path, WithMore, resume="must")


class Warm(LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.shape = partial(min, 1.0)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [self.shape(base * self.last_epoch) for base in self.base_lrs]


class Refuses(Warm):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


@pytest.mark.parametrize("kind", [Warm, Refuses])
def test_a_state_that_no_checkpoint_holds_is_told(
    kind: type[Warm], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class WithFunction(WithHead):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.decay = kind(self.tools["optimizer"])  # type: ignore[assignment]

    _train(tmp_path, WithFunction)
    told = "trainkit: `trainer.decay.state` has become what no checkpoint holds"
    assert capfd.readouterr().out.count(told) == 1


class WithIterators(WithHead):
    """Reads a second loader by hand, from one iterator to the next."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.unlabeled: Any = None
        self.read = open(__file__)  # noqa: SIM115
        self.numbers = itertools.count()

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.run is not None
        if self.run.state.step % 4 == 0:
            self.unlabeled = iter(DataLoader(toy_dataset(), 4))
        inputs, _ = next(self.unlabeled)
        return super().training_step(model, (batch[0] + inputs, batch[1]))


def test_an_iterator_that_no_checkpoint_holds_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, trainer, _ = _train(tmp_path, WithIterators)
    trainer.read.close()  # type: ignore[attr-defined]
    told = [line for line in capfd.readouterr().out.splitlines() if "is an iterator" in line]
    assert [line.split("`")[1] for line in told] == ["trainer.unlabeled", "trainer.numbers"]


def test_a_proxy_of_what_is_gone_is_left_alone(tmp_path: Path) -> None:
    for stop in (CUT, CUT + 1):
        model, gone = nn.Linear(FEATURES, 2), toy_dataset()
        model.parent = weakref.proxy(gone)
        del gone
        _train(tmp_path, model=model, stop=stop, resume="auto")


class Adds(EMA):
    """Adds a sum to a callback whose `state_dict` does not know of it."""

    def __init__(self) -> None:
        super().__init__(0.9)
        self.count = torch.zeros(())

    def on_step_end(self, run: Run, result: StepResult) -> None:
        super().on_step_end(run, result)
        self.count = self.count + result.loss


class Head(Callback, nn.Module):  # type: ignore[misc]
    """Is a module itself."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(1, 1).requires_grad_(False)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.layer.weight += result.loss


class Steers(Callback):
    """Sets the rate and the weights by what it holds, and has no `state_dict`."""

    def __init__(self) -> None:
        self.count, self.mean, self.seen = 0, torch.zeros(()), list[int]()
        self.latest: deque[float] = deque(maxlen=2)
        self.offset, self.teacher = nn.Parameter(torch.zeros(())), None  # type: nn.Parameter, Any
        self.adam = torch.optim.Adam([self.offset])
        self.changes, self.norms = list[Tensor](), list[Tensor]()

    def on_fit_start(self, run: Run) -> None:
        self.average = AveragedModel(run.module)
        self.decay = StepLR(run.optimizer, 4, gamma=0.7)
        self.start = {name: p.detach().clone() for name, p in run.module.named_parameters()}

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.count += 1
        self.seen.append(run.state.step)
        self.latest.append(float(result.loss))
        self.mean = 0.9 * self.mean + 0.1 * result.loss
        self.average.update_parameters(run.module)
        self.decay.step()
        self.norms.append(result.loss.detach())
        self.adam.zero_grad()
        self.offset.grad = self.offset.detach() - result.loss.detach()
        self.adam.step()
        if not self.changes:
            self.teacher = copy.deepcopy(run.module)
            self.changes = [torch.zeros_like(each) for each in run.module.parameters()]
        for change, own in zip(self.changes, run.module.parameters(), strict=True):
            change.lerp_(own.detach(), 0.1)
        with torch.no_grad():
            for own, average in zip(
                run.module.parameters(), self.average.module.parameters(), strict=True
            ):
                own.add_(0.1 * (average - own) / self.count + 0.01 * self.mean)
                own.add_(sum(self.latest) + self.offset, alpha=0.01)
            for part in (self.start.values(), self.changes, self.teacher.parameters()):
                for own, other in zip(run.module.parameters(), part, strict=True):
                    other.lerp_(own, 0.1)
                    own.lerp_(other, 0.1)


@pytest.mark.parametrize("wrap", [lambda callback: callback, MainProcess], ids=["plain", "main"])
def test_what_a_callback_holds_comes_back(wrap: Any, tmp_path: Path) -> None:
    def train(folder: str, steps: int, **arguments: Any) -> tuple[Steers, list[Tensor]]:
        torch.manual_seed(0)
        model, steers, adds, head = nn.Linear(FEATURES, 2), Steers(), Adds(), Head()
        trainer = Trainer(
            max_steps=STEPS,
            output_dir=tmp_path / folder,
            callbacks=[Checkpoint(every_n_steps=CUT), wrap(steers), adds, head, StopsAt(steps)],
        )
        fit(trainer, DataLoader(toy_dataset(), 4), model, **arguments)
        return steers, [*model.parameters(), *head.parameters(), adds.count]

    whole, weights = train("a", STEPS)
    train("b", CUT)
    steers, resumed = train("b", STEPS, resume="must")
    assert all(map(torch.equal, weights, resumed))
    assert (steers.count, steers.latest) == (STEPS, whole.latest)
    assert steers.seen == whole.seen == [*range(1, STEPS + 1)]
    assert len(steers.norms) == STEPS


class Calls(Callback):
    """Has an attribute of the name under which `MainProcess` holds a callback."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.count = callback, 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.count += 1
        self.callback(self.count)


def test_a_callback_may_call_anything_callback(tmp_path: Path) -> None:
    seen: list[int] = []
    for stop in (CUT, STEPS):
        callbacks = [Checkpoint(every_n_steps=CUT), Calls(seen.append), StopsAt(stop)]
        trainer = Trainer(max_steps=STEPS, output_dir=tmp_path, callbacks=callbacks)
        fit(trainer, DataLoader(toy_dataset(), 4), nn.Linear(FEATURES, 2), resume="auto")
    assert seen == [*range(1, STEPS + 1)]
