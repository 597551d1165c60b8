"""What is refused is refused before the first step, in a sentence that says what to do."""

import inspect
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import trainkit.callbacks
import trainkit.metrics
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Accelerator, ConfigError, DataError, StepOutput, Trainer
from trainkit.accelerator import settings
from trainkit.basics.config import Watchdog, check_argument, checked
from trainkit.precision import FP16
from trainkit.strategies import DDP, FSDP, SingleDevice

# What else a constructor must be given, so that only the argument in question is wrong.
NEEDED: dict[str, dict[str, Any]] = {
    "EvaluateMetric": {"module": None},
    "EarlyStopping": {"metric": "eval/loss", "patience": 2, "mode": "min"},
    "FunctionMetric": {"function": len},
    "OptunaPruning": {"trial": None, "metric": "eval/loss"},
    "TimeLimit": {"minutes": 1.0},
    "TorchMetric": {"metric": nn.Identity()},
    "Trainer": {"max_epochs": 1},
}
# No number, no text, no path.
PLAIN = {bool, int, float, str, Path}
BUILT = (
    *(getattr(trainkit.callbacks, name) for name in trainkit.callbacks.__all__),
    *(getattr(trainkit.metrics, name) for name in trainkit.metrics.__all__),
    *(
        each
        for each in vars(settings).values()
        if getattr(each, "__module__", "") == settings.__name__
    ),
    *(Accelerator, DDP, FP16, FSDP, SingleDevice, Trainer, Watchdog),
)


def test_a_last_micro_batch_of_one_sample_for_batch_norm_has_a_hint() -> None:
    data = TensorDataset(torch.rand(9, 4), torch.zeros(9).long())
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        fit(make_trainer(), DataLoader(data, batch_size=4), model)
    assert any("drop_last=True" in note for note in caught.value.__notes__)


def plain_arguments() -> list[Any]:
    """Return the class and name of every argument that is a number, a switch, text or a path."""
    found = []
    for built in BUILT:
        if not inspect.isclass(built) or inspect.isabstract(built):
            continue
        for name, parameter in inspect.signature(built).parameters.items():
            kinds = getattr(parameter.annotation, "__args__", (parameter.annotation,))
            if PLAIN.intersection(k for k in kinds if isinstance(k, type)):
                found.append(pytest.param(built, name, id=f"{built.__name__}-{name}"))
    return found


@pytest.mark.parametrize(("built", "name"), plain_arguments())
def test_an_argument_of_a_wrong_type_is_named(built: Callable[..., Any], name: str) -> None:
    wrong = object()
    with pytest.raises(ConfigError, match=f"`.*{name}.*`|number of accumulation steps"):
        built(**(NEEDED.get(built.__name__, {}) | {name: wrong}))


@pytest.mark.parametrize(
    ("value", "annotation", "said"),
    [
        ("1", float | None, "must be a number or None, but is '1'. Leave out the quotes."),
        (3, str | Path | None, "must be a path or None, but is 3."),
        (True, int, "must be a whole number, but is True."),
        (1, bool, "must be True or False, but is 1."),
        (math.nan, float, "must be a number, but is nan."),
    ],
)
def test_it_is_said_what_an_argument_must_be(value: Any, annotation: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_argument("size", value, annotation)
    assert str(caught.value) == f"`size` {said}"


def test_numbers_of_numpy_and_paths_of_any_class_are_taken() -> None:
    import numpy as np

    @checked
    def take(count: int, rate: float, folder: str | Path, *rest: int, **more: int) -> None: ...

    take(np.int64(1), np.float32(0.5), Path("a"), "x", y="z")  # type: ignore[arg-type]
    take(1, 1, "a")


def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="`device` must be a device, but is 'cud'"):
        SingleDevice(device="cud")


@pytest.mark.parametrize(
    "options", [{"growth_factor": 1.0}, {"init_scale": 0.0}, {"backoff_factor": 1.5}]
)
def test_a_loss_scale_that_cannot_adapt_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="The loss scale needs"):
        FP16(**options)  # type: ignore[arg-type]


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2))


def test_a_model_without_shapes_is_to_see_a_batch_first() -> None:
    model = lazy_model()
    with pytest.raises(
        ConfigError, match=r"`0` of the model is a `LazyLinear` .*`model\(inputs\)`"
    ):
        fit(make_trainer(), model=model)
    with pytest.raises(ConfigError, match="Run one batch"):
        Accelerator().prepare(model)
    model(next(iter(toy_loaders()[0]))[0])
    assert fit(make_trainer(max_steps=2), model=model).step == 2


class Steps(Trainer):
    """Returns what `output` makes of the losses of a batch, from window `bad` on."""

    def __init__(self, output: Callable[[Tensor], Any], bad: int) -> None:
        super().__init__(max_steps=3, callbacks=[])
        self.output, self.left = output, bad

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        self.left -= 1
        return self.output(losses) if self.left < 0 else StepOutput(losses.mean(), len(losses))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda losses: StepOutput(losses.mean(), torch.ones(4)), r"`weight` .*shape \(4,\)"),
        (lambda losses: StepOutput(losses, 4), r"loss must be a scalar, .*\(4,\).*loss\.mean\(\)"),
    ],
)
def test_a_vector_as_weight_or_loss_is_refused(output: Any, said: str, bad: int) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        Steps(output, bad).fit(toy_model(), toy_loaders(), optimizer=partial(SGD, lr=0.1))


def test_a_weight_that_is_no_number_is_refused() -> None:
    output: Any = partial(StepOutput, weight="4")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"`weight` must be a number .*'str'"):
        Steps(lambda losses: output(losses.mean()), 0).fit(
            toy_model(), toy_loaders(), optimizer=partial(SGD, lr=0.1)
        )


class Ends(Dataset[Any]):
    """Raises for one sample what `next` raises when a file is at its end."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(4) if index != 7 else next(iter(()))


class EndsInBatches(Ends):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Ends, EndsInBatches])
def test_a_stop_iteration_of_a_data_set_names_the_sample(kind: type[Ends], workers: int) -> None:
    loader = DataLoader(kind(), batch_size=4, num_workers=workers)
    trainer = make_trainer()
    with pytest.raises(
        DataError, match=r"`StopIteration` was raised .*\b7\b.* of the data set `Ends"
    ):
        trainer.predict(nn.Linear(4, 1), loader)
    batches = Accelerator().prepare(loader)
    with pytest.raises(DataError, match=r"\b7\b"):
        list(batches)


class Unspeakable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no words")


class Fails(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        raise Unspeakable


def test_an_error_whose_text_fails_is_reported_as_any_other(tmp_path: Path) -> None:
    trainer = Fails(max_steps=3, callbacks=[], output_dir=tmp_path)
    with pytest.raises(Unspeakable) as caught:
        fit(trainer)
    assert any("after step 0" in note for note in caught.value.__notes__)
    (report,) = (json.loads(path.read_text()) for path in (tmp_path / "reports").glob("*.json"))
    assert report["error"]["type"] == "Unspeakable"
    assert report["error"]["message"] == "(its `__str__` raised ValueError)"
    assert "Unspeakable" in report["cause"]


class OfLightning(Trainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return batch_idx


class Validated(Trainer):
    def validation_step(self, model: nn.Module, batch: Any) -> None: ...


class Logs(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.log("loss", 1.0)  # type: ignore[attr-defined]


def test_names_of_other_frameworks_are_answered_by_ours() -> None:
    with pytest.raises(ConfigError, match=r"`def training_step\(self, model, batch\)`"):
        OfLightning(max_epochs=1)
    with pytest.warns(UserWarning, match="`Validated.validation_step` is never called.*evaluation"):
        Validated(max_epochs=1)
    with pytest.raises(AttributeError, match=r"no attribute 'log'\. Here that is `self\.run\.log"):
        fit(Logs(max_epochs=1, callbacks=[]))
    trainer = make_trainer()
    with pytest.raises(AttributeError, match=r"Here that is.*`self\.run\.module`"):
        trainer.model  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(trainer, "anything")
    with pytest.raises(ConfigError, match="Did you mean `fp16`"):
        Trainer(max_epochs=1, precision="16-mixed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean `cosine`"):
        fit(make_trainer(), lr_scheduler="cosin")
    with pytest.raises(TypeError) as caught:
        fit(make_trainer(), optimizer=partial(SGD, lr="1e-3"))  # type: ignore[arg-type]
    assert any("`1.0e-3`" in note for note in caught.value.__notes__)


def test_what_is_likely_no_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, data = make_trainer(), TensorDataset(torch.rand(8, 4), torch.zeros(8, 1))
    drawn = WeightedRandomSampler([1.0] * 8, 8)
    for options in (
        {"shuffle": True},
        {"sampler": drawn},
        {"sampler": SubsetRandomSampler(range(8))},
        {"batch_sampler": BatchSampler(drawn, 4, drop_last=False)},
    ):
        with pytest.warns(UserWarning, match="this loader draws"):
            trainer.predict(nn.Linear(4, 1), DataLoader(data, **options))
    with pytest.warns(UserWarning, match="nothing to compute"):
        assert trainer.evaluate(nn.Linear(4, 1), DataLoader(data)) == {}
    fit(
        trainer,
        DataLoader(data),
        nn.Linear(4, 1),
        loss_fn=lambda outputs, targets: (outputs - targets).mean() * math.nan,
    )
    assert "loss of the last step is not finite" in "".join(capsys.readouterr())
