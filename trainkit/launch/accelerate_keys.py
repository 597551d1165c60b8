"""Keys of `accelerate config` for what trainkit does not drive, and for sharding.

A key that is off, or empty, says nothing and is accepted: `accelerate config` writes many such.
"""

from collections.abc import Callable

from trainkit.basics.parsing import boolean, nearest, one_of
from trainkit.errors import ConfigError

NULL = ("", "null", "~")
"""What stands for no value in YAML."""

_OFF = (*NULL, "no", "false", "none", "off", "0")

_UNKNOWN_TO_US = {
    # Either way the address of machine 0 is used, and GPUs are those that torch has.
    "": ("same_network", "use_xpu"),
    "DeepSpeed": ("deepspeed_config",),
    "Intel's extension of torch": ("ipex_config",),
    "Megatron-LM": ("megatron_lm_config",),
    "SageMaker": ("aws_access_key_id", "aws_secret_access_key", "compute_environment"),
    "TPU pods": ("command_file", "commands"),
    "TPUs": ("downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm",
             "tpu_zone"),
    "a function to start: the whole script is run": ("main_training_function",),
    "binding of processes to cores; use `numactl`": ("enable_cpu_affinity",),
    "fp8": ("fp8_config",),
    "mpirun; it starts the processes itself": ("mpirun_config",),
    "tensor, context and sequence parallelism": ("parallelism_config",),
    "torch.compile by the launcher; use `Trainer(compile=True)`": (
        "dynamo_backend", "dynamo_config"),
}  # fmt: skip

KEYS = {key: what for what, keys in _UNKNOWN_TO_US.items() for key in keys}
"""Known keys with what they would switch on."""

GPUS_OF_OTHERS = ("MULTI_NPU", "MULTI_XPU")
"""Values of `distributed_type` that mean MULTI_GPU."""

_HARMLESS = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}


def check(key: str, value: object, place: str) -> None:
    """Raise ConfigError if a key of `KEYS` switches on what trainkit does not drive."""
    if not KEYS[key] or value == _HARMLESS.get(key) or _is_off(value):
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
    return str(value).lower() in _OFF


def _reshard(value: object) -> bool:
    """Read true or false, or the strategy of FSDP's first version, by name or number."""
    names = {"full_shard": True, "1": True, "shard_grad_op": False, "2": False}
    word = str(value).lower()
    if word not in ("true", "false", *names):
        raise ValueError("true or false (FULL_SHARD or SHARD_GRAD_OP)")
    return names.get(word, word == "true")


def _classes(value: object) -> str:
    items = value if isinstance(value, list) else str(value).split(",")
    names = [str(item).strip() for item in items]
    if not all(name.isidentifier() for name in names):
        raise ValueError("names of module classes with commas between them")
    return ",".join(names)


def _no_minimum(value: object) -> None:
    if str(value) not in ("0", "100000000"):
        raise ValueError("0: blocks are chosen by class, not by size")


# With the variable of each key, if there is one, and what reads its value.
_SHARDING: dict[str, tuple[str, Callable[[object], object]]] = {
    "activation_checkpointing": ("ACTIVATION_CHECKPOINTING", boolean),
    "auto_wrap_policy": ("", one_of("TRANSFORMER_BASED_WRAP", "NO_WRAP")),
    "min_num_params": ("", _no_minimum),
    "offload_params": ("CPU_OFFLOAD", boolean),
    "reshard_after_forward": ("RESHARD_AFTER_FORWARD", _reshard),
    "sharding_strategy": ("RESHARD_AFTER_FORWARD", _reshard),
    "transformer_layer_cls_to_wrap": ("WRAP_CLASSES", _classes),
}
# With `fully_shard` these have no choice left, or do not change any result.
_WITHOUT_EFFECT = (
    "backward_prefetch", "backward_prefetch_policy", "cpu_ram_efficient_loading",
    "forward_prefetch", "state_dict_type", "sync_module_states", "use_orig_params", "version",
)  # fmt: skip


def sharding(value: object, place: str) -> dict[str, str]:
    """Return what a `fsdp_config` says, as environment variables for the processes.

    Raises:
        ConfigError: A key is unknown, or a value cannot be.
    """
    if _is_off(value):
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"`fsdp_config` ({place}) must hold keys of its own, but is {value!r}.")
    result: dict[str, str] = {}
    for key, each in value.items():
        short = str(key).removeprefix("fsdp_")
        if each in NULL or short in _WITHOUT_EFFECT:
            continue
        if short not in _SHARDING:
            hint = nearest(f"fsdp_{short}", [f"fsdp_{known}" for known in _SHARDING])
            raise ConfigError(f"`{key}` in `fsdp_config` ({place}) is no known key.{hint}")
        variable, reader = _SHARDING[short]
        try:
            said = reader(each)
        except ValueError as error:
            raise ConfigError(
                f"`{key}` in `fsdp_config` ({place}) must be {error}, but is {each!r}."
            ) from None
        if variable:
            word = str(said).lower() if isinstance(said, bool) else str(said)
            result[f"TRAINKIT_FSDP_{variable}"] = word
    return result
