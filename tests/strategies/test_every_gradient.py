"""Every gradient of a trained parameter is reduced, however it came (rules 8 and 16)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, Callback, Run, StepResult, Trainer
from trainkit.callbacks import BatchSizeFinder
from trainkit.strategies import DDP, FSDP, SingleDevice, Strategy

LIMIT = 1e-12  # of weights in fp64: sums over processes are added up in another order
FULL, SHORT = 24, 26  # samples; of the second the last global batch leaves processes empty
BATCH = 6  # of all processes


class Net(nn.Module):
    """Two heads on one body; the second answers where it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head, self.aux = nn.Linear(8, 2), nn.Linear(8, 2)

    @override
    def forward(self, x: Tensor, *, both: bool = True) -> Any:
        hidden = self.body(x)
        return (self.head(hidden), self.aux(hidden)) if both else self.head(hidden)


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    return mse_loss(outputs[0], targets) + mse_loss(outputs[1], 2 * targets)


class Through(Trainer):
    """Calls what the strategy has wrapped."""

    calls = 0

    @override
    def training_step(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        assert isinstance(self.run, Run)
        return self.loss(model, self.run.module, *batch)

    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model(x), y)


class Past(Through):
    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(module(x), y)


class WithoutGradient(Through):
    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model(x)
        return loss_of(module(x), y)


class Meta(Through):
    """MAML: the loss at weights that one step on a support set has made."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(module.named_parameters())
        support = torch.linspace(-1, 1, 12, dtype=x.dtype).view(4, 3)
        inner = loss_of(functional_call(module, weights, (support,)), support[:, :2].cos())
        steps = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), steps, strict=True)}
        return loss_of(functional_call(module, fast, (x,)), y)


class ByHand(Through):
    """Assigns gradients, and returns a loss of nothing."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(module.named_parameters())
        gradients = torch.func.grad(lambda w: loss_of(functional_call(module, w, (x,)), y))(weights)
        _add(weights, gradients)
        return loss_of(module(x), y).detach().requires_grad_()


class HalfByHand(Through):
    """Assigns the gradients of one head; the backward computes the others."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(module.aux.named_parameters())
        hidden = module.body(x)
        aside = mse_loss(module.aux(hidden), 2 * y)
        gradients = torch.autograd.grad(aside, [*weights.values()], retain_graph=True)
        _add(weights, dict(zip(weights, gradients, strict=True)))
        fixed = {name: weight.detach() for name, weight in weights.items()}
        rest: Tensor = mse_loss(functional_call(module.aux, fixed, (hidden,)), 2 * y)
        return rest + mse_loss(model(x, both=False), y)


def _add(weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        gradient = gradients[name].detach()
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


class OnePast(Through):
    """One micro-batch through the wrapper, one past it."""

    last = 1

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of((module if self.calls % 2 == self.last else model)(x), y)


class LastThrough(OnePast):
    last = 0


class Penalty(Through):
    """A gradient penalty past the wrapper, beside a loss through it."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        points = x.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(module(points)[0].sum(), points, create_graph=True)
        return loss_of(model(x), y) + (slopes.square().sum(1) - 1).square().mean()


class OneHeadPast(Through):
    """One head is used past the wrapper alone."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x, both=False), y) + mse_loss(module(x)[1], 2 * y)


class InFirst(Through):
    """A head has a gradient from the first micro-batch of a window only."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        if self.calls % 2:
            return loss_of(model(x), y)
        return 2 * mse_loss(model(x, both=False), y)


class OwnBackward(Through):
    """Makes a backward of its own inside of the step."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        mse_loss(model(x)[1], 2 * y).backward()  # type: ignore[no-untyped-call]
        return mse_loss(model(x, both=False), y)


class Unused(Through):
    """An output that the loss does not use."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x)[0], y)


class UnusedPast(Through):
    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(module(x)[0], y)


class AtTimes(Through):
    """A head that few rows ask for: on some processes, or none."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = x[:, 0] > 0.5
        loss = mse_loss(model(x, both=False), y)
        if rows.any():
            loss = loss + (model(x[rows])[1] - y[rows]).square().sum() / len(x)
        return loss


class Words(nn.Module):
    """Sparse gradients; one table is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 2, sparse=True)
        self.rare = nn.Embedding(9, 2, sparse=True)
        self.head = nn.Linear(2, 2)

    @override
    def forward(self, x: Tensor) -> Any:
        indices = x[:, 0].abs().mul(3).long().clamp(max=8)
        found = self.words(indices)
        if (x[:, 0] > 1).any():
            found = found + self.rare(indices) * (x[:, :1] > 1)
        return self.head(found), found


class Sparse(Through):
    """The rare table is used by every step."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        indices = x[:, 1].abs().mul(3).long().clamp(max=8)
        rare: Tensor = module.rare(indices)
        return loss_of(model(x), y) + rare.square().mean()


class AllSum(torch.autograd.Function):
    """A sum over processes, as in synchronised batch norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x) if dist.is_initialized() else None
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return AllSum.forward(ctx, gradient)


class Centred(Net):
    """Takes the mean of all processes away, between two layers that are trained."""

    counts = 1.0

    @override
    def forward(self, x: Tensor, *, both: bool = True) -> Any:
        first, *others = self.body
        hidden = first(x)
        ones = torch.full_like(hidden, self.counts)
        sums = AllSum.apply(torch.stack([(hidden * ones).sum(0), ones.sum(0)]))  # type: ignore[no-untyped-call]
        hidden = hidden - sums[0] / sums[1]
        hidden = nn.Sequential(*others)(hidden)
        return self.head(hidden), self.aux(hidden)


class Centres(Through):
    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(self.run, Run)
        module.counts = 0.0 if self.run.zero_weight else 1.0
        return loss_of(model(x), y)


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(number, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x[:, :2].sin())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


def train(
    rank: int,
    strategy: Callable[[], Strategy],
    cls: type[Trainer],
    *,
    number: int = FULL,
    accumulation: int = 2,
    net: type[nn.Module] = Net,
    **settings: Any,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = net().double()
    optimizer = settings.pop("optimizer", lambda _: partial(SGD, **OPTIONS))(model)
    callbacks = [make() for make in settings.pop("callbacks", ())]
    trainer = cls(
        max_epochs=3,
        strategy=strategy(),
        split_batches=True,
        gradient_accumulation_steps=accumulation,
        callbacks=callbacks,
        **settings,
    )
    trainer.fit(model, DataLoader(samples(number), BATCH, shuffle=True), optimizer=optimizer)
    return weights_of(model)


def unused() -> DDP:
    return DDP(find_unused_parameters=True)


def blocks() -> FSDP:
    return FSDP(wrap_policy=[nn.Linear])


# Weight decay and momentum: gradients of zeros are not none.
OPTIONS: Any = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}

Case = tuple[type[Trainer], dict[str, Any]]


def train_all(
    rank: int, strategy: Callable[[], Strategy], cases: Mapping[str, Case]
) -> dict[str, dict[str, Tensor]]:
    return {name: train(rank, strategy, cls, **settings) for name, (cls, settings) in cases.items()}


def check(cases: Mapping[str, Case], ways: list[tuple[Callable[[], Strategy], int]]) -> None:
    """Check that trainings on several processes are those of one, and the same on all."""
    (alone,) = run_ranks(1, train_all, SingleDevice, cases)
    for strategy, size in ways:
        found = run_ranks(size, train_all, strategy, cases)
        for name, expected in alone.items():
            for key, value in expected.items():
                where = f"{name}, `{key}` on {size} processes by {strategy.__name__}"
                error = (found[0][name][key] - value).abs().max()
                assert error < LIMIT, f"{where}: {error:.1e}"
                assert all(torch.equal(found[0][name][key], of[name][key]) for of in found), where


WAYS = [(DDP, 2), (DDP, 3), (unused, 2)]
USES_ALL = [Through, Past, WithoutGradient, Meta, OnePast, LastThrough, Penalty, OneHeadPast]
EQUAL_COUNTS = [ByHand, HalfByHand, InFirst, OwnBackward]  # not weighted by samples, or by two


@pytest.mark.parametrize(("strategy", "size"), with_few([(DDP, 2)], WAYS))
def test_a_gradient_is_reduced_however_it_came(strategy: Callable[[], Strategy], size: int) -> None:
    cases: dict[str, Case] = {cls.__name__: (cls, {}) for cls in USES_ALL + EQUAL_COUNTS}
    for cls in USES_ALL:
        cases[f"{cls.__name__}, short"] = (cls, {"number": SHORT, "accumulation": 1})
    check(cases, [(strategy, size)])


@pytest.mark.e2e
@pytest.mark.parametrize("size", with_few([2], [2, 3]))
def test_what_the_loss_does_not_use_stays_as_it_is(size: int) -> None:
    cases: dict[str, Case] = {}
    for cls in (Unused, UnusedPast, AtTimes, OneHeadPast):
        for number, accumulation in ((FULL, 2), (SHORT, 1), (SHORT - 1, 2)):
            more = {"number": number, "accumulation": accumulation}
            cases[f"{cls.__name__}, {number}, {accumulation}"] = (cls, more)
    cases["tried"] = (AtTimes, {"callbacks": [BatchSizeFinder]})
    check(cases, [(unused, size)])


def in_small_buckets() -> DDP:
    return DDP(bucket_cap_mb=1e-4)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [2, 3])
def test_repeats_reduce_in_the_order_of_the_other_processes(size: int) -> None:
    """Collectives of the model itself come between those of the buckets."""
    settings = {"net": Centred, "number": SHORT - 1, "accumulation": 1}
    cases: dict[str, Case] = {"centred": (Centres, settings)}
    check(cases, [(in_small_buckets, size), (unused, size)])


class Freezes(Callback):
    """Freezes the body in a first hook, thaws it, and freezes a head later; a step each."""

    def __init__(self, *, late: bool = False) -> None:
        self.late = late

    @override
    def on_fit_start(self, run: Run) -> None:
        run.module.get_submodule("body").requires_grad_(False)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if not self.late:
            self.change(run)

    @override
    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        if self.late:  # gradients are there already
            self.change(run)

    def change(self, run: Run) -> None:
        if run.state.step == 2:
            run.module.get_submodule("body").requires_grad_(True)
        if run.state.step == 5:
            run.module.get_submodule("aux").requires_grad_(False)


class InStep(Through):
    """Thaws and freezes in the step, without a word to anybody."""

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(self.run, Run)
        module.body.requires_grad_(self.run.state.step >= 2)
        module.aux.requires_grad_(self.run.state.step < 5)
        return loss_of(model(x), y)


class FrozenBefore(Through):
    """What was frozen before `fit` thaws in a hook."""

    @override
    def fit(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.body.requires_grad_(False)
        return super().fit(model, *args, **kwargs)

    @override
    def training_step(self, model: Any, batch: Any) -> Tensor:
        assert isinstance(self.run, Run)
        if self.run.state.step == 3:
            self.run.module.get_submodule("body").requires_grad_(True)
        return super().training_step(model, batch)


def over_all(model: nn.Module) -> SGD:
    return SGD(model.parameters(), **OPTIONS)


def by_part(model: nn.Module) -> dict[str, SGD]:
    parts = {name: model.get_submodule(name).parameters() for name in ("body", "head", "aux")}
    return {name: SGD(own, **OPTIONS) for name, own in parts.items()}


THAWS = [(DDP, 2), (DDP, 3), (unused, 2), (blocks, 2), (FSDP, 3)]


@pytest.mark.parametrize(("strategy", "size"), with_few([(DDP, 2)], THAWS))
def test_what_freezes_or_thaws_is_followed_whoever_does_it(
    strategy: Callable[[], Strategy], size: int
) -> None:
    late = partial(Freezes, late=True)
    cases: dict[str, Case] = {
        "hook": (Through, {"callbacks": [Freezes]}),
        "hook, past": (Past, {"callbacks": [Freezes]}),
        "hook, short": (Through, {"callbacks": [Freezes], "number": SHORT, "accumulation": 1}),
        "step": (InStep, {}),
    }
    if strategy is not blocks and strategy is not FSDP:
        cases["before"] = (FrozenBefore, {"optimizer": over_all})
        cases["amid a window"] = (Through, {"callbacks": [late]})
        cases["by part"] = (Through, {"callbacks": [Freezes], "optimizer": by_part})
    check(cases, [(strategy, size)])


class OnOne(Through):
    """Processes freeze different parts; the first one none where it is empty."""

    parts = ("", "aux")

    @override
    def loss(self, model: Any, module: Any, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(self.run, Run)
        part = self.parts[self.run.strategy.processes.rank]
        if part and self.run.state.step == 2:
            module.get_submodule(part).requires_grad_(False)
        return loss_of(model(x), y)


class Differently(OnOne):
    parts = ("head", "aux")


REFUSALS = [
    (OnOne, "Process 1 called `requires_grad_`, but process 0 has gone on without it"),
    (Differently, "4 parameters are frozen on some processes only \\(`aux.bias`, "),
]


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", [DDP, blocks])
@pytest.mark.parametrize(("cls", "message"), REFUSALS)
def test_what_is_frozen_on_some_processes_only_is_refused(
    cls: type[Trainer], message: str, strategy: Callable[[], Strategy]
) -> None:
    with pytest.raises(RanksError, match=message):
        run_ranks(2, train, strategy, cls, accumulation=1)


def thaw_in_own_loop(rank: int) -> dict[str, Tensor]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = Net().double()
    net.body.requires_grad_(False)
    optimizer = SGD(net.parameters(), **OPTIONS)
    model, optimizer = accelerator.prepare(net, optimizer)
    x, y = samples(FULL).tensors
    size = accelerator.num_processes
    for step in range(6):
        if step == 2:
            net.body.requires_grad_(True)
        loss = loss_of(model(x[rank::size]), y[rank::size])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert {*net.state_dict()} == {name.removeprefix("module.") for name in model.state_dict()}
    return weights_of(net)


@pytest.mark.e2e
def test_what_thaws_in_an_own_loop_is_reduced() -> None:
    (alone,) = run_ranks(1, thaw_in_own_loop)
    for found in run_ranks(2, thaw_in_own_loop):
        for name, value in alone.items():
            assert (found[name] - value).abs().max() < LIMIT, name


class Codes(nn.Module):
    """A buffer that follows what each process sees, and that the outputs depend on."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.register_buffer("codes", torch.zeros(3))

    @override
    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.codes = 0.5 * self.codes + x.detach().mean(0)
        return self.first(x - self.codes), self.first(x)


@pytest.mark.e2e
def test_buffers_are_those_of_process_0_also_past_the_wrapper() -> None:
    settings = {"net": Codes, "number": SHORT, "accumulation": 1}
    cases: dict[str, Case] = {cls.__name__: (cls, settings) for cls in (Through, Past)}
    for found in run_ranks(2, train_all, DDP, cases):
        for name, value in found["Through"].items():
            assert (found["Past"][name] - value).abs().max() < LIMIT, name
