"""Every precision of trainkit keeps the contract, and broken ones are told what they break."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tests.helpers.tiers import with_few
from trainkit.precision import BF16, FP16, FP32
from trainkit.precision.precision import Precision
from trainkit.testing import check_precision

MAKE: list[Callable[[], Precision]] = [FP32, BF16, FP16, lambda: FP16(growth_interval=2)]


@pytest.mark.parametrize("precision", with_few([FP16], MAKE))
def test_precisions(precision: Callable[[], Precision]) -> None:
    check_precision(precision)


class NeverUnscales(FP16):
    @override
    def unscale(
        self,
        optimizer: Optimizer,
        reduce_overflow: Callable[[Tensor], Tensor],
        *,
        update: bool = True,
    ) -> bool:
        return False


class NeverSkips(FP16):
    @override
    def unscale(
        self,
        optimizer: Optimizer,
        reduce_overflow: Callable[[Tensor], Tensor],
        *,
        update: bool = True,
    ) -> bool:
        super().unscale(optimizer, reduce_overflow, update=update)
        return False


class Casts(FP32):
    @override
    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data = p.data.bfloat16().float() if p.ndim > 1 else p.data.double()


class Noisy(FP32):
    """Draws from a generator that it does not save."""

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        self.generator = torch.Generator().manual_seed(0)

    @override
    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        for p in optimizer.param_groups[0]["params"]:
            p.data += 1e-3 * torch.randn(p.shape, generator=self.generator).to(p.device)


class DrawsApart(FP32):
    """Draws from the global generator, which differs between processes."""

    @override
    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        for p in optimizer.param_groups[0]["params"]:
            p.data += 1e-3 * torch.randn_like(p)


class LosesState(FP16):
    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NeverUnscales, "`unscale` must undo what `backward` scaled"),
        (NeverSkips, "`unscale` did not return True"),
        (Casts, "float32"),
        (Noisy, "What a precision draws or adapts belongs in `state_dict`"),
        (DrawsApart, "The processes hold different models after step"),
        (lambda: LosesState(growth_interval=2), "must be what it was"),
    ],
)
def test_a_broken_precision_is_found(broken: Callable[[], Precision], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_precision(broken)
