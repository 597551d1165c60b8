"""Find a batch size that fits, and give memory back."""

import functools
import gc
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from trainkit.basics.device import accelerator_kind
from trainkit.errors import ConfigError, text_of

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
)
_FACTOR = 0.9
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Run a function again with smaller batches until it fits into the memory.

    The function's first parameter gets the size; the caller leaves it out. A later call begins
    with the size that was found. On several processes all must run out of memory together, as
    each decides for itself.

    Args:
        function: What to run; None where this is used as `@find_executable_batch_size(...)`.
        starting_batch_size: The first size.
        reduce_batch_size_fn: Returns the next size; by default nine tenths of the last one.

    Raises:
        ConfigError: There is no such parameter, or it was passed.
        RuntimeError: Not even a batch of one fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    name, (first, most) = function.__name__, _places(function)
    size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        if len(args) >= most or first in kwargs:
            raise ConfigError(
                f"`{name}` gets its `{first}` from `find_executable_batch_size`. Call it without."
            )
        while size > 0:
            _empty()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            smaller = (
                int(size * _FACTOR) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            )
            size = min(smaller, size - 1)
        raise RuntimeError(f"`{name}` does not fit into the memory, not even with a batch of one.")

    return run


def _places(function: Callable[..., Any]) -> tuple[str, float]:
    """Return the name of the first parameter, and how many arguments fit in by place."""
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    most = sum(kind in _BY_PLACE for kind in kinds)
    takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
    if not most and not takes_all:
        raise ConfigError(
            f"`{function.__name__}` has no first parameter that could take the batch size. Give "
            "it one."
        )
    return next(iter(parameters)), math.inf if takes_all else most


def release_memory(*objects: Any) -> list[None]:
    """Return as many None as there are objects, after giving free memory back.

    Use it as `a, b = release_memory(a, b)`, so that no name refers to them any more.
    """
    _empty()
    return [None] * len(objects)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the memory of a device or of the host is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in text_of(error) for word in _WORDS)


def _empty() -> None:
    gc.collect()
    if accelerator_kind() is not None:
        torch.get_device_module().empty_cache()  # nothing where it is not in use
