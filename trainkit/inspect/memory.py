"""How much memory a training needs before its first step, from shapes alone."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.formatting import readable_size
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

    def rows(self) -> list[tuple[str, str]]:
        """Return what each part is called, and its size in words."""
        sizes = {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            **({"blocks at work, whole": self.at_work} if self.at_work else {}),
            "in all": self.total,
        }
        return [
            (what, f"{readable_size(size):>10}{size:>20,} bytes") for what, size in sizes.items()
        ]


def memory_of(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    shards: int = 1,
    computes_in: torch.dtype | None = None,
    wrap_policy: Any = None,
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
        at_work=0 if shards == 1 else _largest(model, computes_in, wrap_policy),
    )


def like(optimizer: Optimizer, model: nn.Module) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return what makes an optimizer as the one that trains `model`, which stays as it is."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        trained = (p for p in model.parameters() if p.requires_grad)
        taken = dict(zip(trained, parameters, strict=True))
        made = copy.copy(optimizer)
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": [taken[p] for p in group["params"] if p in taken]}
            for group in optimizer.param_groups
        ]
        return made

    return make


def _part(parameter: Tensor, shards: int) -> Tensor:
    """Return the rows of process 0, which has as many as any other, without values."""
    whole = torch.empty_like(parameter, device="meta", requires_grad=False)
    return whole if shards == 1 or not whole.dim() else whole.chunk(shards)[0].clone()


def _largest(model: nn.Module, dtype: torch.dtype | None, policy: Any) -> int:
    blocks = find_blocks(model, policy).values()
    inside = {p for block in blocks for p in block.parameters()}
    groups = [list(block.parameters()) for block in blocks]
    outside = [p for p in model.parameters() if p not in inside]
    return _size(outside, dtype) + max((_size(group, dtype) for group in groups), default=0)


def _size(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    return sum(t.numel() * (t.dtype if dtype is None else dtype).itemsize for t in tensors)
