"""The generators that a data set holds itself run under the keys of its samples, too (rule 13).

Libraries of augmentations draw from objects of their own, such as a `numpy.random.Generator`. No
checkpoint could hold their states: workers have copies of them, which read ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from trainkit.basics import rng

_MOST_OBJECTS = 2_000  # that are looked at
_MOST_ENTRIES = 64  # a longer container holds data, not transforms
_LEAVES = (type(None), str, bytes, int, float, type, ModuleType, torch.Tensor)


class SampleStreams:
    """The generators that samples are drawn from: the global ones, and those found in objects.

    Args:
        *roots: Where to look: a data set, a collate function.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self.own: list[Any] = []  # those that were found
        self.epoch: int | None = None  # when they were looked for
        self.is_new = False  # whether nothing was read in this epoch

    def begin(self, epoch: int) -> None:
        """Look for generators, as another epoch has begun."""
        self.epoch, self.is_new = epoch, True
        self.own = [*generators_in(*self._roots)]

    def finds_more(self) -> bool:
        """Return whether the first sample has made a generator: it is then to be read again."""
        before, self.own, self.is_new = self.own, [*generators_in(*self._roots)], False
        return len(self.own) > len(before)

    def seed(self, key: int) -> None:
        """Seed all of them by one key; what the user has seeded them with does not count."""
        rng.seed_host(key)
        for index, generator in enumerate(self.own):
            rng.seed_generator(generator, rng.in_stream(key, index))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put those that were found back at the end."""
        own = [(generator, rng.state_of(generator)) for generator in self.own]
        try:
            yield
        finally:
            for generator, state in own:
                rng.set_state(generator, state)


def generators_in(*roots: Any) -> Iterator[Any]:
    """Yield the generators that objects hold or their functions read, each once."""
    waiting, seen = list(roots), set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if rng.is_generator(value):
            yield value
        else:
            waiting += _inside(value)


def _inside(found: Any) -> list[Any]:
    from trainkit.basics.outside import Outside, functions_of  # importing trainkit needs none of it

    if isinstance(found, partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, FunctionType):
        given = [*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
        return [*given, *Outside(found).values()]
    attributes = [*getattr(found, "__dict__", {}).values()]
    attributes += Outside(*functions_of(type(found))).values()
    if not isinstance(found, dict | list | tuple | set | frozenset):
        return attributes
    entries = [*islice(found.values() if isinstance(found, dict) else found, _MOST_ENTRIES + 1)]
    return attributes + entries if len(entries) <= _MOST_ENTRIES else attributes
