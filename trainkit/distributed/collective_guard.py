"""Refuse collectives in code that trainkit runs on some processes only (rule 34).

Such a collective would wait for processes that never come. The place is marked by `only`, and
every collective of `Processes` asks `check` first. It also raises on one process, where it could
do no harm: the mistake is found before the job is scaled up.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from trainkit.errors import DistributedError


class _Inside(threading.local):
    name: str | None = None


_inside = _Inside()


@contextmanager
def only(place: str | None) -> Iterator[None]:
    """Mark the code inside as run by some processes only; `place` names it in the error."""
    outer, _inside.name = _inside.name, place
    try:
        yield
    finally:
        _inside.name = outer


def everywhere() -> AbstractContextManager[None]:
    """Allow collectives inside `only`, for code that brings processes of its own."""
    return only(None)


def place() -> str | None:
    """Return the place that this thread is in; None outside of all."""
    return _inside.name


def check(collective: str) -> None:
    """Raise DistributedError if this thread is inside `only`; `collective` is what it wanted."""
    if _inside.name is not None:
        raise DistributedError(
            f"`{collective}` was called inside `{_inside.name}`, which not all processes run at "
            "this moment, but every process must call it. Call it outside, on all processes, "
            "and use its result inside."
        )
