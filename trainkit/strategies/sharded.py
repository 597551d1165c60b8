"""What strategies share that hold parts of the parameters on each process."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.device import wide_dtype
from trainkit.checkpoint.resharding.sharding_spec import local_part
from trainkit.errors import ConfigError, quoted
from trainkit.strategies.strategy import Strategy, zeros_for


class ShardedStrategy(Strategy):
    """One under which parameters and their gradients are `DTensor`s, of which a part lies here."""

    sharded = True

    @override
    @contextmanager
    def zero_gradients(self, module: nn.Module) -> Iterator[None]:
        hooks: list[RemovableHandle] = []

        def before_forward(inner: nn.Module, _: Any) -> None:
            # Gradients are computed for the full parameters, which are there only in a forward.
            trainable = [p for p in inner.parameters(recurse=False) if p.requires_grad]
            hooks.extend(p.register_hook(zeros_for) for p in trainable)  # type: ignore[no-untyped-call]

        hooks += [inner.register_forward_pre_hook(before_forward) for inner in module.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @override
    def check_gradients(self, module: nn.Module) -> None:
        unused = self._without_gradient(module)
        names = sorted({n for own in unused for n in own if not all(n in o for o in unused)})
        if names:
            raise ConfigError(
                f"{len(names)} trainable parameters got a gradient in the first step on some "
                f"processes only ({quoted(names)}). Use the same parameters on all, or freeze "
                "them by `requires_grad_(False)`."
            )

    @override
    def reduce_overflow(self, overflow: Tensor) -> Tensor:
        return self.processes.all_reduce(overflow, "max")

    @override
    def local_parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [local_part(tensor) for tensor in tensors]

    @override
    def clip_grad_norm(self, parameters: Iterable[Any], max_norm: float) -> Tensor:
        parameters = list(parameters)
        norm = self.grad_norm(parameters)
        self.scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @override
    def clip_grad_value(self, parameters: Iterable[Tensor], max_value: float) -> None:
        for gradient in self.local_gradients(parameters):
            gradient.clamp_(-max_value, max_value)

    @override
    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        parameters = list(parameters)
        gradients = self.local_gradients(p for p in parameters if self._counts(p))
        wide = wide_dtype(self.device.type)
        norms = [torch.linalg.vector_norm(g).to(wide) for g in gradients if g.numel()]
        # In fp64 the square of a finite fp32 norm is finite too.
        square = torch.zeros((), dtype=wide, device=self.device)
        if norms:
            square += torch.stack(norms).square().sum()
        norm = self.processes.all_reduce(square).sqrt()
        return norm.to(parameters[0].dtype if parameters else torch.float32)

    def _counts(self, parameter: Tensor) -> bool:
        """Return whether this process is the first that holds what it has of a parameter."""
        return True


def reshard_after_evaluation(model: nn.Module, inputs: Any, outputs: Any) -> None:
    """Give up what no backward will: an evaluation leaves the parameters sharded."""
    if not torch.is_grad_enabled():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for which a compiled model leaves its graph."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]
