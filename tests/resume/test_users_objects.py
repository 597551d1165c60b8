"""What programs after tutorials hold in records, around callbacks and in optimizers comes back."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.toys import FEATURES, fit, toy_dataset
from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, Evaluation
from trainkit.metrics import Metric

STEPS, CUT = 12, 5
CLASSIFIER: Any = None


class Kind(Enum):
    EVEN = 1
    ODD = 2


class Transition(NamedTuple):
    inputs: Tensor
    kind: Kind
    before: "Transition | None"


@dataclass
class Episode:
    loss: float
    inputs: Tensor
    parts: list[Transition] = field(default_factory=list)


class Remembers(Trainer):
    """Trains on what it has seen, too, which it keeps in records."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.memory: deque[Transition] = deque(maxlen=5)
        self.episodes: list[Episode] = []
        self.latest: Transition | None = None
        self.by_kind: dict[Kind, list[Any]] = {}

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        kind = list(Kind)[len(self.episodes) % 2]
        before = self.latest and self.latest._replace(before=None)
        self.latest = Transition(batch[0], kind, before)
        self.memory.append(self.latest)
        self.by_kind.setdefault(kind, []).append(Transition(batch[0][0], kind, None))
        seen = torch.cat([each.inputs * each.kind.value for each in self.memory])
        seen = torch.cat([seen, *(each.inputs for each in self.episodes)])
        more = torch.stack([each.inputs for kind in self.by_kind for each in self.by_kind[kind]])
        loss: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss = loss + 0.1 * (model(seen).square().mean() + model(more).square().mean())
        self.episodes.append(Episode(loss.item(), batch[0][:1], [*self.memory][:1]))
        return loss


def _train(
    folder: Path,
    stop: int | None = None,
    trainer: type[Trainer] = Trainer,
    callbacks: Callable[[nn.Module], list[Callback]] = lambda _: [],
    optimizer: Any = SGD,
    **arguments: Any,
) -> tuple[list[Any], Trainer]:
    """Return weights and rates, and the trainer; with a stop, those of the resumed run."""

    def train(end: int | None, resume: str | None) -> tuple[nn.Module, Trainer]:
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, 2)
        more = [*callbacks(model), Checkpoint(every_n_steps=CUT), StopsAt(end)]
        made = trainer(max_steps=STEPS, output_dir=folder, callbacks=more)
        loader, given = DataLoader(toy_dataset(), 4, shuffle=True), partial(optimizer, lr=0.1)
        fit(made, loader, model, optimizer=given, resume=resume, **arguments)
        return model, made

    if stop:
        train(stop, None)
    model, made = train(None, "must" if stop else None)
    assert made.run is not None
    rates = [group["lr"] for group in made.run.optimizer.param_groups]
    return [*(p.tolist() for p in model.parameters()), rates], made


def test_records_in_lists_and_the_like_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, first = _train(tmp_path / "a", trainer=Remembers)
    assert _train(tmp_path / "b", CUT, Remembers)[0] == whole
    resumed = _train(tmp_path / "c", 2, Remembers)[1]
    assert isinstance(resumed, Remembers)
    assert isinstance(first, Remembers)
    assert repr(resumed.memory) == repr(first.memory)
    assert repr(resumed.episodes) == repr(first.episodes)
    assert "for which this run has nothing" not in capfd.readouterr().out


count, settings = 0, {"best": float("inf"), "wait": 0}


class Calls(Callback):
    """Calls what it was given."""

    def __init__(self, on_step: Callable[[Run, StepResult], None]) -> None:
        self.function = on_step

    def on_step_end(self, run: Run, result: StepResult) -> None:
        global count
        count += 1
        run.optimizer.param_groups[0]["weight_decay"] = 0.01 * count
        self.function(run, result)


def _of_a_script(model: nn.Module) -> list[Callback]:
    """Return a callback whose functions read and set names around them."""
    global count
    count = 0
    average = torch.optim.swa_utils.AveragedModel(model)
    best = {"loss": float("inf"), "waits": 0}

    def plateau(run: Run, result: StepResult) -> None:
        average.update_parameters(model)
        loss = float(result.loss)
        best["waits"] = 0 if loss < best["loss"] else best["waits"] + 1
        best["loss"] = min(best["loss"], loss)
        if best["waits"] == 3:
            run.optimizer.param_groups[0]["lr"] *= 0.5
            best["waits"] = 0
        with torch.no_grad():
            for own, mean in zip(model.parameters(), average.parameters(), strict=True):
                own.lerp_(mean, 0.1)

    return [Calls(plateau)]


@pytest.mark.parametrize("cut", [CUT, 8])
def test_what_functions_of_a_callback_read_from_outside_comes_back(
    cut: int, tmp_path: Path
) -> None:
    whole, _ = _train(tmp_path / "a", callbacks=_of_a_script)
    assert _train(tmp_path / "b", cut, callbacks=_of_a_script)[0] == whole


class Prunes(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step % 3 == 0:
            prune.l1_unstructured(run.module, "weight", amount=0.3)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_ready", [False, True])
def test_parameters_that_get_other_names_are_told_at_the_first_save(
    is_ready: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prunes(model: nn.Module) -> list[Callback]:
        if is_ready:
            prune.identity(model, "weight")  # type: ignore[no-untyped-call]
        return [Prunes()]

    whole, _ = _train(tmp_path / "a", callbacks=prunes)
    told = "trainkit: parameters have other names than when `fit` began (`weight_orig`)"
    assert capfd.readouterr().out.count(told) == (not is_ready)
    if is_ready:
        assert _train(tmp_path / "b", CUT, callbacks=prunes)[0] == whole


best_of_all = 0.0


class PrunesFirst(Callback):
    """Prunes before a forward: by the weights that the last one made."""

    def on_step_start(self, run: Run) -> None:
        if run.state.step == CUT:
            prune.l1_unstructured(run.module, "weight", amount=0.3)  # type: ignore[no-untyped-call]


def test_a_resume_that_prunes_at_once_goes_by_the_weights_that_were(tmp_path: Path) -> None:
    def prunes(model: nn.Module) -> list[Callback]:
        prune.l1_unstructured(model, "weight", amount=0.3)  # type: ignore[no-untyped-call]
        return [PrunesFirst()]

    whole, _ = _train(tmp_path / "a", callbacks=prunes)
    assert _train(tmp_path / "b", CUT, callbacks=prunes)[0] == whole


def best(predictions: Tensor, references: Tensor) -> float:
    global best_of_all
    best_of_all = max(best_of_all, (predictions == references).float().mean().item())
    return best_of_all


class Smoothed(Metric):
    name = "smoothed"
    keys = ("smoothed",)
    higher_is_better = True

    def __init__(self) -> None:
        self.mean = 0.5

    def reset(self) -> None:
        self.values: list[float] = []

    def update(self, predictions: Tensor, references: Tensor) -> None:
        self.values.append((predictions == references).float().mean().item())

    def compute(self) -> dict[str, float]:
        self.mean += 0.1 * (self.values[-1] - self.mean)
        return {"smoothed": self.mean}


class Options(Dataset[Any]):
    """Has settings in a dict, which a callback changes."""

    def __init__(self) -> None:
        self.inner, self.options = toy_dataset(), {"scale": 1.0}

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.inner[index]
        return inputs * self.options["scale"], target


class Widens(Callback):
    def __init__(self, data: Options) -> None:
        self.data = data

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.data.options["scale"] *= 0.9


@pytest.mark.parametrize("cut", [4, 8])
def test_what_metrics_remember_and_options_of_data_come_back(cut: int, tmp_path: Path) -> None:
    def train(folder: Path, steps: int, resume: str | None) -> Any:
        global best_of_all
        best_of_all = 0.0
        torch.manual_seed(0)
        data, model = Options(), nn.Linear(FEATURES, 2)
        used = [Evaluation([best, Smoothed()], every_n_steps=2), Widens(data)]
        trainer = Trainer(
            max_steps=steps, output_dir=folder, callbacks=[*used, Checkpoint()], seed=1
        )
        loaders = DataLoader(data, 4, shuffle=True), DataLoader(toy_dataset(seed=2), 8)
        about: dict[str, Any] = {"schedule": "keep"} if resume else {}
        result = fit(trainer, loaders, model, resume=resume, **about)
        return result.metrics, [p.tolist() for p in model.parameters()]

    whole = train(tmp_path / "a", STEPS, None)
    train(tmp_path / "b", cut, None)
    assert train(tmp_path / "b", STEPS, "must") == whole


class Around(Optimizer):
    """Has another optimizer inside, with its groups, as SAM and Lookahead."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = Adam(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.base.param_groups:
            group["weight_decay"] = 0.01 * self.calls
        self.base.step()


class Warming(LRScheduler):
    """Has another schedule inside, in its `state_dict` too, and a function."""

    def __init__(self, optimizer: Any) -> None:
        self.shape: Callable[[float], float] = lambda part: 0.1 + 0.9 * part
        self.after = StepLR(optimizer, 2, gamma=0.5)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch < 4:
            return [base * self.shape(self.last_epoch / 4) for base in self.base_lrs]
        self.after.step()
        return list(self.after.get_last_lr())


@pytest.mark.parametrize("schedule", [partial(ExponentialLR, gamma=0.9), Warming])
@pytest.mark.parametrize("optimizer", [Around, Adam])
def test_optimizers_and_schedules_around_others_come_back(
    optimizer: Any, schedule: Any, tmp_path: Path
) -> None:
    about = {"optimizer": optimizer, "lr_scheduler": schedule}
    whole, _ = _train(tmp_path / "a", **about)
    for cut in (2, CUT, 9):
        assert _train(tmp_path / f"{cut}", cut, **about)[0] == whole


class Rollouts(IterableDataset[Any]):
    """Draws what it yields from a place that moves on, by a generator of its own."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(3)
        self.place, self.passes, self.seen = torch.zeros(FEATURES), 0, [0.0]

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for _ in range(12):
            self.place = self.place + torch.randn(FEATURES, generator=self.draws)
            self.seen.append(self.place.mean().item())
            yield self.place / self.passes, (self.place.sum() > 0).long()


@pytest.mark.parametrize("cut", [2, 3, 4, 6, 7])
def test_a_stream_that_goes_on_over_passes_comes_back(cut: int, tmp_path: Path) -> None:
    def train(folder: Path, stop: int | None, resume: str | None) -> Any:
        torch.manual_seed(0)
        data, model = Rollouts(), nn.Linear(FEATURES, 2)
        trainer = Trainer(
            max_steps=9, output_dir=folder, callbacks=[Checkpoint(every_n_steps=1), StopsAt(stop)]
        )
        fit(trainer, DataLoader(data, 4), model, resume=resume)
        return [p.tolist() for p in model.parameters()], data.place.tolist(), data.passes

    whole = train(tmp_path / "a", None, None)
    train(tmp_path / "b", cut, None)
    assert train(tmp_path / "b", None, "must") == whole


def _features() -> Any:
    from sklearn.kernel_approximation import RBFSampler

    return RBFSampler(random_state=0).fit([[0.0, 1.0]])


def _pipeline() -> Any:
    from sklearn.pipeline import Pipeline

    return Pipeline([("features", _features())])


class Replay(Dataset[Any]):
    """Samples that training adds; and a cache, which it may do without."""

    def __init__(self) -> None:
        self.buffer = deque([(torch.zeros(2), torch.zeros(1))] * 8, maxlen=8)
        self.paths = [str(index) for index in range(8)]
        self.constant, self.rows = deque(range(8)), [1, 2]
        self.scores, self.large = [0.0] * 8, [*range(50_000)]
        self.transform = _pipeline()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.buffer[index]


def test_samples_that_training_adds_to_a_data_set_are_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, sample = Replay(), (torch.ones(2), torch.ones(1))

    def add(run: Run, result: StepResult) -> None:
        data.buffer.append(sample)
        data.rows = iter([3])  # type: ignore[assignment]
        data.scores[run.state.step % 8] = 1.5
        data.large.sort(reverse=True)
        data.transform.steps[0][1].random_offset_[:] = run.state.step  # of the latest sample

    adds = On(Callback.on_step_end, add)
    trainer = Trainer(
        max_steps=3, output_dir=tmp_path, callbacks=[adds, Checkpoint(every_n_steps=1)]
    )
    loader: DataLoader[Any] = DataLoader(data, 2)
    model = nn.Linear(2, 1)
    trainer.fit(model, loader, optimizer=SGD(model.parameters(), 0.1), loss_fn=nn.MSELoss())
    said = capsys.readouterr().out
    assert said.count("`data.buffer` has changed since training began") == 1
    assert all(f"`data.{name}` has changed" in said for name in ("rows", "scores", "large"))
    assert not [name for name in ("paths", "constant", "transform") if f"data.{name}" in said]


class Scales(Trainer):
    """Fits estimators as it goes, as people do for features and targets of unknown ranges."""

    def __init__(self, **settings: Any) -> None:
        from sklearn.preprocessing import StandardScaler

        super().__init__(**settings)
        self.scaler = StandardScaler()

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        self.scaler.partial_fit(inputs.numpy())
        CLASSIFIER.partial_fit(inputs.numpy(), targets.numpy(), classes=[0, 1])
        scaled = torch.from_numpy(self.scaler.transform(inputs.numpy()))
        advice = torch.from_numpy(CLASSIFIER.decision_function(inputs.numpy()))
        return nn.functional.cross_entropy(model(scaled + advice[:, None].float()), targets)


@pytest.mark.parametrize("cut", [3, 4])
def test_what_estimators_have_learnt_comes_back(cut: int, tmp_path: Path) -> None:
    from sklearn.linear_model import SGDClassifier

    def train(folder: Path, stop: int | None, resume: str | None) -> Any:
        global CLASSIFIER
        CLASSIFIER = SGDClassifier(random_state=0)
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, 2)
        callbacks = [Checkpoint(every_n_steps=1), StopsAt(stop)]
        trainer = Scales(max_steps=9, output_dir=folder, callbacks=callbacks)
        fit(trainer, DataLoader(toy_dataset(), 4), model, resume=resume)
        learnt = trainer.scaler.mean_.tolist(), CLASSIFIER.coef_.tolist(), CLASSIFIER.t_
        return [p.tolist() for p in model.parameters()], learnt

    whole = train(tmp_path / "a", None, None)
    train(tmp_path / "b", cut, None)
    assert train(tmp_path / "b", None, "must") == whole


class Shifts(Callback):
    """Changes an object of a library which a pipeline of that holds."""

    def __init__(self) -> None:
        self.pipeline, self.still = _pipeline(), _features()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.pipeline.steps[0][1].random_offset_[:] += self.still.random_offset_[0]


def test_what_other_objects_of_libraries_have_become_is_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [Shifts(), Checkpoint(every_n_steps=1)]
    trainer = Trainer(max_steps=3, output_dir=tmp_path, callbacks=callbacks)
    fit(trainer, DataLoader(toy_dataset(), 4), nn.Linear(FEATURES, 2))
    said = capsys.readouterr().out
    assert said.count("attributes of a `Pipeline` of `sklearn`") == 1
    assert "RBFSampler" not in said


METER = """
class AverageMeter:
    def __init__(self):
        self.value = self.average = self.total = 0.0
        self.count = 0

    def update(self, value):
        self.value, self.total, self.count = value, self.total + value, self.count + 1
        self.average = self.total / self.count
"""


class Averages(Callback):
    """Averages losses by a meter of a library, as many hold one."""

    def __init__(self, kind: Any) -> None:
        self.meters = {"loss": kind()}
        self.meter = kind()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        for meter in (self.meters["loss"], self.meter):
            meter.update(float(result.loss))


@pytest.mark.parametrize("cut", [3, 4])
def test_a_meter_of_a_library_goes_on(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "meters_of_a_library.py").write_text(METER)
    monkeypatch.syspath_prepend(library)
    kind = import_module("meters_of_a_library").AverageMeter

    def train(folder: Path, stop: int | None, resume: str | None) -> Any:
        averages = Averages(kind)
        callbacks = [averages, Checkpoint(every_n_steps=1), StopsAt(stop)]
        torch.manual_seed(0)
        trainer = Trainer(max_steps=9, output_dir=folder, callbacks=callbacks)
        fit(trainer, DataLoader(toy_dataset(), 4), nn.Linear(FEATURES, 2), resume=resume)
        return vars(averages.meter), vars(averages.meters["loss"])

    whole = train(tmp_path / "a", None, None)
    train(tmp_path / "b", cut, None)
    assert train(tmp_path / "b", None, "must") == whole


@dataclass(eq=False)
class Told(Callback):
    """A callback that is a data class, as some write them."""

    steps: int = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += 1


class Holds(Trainer):
    def __init__(self, told: Told, **settings: Any) -> None:
        super().__init__(**settings)
        self.told, self.all_told = told, [told]


def test_a_callback_that_others_hold_stays_the_same_object(tmp_path: Path) -> None:
    def train(steps: int) -> tuple[Told, Holds]:
        told = Told()
        callbacks = [told, Checkpoint(every_n_steps=CUT), StopsAt(steps)]
        trainer = Holds(told, max_steps=STEPS, output_dir=tmp_path, callbacks=callbacks)
        fit(trainer, DataLoader(toy_dataset(), 4), nn.Linear(FEATURES, 2), resume="auto")
        return told, trainer

    train(CUT)
    told, trainer = train(STEPS)
    assert trainer.told is told is trainer.all_told[0]
    assert told.steps == STEPS
