"""Accelerate's keys and options for what trainkit does not drive, for sharding and compiling.

A key that is off, or empty, says nothing and is accepted: `accelerate config` writes many such.
"""

from collections.abc import Callable, Iterable, Mapping

from trainkit.basics.launch_environment import SHARDING_STRATEGIES, WRAPPING, sharding_strategy
from trainkit.basics.parsing import boolean, nearest, one_of
from trainkit.basics.setting_readers import text, whole
from trainkit.errors import ConfigError

NULL = ("", "null", "~")
"""What stands for no value in YAML."""

_OFF = (*NULL, "no", "false", "none", "off", "0")

NO_EFFECT = (
    *("deepspeed_multinode_launcher", "fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"),
    *("no_tpu_cluster", "quiet", "same_network", "use_xpu"),
)
"""Known keys of files and options of `accelerate launch` that change nothing.

Either way the address of machine 0 is used, machines meet in one way, GPUs are those that torch
has, and after a failure there is one report. Under fp8 FSDP gathers in bf16, and what must be
padded is.
"""

GPUS_OF_OTHERS = ("MULTI_NPU", "MULTI_XPU")
"""Values of `distributed_type` that mean MULTI_GPU."""

HARMLESS = {
    "compute_environment": "local_machine",
    "fp8_backend": "ao",
    "main_training_function": "main",
    **dict.fromkeys(["offload_optimizer_device", "offload_param_device"], "none"),
    **dict.fromkeys(["zero3_init_flag", "zero3_save_16bit_model"], "false"),
    **dict.fromkeys([f"parallelism_config_{axis}_size" for axis in ("sp", "tp")], "1"),
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_attn_implementation": "sdpa",
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": "true",
}
"""The values of others that change nothing, as they ask for what there is."""


def check(key: str, value: object, source: str, allowed: Iterable[str]) -> None:
    """Raise ConfigError if a key that is none of the `allowed` ones switches something on."""
    if key == "fp8_config" and isinstance(value, dict):
        for name, each in value.items():
            check(f"fp8_{str(name).removeprefix('fp8_')}", each, source, ())
        return
    is_harmless = key in HARMLESS and str(value).lower() == HARMLESS[key]
    if not (key in NO_EFFECT or is_harmless or _is_off(value)):
        raise ConfigError(
            f"`{key}` ({source}) is no known key.{nearest(key, allowed)} If it is one of "
            "Accelerate's, it asks for what trainkit does not drive: leave it out."
        )


def _is_off(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_off(each) for each in value.values())
    if isinstance(value, list):
        return not value
    return str(value).lower() in _OFF


def _classes(value: object) -> str:
    items = value if isinstance(value, list) else str(value).split(",")
    names = [str(item).strip() for item in items]
    if not all(name.isidentifier() for name in names):
        raise ValueError("names of module classes with commas between them")
    return ",".join(names)


def _reshards(value: object) -> str | bool:
    name = sharding_strategy(value)
    return {"FULL_SHARD": True, "SHARD_GRAD_OP": False}.get(name, name)


def _number(value: object) -> str:
    float(str(value))
    return str(value)


def _size(value: object) -> str:
    return str(whole(1)(value))


PARTS: dict[str, tuple[Callable[[object], str | bool], str]] = {
    "use_parallelism_config": (boolean, ""),  # before the sizes, which have an effect by it
    "deepspeed_config_file": (text, ""),
    "dynamo_backend": (text, "no"),
    "dynamo_mode": (one_of("default", "reduce-overhead", "max-autotune"), "default"),
    "dynamo_use_dynamic": (boolean, "false"),
    "dynamo_use_fullgraph": (boolean, "false"),
    "dynamo_use_regional_compilation": (boolean, "false"),
    "fsdp_activation_checkpointing": (boolean, "false"),
    "fsdp_activation_checkpointing_offload": (boolean, "false"),
    "fsdp_auto_wrap_policy": (one_of(*WRAPPING), ""),
    "fsdp_backward_prefetch": (text, ""),
    "fsdp_cpu_ram_efficient_loading": (boolean, "true"),
    "fsdp_forward_prefetch": (boolean, "false"),
    "fsdp_min_num_params": (lambda value: str(whole(0)(value)), "100000000"),
    "fsdp_offload_params": (boolean, "false"),
    "fsdp_reshard_after_forward": (_reshards, "true"),
    "fsdp_sharding_strategy": (sharding_strategy, "FULL_SHARD"),
    "fsdp_state_dict_type": (text, ""),
    "fsdp_sync_module_states": (boolean, "true"),
    "fsdp_transformer_layer_cls_to_wrap": (_classes, ""),
    "fsdp_use_orig_params": (boolean, "true"),
    "fsdp_version": (one_of("1", "2"), "1"),
    "gradient_clipping": (_number, ""),
    "parallelism_config_cp_size": (_size, "1"),
    "parallelism_config_dp_replicate_size": (_size, "1"),
    "parallelism_config_dp_shard_size": (_size, "1"),
    "zero_stage": (one_of("1", "2"), ""),
}
"""Options of `accelerate launch` that its files hold in one of `SECTIONS`.

With what reads each, and what `accelerate launch` takes without it. What trainkit itself does not
ask about changes no result with `fully_shard`; scripts on Accelerate do.
"""
SECTIONS = ("deepspeed_config", "dynamo_config", "fsdp_config", "parallelism_config")
OF_DEEPSPEED = ("deepspeed_config_file", "gradient_clipping", "zero_stage")
"""Those of the first; it holds `gradient_accumulation_steps` too, which is a setting of the job."""


def variable(key: str) -> str:
    """Return the environment variable by which `accelerate launch` passes on a part."""
    if key in OF_DEEPSPEED:
        key = f"deepspeed_{key}" if key == "zero_stage" else key
        return f"ACCELERATE_{key.upper()}"
    prefix = "ACCELERATE_" * key.startswith(("dynamo_", "use_"))
    return f"{prefix}{key.upper().replace('LAYER_CLS', 'CLS')}"


GROUPS = variable("use_parallelism_config")


def part(key: str, value: object, source: str) -> dict[str, str]:
    """Return one of `PARTS` as an environment variable for the processes."""
    try:
        said = PARTS[key][0](value)
    except ValueError as error:
        raise ConfigError(f"`{key}` ({source}) must be {error}, but is {value!r}.") from None
    return {variable(key): str(said).lower() if isinstance(said, bool) else said}


def section(name: str, value: object, source: str) -> dict[str, str]:
    """Return what one of `SECTIONS` says, as environment variables for the processes."""
    if _is_off(value):
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"`{name}` ({source}) must hold keys of its own, but is {value!r}.")
    result: dict[str, str] = {GROUPS: "true"} if name == "parallelism_config" else {}
    prefix, source = name.removesuffix("config"), f"in `{name}`, {source}"
    for key, each in value.items():
        full = prefix + str(key).removeprefix(prefix)
        full = full if name != "deepspeed_config" else str(key)
        if full == "gradient_accumulation_steps":
            result["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(each)
        elif full not in PARTS and name in ("deepspeed_config", "parallelism_config"):
            check(full, each, source, PARTS)
        elif full in PARTS and each not in NULL:
            result |= part(full, each, source)
        elif full not in PARTS and full != "fsdp_backward_prefetch_policy":
            raise ConfigError(f"`{key}` ({source}) is no known key.{nearest(full, PARTS)}")
    return result


def check_groups(variables: Mapping[str, str], kind: str | None, processes: int) -> None:
    """Raise ConfigError where a job cannot have the groups of processes that it is told to have."""
    if variables.get(GROUPS) != "true":
        return
    replicas, shards, pieces = (
        int(variables[variable(f"parallelism_config_{what}_size")])
        for what in ("dp_replicate", "dp_shard", "cp")
    )
    both = "`parallelism_config_dp_replicate_size` times `parallelism_config_dp_shard_size`"
    if replicas * shards * pieces not in (1, processes):
        raise ConfigError(
            f"{both}, and times `parallelism_config_cp_size`, must be the number of processes, but "
            f"is {replicas} times {shards} times {pieces} on {processes}. Change them, or leave "
            "them out."
        )
    is_sharded = shards > 1 or (pieces > 1 and kind == "FSDP")
    if replicas * shards > 1 and is_sharded != (kind == "FSDP"):
        raise ConfigError(
            f"`parallelism_config_dp_shard_size` is {shards}, but `distributed_type` is {kind}: "
            "FSDP (`--use_fsdp`) shards a model, and no other does. Change one of the two."
        )
    said = [variables.get(f"FSDP_{n}", "") for n in ("SHARDING_STRATEGY", "RESHARD_AFTER_FORWARD")]
    if words := [word for word in said if "replicas" in SHARDING_STRATEGIES.get(word, ())]:
        raise ConfigError(
            f"`fsdp_sharding_strategy` is {words[0]}, which says how many processes hold a model, "
            f"as {both} does. Leave one of the two out."
        )
