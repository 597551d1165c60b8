"""What `trainkit launch`, or `accelerate launch`, says to the processes by variables."""

import os
from typing import Any

from trainkit.errors import ConfigError
from trainkit.strategies import FSDP, Strategy

__all__ = ["flag", "number", "strategy_of", "text"]

_ON, _OFF = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")


def text(name: str, default: str = "") -> str:
    """Return `TRAINKIT_<name>`, else `ACCELERATE_<name>`, else the default."""
    return os.environ.get(f"TRAINKIT_{name}") or os.environ.get(f"ACCELERATE_{name}") or default


def flag(name: str) -> bool:
    """Return whether a variable is switched on; ConfigError if it says neither on nor off."""
    value = text(name)
    if value.lower() not in _ON + _OFF:
        raise ConfigError(
            f"The environment variable `TRAINKIT_{name}` must be true or false, not {value!r}."
        )
    return value.lower() in _ON


def number(name: str, default: int) -> int:
    """Return the whole number in a variable; ConfigError if there is something else."""
    value = text(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"The environment variable `TRAINKIT_{name}` must be a whole number, not {value!r}."
        ) from None


def strategy_of(device: Any) -> Strategy | None:
    """Return the strategy that the launcher asks for; None where it leaves that open."""
    if text("STRATEGY") != "fsdp" and not flag("USE_FSDP"):
        return None
    keeps = text("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in _OFF
    classes = set(filter(None, text("FSDP_WRAP_CLASSES").split(",")))
    return FSDP(
        wrap_policy=(lambda name, module: type(module).__name__ in classes) if classes else None,
        reshard_after_forward=not keeps,
        cpu_offload=flag("FSDP_CPU_OFFLOAD"),
        activation_checkpointing=flag("FSDP_ACTIVATION_CHECKPOINTING"),
        device=device,
    )
