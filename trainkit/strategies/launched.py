"""Sharding that `trainkit launch` asks for, by environment variables."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainkit.errors import ConfigError
from trainkit.strategies.fsdp import FSDP
from trainkit.strategies.strategy import Strategy

__all__ = ["launched_strategy"]

_SWITCHES = ("reshard_after_forward", "cpu_offload", "activation_checkpointing")


def launched_strategy(env: Mapping[str, str] = os.environ) -> Strategy:
    """Return the strategy that `TRAINKIT_STRATEGY` names, which is `fsdp`.

    `TRAINKIT_FSDP_RESHARD_AFTER_FORWARD`, `_CPU_OFFLOAD` and
    `_ACTIVATION_CHECKPOINTING` are `true` or `false`; `TRAINKIT_FSDP_WRAP_CLASSES` has the names
    of classes with commas between them.
    """
    name = env.get("TRAINKIT_STRATEGY", "")
    if name != "fsdp":
        raise ConfigError(f"`TRAINKIT_STRATEGY` must be fsdp, or not set, but is {name!r}.")
    return FSDP(**_fsdp_arguments(env))


def _fsdp_arguments(env: Mapping[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for switch in _SWITCHES:
        variable = f"TRAINKIT_FSDP_{switch.upper()}"
        if variable in env:
            if env[variable] not in ("true", "false"):
                raise ConfigError(f"`{variable}` must be true or false, but is {env[variable]!r}.")
            arguments[switch] = env[variable] == "true"
    names = env.get("TRAINKIT_FSDP_WRAP_CLASSES")
    if names:
        classes = set(names.split(","))

        def is_named(name: str, module: nn.Module) -> bool:
            return type(module).__name__ in classes

        arguments["wrap_policy"] = is_named
    return arguments
