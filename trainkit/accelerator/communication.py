"""Communication hooks of DDP: what it sends in the place of the gradients."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from trainkit.errors import ConfigError


class DDPCommunicationHookType(StrEnum):
    """What DDP sends in the place of the gradients: torch's own communication hooks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def checked_hooks(
    hook: str, wrapper: str, options: Mapping[str, Any]
) -> tuple[DDPCommunicationHookType, DDPCommunicationHookType]:
    """Return the hook and what wraps it."""
    kinds = DDPCommunicationHookType
    known = {"comm_hook": (hook, [*kinds]), "comm_wrapper": (wrapper, [*kinds][:3])}
    for name, (value, allowed) in known.items():
        if value not in allowed:
            raise ConfigError(f"`{name}` must be one of {', '.join(allowed)}, but is {value!r}.")
    if wrapper != kinds.NO and hook == kinds.NO:
        raise ConfigError(
            f"`comm_wrapper={str(wrapper)!r}` wraps a communication hook, but there is none. Pass "
            "it as `comm_hook`."
        )
    if options and not hook.endswith("power_sgd"):
        raise ConfigError(
            f"`comm_state_option` is for PowerSGD, but `comm_hook` is {str(hook)!r}. Leave it out."
        )
    return kinds(hook), kinds(wrapper)


def register(
    model: DistributedDataParallel, hook: str, wrapper: str, options: Mapping[str, Any]
) -> None:
    """Let a model send what torch's hook makes of its gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    known: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    called = known[hook] if wrapper not in wrappers else wrappers[wrapper](known[hook])
    state = powerSGD_hook.PowerSGDState(None, **options) if hook.endswith("power_sgd") else None
    model.register_comm_hook(state, called)
