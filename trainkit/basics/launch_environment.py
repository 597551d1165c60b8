"""What a launcher says to the processes that it starts, by environment variables.

`trainkit launch` sets `TRAINKIT_<NAME>`; without it, or where it is empty, `ACCELERATE_<NAME>` is
read. How a model is sharded is said by Accelerate's `FSDP_<NAME>` and `PARALLELISM_CONFIG_<NAME>`.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.basics.parsing import boolean, one_of
from trainkit.errors import ConfigError

T = TypeVar("T")

MIXED_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
"""The precisions that a launcher and `Accelerator` know, with their names in `Trainer`."""

SHARDING_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "NO_SHARD": {"replicas": "processes"},
    "HYBRID_SHARD": {"replicas": "machines"},
    "HYBRID_SHARD_ZERO2": {"reshard_after_forward": False, "replicas": "machines"},
}
"""The strategies of FSDP's first version in its order, with what `FSDP` calls each."""
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def read(name: str, reader: Callable[[object], T], default: T) -> T:
    """Return what a launcher says under a name; the default where it says nothing.

    Args:
        name: Of the variable, behind the prefix; `FSDP_...` and `PARALLELISM_...` have none.
    """
    of_sharding = name.startswith(("FSDP_", "PARALLELISM_"))
    for variable in (name,) if of_sharding else (f"TRAINKIT_{name}", f"ACCELERATE_{name}"):
        if not (value := os.environ.get(variable)):
            continue
        try:
            return reader(value)
        except ValueError as error:
            raise ConfigError(
                f"The environment variable `{variable}` must be {error}, but is {value!r}."
            ) from None
    return default


def mixed_precision() -> str:
    """Return "no", "fp16", "bf16" or "fp8"."""
    return read("MIXED_PRECISION", one_of(*MIXED_PRECISIONS), "no")


def uses_cpu() -> bool:
    """Return whether the CPU is to be used also where there is a GPU."""
    return read("USE_CPU", boolean, False)


def sharding(*, asked: bool = False) -> dict[str, Any] | None:
    """Return the arguments of `FSDP` that a launcher says; None where nobody has `asked` for it."""
    if not (asked or read("STRATEGY", one_of("fsdp"), "") or read("USE_FSDP", boolean, False)):
        return None
    wrapping = read("FSDP_AUTO_WRAP_POLICY", one_of(*WRAPPING), "")
    offloads = read("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", boolean, False)
    checkpointing = read("FSDP_ACTIVATION_CHECKPOINTING", boolean, False)
    reshards = read("FSDP_RESHARD_AFTER_FORWARD", sharding_strategy, "FULL_SHARD")
    strategy = read("FSDP_SHARDING_STRATEGY", sharding_strategy, "FULL_SHARD")
    arguments: dict[str, Any] = {
        **SHARDING_STRATEGIES[strategy],
        **SHARDING_STRATEGIES[reshards],
        "cpu_offload": read("FSDP_OFFLOAD_PARAMS", boolean, False),
        "activation_checkpointing": checkpointing and ("offload" if offloads else True),
    }
    if read("USE_PARALLELISM_CONFIG", boolean, False):
        arguments["replicas"] = read(
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", lambda v: int(str(v)), 1
        )
    if wrapping == "SIZE_BASED_WRAP":
        size = read("FSDP_MIN_NUM_PARAMS", lambda value: int(str(value)), 0)
        return arguments | {"wrap_policy": size or None}
    if classes := set(filter(None, read("FSDP_TRANSFORMER_CLS_TO_WRAP", str, "").split(","))):
        arguments["wrap_policy"] = lambda name, module: type(module).__name__ in classes
    return arguments


def sharding_strategy(value: object) -> str:
    """Read a key of `SHARDING_STRATEGIES`, its number, or whether blocks are given up."""
    word, names = str(value).strip().upper().removeprefix("_"), [*SHARDING_STRATEGIES]
    if word in names:
        return word
    try:
        return names[int(word) - 1 if word in [*"2345"] else not boolean(word)]
    except ValueError:
        raise ValueError(f"true or false ({', '.join(names)})") from None
