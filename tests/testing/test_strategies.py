"""Every strategy of trainkit keeps the contract, and broken ones are told what they break."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from tests.helpers.tiers import with_few
from trainkit.precision import Precision
from trainkit.strategies import DDP, FSDP, SingleDevice
from trainkit.testing import check_strategy


def test_single_device() -> None:
    check_strategy(SingleDevice, processes=1)


@pytest.mark.e2e
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_ddp(processes: int) -> None:
    check_strategy(DDP, processes=processes)


@pytest.mark.filterwarnings("ignore:FSDP gains nothing")
@pytest.mark.parametrize("processes", with_few([], [1, 2, 3]))
def test_fsdp(processes: int) -> None:
    check_strategy(FSDP, processes=processes)


class Alone(DDP):
    """Reduces no gradient."""

    @override
    def wrap(self, model: nn.Module, *_: object) -> nn.Module:
        return model.to(self.device)


class AlwaysReduces(DDP):
    """Lets each forward make the reducer of torch ready, as torch itself does."""

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        wrapped = super().wrap(model, precision, seed)
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped.require_backward_grad_sync = True
        return wrapped


class Prefixed(DDP):
    """Gives the wrapper as the user's module."""

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


class HalfClipped(DDP):
    @override
    def clip_grad_norm(self, parameters: object, max_norm: float) -> torch.Tensor:
        return super().clip_grad_norm(parameters, max_norm / 2)  # type: ignore[arg-type]


class Forgetful(DDP):
    """Leaves its process group and a thread."""

    @override
    def close(self) -> None:
        threading.Thread(target=threading.Event().wait, name="forgotten").start()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Alone, "hold different models after step 1"),
        (AlwaysReduces, "`no_sync` reduced them"),
        (Prefixed, "`unwrap` must return the module"),
        (HalfClipped, "are not those of one device"),
        (Forgetful, "left .*forgotten.*a process group.* behind"),
    ],
)
def test_a_broken_strategy_is_found(broken: type[DDP], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_strategy(broken, processes=2)


def test_the_number_of_processes_must_share_the_batch() -> None:
    with pytest.raises(ValueError, match="`processes` must be 1, 2, 3, 4 or 6"):
        check_strategy(DDP, processes=5)
