"""An argument that does not exist is answered by the one that is meant, wherever that is."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainkit.callbacks
from trainkit import Accelerator, Callback, ConfigError, Trainer
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation, TensorBoardLogger, Timer
from trainkit.cli.main import main
from trainkit.inspect.argument_names import PLACES

OWNERS: dict[str, Callable[..., Any]] = {
    "Trainer": Trainer,
    "fit": Trainer.fit,
    "torch.utils.data.DataLoader": DataLoader,
    **{name: getattr(trainkit.callbacks, name) for name in trainkit.callbacks.__all__},
}


def fit(**options: Any) -> None:
    Trainer(max_steps=1, callbacks=[]).fit(torch.nn.Linear(1, 1), [], **options)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (
            Trainer,
            {"accumulate_grad_batches": 2},
            "`Trainer` has no argument `accumulate_grad_batches`: it is "
            "`gradient_accumulation_steps` here.",
        ),
        (
            Trainer,
            {"process_group_timeout": 60},
            r"write `Trainer\(watchdog=Watchdog\(process_group_timeout=...\)\)`",
        ),
        (Trainer, {"gradient_clip_val": 1.0}, "it is `max_grad_norm` here"),
        (Trainer, {"num_train_epochs": 2}, "it is `max_epochs` here"),
        (Trainer, {"devices": 2}, "write `trainkit launch --num_processes N SCRIPT`"),
        (
            Trainer,
            {"per_device_train_batch_size": 8},
            r"write `torch.utils.data.DataLoader\(...\)`",
        ),
        (Trainer, {"optimizer": None}, r"write `fit\(optimizer=...\)`"),
        (Trainer, {"learning_rate": 1e-3}, r"write `fit\(optimizer=...\)`"),
        (Trainer, {"patience": 3}, r"write `EarlyStopping\(patience=...\)`"),
        (
            Trainer,
            {"monitor": "val_loss"},
            r"write `Checkpoint\(keep_best=...\)` or `EarlyStopping\(metric=...\)`",
        ),
        (Trainer, {"max_epoch": 3}, "no argument `max_epoch`. Did you mean `max_epochs`?"),
        (Trainer, {"quux": 3}, "no argument `quux`. It has `max_epochs`, `max_steps`, "),
        (fit, {"epochs": 3}, r"`fit` has no argument `epochs`: write `Trainer\(max_epochs=...\)`"),
        (fit, {"callbacks": []}, r"write `Trainer\(callbacks=...\)`\."),
        (fit, {"ckpt_path": "last"}, "it is `resume` here"),
        (fit, {"metrics": []}, r"write `Evaluation\(metrics=...\)`"),
        (fit, {"learning_rate": 1, "verbose": 2}, r"`optimizer` here\. `fit` has no .*`verbose`"),
        (EarlyStopping, {"monitor": "val_loss", "patience": 2}, "it is `metric` here"),
        (Checkpoint, {"every_n_train_steps": 5}, "it is `every_n_steps` here"),
        (Checkpoint, {"dirpath": "here"}, r"write `Trainer\(output_dir=...\)`"),
        (TensorBoardLogger, {"log_dir": "here"}, "it is `directory` here"),
        (Evaluation, {"metric": []}, "Did you mean `metrics`?"),
        (Accelerator, {"mixed_precison": "no"}, "Did you mean `mixed_precision`?"),
    ],
)
def test_what_is_meant_is_named(call: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        call(**options)
    assert isinstance(raised.value, TypeError)  # what Python raises
    assert raised.value.__suppress_context__


def test_each_name_of_ours_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for place in PLACES:
        if place.startswith("trainkit "):
            _, command, option, *_ = place.split()
            with pytest.raises(SystemExit):
                main([command, "--help"])
            assert option in capsys.readouterr().out
            continue
        owner, argument = re.fullmatch(r"([\w.]+)\((?:(\w+)=)?.*\)", place).groups()  # type: ignore[union-attr]
        assert argument is None or argument in inspect.signature(OWNERS[owner]).parameters
        assert {*re.findall(r"(\w+)\(\)", place)} <= {*trainkit.callbacks.__all__}


def test_no_name_of_others_is_one_of_ours_there() -> None:
    for place, names in PLACES.items():
        own = inspect.signature(OWNERS.get(place.partition("(")[0], fit)).parameters
        assert place.startswith("torch") or not {*names.split()} & {*own}


def test_signatures_stay_as_they_are_written() -> None:
    kinds = {each.kind for each in inspect.signature(Trainer).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert [*inspect.signature(Trainer.fit).parameters][:3] == ["self", "model", "loaders"]
    assert next(iter(inspect.signature(EarlyStopping).parameters)) == "metric"


class Own(Callback):
    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength + 0.0


class Further(Own):
    def __init__(self, color: str, **options: Any) -> None:
        super().__init__(**options)
        self.color = color


def test_a_callback_of_the_user_s_own_answers_too() -> None:
    assert Further("red", strength=2.0).strength == 2.0
    for call in (Own, lambda **options: Further("red", **options)):
        with pytest.raises(ConfigError, match=r"`Own` has no .* `strenght`. Did you mean `stren"):
            call(strenght=2.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"`Own` has no argument `monitor`. It has `strength`."):
        Own(monitor="eval/loss")  # type: ignore[call-arg]


def test_other_mistakes_are_told_by_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'loaders'"):
        Trainer(max_steps=1, callbacks=[]).fit(torch.nn.Linear(1, 1))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="concatenate") as raised:
        Own("much")  # type: ignore[arg-type]
    assert not isinstance(raised.value, ConfigError)
    with pytest.raises(TypeError, match="takes"):
        Timer(5)  # type: ignore[call-arg]
