"""Where the passes over a data set with a state begin (rule 15)."""

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class StreamStart:
    """Where a pass over a data set with a state begins, and how the data set comes back there.

    What `state_dict` says outside of a pass has no common meaning. Some data sets count by
    themselves, and a new iterator goes on where they are. With others it begins anew, and the
    state is that of the latest iterator: after a full pass it is "at the end". Some begin every
    pass where a state was loaded. So nothing is loaded between two passes, as in a loop by hand;
    where something must be, new iterators show what the data set does.

    Args:
        dataset: With `state_dict` and `load_state_dict`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._found = copy.deepcopy(dataset.state_dict())
        if id(dataset) not in _habits:
            _habits[id(dataset)] = _Habits(self._found)
            finalize(dataset, _habits.pop, id(dataset)).atexit = False
        self._habits = _habits[id(dataset)]
        self._token = self._habits.latest_pass = object()
        self._is_resumed = False
        self._others: list[Any] = []  # states to begin with where the pass turns out empty
        self._after_first: Any = None  # the state after the first sample

    def resume(self) -> None:
        """Note that the pass begins inside of another, by a state that the reader loads."""
        self._is_resumed = True

    def follow(self, state: Any) -> None:
        """Let the pass begin as it would have after one that ended in `state`.

        What is left of that one is read first: nothing, or what is the next pass.
        """
        self._load(state)
        self._others = [None, self._habits.first]

    def is_elsewhere(self, *, is_empty: bool) -> bool:
        """Return whether a new iterator must be made, as the first sample is of another place.

        Args:
            is_empty: The pass has no first sample.
        """
        if self._after_first is not None:  # seen before
            return False
        if is_empty:
            if not self._others:
                return False
            self._load(self._others.pop(0))
            return True
        state = copy.deepcopy(self._dataset.state_dict())
        resumed, self._habits.after_resume = self._habits.after_resume, None
        if resumed is not None and not self._is_resumed and is_same(state, resumed):
            self._load(self._habits.first)
            return True
        self._after_first = state
        return False

    def leave(self, peek: Callable[[], Any], *, is_over: bool) -> None:
        """Note that the pass is left; unless `is_over`, the data set comes back to its beginning.

        Where another pass has begun to read the same object, nothing is done.

        Args:
            peek: Reads the first sample of a new iterator, and returns the state then; None where
                it has none.
        """
        habits, start = self._habits, self._found
        if habits.latest_pass is not self._token:
            return
        if self._is_resumed:
            habits.after_resume = self._after_first
        elif habits.next_pass == "anew" or is_same(self._dataset.state_dict(), start):
            return
        if is_over:
            return
        if habits.next_pass != "goes on":
            first = peek()
            if first is not None and is_same(first, peek()):  # both begin at one place
                if not self._is_resumed or not is_same(first, self._after_first):
                    habits.next_pass = "anew"
                    return
                start = habits.first
        self._load(start)
        if habits.next_pass != "goes on":
            first = peek()
            if first is None or not (self._is_resumed or is_same(first, self._after_first)):
                if habits.next_pass != "lost":
                    logger.warning(
                        "A pass over `%s` was left, and given the state that it had before, the "
                        "data set does not begin where the pass began: its next one may be "
                        "another.",
                        type(self._dataset).__name__,
                    )
                habits.next_pass = "lost"
                return
            self._load(start)
            habits.next_pass = "" if self._is_resumed else "goes on"

    def _load(self, state: Any) -> None:
        if state is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))


@dataclass(slots=True)
class _Habits:
    """What passes have shown of a data set.

    Args:
        first: Its state before the first of them.
        latest_pass: Stands for the latest of them.
        next_pass: Where a new iterator begins after one that was left, as far as that is known.
        after_resume: The state after the first sample of the latest, if it began inside another.
    """

    first: Any
    latest_pass: object = None
    next_pass: Literal["", "anew", "goes on", "lost"] = ""
    after_resume: Any = None


_habits: dict[int, _Habits] = {}  # by the identity of data sets, which need not be hashable


def begins_anew(dataset: Any) -> bool:
    """Return whether a state that is taken between two passes says nothing of the next."""
    habits = _habits.get(id(dataset))
    return is_huggingface(dataset) or (habits is not None and habits.next_pass in ("anew", "lost"))


def forget_loaded(dataset: Any) -> None:
    """Let what was loaded count for one iterator only, in data sets of Hugging Face.

    They would begin each later pass there, if its epoch has the same number.
    """
    for part in (dataset, *getattr(dataset, "__dict__", {}).values()):
        if is_huggingface(part):
            part.load_state_dict(None)


def is_stateful(obj: Any) -> bool:
    """Return whether `obj` has `state_dict` and `load_state_dict`, and says in them all it needs.

    The shuffle buffers of `datasets` are left out of their states: their samples would be lost.
    """
    part = getattr(obj, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return False
        part = getattr(part, "ex_iterable", None)
    return _takes(obj, "state_dict") and _takes(obj, "load_state_dict", {})


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states are equal; not where that cannot be told."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(is_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(is_same, one, other))
    try:
        return bool(one == other)
    except Exception:  # such as of arrays
        return False


def _takes(obj: Any, name: str, *values: Any) -> bool:
    # Those of mosaicml-streaming want to be told how much was read.
    method = getattr(obj, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*values)
    except TypeError:
        return False
    except ValueError:  # one written in C tells nothing
        return True
    return True


def is_huggingface(obj: Any) -> bool:
    """Return whether `obj` is an iterable data set of `datasets`."""
    return hasattr(obj, "_ex_iterable") and callable(getattr(obj, "load_state_dict", None))
