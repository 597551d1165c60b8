"""Keys of `accelerate config` for what trainkit does not drive, and for sharding.

A key that is off, or empty, says nothing and is accepted: `accelerate config` writes many such.
"""

import difflib
from collections.abc import Callable
from typing import Any

from trainkit.cli import values
from trainkit.errors import ConfigError

__all__ = ["KEYS", "check", "check_distributed_type", "sharding"]

_OFF: tuple[Any, ...] = (None, False, "", 0)
_OFF_WORDS = ("no", "false", "none", "off")

KEYS: dict[str, str] = {
    "aws_access_key_id": "SageMaker",
    "aws_secret_access_key": "SageMaker",
    "command_file": "TPU pods",
    "commands": "TPU pods",
    "compute_environment": "SageMaker",
    "deepspeed_config": "DeepSpeed",
    "downcast_bf16": "TPUs",
    "dynamo_backend": "torch.compile by the launcher; use `Trainer(compile=True)`",
    "dynamo_config": "torch.compile by the launcher; use `Trainer(compile=True)`",
    "enable_cpu_affinity": "binding of processes to cores; use `numactl`",
    "fp8_config": "fp8",
    "ipex_config": "Intel's extension of torch",
    "main_training_function": "a function to start: the whole script is run",
    "megatron_lm_config": "Megatron-LM",
    "mpirun_config": "mpirun; it starts by torch.distributed.run",
    "parallelism_config": "tensor, context and sequence parallelism",
    "same_network": "",  # either way the address of machine 0 is used
    "tpu_env": "TPUs",
    "tpu_name": "TPUs",
    "tpu_use_cluster": "TPUs",
    "tpu_use_sudo": "TPUs",
    "tpu_vm": "TPUs",
    "tpu_zone": "TPUs",
    "use_xpu": "Intel GPUs",
}
"""Known keys with what they would switch on."""

_HARMLESS = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}

_TYPES = {
    "DEEPSPEED": "DeepSpeed; use FSDP",
    "MEGATRON_LM": "Megatron-LM",
    "MULTI_HPU": "Gaudi",
    "MULTI_MLU": "Cambricon",
    "MULTI_MUSA": "Moore Threads",
    "MULTI_NEURON": "Trainium",
    "MULTI_NPU": "Ascend",
    "MULTI_SDAA": "SDAA",
    "MULTI_XPU": "Intel GPUs",
    "TP": "tensor parallelism",
    "TPU": "TPUs",
    "XLA": "TPUs",
}


def check(key: str, value: object, place: str) -> None:
    """Raise ConfigError if a key of `KEYS` switches on what trainkit does not drive."""
    if key == "same_network" or value == _HARMLESS.get(key) or _is_off(value):
        return
    raise ConfigError(
        f"`{key}` ({place}) is {value!r}, which asks for {KEYS[key]}: trainkit does not drive it. "
        "Remove the key."
    )


def _is_off(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_off(each) for each in value.values())
    if isinstance(value, list):
        return not value
    return value in _OFF or str(value).lower() in _OFF_WORDS


def check_distributed_type(value: object, place: str) -> None:
    """Raise ConfigError if the type is one of accelerate's for other hardware."""
    what = _TYPES.get(str(value).upper())
    if what is not None:
        raise ConfigError(
            f"`distributed_type` ({place}) is {value}, which asks for {what}: trainkit does not "
            "drive it. It drives NO, MULTI_CPU, MULTI_GPU and FSDP."
        )


def _offload(value: object) -> dict[str, str]:
    return {"TRAINKIT_FSDP_CPU_OFFLOAD": str(values.boolean(value)).lower()}


def _checkpointing(value: object) -> dict[str, str]:
    return {"TRAINKIT_FSDP_ACTIVATION_CHECKPOINTING": str(values.boolean(value)).lower()}


def _reshard(value: object) -> dict[str, str]:
    """Read true or false, or the strategy of FSDP's first version, by name or number."""
    names = {"full_shard": True, "1": True, "shard_grad_op": False, "2": False}
    word = str(value).lower()
    if word in ("true", "false"):
        return {"TRAINKIT_FSDP_RESHARD_AFTER_FORWARD": word}
    if word not in names:
        raise ValueError("true or false (FULL_SHARD or SHARD_GRAD_OP)")
    return {"TRAINKIT_FSDP_RESHARD_AFTER_FORWARD": str(names[word]).lower()}


def _classes(value: object) -> dict[str, str]:
    items = value if isinstance(value, list) else str(value).split(",")
    names = [str(item).strip() for item in items]
    if not all(name.isidentifier() for name in names):
        raise ValueError("names of module classes with commas between them")
    return {"TRAINKIT_FSDP_WRAP_CLASSES": ",".join(names)}


def _wrap_policy(value: object) -> dict[str, str]:
    values.one_of("TRANSFORMER_BASED_WRAP", "NO_WRAP")(value)
    return {}


def _no_minimum(value: object) -> dict[str, str]:
    if str(value) not in ("0", "100000000"):
        raise ValueError("0: blocks are chosen by class, not by size")
    return {}


def _nothing(value: object) -> dict[str, str]:
    return {}


# With fully_shard the rest has no choice left, or does not change any result.
_SHARDING: dict[str, Callable[[object], dict[str, str]]] = {
    "activation_checkpointing": _checkpointing,
    "auto_wrap_policy": _wrap_policy,
    "backward_prefetch": _nothing,
    "backward_prefetch_policy": _nothing,
    "cpu_ram_efficient_loading": _nothing,
    "forward_prefetch": _nothing,
    "min_num_params": _no_minimum,
    "offload_params": _offload,
    "reshard_after_forward": _reshard,
    "sharding_strategy": _reshard,
    "state_dict_type": _nothing,
    "sync_module_states": _nothing,
    "transformer_layer_cls_to_wrap": _classes,
    "use_orig_params": _nothing,
    "version": _nothing,
}


def sharding(value: object, place: str) -> dict[str, str]:
    """Return what a `fsdp_config` says, as environment variables for the processes.

    Raises:
        ConfigError: A key is unknown, or a value cannot be.
    """
    result: dict[str, str] = {}
    if not isinstance(value, dict):
        if _is_off(value):
            return result
        raise ConfigError(f"`fsdp_config` ({place}) must hold keys of its own, but is {value!r}.")
    for key, each in value.items():
        short = str(key).removeprefix("fsdp_")
        if short not in _SHARDING:
            near = difflib.get_close_matches(short, list(_SHARDING), n=1, cutoff=0.5)
            hint = f" Did you mean `fsdp_{near[0]}`?" if near else ""
            raise ConfigError(f"`{key}` in `fsdp_config` ({place}) is no known key.{hint}")
        try:
            result |= {} if each is None else _SHARDING[short](each)
        except ValueError as error:
            raise ConfigError(
                f"`{key}` in `fsdp_config` ({place}) must be {error}, but is {each!r}."
            ) from None
    return result
