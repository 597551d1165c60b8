"""How much memory a training needs before its first step, from shapes alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.strategies.blocks import find_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the process that holds the most, process 0; activations are not among them."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    at_work: int
    """Of FSDP: the largest block while it is whole, in the dtype that it computes in."""

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.at_work


def memory_of(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    shards: int = 1,
    computes_in: torch.dtype | None = None,
) -> Memory:
    """Return what process 0 holds after a step.

    Args:
        model: On any device; nothing of it changes, and on `meta` it needs no memory.
        make_optimizer: Makes one of parameters. It makes one step on the device `meta`, so that
            what it keeps is counted, not guessed.
        shards: Processes that share a model (FSDP); 1: each holds all of it.
        computes_in: In which FSDP computes; None: the dtype of the parameters.
    """
    held = {p: _part(p, shards) for p in model.parameters()}
    trained = [nn.Parameter(part) for p, part in held.items() if p.requires_grad]
    for part in trained:
        part.grad = torch.empty_like(part)
    optimizer = make_optimizer(trained)
    optimizer.step()
    states = (v for state in optimizer.state.values() for v in state.values())
    return Memory(
        parameters=_size(held.values()),
        buffers=_size(model.buffers()),
        gradients=_size(trained),
        optimizer=_size(value for value in states if isinstance(value, Tensor)),
        at_work=0 if shards == 1 else _largest(model, computes_in),
    )


def _part(parameter: Tensor, shards: int) -> Tensor:
    """Return the rows of process 0, which has as many as any other, without values."""
    whole = torch.empty_like(parameter, device="meta", requires_grad=False)
    return whole if shards == 1 or not whole.dim() else whole.chunk(shards)[0].clone()


def _largest(model: nn.Module, dtype: torch.dtype | None) -> int:
    blocks = find_blocks(model).values()
    inside = {p for block in blocks for p in block.parameters()}
    groups = [list(block.parameters()) for block in blocks]
    outside = [p for p in model.parameters() if p not in inside]
    return _size(outside, dtype) + max((_size(group, dtype) for group in groups), default=0)


def _size(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    return sum(t.numel() * (t.dtype if dtype is None else dtype).itemsize for t in tensors)
