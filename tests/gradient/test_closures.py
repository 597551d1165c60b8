"""Optimizers that compute the gradients again: `step(closure)`, as LBFGS and SAM do."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import FEATURES, make_trainer, toy_dataset
from trainkit import StepOutput, Trainer
from trainkit.basics import rng
from trainkit.callbacks import Checkpoint
from trainkit.errors import ConfigError

LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class SAM(Optimizer):
    """Sharpness-aware minimisation: gradients at the worst place nearby move the weights."""

    needs_closure = True

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        moved: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            moved += [(p, p.grad * (group["rho"] / (norm + 1e-12))) for p in group["params"]]
        for p, shift in moved:
            p.add_(shift)
        with torch.enable_grad():
            closure()
        for p, shift in moved:
            p.sub_(shift)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def noisy_model() -> nn.Module:
    """Return a model with statistics of its own and with dropout."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    return nn.Sequential(*layers).double()


def data(batch_size: int = 8) -> DataLoader[Any]:
    features, targets = toy_dataset().tensors
    return DataLoader(TensorDataset(features.double(), targets), batch_size=batch_size)


def by_hand(model: nn.Module, make: Callable[..., Optimizer], **options: Any) -> nn.Module:
    """Train as one writes it by hand; SAM gets gradients before its step, LBFGS does not."""
    clip = options.get("max_grad_norm")
    optimizer = make(model.parameters())
    batches = [*data()]  # which draws a seed for workers
    rng.seed_all(rng.device_seed(0, 0), torch.device("cpu"))  # as a run with the seed 0 does
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if isinstance(optimizer, SAM):
            closure()
        optimizer.step(closure)
    return model


def trained(make: Any, model: nn.Module | None = None, batch: int = 8, **options: Any) -> nn.Module:
    model = noisy_model() if model is None else model
    trainer = make_trainer(**options)
    trainer.fit(model, data(batch), optimizer=make, loss_fn=nn.CrossEntropyLoss())
    return model


def equal(a: nn.Module, b: nn.Module) -> bool:
    states = a.state_dict(), b.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Nesterov(Optimizer):
    """Looks ahead first: its closure is required, and is for weights that have moved already."""

    def __init__(self, params: Any, clears: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.clears = clears

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.data.sub_(self.state[p].get("velocity", torch.ones_like(p)), alpha=0.05)
        if self.clears:
            self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(parameters, before, strict=True):
            self.state[p]["velocity"] = p.grad.clone()
            p.copy_(old - 0.1 * p.grad)


@pytest.mark.parametrize("clears", [False, True])
def test_a_required_closure_is_for_the_weights_that_it_is_called_at(clears: bool) -> None:
    make = partial(Nesterov, clears=clears)
    assert equal(trained(make, plain_model()), by_hand(plain_model(), make))


@pytest.mark.parametrize("make", [LBFGS, SAM], ids=["LBFGS", "SAM"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["", "clipped"])
def test_a_step_with_a_closure_is_that_of_a_loop_by_hand(make: Any, options: Any) -> None:
    assert equal(trained(make, **options), by_hand(noisy_model(), make, **options))


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def _shared(rank: int, make: Any, strategy: str, options: dict[str, Any]) -> dict[str, Tensor]:
    state = trained(make, plain_model(), strategy=strategy, **options).state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


@pytest.mark.parametrize("make", with_few([LBFGS], [LBFGS, SAM]), ids=["LBFGS", "SAM"])
def test_it_does_not_depend_on_how_a_window_is_split(make: Any) -> None:
    whole = trained(make, plain_model(), batch=8).state_dict()
    in_two = trained(make, plain_model(), batch=4, gradient_accumulation_steps=2).state_dict()
    options = {"batch": 2, "gradient_accumulation_steps": 2}
    on_two = [run_ranks(2, _shared, make, strategy, options)[0] for strategy in ("ddp", "fsdp")]
    for split in (in_two, *on_two):
        assert all(torch.allclose(whole[k], split[k], rtol=0, atol=1e-12) for k in whole)


class Weighted(Trainer):
    """Gives each micro-batch the weight of its first class, logs, and counts its calls."""

    calls = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        assert self.run is not None
        x, y = batch
        self.calls += 1
        self.run.log({"calls": 1.0}, reduce="sum")
        picked = y == 0
        loss = nn.functional.cross_entropy(model(x)[picked], y[picked])
        return StepOutput(loss, weight=picked.sum())


def test_weights_of_the_step_count_in_each_evaluation() -> None:
    models = []
    for batch, accumulation in ((8, 1), (4, 2)):
        trainer = Weighted(
            max_epochs=1, callbacks=[], gradient_accumulation_steps=accumulation, max_grad_norm=1.0
        )
        model = plain_model()
        trainer.fit(model, data(batch), optimizer=LBFGS)
        models.append(model.state_dict())
        assert trainer.calls > 4 * accumulation
    assert all(torch.allclose(models[0][k], models[1][k], rtol=0, atol=1e-12) for k in models[0])


@pytest.mark.parametrize("make", [LBFGS, SAM], ids=["LBFGS", "SAM"])
def test_a_resume_is_equal_to_the_last_bit(make: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": make, "loss_fn": nn.CrossEntropyLoss()}

    def runs(steps: list[int], folder: Path) -> Iterator[nn.Module]:
        for each in steps:
            model = noisy_model()
            trainer = make_trainer(
                max_steps=each, output_dir=folder, callbacks=[Checkpoint(every_n_steps=1)]
            )
            trainer.fit(model, data(), **options, resume="auto", schedule="rescale")
            yield model

    (whole,) = runs([6], tmp_path / "whole")
    *_, halves = runs([3, 6], tmp_path / "halves")
    assert equal(whole, halves)


def test_what_cannot_take_a_closure_says_so() -> None:
    with pytest.raises(ConfigError, match=r"`LBFGS` computes gradients again.*fp16.*bf16"):
        trained(LBFGS, plain_model().float(), precision="fp16")
    model = nn.ModuleDict({"a": nn.Linear(FEATURES, 2), "b": nn.Linear(2, 2)})
    optimizers = {"a": LBFGS, "b": partial(torch.optim.SGD, lr=0.1)}
    with pytest.raises(ConfigError, match=r"`LBFGS` computes gradients again.*several optimizers"):
        make_trainer().fit(model, data(), optimizer=optimizers)
