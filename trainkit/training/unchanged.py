"""Put back what a pass that counts for nothing leaves in modules and other objects."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics.torch_internals import buffers_of

_MISSING = object()
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}  # one may remove itself


@contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the buffers of modules back: which ones they have, and what is in them."""
    own = [buffers_of(module) for module in modules]
    names = [(now, dict(now)) for now in own if now]
    with _kept_tensors(t for _, before in names for t in before.values() if t is not None):
        try:
            yield
        finally:
            for now, before in names:
                _restore(now, before)


@contextmanager
def kept(*roots: object) -> Iterator[None]:
    """Put objects, and the modules that they hold, back into the state that they have now.

    That is what their attributes are, and what is in those which are tensors, lists, sets or
    dicts; and buffers. Parameters and deeper contents are left alone.
    """
    owners = _owners(roots)
    values = [v for owner in owners for name, v in vars(owner).items() if name not in _HOOKS]
    names = [(each, dict(each)) for each in values if isinstance(each, dict)]
    lists = [(each, list(each)) for each in values if isinstance(each, list)]
    sets = [(each, set(each)) for each in values if isinstance(each, set)]
    names += [(vars(owner), dict(vars(owner))) for owner in owners]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    with kept_buffers(modules), _kept_tensors(v for v in values if isinstance(v, Tensor)):
        try:
            yield
        finally:
            for now, before in names:
                _restore(now, before)
            for items, entries in lists:
                items[:] = entries
            for members, entries_of_set in sets:
                members.clear()
                members.update(entries_of_set)


@contextmanager
def _kept_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.clone()) for tensor in tensors if _is_writable(tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if tensor.shape != value.shape:  # an observer gets its size with the first batch
                    tensor.resize_(value.shape)
                tensor.copy_(value)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether a tensor can be written in place; not where it was expanded."""
    return tensor.layout is not torch.strided or all(
        step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _restore(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Let a dict hold what it held before; one that does is not touched, as compilers watch it."""
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            now[name] = value


def _owners(roots: Iterable[object]) -> list[Any]:
    """Return the objects that have attributes, and the modules in these, each once."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        owner = waiting.pop()
        if id(owner) in found or not hasattr(owner, "__dict__"):
            continue
        found[id(owner)] = owner
        for value in vars(owner).values():
            members = value.values() if isinstance(value, dict) else value
            inside = members if isinstance(value, dict | list | tuple) else (value,)
            waiting += [member for member in inside if isinstance(member, nn.Module)]
    return list(found.values())
