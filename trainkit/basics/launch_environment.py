"""What a launcher says to the processes that it starts, by environment variables.

`trainkit launch` sets `TRAINKIT_<NAME>`; without it, or where it is empty, `ACCELERATE_<NAME>` is
read.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.basics.parsing import boolean, one_of
from trainkit.errors import ConfigError

T = TypeVar("T")

MIXED_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""The precisions that a launcher and `Accelerator` know, with their names in `Trainer`."""

_SHARDING = ("reshard_after_forward", "cpu_offload", "activation_checkpointing")


def read(name: str, reader: Callable[[object], T], default: T) -> T:
    """Return what a launcher says under a name; the default where it says nothing.

    Args:
        name: Of the variable, behind the prefix.
        reader: Of `trainkit.basics.parsing`.
        default: What holds without the variable.

    Raises:
        ConfigError: The value cannot be; names the variable.
    """
    for variable in (f"TRAINKIT_{name}", f"ACCELERATE_{name}"):
        value = os.environ.get(variable)
        if not value:
            continue
        try:
            return reader(value)
        except ValueError as error:
            raise ConfigError(
                f"The environment variable `{variable}` must be {error}, but is {value!r}."
            ) from None
    return default


def mixed_precision() -> str:
    """Return "no", "fp16" or "bf16"."""
    return read("MIXED_PRECISION", one_of(*MIXED_PRECISIONS), "no")


def uses_cpu() -> bool:
    """Return whether the CPU is to be used also where there is a GPU."""
    return read("USE_CPU", boolean, False)


def sharding() -> dict[str, Any] | None:
    """Return the arguments of `FSDP` that a launcher asks for; None where it asks for no FSDP."""
    if not read("STRATEGY", one_of("fsdp"), "") and not read("USE_FSDP", boolean, False):
        return None
    said = {name: read(f"FSDP_{name.upper()}", boolean, None) for name in _SHARDING}
    arguments: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    classes = set(filter(None, read("FSDP_WRAP_CLASSES", str, "").split(",")))
    if classes:
        arguments["wrap_policy"] = lambda name, module: type(module).__name__ in classes
    return arguments
