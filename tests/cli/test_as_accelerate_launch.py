"""`trainkit launch` beside `accelerate launch`: options, what processes get, what they train."""

import argparse
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.test_config_file import ACCELERATE, FSDP
from tests.helpers.needs import late
from tests.helpers.scripts import TRANSFORMERS
from tests.helpers.warm import warm
from trainkit.cli.main import main
from trainkit.errors import ConfigError
from trainkit.launch import plan
from trainkit.launch.resolving import Resolved, add_options, resolve

theirs, utils = late("accelerate.commands.launch"), late("accelerate.utils.launch")

DYNAMO = f"""{ACCELERATE}
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: reduce-overhead
  dynamo_use_dynamic: true
  dynamo_use_fullgraph: false
"""
FIRST_FSDP = f"""{ACCELERATE.replace("MULTI_GPU", "FSDP")}
fsdp_config:
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_use_orig_params: false
"""
GROUPS = f"""{FSDP}
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
"""
FILES = {
    **{"gpus": ACCELERATE, "fsdp2": FSDP, "fsdp1": FIRST_FSDP, "compiled": DYNAMO},
    "groups": GROUPS,
}
LINES = {
    "sharded": [
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "True",
        "--fsdp-activation-checkpointing=true", "--fsdp_transformer_layer_cls_to_wrap", "A,B",
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--mixed_precision", "bf16",
    ],
    "compiled": ["--multi_gpu", "--dynamo_backend", "eager", "--dynamo_use_fullgraph"],
    "strategy": ["--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--debug"],
    "groups": [
        "--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config",
        "--parallelism_config_dp_shard_size", "2", "--parallelism_config_cp_backend=torch",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_said_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as a plan would
    monkeypatch.setattr(plan, "gpu_count", lambda: 2)
    (tmp_path / "script.py").touch()


def resolved(*words: str) -> Resolved:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return resolve(parser.parse_args(words), {})


def variables(environment: Any) -> dict[str, str]:
    """Return what an environment says to scripts on Accelerate, in small letters."""
    kinds = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_DP_")
    said = {k: v.lower() for k, v in environment.items() if k.startswith(kinds)}
    # `accelerate launch` leaves it out on GPUs; where it is not there, it is false.
    return {"ACCELERATE_USE_CPU": "false", **said}


def both(tmp_path: Path, *words: str) -> tuple[dict[str, str], dict[str, str]]:
    script = str(tmp_path / "script.py")
    options = theirs.launch_command_parser().parse_args([*words, script])
    options, *_ = theirs._validate_launch_command(options)
    ours = plan.make_plan(resolved(*words), plan.Script(path=script))
    return variables(ours.environment), variables(utils.prepare_multi_gpu_env(options))


@pytest.mark.parametrize("name", FILES)
def test_processes_are_told_what_accelerate_tells_them_of_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    whole = {**yaml.safe_load(ACCELERATE), **yaml.safe_load(FILES[name])}
    path.write_text(yaml.safe_dump(whole))
    ours, expected = both(tmp_path, "--config_file", str(path))
    assert ours == expected


@pytest.mark.parametrize("name", LINES)
def test_processes_are_told_what_accelerate_tells_them_of_options(
    name: str, tmp_path: Path
) -> None:
    ours, expected = both(tmp_path, "--num_processes", "2", *LINES[name])
    assert ours == expected


def test_every_long_option_of_accelerate_is_taken_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = argparse.ArgumentParser()
    add_options(known)
    launch = {"--module", "--no_python", "--no-python"}  # beside the settings
    names = {name for action in theirs.launch_command_parser()._actions for name in
             action.option_strings if name.startswith("--")} - {"--help"}  # fmt: skip
    refused = names - launch - {*known._option_string_actions}
    for name in sorted(refused):
        with pytest.raises(SystemExit) as caught:
            main(["launch", name, "script.py"])
        assert caught.value.code == 2
        assert f"`{name}` is no known option" in capsys.readouterr().err
    families = "aws_|deepspeed_|fp8_|megatron_lm_|mpirun_|offload_|parallelism_config_sp_|tpu"
    families += "|downcast_bf16|enable_cpu_affinity|env|use_megatron_lm|vm"
    assert refused
    assert not [name for name in refused if not re.match(families, name[2:].replace("-", "_"))]


def test_what_is_off_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").touch()
    words = "--use_deepspeed --zero_stage 2 --offload_optimizer_device none --zero3_init_flag False"
    script = str(tmp_path / "script.py")
    assert main(["launch", "--cpu", "--dry-run", *words.split(), script]) == 0
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=2" in capsys.readouterr().out


def test_what_has_no_effect_takes_no_word_of_the_script(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args(["--same_network", "--quiet", "train.py", "--zero_stage", "2"])
    assert options.script == ["train.py", "--zero_stage", "2"]


def test_sharding_without_fsdp_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--fsdp_offload_params", "true", "script.py"]) == 1
    assert "`--fsdp_offload_params` has no effect without `--use_fsdp`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--parallelism_config_dp_shard_size 2", "no effect without `--use_parallelism_config`"),
        ("--use_parallelism_config --parallelism_config_tp_size 2", "invalid choice: '2'"),
        (
            "--use_parallelism_config --parallelism_config_dp_shard_size 2",
            "`parallelism_config_dp_shard_size` is 2, but",
        ),
        (
            "--use_parallelism_config --parallelism_config_dp_replicate_size 2 --use_fsdp",
            "`parallelism_config_dp_shard_size` is 1, but",
        ),
        (
            "--use_parallelism_config --parallelism_config_dp_replicate_size 2 --use_fsdp "
            "--parallelism_config_dp_shard_size 2",
            "the number of processes, but is 2 times 2 times 1 on 2",
        ),
        (
            "--use_parallelism_config --parallelism_config_dp_shard_size 2 --use_fsdp "
            "--fsdp_sharding_strategy HYBRID_SHARD",
            "HYBRID_SHARD",
        ),
    ],
)
def test_sizes_of_groups_that_cannot_be_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = str(tmp_path / "script.py")
    with suppress(SystemExit):  # as a parser ends
        assert main(["launch", "--num_processes", "2", "--dry-run", *words.split(), script]) == 1
    assert said in capsys.readouterr().err


def test_sizes_of_groups_in_the_environment_are_read_as_elsewhere() -> None:
    env = {"ACCELERATE_USE_PARALLELISM_CONFIG": "True", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "two"}
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(ConfigError, match=r"in the environment variable PARALL.*must be a whole"):
        resolve(parser.parse_args([]), env)
    said = resolve(parser.parse_args([]), env | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}).variables
    assert said["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert said["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"


def test_pieces_of_sequences_are_a_size_of_groups(tmp_path: Path) -> None:
    words = ["--use_parallelism_config", "--parallelism_config_cp_size", "2"]
    said = resolved("--num_processes", "2", *words).variables
    assert said["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    script = str(tmp_path / "script.py")
    for more in ([], ["--use_fsdp"]):
        assert main(["launch", "--num_processes", "2", "--dry-run", *words, *more, script]) == 0


def test_copies_of_a_whole_model_are_no_sharding(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 1}
    path.write_text(yaml.safe_dump({**yaml.safe_load(ACCELERATE), "parallelism_config": sizes}))
    ours, expected = both(tmp_path, "--config_file", str(path))
    assert ours == expected
    assert ours["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"


def test_what_config_is_told_of_sharding_is_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    words = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true"]
    words += ["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"]
    assert main(["config", "--default", "--config_file", str(path), *words]) == 0
    written = {"fsdp_version": "2", "fsdp_offload_params": "true"}
    assert yaml.safe_load(path.read_text())["fsdp_config"] == written
    said = resolved("--config_file", str(path)).variables
    assert said["FSDP_OFFLOAD_PARAMS"] == said["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert said["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"


TRAINS = """
import hashlib, json, os, sys
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

class Tokens(Dataset):
    rows = torch.randint(0, 64, (24, 8), generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

set_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=2)
trainer = Trainer(
    LlamaForCausalLM(config),
    TrainingArguments("out", max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
                      logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True),
    train_dataset=Tokens(),
)
trainer.train()
accelerator = trainer.accelerator
weights = accelerator.get_state_dict(trainer.model_wrapped)
if accelerator.is_main_process:
    sums = {name: hashlib.sha256(value.float().numpy().tobytes()).hexdigest()
            for name, value in weights.items()}
    history = [{k: row[k] for k in ("loss", "grad_norm") if k in row}
               for row in trainer.state.log_history]
    how = [accelerator.mixed_precision, accelerator.distributed_type.value,
           accelerator.num_processes]
    print("RESULT", json.dumps([how, history, sums]))
# Else a thread of gloo may let go of its last tensor while Python ends, which aborts the process.
accelerator.end_training()
"""
# Accelerate shards on accelerators alone; that the CPU is one is said to it, under both launchers.
ON_CPU = """
import os
os.environ |= {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu"}
from accelerate.state import DistributedType, PartialState
PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
"""
SHARDED = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_reshard_after_forward": False,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_version": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "MULTI_CPU": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
    "FSDP": {
        "distributed_type": "FSDP",
        "fsdp_config": SHARDED,
        "parallelism_config": {"parallelism_config_dp_shard_size": 2},
    },
}


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says that the CPU is the accelerator")
@pytest.mark.parametrize("kind", ["MULTI_CPU", pytest.param("FSDP", marks=pytest.mark.slow)])
def test_transformers_trains_as_under_accelerate_launch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HOME")  # the file is named, and with it programs would not begin warm
    script = tmp_path / "train.py"
    script.write_text(ON_CPU * (kind == "FSDP") + TRAINS)
    file = {**yaml.safe_load(ACCELERATE), "mixed_precision": "no", **KINDS[kind]}
    found = []
    for start in ("accelerate.commands.accelerate_cli", "trainkit.cli.main"):
        if start.startswith("trainkit"):  # which starts processes on the CPU by these alone
            file["distributed_type"] = kind
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(file))
        code = f"import sys; from {start} import main; sys.exit(main())"
        with warm(inside=1, imports=TRANSFORMERS):
            done = subprocess.run(
                [sys.executable, "-c", code, "launch", "--config_file", "job.yaml", str(script)],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
                capture_output=True, text=True, check=False, timeout=600,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        line = next(line for line in done.stdout.splitlines() if "RESULT" in line)
        found.append(json.loads(line.partition("RESULT")[2]))
    assert found[0] == found[1]
    assert found[0][0] == [KINDS[kind].get("mixed_precision", "no"), kind, 2]
