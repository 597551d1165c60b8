"""Data parallelism by torch's DistributedDataParallel."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainkit.config import checked
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies.strategy import Strategy

__all__ = ["DDP"]


class DDP(Strategy):
    """Holds the whole model on every process and averages the gradients once a window.

    Args:
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
        find_unused_parameters: Set it where a step does not use every parameter; costs a walk
            over the graph each forward.
        bucket_cap_mb: Size of a gradient bucket in MiB.
    """

    name = "ddp"

    @checked
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(device=device)
        if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
            raise ConfigError(
                f"`bucket_cap_mb` must be a positive number of MiB, but is {bucket_cap_mb}."
            )
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        model = self.to_device(model)
        if self.processes.size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model  # there is nothing to reduce
        return _FixedLayout(model, **self._options())

    def _options(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel but for the model."""
        return {
            "device_ids": None if self.device.type == "cpu" else [self.device],
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
        }

    @override
    def rebuild_after_freeze(self, model: nn.Module, precision: Precision) -> nn.Module:
        # The reducer waits for the gradients of those parameters that it found when it was made.
        if isinstance(model, DistributedDataParallel):
            # Else the old one would go on taking gradients.
            model._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        return self.wrap(self.unwrap(model), precision)

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module = model.module
            assert isinstance(module, nn.Module)
            return module
        return model

    @override
    def check_gradients(self, module: nn.Module) -> None:
        if self.processes.size == 1 or self.find_unused_parameters:
            return
        names = sorted({name for own in self._without_gradient(module) for name in own})
        if names:
            raise _no_gradient(names, "the first step")

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model)

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[object]:
        if isinstance(model, _FixedLayout):
            return model.reducing()
        return super().sync_in_backward(model)


class _FixedLayout(DistributedDataParallel):
    """One whose buckets of gradients are those of its last step from the first step on.

    Torch lays buckets out anew after the first backward, and an element is summed over processes
    in an order that depends on its place: a resumed run would differ in the last bit from one
    that was never stopped (rule 30). Here the buckets are laid out at once, as if gradients came
    in the reverse order of registration. With `find_unused_parameters` torch never changes them.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        held = [(p, p.grad) for p in model.parameters()]
        model.zero_grad()  # torch would divide those in its buckets, where it multiplies others
        super().__init__(model, **options)
        self.reducer._push_all_rebuilt_params()
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        for p, gradient in held:
            p.grad = gradient

    @override
    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        backwards = slice(None, None, 1 if self.find_unused_parameters else -1)
        self._reduced = parameters[backwards]
        return self._reduced, are_sparse[backwards]

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Reduce in the backward inside; at the end where none came, or some may be unused."""
        first, held = self._reduced[0], self._reduced[0].grad
        if not self.find_unused_parameters:
            self.reducer.prepare_for_backward([])  # no forward has done it
        yield
        try:  # torch would say it in the next forward, after an update
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            indices = str(error).rpartition("did not receive grad for rank")[2]
            raise self._unreduced(map(int, re.findall(r"\d+", indices)[1:])) from error
        if self.find_unused_parameters or (first.grad is held and not self.static_graph):
            self._reduce_held()

    def _reduce_held(self) -> None:
        """Reduce the gradients that there are, by a backward that computes none."""
        without = {index for index, p in enumerate(self._reduced) if p.grad is None}
        used = [index for index in range(len(self._reduced)) if index not in without] or [0]
        if self.find_unused_parameters:
            self.reducer._reset_state()  # the backwards of other optimizers left marks
            self.reducer.prepare_for_backward([self._reduced[index][...] for index in used])
        elif without:
            raise self._unreduced(without)

        def take(_: Tensor) -> None:
            for index in used:
                self.reducer._autograd_hook(index)  # type: ignore[attr-defined]

        start = torch.zeros((), device=self.device, requires_grad=True)
        start.register_hook(take)  # type: ignore[no-untyped-call]
        start.backward()  # type: ignore[no-untyped-call]

    def _unreduced(self, indices: Iterable[int]) -> ConfigError:
        missing = {id(self._reduced[index]) for index in indices}
        names = [name for name, p in self.module.named_parameters() if id(p) in missing]
        return _no_gradient(names, "the last micro-batch of this window")


def _no_gradient(names: list[str], when: str) -> ConfigError:
    return ConfigError(
        f"{len(names)} trainable parameters got no gradient in {when} ({quoted(names)}), so the "
        "gradients of the processes would not be averaged. Freeze what the step does not use by "
        "`requires_grad_(False)`, or pass `strategy=DDP(find_unused_parameters=True)`."
    )
