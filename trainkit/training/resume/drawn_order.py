"""What samplers and data sets were when the order of an epoch was drawn of them (rule 22)."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from trainkit.basics.outside import is_users
from trainkit.training.resume.owners import attributes_in
from trainkit.training.resume.values import SCALARS, Mark, is_array, mark_of

_MOST = 100_000  # entries of a list or dict of a sampler


class DrawnOrder:
    """Keeps what a sampler that training changes was when it was run, so that it can be run again.

    Args:
        samplers: Those of the loaders, by name.
        say: Prints a line, once for all processes.
    """

    def __init__(self, samplers: Mapping[str, Any], say: Callable[[str], None]) -> None:
        # Of others the order follows from the epoch.
        self._samplers = {
            name: one
            for name, one in samplers.items()
            if is_users(type(one)) or isinstance(getattr(one, "weights", None), Tensor)
        }
        self.is_needed = bool(self._samplers)  # whether training may change any of them
        self._say = say
        self._told = set[str]()
        self._marks: dict[str, Mapping[str, Mark]] = {}
        self._entries: dict[str, Any] = {}

    def note(self, owners: Iterable[tuple[str, Mapping[str, Mark], dict[str, Any]]]) -> None:
        """Note marks and saved values of samplers and data sets before an order is drawn."""
        noted = [*owners]
        self._marks = {name: marks for name, marks, _ in noted}
        self._entries = copy.deepcopy({name: entries for name, _, entries in noted})

    def saved(self, name: str, marks: Mapping[str, Mark]) -> dict[str, Any]:
        """Return what was noted of an owner, if that is another by now."""
        return self._entries[name] if marks != self._marks.get(name, marks) else {}

    def tell_changed(self) -> None:
        """Say once that weights of a user's sampler changed after an order was drawn of them."""
        for name, marks in self._marks.items():
            sampler = self._samplers.get(name)
            if name in self._told or not is_users(type(sampler)):
                continue
            now = {k: v for k, v in attributes_in(sampler).items() if k in marks and is_tensor(v)}
            if any(mark_of(value) != marks[key] for key, value in now.items()):
                self._told.add(name)
                self._say(
                    f"trainkit: the weights of the sampler `{type(sampler).__name__}` changed "
                    "inside of an epoch. The order of an epoch is drawn whole when it begins: what "
                    "changes counts from the next one on. Shorter epochs let it count sooner."
                )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or an array."""
    return isinstance(value, Tensor) or is_array(value)


def is_of_sampler(value: Any, is_own: bool) -> bool:
    """Return whether a checkpoint holds an attribute of a sampler, of a user's class or not."""
    is_short = type(value) in (list, tuple, dict, set) and len(value) <= _MOST
    return is_tensor(value) or (is_own and (is_short or type(value) in SCALARS))
