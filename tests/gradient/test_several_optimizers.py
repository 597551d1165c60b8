"""Several optimizers in one training: turns, or losses by name, or one loss for all."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from trainkit import (
    Alternating,
    Callback,
    CheckpointError,
    ConfigError,
    Run,
    StepResult,
    Trainer,
    TrainkitError,
)
from trainkit.callbacks import (
    Checkpoint,
    FreezeUntil,
    GradientMonitor,
    Journal,
    LRMonitor,
    NaNGuard,
)
from trainkit.journal import read
from trainkit.precision import FP16, Precision
from trainkit.strategies import DDP, SingleDevice

TURNS = {"critic": 2, "maker": 1}
MAKE: dict[str, Any] = {"critic": partial(Adam, lr=0.02), "maker": partial(RMSprop, lr=0.01)}
pytestmark = pytest.mark.filterwarnings("ignore:FSDP gains nothing")


class Pair(nn.Module):
    """A maker of points and a critic of them, with buffers that both forwards change."""

    def __init__(self, normalises: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if normalises else nn.Identity()
        self.maker = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    @override
    def forward(self, batch: Any, of: str) -> Any:
        real, noise = batch
        made = self.maker(noise)
        if of == "maker":
            return _judged(self.critic(made), 1.0)
        critic = _judged(self.critic(real), 1.0) + _judged(self.critic(made.detach()), 0.0)
        return critic if of == "critic" else (critic, _judged(self.critic(made), 1.0))


def _judged(logits: Tensor, target: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


class Turns(Trainer):
    def training_step_critic(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch, "critic")  # type: ignore[no-any-return]

    def training_step_maker(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch, "maker")  # type: ignore[no-any-return]


class ByName(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        critic, maker = model(batch, "both")
        self.run.optimize("critic", critic)
        self.run.optimize("maker", maker)


class Together(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return sum(model(batch, "both"))  # type: ignore[no-any-return]


KINDS: dict[str, tuple[type[Trainer], Any]] = {
    "turns": (Turns, Alternating(MAKE, TURNS)),
    "by name": (ByName, MAKE),
    "together": (Together, MAKE),
}


class Watch(Callback):
    """Keeps what a training tells."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.results: list[StepResult] = []

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.results.append(result)

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.results.append(result)

    @override
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logs.append(values)


def make_data(samples: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(samples, 5, generator=generator).double()
    return TensorDataset(points[:, :2] + 2, points[:, 2:])


def make_pair(normalises: bool = False) -> Pair:
    torch.manual_seed(0)
    return Pair(normalises).double()


def fit(kind: str, model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, Trainer]:
    """Train for three epochs of 26 samples in windows of 12, of which the last has 2."""
    cls, optimizer = KINDS[kind]
    of_fit: dict[str, Any] = {"optimizer": optimizer}
    for name in ("optimizer", "lr_scheduler", "resume", "loss_fn"):
        if name in settings:
            of_fit[name] = settings.pop(name)
    if kind == "turns" and isinstance(of_fit["optimizer"], dict):
        of_fit["optimizer"] = Alternating(of_fit["optimizer"], TURNS)
    if "max_steps" not in settings:
        settings.setdefault("max_epochs", 3)
    data, batch_size = settings.pop("data", None), settings.pop("batch_size", 6)
    settings = {
        "split_batches": True,
        "gradient_accumulation_steps": 2,
        "callbacks": [],
        "max_grad_norm": 0.3,
        **settings,
    }
    trainer = settings.pop("cls", cls)(**settings)
    model = model or make_pair()
    loader = DataLoader(data or make_data(), batch_size, shuffle=True)
    trainer.fit(model, loader, **of_fit)
    return model, trainer


def whole(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone()
        for name, t in state.items()
    }


def counts(trainer: Trainer) -> dict[str, tuple[int, int]]:
    assert trainer.run is not None
    return {name: (o.steps, o.skipped_steps) for name, o in trainer.run.optimizers.items()}


def windows(epochs: int = 3, samples: int = 26) -> Iterator[list[Tensor]]:
    """Yield the windows that the trainer makes, from what one optimizer sees of the same data."""
    seen: list[list[Tensor]] = []

    class Sees(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            seen.append([each.cpu() for each in batch])
            return model(batch, "critic")  # type: ignore[no-any-return]

    trainer = Sees(max_epochs=epochs, callbacks=[], split_batches=True)
    optimizer = partial(SGD, lr=0.0)
    trainer.fit(make_pair(), DataLoader(make_data(samples), 12, shuffle=True), optimizer=optimizer)
    yield from seen


def reference(kind: str) -> dict[str, Tensor]:
    """Return what a loop by hand comes to."""
    model = make_pair()
    parts = {"critic": model.critic, "maker": model.maker}
    optimizers = {name: MAKE[name](part.parameters()) for name, part in parts.items()}
    order = ["critic", "critic", "maker"]
    for number, batch in enumerate(windows()):
        names = [order[number % 3]] if kind == "turns" else ["critic", "maker"]
        gradients = {}
        for name in names:
            parameters = [*parts[name].parameters()]
            gradients[name] = torch.autograd.grad(model(batch, name), parameters)
        for name in names:
            for parameter, gradient in zip(parts[name].parameters(), gradients[name], strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parts[name].parameters(), 0.3)
            optimizers[name].step()
    return whole(model)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize("kind", ["turns", "by name"])
def test_each_optimizer_does_what_a_loop_by_hand_does(kind: str, tmp_path: Path) -> None:
    watch = Watch()
    given: dict[str, Any] = {"output_dir": tmp_path, "log_every_n_steps": 1}
    model, trainer = fit(kind, callbacks=[watch, Journal()], **given)
    assert difference(whole(model), reference(kind)) < 1e-12
    expected = {"critic": (6, 0), "maker": (3, 0)} if kind == "turns" else None
    assert counts(trainer) == (expected or {"critic": (9, 0), "maker": (9, 0)})
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    names = [{*(result.optimizers or {})} for result in watch.results]
    assert names == (
        [{"critic"}, {"critic"}, {"maker"}] * 3 if kind == "turns" else [{"critic", "maker"}] * 9
    )
    records = read(tmp_path).records
    for values, result, record in zip(watch.logs, watch.results, records, strict=True):
        norms = [each.grad_norm for each in (result.optimizers or {}).values()]
        assert record.grad_norm == math.hypot(*(float(norm) for norm in norms if norm is not None))
        own = {f"loss/{name}" for name in result.optimizers or {}}
        assert {name for name in values if name.startswith("loss/")} == own
        assert values["loss"] == pytest.approx(sum(values[name] for name in own))
        assert {name for name in values if name.startswith("grad_norm")} == {
            f"grad_norm/{name}" for name in result.optimizers or {}
        }


def train_on(rank: int, strategy: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        watch = Watch()
        settings: dict[str, Any] = {"strategy": strategy, "log_every_n_steps": 1}
        model, trainer = fit(kind, callbacks=[watch, NaNGuard()], **settings)
        found[kind] = whole(model), counts(trainer), watch.logs
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_two_and_three_processes_are_the_same_training(strategy: str) -> None:
    """Windows of 12 and of 2 samples, so that a process has none of the last one."""
    alone = run_ranks(1, train_on, "single")[0]
    for size in (2, 3) if strategy == "ddp" else (3,):
        for of_process in run_ranks(size, train_on, strategy):
            for kind in KINDS:
                weights, updates, logs = alone[kind]
                assert difference(weights, of_process[kind][0]) < 1e-12, kind
                assert of_process[kind][1] == updates
                for one, other in zip(logs, of_process[kind][2], strict=True):
                    assert one == pytest.approx(other, abs=1e-12), kind


class StopAt(Callback):
    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.attempts == self.attempts:
            run.request_stop("enough", agreed=True)


def saved_state(trainer: Trainer) -> dict[str, Any]:
    """Return all that a training came to."""
    assert trainer.run is not None
    optimizer: Any = trainer.run.optimizer
    schedule = trainer.run.lr_schedule
    return {
        "model": whole(trainer.run.module),
        "optimizer": [
            {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
            for values in optimizer.state_dict()["state"].values()
        ],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "schedule": schedule and schedule.scheduler.state_dict(),
        "counters": trainer.run.state.state_dict(),
        "several": trainer.run.objectives.state_dict(),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def resume_everywhere(rank: int, folder: Path, strategy: str, precision: str) -> list[str]:
    """Return which trainings differ that were stopped after 1 to 6 windows and resumed."""
    different = []
    for kind in KINDS if strategy != "fsdp" else ("turns", "by name"):

        def train(place: Path, *callbacks: Callback, kind: str = kind, **more: Any) -> Any:
            model = make_pair(normalises=True)
            model = model if precision == "fp32" else model.float()
            _, trainer = fit(
                kind,
                model,
                strategy=strategy,
                precision=FP16(init_scale=2.0**28, growth_interval=2)
                if precision == "fp16"
                else precision,
                output_dir=place,
                callbacks=[Checkpoint(every_n_steps=1), *callbacks],
                lr_scheduler={"critic": "cosine"},
                max_epochs=2,
                data=make_data() if precision == "fp32" else floats(),
                **more,
            )
            return saved_state(trainer)

        undisturbed = train(folder / kind / "whole")
        for windows in (1, 4) if precision == "fp16" else (4,):
            place = folder / kind / str(windows)
            train(place, StopAt(windows))
            if not equal(train(place, resume="must"), undisturbed):
                different.append(f"{kind} after {windows}")
    return different


def floats() -> TensorDataset:
    return TensorDataset(*(tensor.float() for tensor in make_data().tensors))


@pytest.mark.parametrize(
    ("size", "strategy", "precision"),
    [
        (1, "single", "fp32"),
        pytest.param(1, "single", "fp16", marks=pytest.mark.e2e),
        pytest.param(2, "fsdp", "fp32", marks=pytest.mark.e2e),
        pytest.param(3, "ddp", "fp32", marks=pytest.mark.e2e),
    ],
)
def test_a_resume_goes_on_bit_by_bit(
    size: int, strategy: str, precision: str, tmp_path: Path
) -> None:
    assert run_ranks(size, resume_everywhere, tmp_path, strategy, precision) == [[]] * size


class Overflows(Turns):
    """The critic's loss is beyond float16 in its second window, on the last process."""

    def training_step_critic(self, model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(self.run, Run)
        loss: Tensor = model(batch, "critic")
        last = self.run.processes.process_index == self.run.processes.num_processes - 1
        return loss * (1e30 if last and self.run.state.attempts == 1 else 1.0)


class OverflowsByName(ByName):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        last = self.run.processes.process_index == self.run.processes.num_processes - 1
        factor = 1e30 if last and self.run.state.attempts == 1 else 1.0
        critic, maker = model(batch, "both")
        self.run.optimize("critic", critic * factor)
        self.run.optimize("maker", maker)
        return {"accuracy": 0.5}


def overflow_of_one(rank: int, strategy: str) -> list[Any]:
    found = []
    for kind, cls in (("turns", Overflows), ("by name", OverflowsByName)):
        watch, guard = Watch(), NaNGuard()
        _, trainer = fit(
            kind,
            make_pair().float(),
            cls=cls,
            data=floats(),
            strategy=strategy,
            precision=FP16(init_scale=64.0),
            callbacks=[watch, guard],
            lr_scheduler="linear",
            max_epochs=2,
        )
        assert trainer.run is not None
        optimizers = trainer.run.optimizers
        skipped = [
            (number, name, own.reason, result.reason)
            for number, result in enumerate(watch.results)
            for name, own in (result.optimizers or {}).items()
            if own.skipped
        ]
        scales = {name: each.precision.scale for name, each in optimizers.items()}  # type: ignore[attr-defined]
        rates = {n: o.optimizer.param_groups[0]["lr"] for n, o in optimizers.items()}
        state = trainer.run.state
        why = [result.reason for result in watch.results]
        updates = state.step, state.skipped_steps
        found.append((counts(trainer), skipped, scales, rates, updates, why))
    return found


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.e2e),
        pytest.param(2, "fsdp", marks=pytest.mark.e2e),
    ],
)
def test_an_overflow_of_one_optimizer_skips_its_update_alone(size: int, strategy: str) -> None:
    for turns, by_name in run_ranks(size, overflow_of_one, strategy):
        scales, why = {"critic": 32.0, "maker": 64.0}, "the gradients overflowed"
        skipped: list[Any] = [(1, "critic", why, why)]
        assert turns[:3] == ({"critic": (3, 1), "maker": (2, 0)}, skipped, scales)
        assert turns[3] == pytest.approx({"critic": 0.02 * 0.25, "maker": 0.0})
        assert turns[4] == (5, 1)
        assert turns[5] == [None, why, *[None] * 4]  # which a journal holds
        skipped = [(1, "critic", why, None)]
        assert by_name[:3] == ({"critic": (5, 1), "maker": (6, 0)}, skipped, scales)
        assert by_name[3] == pytest.approx({"critic": 0.02 / 6, "maker": 0.0})
        assert by_name[4] == (6, 0)  # one of the two was updated
        assert by_name[5] == [None] * 6


def test_an_optimizer_that_never_gets_on_ends_the_run() -> None:
    class Always(ByName):
        @override
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            assert isinstance(self.run, Run)
            critic, maker = model(batch, "both")
            self.run.optimize("critic", critic * 1e30)
            self.run.optimize("maker", maker)

    with pytest.raises(TrainkitError, match="4 windows in a row were skipped for `critic`"):
        fit(
            "by name",
            make_pair().float(),
            cls=Always,
            data=floats(),
            precision="fp16",
            max_consecutive_skips=3,
        )


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Split(Trainer):
    """Muon for matrices, AdamW for the rest."""

    @override
    def configure_optimizers(self, model: nn.Module, optimizers: Any) -> dict[str, Optimizer]:
        parameters = [*model.parameters()]
        return {
            "muon": Muon([p for p in parameters if p.ndim == 2], lr=0.02),
            "adamw": AdamW([p for p in parameters if p.ndim != 2], lr=0.01),
        }


def split(rank: int, strategy: Any, rounds: bool = True) -> dict[str, Tensor]:
    if not rounds:  # in torch's Newton-Schulz iteration
        Tensor.bfloat16 = Tensor.clone  # type: ignore[method-assign]
    torch.manual_seed(0)
    model, points = Wide().double(), torch.randn(26, 4).double()
    trainer = Split(max_epochs=2, strategy=strategy, split_batches=True, callbacks=[])
    loader = DataLoader(TensorDataset(points, points.flip(1)), 12, shuffle=True)
    trainer.fit(model, loader, loss_fn=nn.MSELoss(), lr_scheduler="cosine")
    assert counts(trainer) == {"muon": (6, 0), "adamw": (6, 0)}
    return whole(model)


@pytest.mark.e2e
def test_one_loss_is_shared_by_muon_for_matrices_and_adamw_for_the_rest() -> None:
    alone = run_ranks(1, split, "single")[0]
    assert difference(alone, {k: v.double() for k, v in Wide().state_dict().items()}) > 1e-3
    for weights in run_ranks(2, split, "ddp"):
        assert difference(alone, weights) < 1e-12


@pytest.mark.e2e
def test_under_fsdp_muon_makes_the_update_of_whole_matrices() -> None:
    """Of 8 and 4 rows, so that of three processes one has fewer, or none."""
    (alone,) = run_ranks(1, split, "single", rounds=False)
    for weights in run_ranks(3, split, "fsdp", rounds=False):
        assert difference(alone, weights) < 1e-12
    assert difference(alone, split(0, "single")) > 1e-6  # what bfloat16 changes


class Strange(ByName):
    """Does with the losses what a test asks for."""

    how = ""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        critic, maker = model(batch, "both")
        give, how = self.run.optimize, self.how
        before: dict[str, Any] = {
            "name": [("criticc", critic)],
            "number": [("critic", 3.0)],
            "detached": [("critic", critic.detach())],
            "two weights": [("critic", critic, 3), ("critic", critic, 3)],
        }
        if how == "nothing" or (how == "loss later" and self.run.state.attempts):
            return critic if how == "loss later" else None
        for arguments in before.get(how, []):
            give(*arguments)
        if not (how == "process" and self.run.processes.process_index):
            give("critic", critic)
        if how != "micro-batch" or self.run.objectives.samples == 0:
            give("maker", critic if how == "unreached" else maker)
        return critic if how == "loss too" else None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "`training_step` optimized nothing: it returned 'NoneType'"),
        ("loss later", "optimized nothing: it returned 'Tensor' .*as it did before"),
        ("loss too", "called `run.optimize` and returned 'Tensor' too"),
        ("name", "the name 'criticc', but the optimizers are `critic`, `maker`"),
        ("number", "needs a tensor of one element with a graph, but was given a 'float'"),
        ("detached", r"given one of the shape \(\) without a graph"),
        ("two weights", "given a weight with a second loss"),
        ("unreached", "of the optimizer `maker` reaches none of its parameters"),
        ("micro-batch", "for `critic` in one micro-batch and for `critic`, `maker` in another"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(how: str, message: str) -> None:
    class Odd(Strange):
        pass

    Odd.how = how
    with pytest.raises(ConfigError, match=message):
        fit("by name", cls=Odd)


def forget(rank: int) -> str:
    class Odd(Strange):
        how = "process"

    with pytest.raises(ConfigError) as error:
        fit("by name", cls=Odd)
    return str(error.value)


@pytest.mark.e2e
def test_a_name_that_one_process_forgets_is_said_on_all() -> None:
    texts = run_ranks(2, forget)
    assert texts[0] == texts[1]
    assert "process 0: `critic`, `maker`; process 1: `maker`" in texts[0]


class FreezesOnOne(Callback):
    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.module.get_submodule("maker.0").requires_grad_(run.processes.process_index == 0)


def freeze_on_one(rank: int) -> str:
    with pytest.raises(ConfigError) as error:
        fit("by name", callbacks=[FreezesOnOne()])
    return str(error.value)


@pytest.mark.e2e
def test_what_froze_on_one_process_alone_is_said_on_all() -> None:
    texts = run_ranks(2, freeze_on_one)
    assert texts[0] == texts[1]
    assert "of the optimizer `maker` are frozen: process 0: 0 of 4; process 1: 2 of 4" in texts[0]


class Adds(Callback):
    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 2:
            late = [*run.module.get_submodule("maker.0").parameters()]
            run.optimizers["maker"].optimizer.add_param_group({"params": late})


@pytest.mark.parametrize("kind", ["turns", "by name"])
def test_parameters_that_an_optimizer_is_given_later_are_refused(kind: str) -> None:
    model = make_pair()
    late: dict[str, Any] = {"maker": partial(SGD, lr=0.1), "critic": partial(SGD, lr=0.1)}
    late["maker"] = SGD(model.maker[3].parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"`maker` has other parameters than .* `FreezeUntil`"):
        fit(kind, model, optimizer=late, callbacks=[Adds()])


def test_what_cannot_be_meant_is_said_before_the_first_step() -> None:
    model = make_pair()
    both = {"critic": Adam(model.parameters()), "maker": SGD(model.maker.parameters(), 0.1)}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("turns", "names ['critic']", {"optimizer": Alternating(MAKE, {"critic": 1})}),
        (
            "turns",
            "names ['critic', 'maker', 'x']",
            {"optimizer": Alternating(MAKE, {**TURNS, "x": 1})},
        ),
        (
            "turns",
            "`Alternating(...).windows['maker']` must be a whole number",
            {"optimizer": Alternating(MAKE, {**TURNS, "maker": 0})},
        ),
        ("by name", "which nothing would call", {"cls": Turns}),
        (
            "by name",
            "needs a method `training_step_critic",
            {"optimizer": Alternating(MAKE, TURNS)},
        ),
        ("by name", "share parameters, such as `maker.0.weight`", {"optimizer": both}),
        ("by name", "a mapping of at least two, but it is 1", {"optimizer": {"critic": Adam}}),
        ("by name", "parts are `maker`, `critic`", {"optimizer": {"actor": Adam, "critic": Adam}}),
        (
            "by name",
            "must be a `torch.optim.Optimizer`",
            {"optimizer": {"critic": 3, "maker": Adam}},
        ),
        ("by name", "`lr_scheduler` names 'actor'", {"lr_scheduler": {"actor": "cosine"}}),
        ("together", "this training has one. Return", {"cls": ByName, "optimizer": Adam}),
        ("by name", "Neither a compiled model nor activation", {"compile": {"backend": "eager"}}),
    ]
    frozen = make_pair()
    frozen.maker.requires_grad_(False)
    cases += [
        ("together", "several of them by name", {"optimizer": [Adam(model.parameters())]}),
        ("turns", "`maker` has nothing to train", {"model": frozen}),
    ]
    for kind, message, settings in cases:
        with pytest.raises(ConfigError) as error:
            fit(kind, settings.pop("model", model), **settings)
        assert message in str(error.value), message

    class Both(Split):
        @override
        def configure_optimizer(self, model: nn.Module, optimizer: Any) -> Optimizer:
            return Adam(model.parameters())

    old: Any = {"alternate": TURNS}
    with pytest.raises(ConfigError, match=r"`alternate`: write `fit\(optimizer=Alternating\("):
        Trainer(max_epochs=1, callbacks=[]).fit(model, [], optimizer=MAKE, **old)
    with pytest.raises(ConfigError, match="makes one optimizer, but there are several, by"):
        fit("by name", cls=Both, optimizer=Adam)
    run = fit("by name")[1].run
    assert run is not None
    with pytest.raises(ConfigError, match="is for a `training_step`, while it runs"):
        run.optimize("critic", torch.zeros((), requires_grad=True))


def test_another_order_of_turns_or_names_cannot_be_resumed(tmp_path: Path) -> None:
    save: dict[str, Any] = {"output_dir": tmp_path, "callbacks": [Checkpoint(every_n_steps=1)]}
    fit("turns", max_steps=2, **save)
    changes: list[dict[str, Any]] = [
        {"optimizer": Alternating(MAKE, {"critic": 1, "maker": 1})},
        {"optimizer": {"maker": MAKE["maker"], "critic": MAKE["critic"]}},
    ]
    for change in changes:
        with pytest.raises(CheckpointError, match="optimizer: 'critic: Adam, maker: RMSprop; in"):
            fit("turns", max_steps=2, resume="must", **save, **change)


def test_a_callback_that_freezes_and_one_that_logs_rates_see_all_optimizers() -> None:
    watch = Watch()
    before = whole(make_pair())
    model, _ = fit(
        "turns",
        callbacks=[
            FreezeUntil(step={"maker.0": 100}),
            LRMonitor(),
            GradientMonitor(depth=1),
            watch,
        ],
        log_every_n_steps=1,
        lr_scheduler={"maker": "linear"},
    )
    after = whole(model)
    assert all(torch.equal(before[n], after[n]) == n.startswith("maker.0") for n in after)
    assert all(p.requires_grad for p in model.parameters())
    assert [values["lr/maker"] for values in watch.logs] == pytest.approx(
        [0.01, 0.01, 0.01, 0.01 * 2 / 3, 0.01 * 2 / 3, 0.01 * 2 / 3, *[0.01 / 3] * 3]
    )
    assert {values["lr/critic"] for values in watch.logs} == {0.02}


def weighted(rank: int, strategy: str) -> dict[str, Tensor]:
    class Weighted(Trainer):
        def training_step(self, model: Any, batch: Any) -> None:
            assert isinstance(self.run, Run)
            real, noise = batch
            made, weight = model.maker(noise), (noise[:, 0] > 0).sum()
            errors = ((made - real) ** 2).sum(1)[noise[:, 0] > 0]
            self.run.optimize("maker", errors.sum() / weight.clamp(min=1), weight)
            self.run.optimize("critic", mse_loss(model.critic(real), real[:, :1]))
            self.run.optimize("critic", model.critic(made).square().mean())

    return whole(fit("by name", cls=Weighted, strategy=strategy)[0])


@pytest.mark.e2e
def test_losses_have_weights_and_add_up_by_name() -> None:
    alone = run_ranks(1, weighted, "single")[0]
    for weights in run_ranks(2, weighted, "ddp"):
        assert difference(alone, weights) < 1e-12


class Reduced(Callback):
    """Keeps the gradients that the backward of each micro-batch left."""

    def __init__(self) -> None:
        self.found: list[list[Tensor]] = []

    @override
    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        gradients = (p.grad for p in run.module.parameters() if p.grad is not None)
        self.found.append([gradient.clone() for gradient in gradients])


def left_by_backward(rank: int) -> dict[str, list[list[Tensor]]]:
    found = {}
    for kind in ("turns", "by name"):
        watch = Reduced()
        fit(kind, callbacks=[watch], data=make_data(24), strategy="ddp", max_epochs=3)
        found[kind] = watch.found
    return found


@pytest.mark.e2e
def test_under_ddp_the_backward_of_an_optimizer_reduces_its_gradients() -> None:
    """In its first window they are reduced at the end."""
    one, other = run_ranks(2, left_by_backward)
    first_windows = {"turns": (0, 2), "by name": (0,)}
    for kind, found in one.items():
        alike = [equal(a, b) for a, b in zip(found, other[kind], strict=True)]
        last = [window not in first_windows[kind] for window in range(6)]
        assert alike == [each for end in last for each in (False, end)], kind


class Routed(nn.Module):
    """Experts that few samples, or only the first windows, reach."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))


class Routes(Trainer):
    """A loss of the experts may reach none of them, on one process or on all."""

    def training_step(self, model: Any, batch: Any) -> None:
        assert isinstance(self.run, Run)
        hidden = model.shared(batch[1]).tanh()
        of_rows = hidden.square().sum(1)
        for expert, rows in zip(
            model.experts, (batch[1][:, 0] > 1, batch[1][:, 0] > 10 * self.run.state.attempts - 15),
            strict=True,
        ):  # fmt: skip
            if rows.any():
                more = expert(hidden[rows]).square().sum(1)
                of_rows = of_rows.index_add(0, rows.nonzero()[:, 0], more)
        self.run.optimize("experts", of_rows.mean())
        self.run.optimize("shared", 2 * of_rows.mean())


class Alternates(Callback):
    """Freezes by hand."""

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.module.get_submodule("maker.0").requires_grad_(run.state.step % 2 == 0)

    @override
    def on_fit_end(self, run: Run) -> None:
        run.module.requires_grad_(True)


def changing(rank: int, strategy: Any) -> dict[str, dict[str, Tensor]]:
    """Train what uses other parameters in one window than in another."""
    found = {}
    for kind in ("turns", "by name"):
        callbacks: dict[str, Callback] = {"by hand": Alternates()}
        callbacks["a layer"] = FreezeUntil(step={"maker.0": 3})
        if kind == "by name":
            callbacks["all of one"] = FreezeUntil(step={"maker": 2})
        for name, callback in callbacks.items():
            model, _ = fit(kind, strategy=strategy(), callbacks=[callback])
            found[f"{kind}, {name}"] = whole(model)
    torch.manual_seed(0)
    decays = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1)  # also of a gradient of zeros
    model, _ = fit(
        "by name",
        Routed().double(),
        cls=Routes,
        data=make_data(24),
        optimizer={"experts": decays, "shared": decays},
        strategy=strategy(find_unused_parameters=True) if strategy is DDP else strategy(),
    )
    return found | {"routed": whole(model)}


@pytest.mark.e2e
def test_what_froze_and_what_was_not_used_are_those_of_one_device() -> None:
    alone = run_ranks(1, changing, SingleDevice)[0]
    for found in run_ranks(2, changing, DDP):
        for name, weights in alone.items():
            assert difference(weights, found[name]) < 1e-12, name


class LeavesOut(Turns):
    """The maker's loss leaves a parameter out where a test asks for it."""

    leaves_out = staticmethod(lambda call: False)
    calls = 0

    def training_step_maker(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        loss: Tensor = model(batch, "maker")
        return loss if self.leaves_out(self.calls) else loss + model.idle.square().sum()


def leave_out(rank: int) -> list[str]:
    """Leave it out in the first window on one process, and later."""
    texts = []
    for where in (lambda call: rank == 1, lambda call: call > 2):
        model: Any = make_pair()
        model.idle = nn.Parameter(torch.ones(2).double())
        makes = {"critic": SGD(model.critic.parameters(), 0.1)}
        makes["maker"] = SGD([*model.maker.parameters(), model.idle], 0.1)
        cls = type("Odd", (LeavesOut,), {"leaves_out": staticmethod(where)})
        settings: dict[str, Any] = {"optimizer": makes, "data": make_data(24), "strategy": "ddp"}
        with pytest.raises(ConfigError) as error:
            fit("turns", model, cls=cls, **settings)
        texts.append(str(error.value))
    return texts


@pytest.mark.e2e
def test_a_parameter_without_a_gradient_is_named_on_all_processes() -> None:
    for texts in run_ranks(2, leave_out):
        for text in texts:
            assert text.startswith("1 trainable parameters got no gradient in this window (`idle`)")


class Around(SingleDevice):
    """Says nothing of a backward whose forward was not that of its own module."""

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        return nn.Sequential(super().wrap(model, precision, seed))

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        return model[0] if isinstance(model, nn.Sequential) else model


def test_a_strategy_that_cannot_reduce_for_one_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="`Around` does not say how gradients are reduced"):
        fit("turns", strategy=Around())
