"""Work for the disk in threads, which a save that outlives the main thread can still ask for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

__all__ = ["begin"]

P = ParamSpec("P")


def begin(
    pool: ThreadPoolExecutor, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> Callable[[], None]:
    """Begin `action` in a thread; return what waits for its end, and raises what it raises.

    Executors take nothing any more while Python shuts down: then it is done here and now.
    """
    try:
        return pool.submit(action, *args, **kwargs).result
    except RuntimeError:
        action(*args, **kwargs)
        return _nothing


def _nothing() -> None:
    """Wait for what is done."""
