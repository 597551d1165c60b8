"""What goes through the modules of a model in one micro-batch, forward and back; for a replay."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.basics.device import wide_dtype
from trainkit.basics.torch_internals import stored_values
from trainkit.containers.tree import children, is_container
from trainkit.types import class_name

_NUMBERS = ("non_finite", "mean", "std", "min", "max", "bits")
"""What is kept of a tensor; `bits` is a sum over its bits, another one where a bit differs."""

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**24  # every float holds the whole numbers below it


@dataclass(slots=True)
class Event:
    """A tensor that was seen."""

    what: str  # batch, input, output, loss; or the gradient of an input, output or parameter
    module: str  # whose it is
    numbers: Tensor
    rows: Tensor | None = None  # which of its rows are not finite
    inside: str | None = None  # the module that called it; None: the training step
    depth: int = 0  # calls around it
    edge: tuple[Any, int] = (None, 0)  # of the tensor in the graph

    @property
    def key(self) -> tuple[str, str]:
        """What it is called in other micro-batches."""
        return self.what, self.module


@dataclass(slots=True)
class Observer:
    """Sees the inputs and outputs of every module, and their gradients.

    Nothing is read from the device before somebody asks, and nothing is changed.
    """

    module: nn.Module
    events: list[Event] = field(default_factory=list)
    gradients: list[Event] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)  # modules, the outermost first
    _handles: list[RemovableHandle] = field(default_factory=list)
    sees: bool = False  # not in a backward, where a forward may be repeated
    is_forward_done: bool = False

    def begin(self, batch: Any) -> None:
        """See a micro-batch, from now on."""
        self.sees = True
        for tensor in tensors_in(batch):
            self._see("batch", "", tensor)
        for name, module in self.module.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, name)),
            ]

    def end_forward(self, loss: Tensor) -> None:
        """See the loss; a backward comes next."""
        self._see("loss", "", loss)
        self.sees, self.is_forward_done = False, True

    def end(self) -> None:
        """See nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.sees = [], False

    def first_bad(self, events: list[Event], usual: set[tuple[str, str]]) -> Event | None:
        """Return the first event that is not finite and not of those in `usual`."""
        return next((event for event in bad(events) if event.key not in usual), None)

    def consumer(self, event: Event) -> str:
        """Return whose backward made a gradient that is not finite; "training_step" for none's.

        It is the innermost module that took the tensor, else what is around those that gave it.
        """
        if event.what == "parameter":
            return event.module
        same = [each for each in self.gradients if _same(each, event)]
        if takers := [each for each in same if each.what == "input"]:
            return max(takers, key=lambda each: each.depth).module
        outer = min(same, key=lambda each: each.depth)
        if outer.inside is not None:
            return outer.inside
        # What the model returns: it may be the model that makes the loss of it.
        losses = [each for each in self.events if each.what == "loss"]
        returned = [each for each in self.events if each.what == "output" and each.inside is None]
        own = any(_same(one, other) for one in losses for other in returned)
        return outer.module if own else "training_step"

    def table(self) -> list[dict[str, Any]]:
        """Return what was seen of each output and its gradient, in the order of the forward."""
        outputs = [event for event in self.events if event.what in ("output", "loss")]
        numbers = named_numbers([event.numbers for event in (*outputs, *self.gradients)])
        back = {id(e): n for e, n in zip(self.gradients, numbers[len(outputs) :], strict=True)}
        names = dict(self.module.named_modules())
        table = []
        for event, values in zip(outputs, numbers, strict=False):
            entry: dict[str, Any] = {"module": event.module, "what": event.what, "output": values}
            if event.what == "output":
                entry["class"] = class_name(names[event.module])
            same = [e for e in self.gradients if e.what == "output" and _same(e, event)]
            table.append(entry | ({"gradient": back[id(same[0])]} if same else {}))
        return table

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.sees:
            return
        for tensor in tensors_in((args, kwargs)):
            self._see("input", name, tensor)
        self.under_way.append(name)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:  # before other processes add their part
                self._follow(Event("parameter", name, parameter), parameter)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.sees:
            self.under_way.pop()
            for tensor in tensors_in(output):
                self._see("output", name, tensor)

    def _see(self, what: str, name: str, tensor: Tensor) -> None:
        node, depth = tensor.grad_fn, len(self.under_way)
        inside = self.under_way[-1] if depth else None
        finite = torch.isfinite(tensor.detach())
        rows = ~finite.flatten(1).all(1) if finite.ndim > 1 else ~finite if finite.ndim else None
        edge = (tensor if node is None else node, tensor.output_nr)
        event = Event(what, name, numbers_of(tensor), rows, inside, depth, edge)
        self.events.append(event)
        if tensor.requires_grad and what in ("input", "output"):
            self._follow(event, tensor)

    def _follow(self, event: Event, tensor: Tensor) -> None:
        """Note the gradient of what was seen."""

        def note(gradient: Tensor) -> None:
            self.gradients.append(replace(event, numbers=numbers_of(gradient)))

        self._handles.append(tensor.register_hook(note))  # type: ignore[no-untyped-call]


def _same(one: Event, other: Event) -> bool:
    """Return whether two events are of one tensor."""
    return one.edge[0] is other.edge[0] and one.edge[1] == other.edge[1]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in any nesting."""
    if isinstance(tree, Tensor):
        if (tree.is_floating_point() or tree.is_complex()) and tree.numel():
            yield torch.view_as_real(tree) if tree.is_complex() else tree
    elif is_container(tree):
        for child in children(tree):
            yield from tensors_in(child)


def numbers_of(tensor: Tensor) -> Tensor:
    """Return what is kept of a tensor, see `_NUMBERS`, on its device."""
    values = stored_values(tensor.detach())
    wide = values.to(wide_dtype(values.device.type))
    bits = values.contiguous().view(_WHOLE[values.element_size()]).to(torch.int64).sum() % _MODULUS
    if not values.numel():
        return wide.new_zeros(len(_NUMBERS))
    return torch.stack(
        [
            (~torch.isfinite(wide)).sum().to(wide),
            wide.mean(),
            wide.std(unbiased=False),
            wide.min(),
            wide.max(),
            bits.to(wide),
        ]
    )


def bad(events: list[Event]) -> Iterator[Event]:
    """Yield the events that are not finite; reads the device once."""
    for event, values in zip(events, named_numbers([e.numbers for e in events]), strict=True):
        if values["non_finite"]:
            yield event


def named_numbers(numbers: list[Tensor]) -> list[dict[str, float]]:
    """Return what `numbers_of` gave, by name; reads the device once."""
    if not numbers:
        return []
    rows = torch.stack([each.to(numbers[0]) for each in numbers]).tolist()
    return [dict(zip(_NUMBERS, row, strict=True)) for row in rows]
