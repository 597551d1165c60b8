"""What a checkpoint cannot hold is found before the work that it would lose."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from tests.helpers.callbacks import Counts
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import Registered, toy_dataset, toy_model
from trainkit import (
    Accelerator,
    Callback,
    CheckpointError,
    ConfigError,
    Run,
    StepResult,
    Trainer,
)
from trainkit.callbacks import Checkpoint
from trainkit.strategies import FSDP


class Halved(torch.Tensor):
    """A tensor that is kept in half its precision, as quantized optimizers do."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> "Halved":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32)
        made.kept = kept
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> "Halved":
        return cls(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, *rest: Any) -> Any:
        raise NotImplementedError(op)


class Opaque(Halved):
    """One that does not say what it is made of."""

    __tensor_flatten__ = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "__tensor_flatten__":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Quantized(Optimizer):
    """Momentum in a tensor subclass."""

    def __init__(self, parameters: Any, lr: float = 0.1, made: Any = Halved) -> None:
        self.made = made
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = self.made(torch.zeros_like(p, dtype=torch.bfloat16))
                kept = state["momentum"].kept
                kept.mul_(0.9).add_(p.grad)
                p.sub_(kept, alpha=group["lr"])


def train(
    folder: Path,
    steps: int = 4,
    *,
    optimizer: Any = None,
    model: nn.Module | None = None,
    callbacks: tuple[Callback, ...] = (),
    strategy: Any = "single",
    prepare: Callable[[Trainer], None] = lambda trainer: None,
    background: bool = False,
    **arguments: Any,
) -> tuple[Trainer, nn.Module]:
    model = model or toy_model()
    saves = Checkpoint(every_n_steps=2, background=background)
    trainer = Trainer(
        max_steps=steps, output_dir=folder, strategy=strategy, callbacks=[saves, *callbacks]
    )
    prepare(trainer)
    loader = DataLoader(toy_dataset(), batch_size=4)
    optimizer = optimizer or partial(SGD, lr=0.1)
    trainer.fit(model, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **arguments)
    return trainer, model


def with_group(key: str, value: Any) -> Any:
    def make(parameters: Any) -> Optimizer:
        return SGD([{"params": parameters, key: value}], lr=0.1)

    return make


class Decay:
    """A factor of a learning rate, with something in it that has no form in a file."""

    def __init__(self) -> None:
        self.plan = len

    def __call__(self, step: int) -> float:
        return 1.0


class Holds(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"found": [object()]}


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"made_by": type(self)}

    def set_extra_state(self, state: Any) -> None: ...


def register(trainer: Trainer) -> None:
    thing = Registered()
    trainer.register_for_checkpointing(thing=thing)
    thing.value = len


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a function in a group": (
        {"optimizer": with_group("decay_fn", len)},
        r"`optimizer.param_groups\[0\]\[\"decay_fn\"\]` is a `builtins.builtin_function",
    ),
    "an object in a group": (
        {"optimizer": with_group("plan", [1, {"a": Decay()}])},
        r"`optimizer.param_groups\[0\]\[\"plan\"\]\[1\].a` is a `tests.resume.test_savable.Decay`",
    ),
    "a scheduler": (
        {"lr_scheduler": lambda optimizer: LambdaLR(optimizer, Decay())},
        r"`lr_scheduler.lr_lambdas\[0\].plan`",
    ),
    "a callback": (
        {"callbacks": (Holds(),)},
        r"`callbacks.Holds.found\[0\]` is a `builtins.object`",
    ),
    "an object": ({"prepare": register}, r"`objects.thing.value` is a"),
    "a module": (
        {"model": nn.Sequential(nn.Linear(4, 3), Extra(3, 2))},
        r"`model\['1._extra_state'\].made_by`",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_saved_is_named_before_the_first_step(case: str, tmp_path: Path) -> None:
    arguments, words = CASES[case]
    steps = Counts()
    arguments = {**arguments, "callbacks": (*arguments.get("callbacks", ()), steps)}
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, **arguments)
    assert steps.steps == 0


class Averages(Callback):
    """Holds shards of its own, and those of the model, which are saved with it."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.models = [*run.module.parameters()]
        self.own = [parameter.detach().clone() for parameter in self.models]


def _refused_on_both(rank: int, folder: Path) -> bool:
    steps = Counts()
    with pytest.raises(ConfigError, match="decay_fn"):
        train(
            folder,
            optimizer=with_group("decay_fn", len),
            callbacks=(steps,),
            strategy=FSDP(device="cpu"),
        )
    train(folder, callbacks=(Averages(),), strategy=FSDP(device="cpu"))
    return steps.steps == 0


def test_so_it_is_on_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(2, _refused_on_both, tmp_path) == [True, True]
    told = [line for line in capfd.readouterr().out.splitlines() if "that is sharded" in line]
    assert len(told) == 1
    assert "`callbacks[Averages].own` holds a tensor that is sharded" in told[0]


def test_a_run_without_checkpoints_may_hold_anything() -> None:
    trainer = Trainer(max_steps=2, callbacks=[Holds()])
    optimizer = with_group("decay_fn", len)
    loader = DataLoader(toy_dataset(), batch_size=4)
    trainer.fit(toy_model(), loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())


def test_schedules_of_torch_are_not_refused(tmp_path: Path) -> None:
    train(tmp_path / "1", lr_scheduler=lambda o: OneCycleLR(o, max_lr=0.1, total_steps=4))
    train(tmp_path / "2", lr_scheduler=lambda o: LambdaLR(o, lambda step: 0.5**step))


@pytest.mark.parametrize("background", [False, True])
def test_tensor_subclasses_come_back_by_their_parts(background: bool, tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", 6, optimizer=Quantized)
    train(tmp_path / "cut", 4, optimizer=Quantized, background=background)
    trainer, resumed = train(
        tmp_path / "cut", 6, optimizer=Quantized, resume="must", schedule="keep"
    )
    pairs = zip(resumed.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert trainer.run is not None
    kinds = [type(state["momentum"]) for state in trainer.run.optimizer.state.values()]
    assert kinds == [Halved] * 4


def test_other_parts_than_the_saved_ones_are_refused(tmp_path: Path) -> None:
    train(tmp_path, 4, optimizer=Quantized)
    plain = partial(Quantized, made=lambda kept: Halved(kept.float()))
    words = r"`0.weight.momentum` was saved in the parts .* bfloat16"
    with pytest.raises(CheckpointError, match=words):
        train(tmp_path, 6, optimizer=plain, resume="must", schedule="keep")


def test_one_that_has_no_parts_is_refused_after_one_step(tmp_path: Path) -> None:
    steps = Counts()
    words = r"`optimizer.state\[\"0.weight\"\]\[\"momentum\"\]` is a `.*test_savable.Opaque`"
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, optimizer=partial(Quantized, made=Opaque), callbacks=(steps,))
    assert steps.steps == 1


def _sharded_is_refused(rank: int, folder: Path) -> bool:
    with pytest.raises(ConfigError, match=r"`optimizer.state.* is a `.*test_savable.Halved`"):
        train(folder, optimizer=Quantized, strategy=FSDP(device="cpu"))
    return True


@pytest.mark.e2e
def test_sharded_ones_are_refused_after_one_step(tmp_path: Path) -> None:
    assert run_ranks(2, _sharded_is_refused, tmp_path) == [True, True]


def test_a_loop_of_ones_own_saves_them_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = toy_model()
    optimizer: Any = Quantized(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(tmp_path)
    step()
    step()
    expected = [p.clone() for p in model.parameters()]
    accelerator.load_state(tmp_path)
    step()
    step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))


class Counting(torch.optim.SGD):
    """Keeps more than groups and states of parameters: in its own key, and under no parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.count = 0
        self.param_groups[0]["seen"] = []

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        shared: Any = self.state
        shared["all"] = {"steps": self.count}
        self.param_groups[0]["seen"] = [*self.param_groups[0]["seen"], float(self.count)]
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count", 0)
        super().load_state_dict(state_dict)


def _counting(folder: Path, steps: int, resume: str | None) -> tuple[list[Tensor], Any]:
    model = toy_model()
    optimizer = Counting(model.parameters())
    trainer = Trainer(max_steps=steps, callbacks=[Checkpoint()], output_dir=folder)
    trainer.fit(
        model,
        DataLoader(toy_dataset(), 4),
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
        schedule="keep" if resume else None,
    )
    return [p.detach().clone() for p in model.parameters()], optimizer


def test_all_that_the_state_dict_of_an_optimizer_holds_comes_back(tmp_path: Path) -> None:
    straight, _ = _counting(tmp_path / "straight", 6, None)
    _counting(tmp_path / "run", 3, None)
    resumed, optimizer = _counting(tmp_path / "run", 6, "must")
    assert optimizer.count == 6
    assert optimizer.state["all"] == {"steps": 6}
    assert optimizer.param_groups[0]["seen"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert all(map(torch.equal, straight, resumed))


def test_so_it_does_in_a_loop_of_your_own(tmp_path: Path) -> None:
    def run(steps: int, load: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = toy_model()
        accelerator = Accelerator()
        model, prepared = accelerator.prepare(model, Counting(model.parameters()))
        if load:
            accelerator.load_state(tmp_path / "state")
        for _ in range(steps):
            model(torch.ones(2, 4, device=accelerator.device)).sum().backward()
            prepared.step()
            prepared.zero_grad()
        if not load:
            accelerator.save_state(tmp_path / "state")
        return model, prepared.optimizer

    run(2, load=False)
    _, optimizer = run(1, load=True)
    assert (optimizer.count, optimizer.state["all"]) == (3, {"steps": 3})


class Replaces(Callback):
    """Puts a new last layer into the model and into the optimizer's group."""

    def on_epoch_start(self, run: Run) -> None:
        if run.state.epoch == 1:
            model, group = cast("Any", run.module), run.optimizer.param_groups[0]
            old, model[-1] = [*model[-1].parameters()], nn.Linear(8, 2)
            kept = [p for p in group["params"] if all(p is not each for each in old)]
            group["params"] = [*kept, *model[-1].parameters()]


def test_the_state_of_a_layer_that_was_replaced_is_named(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=2, output_dir=tmp_path, callbacks=[Replaces(), Checkpoint()])
    with pytest.raises(CheckpointError, match=r"the shapes \[\[2, 8\], \[2\]\].*state.pop"):
        trainer.fit(
            toy_model(),
            DataLoader(toy_dataset(), 8),
            optimizer=partial(torch.optim.Adam, lr=0.1),
            loss_fn=nn.CrossEntropyLoss(),
        )
