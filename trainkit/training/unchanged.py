"""Put back what a pass that counts for nothing leaves in modules and other objects."""

from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics.outside import Outside, outside_of
from trainkit.basics.torch_internals import buffers_of
from trainkit.training.resume.owners import has_state, is_owner

_LARGEST = 1 << 20  # bytes of a tensor around functions: what is larger is data
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

    That is what their attributes are, what their functions read from outside, objects of a user's
    classes in there, and what is in those which are tensors, lists, sets or dicts; and buffers.
    Parameters and deeper contents are left alone.
    """
    owners = _owners(roots)
    spaces = [_space(owner) for owner in owners]
    values = [v for space in spaces for name, v in space.items() if name not in _HOOKS]
    names = [(space, dict(space)) for space in spaces]
    # A registry of the user's may give by `[]` something else than it holds.
    names += [(each, dict(dict.items(each))) for each in values if isinstance(each, dict)]
    lists = [(each, list(each)) for each in values if isinstance(each, list | deque)]
    sets = [(each, set(each)) for each in values if isinstance(each, set)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    large = [v for each in owners if isinstance(each, Outside) for v in each.values()]
    large = [v for v in large if isinstance(v, Tensor)]
    data = {id(v) for v in large if isinstance(v, nn.Parameter) or v.nbytes > _LARGEST}
    tensors = [v for v in values if isinstance(v, Tensor) and id(v) not in data]
    with kept_buffers(modules), _kept_tensors(tensors):
        try:
            yield
        finally:
            for now, before in names:
                _restore(now, before)
            for items, entries in lists:
                items.clear()
                items.extend(entries)
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


def _restore(now: MutableMapping[Any, Any], before: dict[Any, Any]) -> None:
    """Let a dict hold what it held before; one that does is not touched, as compilers watch it."""
    for name in now.keys() - before.keys():
        del now[name]
    held = dict(dict.items(now)) if isinstance(now, dict) else now
    for name, value in before.items():
        if held.get(name, _MISSING) is not value:
            now[name] = value


def _owners(roots: Iterable[object]) -> list[Any]:
    """Return the objects that have attributes, and what is in these, each once."""
    owners: dict[int, Any] = {}
    modules = (m for root in roots if isinstance(root, nn.Module) for m in root.modules())
    waiting = [*roots, outside_of([*roots, *modules])]
    while waiting:
        owner = waiting.pop()
        if id(owner) in owners or not hasattr(owner, "__dict__"):
            continue
        owners[id(owner)] = owner
        for value in [*_space(owner).values()]:
            members = value.values() if isinstance(value, dict) else value
            inside = members if isinstance(value, dict | list | tuple) else (value,)
            waiting += [each for each in inside if isinstance(each, nn.Module) or _is_object(each)]
    return list(owners.values())


def _space(owner: Any) -> MutableMapping[Any, Any]:
    return owner if isinstance(owner, Outside) else vars(owner)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of a user's class."""
    return is_owner(value) and not has_state(value)
