"""What a training changes and is in no `state_dict` comes back too (rule 22)."""

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, SAMPLES, fit, make_trainer, toy_dataset, toy_loaders
from trainkit import Callback, CheckpointCorrupt, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore

STEPS, CUT = 21, 11  # in an epoch of eight steps each


class Changes(nn.Module):
    """A classifier that remembers, in all the ways that are in no `state_dict`."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(FEATURES, 8)
        self.body = nn.Sequential(first, nn.Dropout(0.0), nn.Linear(8, 2))
        self.register_buffer("batches", torch.zeros(()), persistent=False)
        self.forwards = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(3)
        self.before: Tensor | None = None
        self.latest: deque[Tensor] = deque(maxlen=3)
        self.by_class = {"0": 1.0, "1": 1.0}
        self.alias = first.weight.detach()  # shares memory with what is trained

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            outputs: Tensor = self.body(inputs)
            return outputs
        self.batches += 1
        self.forwards += 1
        noise = torch.randn(inputs.shape, generator=self.generator) * self.numbers.normal()
        outputs = self.body(inputs + 0.1 * noise)
        outputs = outputs * (1 + 0.01 * self.forwards + 0.01 * self.batches)
        if self.before is not None:
            outputs = outputs + 0.1 * self.before + torch.stack(list(self.latest)).mean(0)
        self.before = outputs.detach().mean(0)
        self.latest.append(self.before)
        self.by_class = {name: value * 0.9 for name, value in self.by_class.items()}
        return outputs * torch.tensor(self.by_class["0"])


class Centred(nn.Module):
    """A loss with a running centre, which is a part of no model."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs - self.centre, targets)
        self.centre.lerp_(outputs.detach().mean(0), 0.1)
        return loss


class Counted:
    """A loss that is no module and grows by the call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * (1 + 0.01 * self.calls)


def _closed() -> Any:
    known = {"calls": 0}
    factor = 1.0

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal factor
        known["calls"] += 1
        factor *= 1.01
        return nn.functional.cross_entropy(outputs, targets) * factor * known["calls"]

    return loss_fn


class Collated:
    """Makes batches, each larger than the one before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        self.calls += 1
        inputs, targets = default_collate(samples)
        return inputs * (1 + 0.01 * self.calls), targets


class Levels(Dataset[Any]):
    """Samples that become harder, and count how often they were read."""

    def __init__(self) -> None:
        self.level, self.seen = 0, torch.zeros(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, target = toy_dataset()[index]
        self.seen[index] += 1
        return inputs * (1 + 0.1 * self.level + 0.01 * self.seen[index]), target


class Passes(IterableDataset[Any]):
    """A stream with another order in each pass, which it counts, and noise."""

    def __init__(self) -> None:
        self.passes = 0
        self.noise = {"generators": [np.random.default_rng(1)]}

    def __iter__(self) -> Any:
        self.passes += 1
        order = list(range(SAMPLES))
        random.Random(self.passes).shuffle(order)
        for index in order:
            inputs, target = toy_dataset()[index]
            yield inputs + 0.1 * float(self.noise["generators"][0].normal()), target


class Batches:
    """A loader of one's own."""

    def __init__(self) -> None:
        self.generator, self.passes = random.Random(1), 0

    def __iter__(self) -> Any:
        self.passes += 1
        for _ in range(8):
            rows = self.generator.sample(range(SAMPLES), 4)
            inputs, targets = toy_dataset()[rows]
            yield inputs * (1 + 0.1 * self.passes), targets


class Baseline(Trainer):
    """A trainer that subtracts the mean of earlier losses."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mean, self.number, self.generator = torch.zeros(()), 0, random.Random(1)
        self.latest: list[Tensor] = []

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.mean, self.number = self.mean.lerp(loss.detach(), 0.1), self.number + 1
        self.latest = [*self.latest[-3:], loss.detach()]
        shift = self.generator.random() + torch.stack(self.latest).mean()
        return loss * (loss.detach() - self.mean + 0.01 * self.number + shift)


class Taught(Trainer):
    """A trainer that holds the teacher, an average of the model, and another one in a list."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        with torch.random.fork_rng(devices=[]):
            self.teacher = nn.Linear(FEATURES, 2).requires_grad_(False)
            self.others = [nn.BatchNorm1d(FEATURES)]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs: Tensor = model(inputs)
        with torch.no_grad():
            aim = self.teacher(self.others[0](inputs))
            self.teacher.weight.lerp_(torch.ones(()), 0.01)
            self.teacher.bias.data.mul_(0.9)  # which no version of the tensor counts
            self.teacher = copy.deepcopy(self.teacher)  # whose parameters stay parameters
        loss: Tensor = nn.functional.cross_entropy(outputs, targets)
        return loss + nn.functional.mse_loss(outputs, aim)


class Bank:
    """An object of a user's class, which holds another one."""

    def __init__(self) -> None:
        self.mean, self.inner = torch.zeros(2), Counted()


calls: int
factor: float
bank: Bank
teacher: nn.Linear
noise: np.random.Generator


class Notebook(Trainer):
    """A trainer whose step reads globals, some by way of a function, and sets them."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        global calls
        calls += 1
        outputs: Tensor = model(batch[0])
        bank.mean = bank.mean.lerp(outputs.detach().mean(0), 0.1)
        with torch.no_grad():
            teacher.weight.lerp_(torch.ones(()), 0.01)
        shift = float(noise.normal()) + nn.functional.mse_loss(outputs, teacher(batch[0]))
        loss: Tensor = bank.inner(outputs, batch[1]) * _factor()
        return loss + 0.01 * shift * (outputs - bank.mean).tanh().mean() * calls


def _factor() -> float:
    global factor  # which is not there at first
    factor = globals().get("factor", 1.0) * 1.01
    return float(factor)


def _notebook() -> dict[str, Any]:
    global calls, bank, teacher, noise
    calls, bank, noise = 0, Bank(), np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        teacher = nn.Linear(FEATURES, 2).requires_grad_(False)
    globals().pop("factor", None)
    return _plain(loss_fn=None, trainer=Notebook)


def _weighted(outputs: Tensor, targets: Tensor, *, inner: Counted, known: dict[str, int]) -> Tensor:
    known["calls"] = known.get("calls", 0) + 1
    return inner(outputs, targets) * (1 + 0.1 * known["calls"])


def _freeze(run: Run, *_: Any) -> None:
    if run.state.step == 3:
        layer = run.module.get_submodule("body.0")
        layer.requires_grad_(False)
        run.module.get_submodule("body.1").eval()


def _raise_dropout(run: Run, *_: Any) -> None:
    dropout = run.module.get_submodule("body.1")
    assert isinstance(dropout, nn.Dropout)
    dropout.p = min(0.5, dropout.p + 0.05)


def _loader(data: Any = None) -> DataLoader[Any]:
    shuffles = not isinstance(data, IterableDataset)
    return DataLoader(toy_dataset() if data is None else data, batch_size=4, shuffle=shuffles)


def _harder(data: Levels, run: Run) -> None:
    data.level += 1


def _plain(**settings: Any) -> dict[str, Any]:
    body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    return {"model": nn.Sequential(), "loaders": _loader()} | {"model": _named(body)} | settings


def _named(body: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", body)
    return model


def _harder_by_epoch() -> dict[str, Any]:
    data = Levels()
    harder = On(Callback.on_epoch_end, partial(_harder, data))
    part = Subset(data, [*range(SAMPLES)])
    return _plain(loaders=_loader(part), callback=harder)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "module": lambda: _plain(model=Changes()),
    "loss module": lambda: _plain(loss_fn=Centred()),
    "loss object": lambda: _plain(loss_fn=Counted()),
    "loss method": lambda: _plain(loss_fn=Counted().__call__),
    "loss closure": lambda: _plain(loss_fn=_closed()),
    "loss partial": lambda: _plain(loss_fn=partial(_weighted, inner=Counted(), known={})),
    "notebook": _notebook,
    "collate function": lambda: _plain(loaders=DataLoader(toy_dataset(), 4, collate_fn=Collated())),
    "data set": _harder_by_epoch,
    "teacher": lambda: _plain(loss_fn=None, trainer=Taught),
    "trainer": lambda: _plain(loss_fn=None, trainer=Baseline),
    "stream": lambda: _plain(loaders=_loader(Passes())),
    "loader": lambda: _plain(loaders=Batches()),
    "frozen": lambda: _plain(callback=On(Callback.on_step_end, _freeze)),
    "dropout": lambda: _plain(callback=On(Callback.on_step_end, _raise_dropout)),
}


def _train(
    kind: str, folder: Path, *, stop: int | None = None, accumulation: int = 1, **arguments: Any
) -> Any:
    """Return the losses from here on, and the model."""
    torch.manual_seed(0)
    made = KINDS[kind]()
    losses: list[float] = []
    seen = On(Callback.on_step_end, lambda run, result: losses.append(float(result.loss)))
    seen.name = "losses"
    callbacks = [Checkpoint(every_n_steps=CUT), seen, StopsAt(stop)]
    callbacks += [made.pop("callback")] if "callback" in made else []
    trainer = made.pop("trainer", Trainer)(
        max_steps=STEPS,
        output_dir=folder,
        callbacks=callbacks,
        gradient_accumulation_steps=accumulation,
    )
    fit(trainer, made.pop("loaders"), **made, **arguments)
    return losses, made["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_brings_back_what_no_state_dict_holds(kind: str, tmp_path: Path) -> None:
    losses, whole = _train(kind, tmp_path / "a")
    _train(kind, tmp_path / "b", stop=CUT)
    later, resumed = _train(kind, tmp_path / "b", resume="must")
    assert later == losses[CUT:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [m.training for m in whole.modules()] == [m.training for m in resumed.modules()]
    assert [p.requires_grad for p in whole.parameters()] == [
        p.requires_grad for p in resumed.parameters()
    ]


def test_what_a_user_set_otherwise_and_a_resume_brings_back_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _train("loss object", tmp_path, stop=CUT)
    assert "`loss_fn." not in capfd.readouterr().out
    _train("loss object", tmp_path, resume="must")
    assert "loss_fn." not in capfd.readouterr().out
    made = KINDS["loss object"]()
    made["loss_fn"].calls = 100
    trainer = Trainer(max_steps=STEPS, output_dir=tmp_path)
    fit(trainer, made.pop("loaders"), **made, resume="must")
    told = "`loss_fn.calls` is 100 here, and was 0 when the saved run began. It goes on with "
    assert told in capfd.readouterr().out


def test_globals_that_a_resume_brings_back_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who keeps a list of losses in a global must not take it for that of this `fit` alone."""
    told = "attributes of data sets that the saved run had changed are back as it left them"
    _train("notebook", tmp_path, stop=CUT)
    assert told not in capfd.readouterr().out
    _train("notebook", tmp_path, resume="must")
    assert f"{told}: `training_step.bank.inner.calls`, `training_step" in capfd.readouterr().out


def test_parameters_of_a_teacher_stay_parameters(tmp_path: Path) -> None:
    _train("teacher", tmp_path, stop=CUT)
    made: list[Taught] = []

    class Noted(Taught):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            made.append(self)

    trainer = Noted(max_steps=STEPS, output_dir=tmp_path, callbacks=[])
    torch.manual_seed(0)
    fit(trainer, _loader(), _plain()["model"], loss_fn=None, resume="must", schedule="keep")
    assert all(type(p) is nn.Parameter for p in made[0].teacher.parameters())
    assert len([*made[0].teacher.parameters()]) == 2


def test_weights_of_a_sampler_come_back_between_two_epochs(tmp_path: Path) -> None:
    def run(folder: Path, steps: int, resume: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)

        def weigh(run: Run, *_: Any) -> None:
            sampler.weights[run.state.step] += 5

        weighs = On(Callback.on_step_end, weigh)
        callbacks = [weighs, Checkpoint(every_n_steps=8), StopsAt(steps)]
        trainer = Trainer(max_epochs=3, output_dir=folder, callbacks=callbacks)
        model = nn.Linear(FEATURES, 2)
        fit(trainer, DataLoader(toy_dataset(), 4, sampler=sampler), model, resume=resume)
        return [*model.parameters()]

    whole = run(tmp_path / "a", 99, None)
    run(tmp_path / "b", 8, None)
    assert all(map(torch.equal, whole, run(tmp_path / "b", 99, "must")))


def test_what_shares_memory_with_a_parameter_stays_so(tmp_path: Path) -> None:
    _train("module", tmp_path, stop=CUT)
    _, model = _train("module", tmp_path, resume="must")
    assert model.alias.data_ptr() == model.body[0].weight.data_ptr()


class Constant(nn.Linear):
    """A layer with constants, which strategies and evaluations write back as they were."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.register_buffer("table", torch.ones(FEATURES), persistent=False)
        self.places, self.names, self.factor = torch.arange(FEATURES), ["a"], 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * self.table * self.factor)[:, self.places[:2]]


def _saved_of_constants(rank: int, folder: Path) -> Any:
    save = Checkpoint(every_n_steps=2)
    trainer = make_trainer(max_steps=2, output_dir=folder, callbacks=[save])
    fit(trainer, toy_loaders(SAMPLES - 1), Constant())
    store = CheckpointStore(folder / "checkpoints")
    return store.open(store.checkpoints()[-1].path).read("trainer")["attributes"]


def test_what_does_not_change_is_not_saved(tmp_path: Path) -> None:
    assert _saved_of_constants(0, tmp_path) == {"changed": {}}


class Scaled(nn.Module):
    """A loss with a parameter, and the model that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.scale, targets)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(FEATURES, 2), Scaled()

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs)


def test_what_is_part_of_the_model_is_saved_with_it_alone(tmp_path: Path) -> None:
    model = Whole()
    trainer = Trainer(max_steps=2, output_dir=tmp_path, callbacks=[Checkpoint(every_n_steps=2)])
    fit(trainer, toy_loaders(SAMPLES), model, loss_fn=model.loss)
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = store.open(store.checkpoints()[-1].path)
    assert saved.read("trainer")["attributes"] == {"changed": {}}


def _by_process(rank: int, folder: Path) -> list[list[float]]:
    assert _saved_of_constants(rank, folder / "e") == {"changed": {}}
    whole, _ = _train("module", folder / "a")
    _train("module", folder / "b", stop=CUT)
    later, _ = _train("module", folder / "b", resume="must")
    frozen, _ = _train("frozen", folder / "c")
    _train("frozen", folder / "d", stop=CUT)
    return [whole[CUT:], later, frozen[CUT:], _train("frozen", folder / "d", resume="must")[0]]


def test_each_process_has_its_own_back_and_others_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for whole, later, frozen, later_frozen in run_ranks(2, _by_process, tmp_path):
        assert later == whole
        assert later_frozen == frozen
    capfd.readouterr()
    _train("module", tmp_path / "b", resume="must", accumulation=2)
    assert "`model.forwards`" in (said := capfd.readouterr().out)
    assert "differed between the processes" in said


def test_a_forged_attribute_is_refused(tmp_path: Path) -> None:
    _train("loss object", tmp_path, stop=CUT)
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = store.open(store.checkpoints()[-1].path)
    parts = {name: saved.read(name) for name in saved.names()}
    parts["trainer"]["attributes"]["changed"]["loss_fn"]["__call__"] = {"value": 1}
    about = {**saved.manifest.metadata, "run_id": saved.manifest.run_id}
    store.save(CUT, parts, metadata=about)
    with pytest.raises(CheckpointCorrupt, match="a method"):
        _train("loss object", tmp_path, resume=store.checkpoints()[-1].path)


class Closed:
    """Has no attribute that can be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not connected: {name}")


class Odd(Trainer):
    """Holds and changes what no checkpoint can have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.handle, self.deep = Closed(), list[Any]()
        for _ in range(2000):
            self.deep = [self.deep]
        self.windows = {"loss": deque([0.0])}
        self.records = np.zeros(2, dtype=[("a", "i4")])

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        self.windows["loss"].append(loss.item())
        self.deep.append(loss.item())
        self.records["a"] += 1
        self.shape = torch.zeros(2, device="meta")
        return loss


def test_what_no_checkpoint_can_hold_ends_no_fit(tmp_path: Path) -> None:
    trainer = Odd(max_steps=2, output_dir=tmp_path, callbacks=[Checkpoint(every_n_steps=1)])
    fit(trainer, _loader(), nn.Linear(FEATURES, 2))
    assert trainer.run is not None
    assert trainer.run.checkpoint is not None
