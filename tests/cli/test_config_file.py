"""Configuration files: those of `accelerate config` are read, and what is wrong is named."""

from pathlib import Path

import pytest
import yaml

from trainkit.errors import ConfigError
from trainkit.launch import config_file

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""What `accelerate config` writes for one machine with two GPUs."""

OLDER = """\
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: 0
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config: {}
mixed_precision: no
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
"""
"""The same from an older version, with an unquoted `no`."""

FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block,Other
  fsdp_version: 2
num_processes: 2
"""


def read(tmp_path: Path, text: str) -> config_file.ConfigFile:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return config_file.read(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_a_file_of_accelerate_is_read(tmp_path: Path) -> None:
    file = read(tmp_path, ACCELERATE)
    assert file.values["num_processes"] == 2
    assert file.values["mixed_precision"] == "fp16"
    assert file.values["distributed_type"] == "MULTI_GPU"
    assert file.lines["num_processes"] == 11


def test_an_older_file_of_accelerate_is_read(tmp_path: Path) -> None:
    values = read(tmp_path, OLDER).values
    assert (values["mixed_precision"], values["gpu_ids"]) == ("no", "0")
    assert "main_process_ip" not in values
    assert read(tmp_path, "fp16: true\n").values["mixed_precision"] == "fp16"


def test_fp8_of_torchao_is_read(tmp_path: Path) -> None:
    settings = "{backend: AO, pad_inner_dim: true, enable_fsdp_float8_all_gather: true}"
    file = read(tmp_path, f"mixed_precision: fp8\nfp8_config: {settings}\n")
    assert file.values == {"mixed_precision": "fp8"}


def test_sharding_becomes_variables(tmp_path: Path) -> None:
    assert read(tmp_path, FSDP).variables == {
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block,Other",
        "FSDP_VERSION": "2",
    }


def test_deepspeed_is_passed_on_as_accelerate_does(tmp_path: Path) -> None:
    said = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  zero3_init_flag: false
  zero_stage: 2
"""
    assert read(tmp_path, said).variables == {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    }


def test_multi_cpu_hides_the_gpus(tmp_path: Path) -> None:
    assert read(tmp_path, "distributed_type: MULTI_CPU\n").values["use_cpu"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_proceses: 2\n", ["`num_proceses`", "line 1", "Did you mean `num_processes`?"]),
        ("a: 1\nqqqqqqqqqq: 2\n", ["`a`", "no known key."]),
        ("machine_ran: 0\n", ["Did you mean `machine_rank`?"]),  # though it is off
        ("fsdp_config:\n  fsdp_offload_parms: true\n", ["Did you mean `fsdp_offload_params`?"]),
        ("fsdp_config:\n  fsdp_auto_wrap_policy: BY_SIZE\n", ["TRANSFORMER_BASED_WRAP"]),
        ("fsdp_config:\n  fsdp_min_num_params: -1\n", ["whole number of at least 0"]),
        ("fsdp_config: 3\n", ["keys of its own", "3"]),
        ("fsdp_config:\n  fsdp_sharding_strategy: HALF_SHARD\n", ["FULL_SHARD", "NO_SHARD"]),
        ("debug: false\nnum_processes: [\n", ["line 3, column 1"]),
        ("a: b: c\n", ["line 1, column 5"]),
        ("num_processes: 2\nnum_processes: 4\n", ["twice", "lines 1, 2"]),
        ("num_processes: !!python/object/apply:os.system ['false']\n", ["line 1", "whole number"]),
        ("- 1\n- 2\n", ["`key: value`", "sequence"]),
        ("", ["is empty"]),
        ("\x00\n", ["no valid YAML"]),
        ("num_processes: 0\n", ["at least 1", "0", "line 1"]),
        ("num_processes: two\n", ["whole number", "'two'"]),
        ("num_processes: true\n", ["whole number", "'true'"]),
        ("num_processes: 1.5\n", ["whole number", "1.5"]),
        ("main_process_port: 70000\n", ["port", "70000"]),
        ("mixed_precision: int8\n", ["one of no, fp16, bf16, fp8", "int8"]),
        ("fp8_config:\n  backend: TE\n", ["`fp8_backend`", "does not drive"]),
        ("fp8_config: {backend: AO, margins: 1}\n", ["`fp8_margins`", "no known key"]),
        ("mixed_precision: fp32\n", ["one of no, fp16, bf16"]),
        ("gpu_ids: 0,0\n", ["different GPUs"]),
        ("gpu_ids: a\n", ["different GPUs"]),
        ("use_cpu: maybe\n", ["true or false"]),
        ("monitor_interval: -1\n", ["above 0"]),
        ("monitor_interval: .nan\n", ["above 0"]),
        ("distributed_type: XLA\n", ["one of NO, MULTI_CPU, MULTI_GPU, FSDP", "'XLA'"]),
        ("tpu_use_cluster: true\n", ["`tpu_use_cluster`", "leave it out"]),
        ("tpu_env: [A=1]\n", ["`tpu_env`", "does not drive"]),
        ("downcast_bf16: 'yes'\n", ["`downcast_bf16`", "does not drive"]),
        ("deepspeed_config:\n  zero_stage: 3\n", ["`zero_stage`", "one of 1, 2", "'3'"]),
        ("deepspeed_config:\n  offload_optimizer_device: cpu\n", ["does not drive"]),
        ("deepspeed_config:\n  zero3_init_flag: true\n", ["`zero3_init_flag`", "does not drive"]),
        ("compute_environment: AMAZON_SAGEMAKER\n", ["`compute_environment`", "does not drive"]),
        ("main_training_function: train\n", ["`main_training_function`", "does not drive"]),
        ("dynamo_config:\n  dynamo_mode: fast\n", ["`dynamo_mode`", "reduce-overhead"]),
        ("enable_cpu_affinity: true\n", ["`enable_cpu_affinity`", "does not drive"]),
        (
            "parallelism_config: {parallelism_config_tp_size: 2}\n",
            ["config_tp_size`", "leave it"],
        ),
        ("parallelism_config: {parallelism_config_dp_shard_size: -1}\n", ["at least 1", "-1"]),
        ("parallelism_config: {dp_shard_size: 2}\n", ["mean `parallelism_config_dp_shard_size`"]),
    ],
)
def test_what_is_wrong_is_named(text: str, words: list[str], tmp_path: Path) -> None:
    message = refused(tmp_path, text)
    assert [word for word in words if word not in message] == [], message


def test_gpus_of_all_makers_are_gpus(tmp_path: Path) -> None:
    for kind in ("MULTI_XPU", "multi_npu", "MULTI_GPU"):
        file = read(tmp_path, f"distributed_type: {kind}\nuse_xpu: true\n")
        assert file.values == {"distributed_type": "MULTI_GPU"}


def test_a_bomb_of_aliases_is_harmless(tmp_path: Path) -> None:
    lines = ["x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
    for level in range(1, 12):
        aliases = ", ".join([f"*x{level - 1}"] * 10)
        lines.append(f"x{level}: &x{level} [{aliases}]")
    assert "`x0`" in refused(tmp_path, "\n".join(lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml.*trainkit config"):
        config_file.read(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="no valid YAML"):
        config_file.read(tmp_path / "binary.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="1 MiB"):
        config_file.read(tmp_path / "large.yaml")


def test_accelerates_own_defaults_are_read(tmp_path: Path) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "job.yaml"
    args.ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="MULTI_GPU", mixed_precision="bf16",
        use_cpu=False, debug=False, num_processes=4,
    ).to_yaml_file(str(path))  # fmt: skip
    assert config_file.read(path).values["num_processes"] == 4


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "job.yaml"
    config_file.write(path, {"num_processes": 2, "mixed_precision": "no"})
    assert yaml.safe_load(path.read_text()) == {"num_processes": 2, "mixed_precision": "no"}
    assert [each.name for each in path.parent.iterdir()] == ["job.yaml"]
    with pytest.raises(ConfigError, match="cannot be written"):
        config_file.write(path / "below-a-file.yaml", {"num_processes": 2})


def test_the_default_file_is_looked_for(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = tmp_path / "trainkit" / "default_config.yaml"
    assert config_file.default_path(env) == path
    assert config_file.find(None, env) is None
    config_file.write(path, {"num_processes": 2})
    assert config_file.find(None, env) == path
    assert config_file.find("other.yaml", env) == Path("other.yaml")
    # A file that is named must be there, unlike the default one.
    named = {**env, "TRAINKIT_CONFIG": str(tmp_path / "missing.yaml")}
    assert config_file.find(None, named) == tmp_path / "missing.yaml"
