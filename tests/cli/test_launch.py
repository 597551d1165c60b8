"""`trainkit launch` before anything starts: where settings come from, what is planned, refused."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_config_file import ACCELERATE, FSDP
from trainkit.cli.main import main
from trainkit.launch import accelerate_keys, config_file, plan, settings
from trainkit.launch.meeting import alone as alone_here
from trainkit.launch.settings import SETTINGS, JobSettings

ROOT = Path(__file__).resolve().parents[2]
LIGHT = """
import sys
from trainkit.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
sys.exit(code)
"""
SETTING_VARIABLES = [name for setting in SETTINGS.values() for name in setting.variables]
OTHER_VARIABLES = ["TRAINKIT_CONFIG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, without settings from the environment and without GPUs."""
    for name in [*SETTING_VARIABLES, *OTHER_VARIABLES]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as a plan would, before torch is imported
    monkeypatch.setattr(plan, "gpu_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run `trainkit launch` and return what it prints, with errors behind it."""
    assert main(["launch", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def planned(
    capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command of each process in a dry run."""
    words = shlex.split(output(capsys, "--dry-run", *arguments))
    start = next(index for index, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[str, str]]:
    """Return value and source of each setting."""
    lines = output(capsys, *arguments, "--show-config").splitlines()[2:]
    return {words[0]: (words[1], " ".join(words[2:])) for words in map(str.split, lines)}


def test_the_command_line_beats_the_file_beats_the_environment(
    alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = alone / "job.yaml"
    file.write_text("num_processes: 2\nmixed_precision: bf16\n")
    monkeypatch.setenv("TRAINKIT_NUM_PROCESSES", "8")
    monkeypatch.setenv("TRAINKIT_MAX_RESTARTS", "5")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    rows = shown(capsys, "--config_file", file, "--num_processes", "4")
    assert rows["num_processes"] == ("4", "command line")
    assert rows["mixed_precision"] == ("bf16", f"{file}:2")
    assert rows["max_restarts"] == ("5", "environment (TRAINKIT_MAX_RESTARTS)")
    assert rows["machine_rank"] == ("0", "default")
    compiling = {key for key in accelerate_keys.PARTS if key.startswith("dynamo_")}
    assert set(rows) == set(SETTINGS) | compiling
    assert shown(capsys)["mixed_precision"] == ("fp16", "environment (ACCELERATE_MIXED_PRECISION)")
    assert shown(capsys, "--config_file", file)["num_processes"][0] == "2"
    assert rows["dynamo_backend"] == ("no", "default")
    file.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n")
    rows = shown(capsys, "--config_file", file, "--fsdp_version", "2")
    assert rows["fsdp_offload_params"] == ("true", str(file))
    assert rows["fsdp_version"] == ("2", "command line")
    assert rows["fsdp_sync_module_states"] == ("true", "default")


def test_the_default_file_is_read(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file.write(config_file.default_path(), {"num_processes": 3})
    assert shown(capsys)["num_processes"][0] == "3"


def test_accelerates_own_default_file_is_not(
    alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(alone))
    config_file.write(alone / "accelerate" / "default_config.yaml", {"num_processes": 3})
    assert shown(capsys)["num_processes"] == ("-", "default")


def test_the_settings_are_the_table() -> None:
    assert list(settings.JobSettings.__dataclass_fields__) == list(SETTINGS)


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    assert [name for name in SETTINGS if f"`{name}`" not in page] == []


def test_both_spellings_work(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (("--num_processes", 2), ("--num-processes", 2), ("--num-processes=2",)):
        environment, command = planned(capsys, *option, "script.py")
        assert environment["LOCAL_WORLD_SIZE"] == "2"
        assert command == [sys.executable, "-u", "script.py"]


def test_arguments_of_the_script_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--cpu", "-m", "--num_processes", "9", "a b", "--", "--help"]
    environment, arguments = planned(capsys, "--num_processes", 2, "script.py", *own)
    assert arguments[-len(own) - 1 :] == ["script.py", *own]
    assert environment["TRAINKIT_USE_CPU"] == "true"  # there are no GPUs
    assert "CUDA_VISIBLE_DEVICES" not in environment
    _, arguments = planned(capsys, "--", "script.py", "x")
    assert arguments[-2:] == ["script.py", "x"]


def test_a_switch_of_the_file_can_be_switched_off(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "job.yaml").write_text("use_cpu: true\n")
    assert (
        planned(capsys, "--config_file", "job.yaml", "script.py")[0]["TRAINKIT_USE_CPU"] == "true"
    )
    for option in ("--no_cpu", "--no-cpu", "--no_use_cpu"):
        assert shown(capsys, "--config_file", "job.yaml", option)["use_cpu"][0] == "False"


def test_a_file_for_gpus_is_planned_for_gpus(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "job.yaml").write_text(ACCELERATE.replace("gpu_ids: all", "gpu_ids: 2,3"))
    environment, _ = planned(capsys, "--config_file", "job.yaml", "script.py")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["TRAINKIT_MIXED_PRECISION"] == "fp16"
    assert environment["LOCAL_WORLD_SIZE"] == "2"
    environment, _ = planned(capsys, "--config_file", "job.yaml", "--cpu", "script.py")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_dry_run_says_that_gpus_are_missing(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "job.yaml").write_text(ACCELERATE)
    assert main(["launch", "--dry-run", "--config_file", "job.yaml", "script.py"]) == 0
    assert "0 GPU(s) for 2 process(es)" in capsys.readouterr().err


def test_processes_are_as_many_as_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_count", lambda: 4)
    assert planned(capsys, "script.py")[0]["LOCAL_WORLD_SIZE"] == "4"
    assert planned(capsys, "--cpu", "script.py")[0]["LOCAL_WORLD_SIZE"] == "1"
    assert planned(capsys, "--gpu_ids", "2,3", "script.py")[0]["LOCAL_WORLD_SIZE"] == "2"


def test_threads_are_shared_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "core_count", lambda: 16)
    assert planned(capsys, "--num_processes", 4, "script.py")[0]["OMP_NUM_THREADS"] == "4"
    assert planned(capsys, "--num_processes", 64, "script.py")[0]["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert planned(capsys, "--num_processes", 4, "script.py")[0]["OMP_NUM_THREADS"] == "3"
    arguments = ("--num_cpu_threads_per_process", 2, "script.py")
    assert planned(capsys, *arguments)[0]["OMP_NUM_THREADS"] == "2"


def test_sharding_reaches_the_processes(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone / "job.yaml").write_text(FSDP)
    environment, _ = planned(capsys, "--config_file", "job.yaml", "--cpu", "script.py")
    assert environment["TRAINKIT_STRATEGY"] == "fsdp"
    assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "GPT2Block,Other"
    environment, _ = planned(
        capsys, "--config_file", "job.yaml", "--distributed_type", "MULTI_CPU", "script.py"
    )
    assert "TRAINKIT_STRATEGY" not in environment


def test_several_machines_meet_at_machine_0(capsys: pytest.CaptureFixture[str]) -> None:
    environment, _ = planned(
        capsys, "--num_machines", 2, "--machine_rank", 1, "--num_processes", 4,
        "--main_process_ip", "10.0.0.1", "--main_process_port", 1234,
        "--rdzv_backend", "c10d", "--max_restarts", 1, "script.py",
    )  # fmt: skip
    assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_ports_hold_the_port_of_machine_0(capsys: pytest.CaptureFixture[str]) -> None:
    environment, _ = planned(capsys, *SEVERAL, "--ports", "4000-4009", "script.py")
    assert environment["TRAINKIT_PORTS"] == "4000-4009"
    assert environment["MASTER_PORT"] == "4000"


def test_modules_and_programs_can_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "-m", "json.tool", "x")[1][1:] == ["-u", "-m", "json.tool", "x"]
    assert planned(capsys, "--no-python", "true", "x")[1] == ["true", "x"]


@pytest.mark.parametrize("is_in_range", [False, True])
def test_a_taken_port_of_one_machine_is_replaced(is_in_range: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ports = f"{port}-{port + 9}" if is_in_range else None
        meeting = alone_here(JobSettings(main_process_port=port, ports=ports))
        found = meeting.open_store()
        assert found != port
        assert not is_in_range or port < found <= port + 9
    assert alone_here(JobSettings(main_process_port=port)).open_store() == port


PORTS = ("--ports", "29500-29520")
SEVERAL = ("--num_machines", 2, "--main_process_ip", "10.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope.py"], ["no script `nope.py`", "--module"]),
        (["/"], ["`/` is a folder"]),
        (["--no_python", "no-such-program"], ["no program `no-such-program`"]),
        (["-m", "--no_python", "true"], ["exclude each other"]),
        ([], ["There is no script"]),
        (["--num_processes", 0, "script.py"], ["`num_processes`", "command line", "'0'"]),
        (["--num_processes", "two", "script.py"], ["whole number of at least 1", "'two'"]),
        (["--num_processes=-3", "script.py"], ["at least 1", "'-3'"]),
        (["--main_process_port", 99999, "script.py"], ["from 0 to 65535"]),
        (["--monitor_interval", "inf", "script.py"], ["above 0"]),
        (["--rdzv_conf", "timeout", "script.py"], ["pairs such as"]),
        (["--tee", "4", "script.py"], ["one of 0, 1, 2, 3"]),
        (["--mixed_precision", "int8", "script.py"], ["one of no, fp16, bf16, fp8", "int8"]),
        (["--mixed_precision", "bf61", "script.py"], ["one of no, fp16, bf16"]),
        (["--gpu_ids", "0,x", "script.py"], ["different GPUs"]),
        (["--gpu_ids", "0", "--num_processes", 2, "script.py"], ["1 GPU(s)", "2 processes"]),
        ([*SEVERAL, "--num_processes", 3, "script.py"], ["3", "2 machines", "together"]),
        ([*SEVERAL, "--machine_rank", 2, "script.py"], ["`machine_rank` is 2", "counted from 0"]),
        (["--machine_rank", 1, "script.py"], ["`machine_rank` is 1"]),
        ([*SEVERAL[:2], "script.py"], ["needs `main_process_ip`"]),
        ([*SEVERAL, "--main_process_port", 0, "script.py"], ["Name one"]),
        (["--ports", "29500", "script.py"], ["first and the last", "29500-29520"]),
        (["--ports", "3-2", "script.py"], ["first and the last"]),
        ([*PORTS, "--main_process_port", 1, "script.py"], ["none of the `ports`"]),
        ([*SEVERAL, "--standalone", "script.py"], ["`--standalone` is for one machine"]),
        (["--config_file", "none.yaml", "script.py"], ["`none.yaml` cannot be read"]),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = output(capsys, "--dry-run", *arguments, code=1)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--num_proceses", "--num_processes"),
        ("--main-process-prot", "--main-process-port"),
        ("--mixed_precison=fp16", "--mixed_precision"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(
    option: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["launch", option, "2", "script.py"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"`{option.partition('=')[0]}` is no known option. Did you mean `{near}`?" in message


def test_more_processes_than_gpus_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.basics.device.accelerator_count", lambda: 1)
    monkeypatch.setattr(plan, "gpu_count", lambda: 1)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    message = output(capsys, "--num_processes", 2, "script.py", code=1)
    assert "needs a GPU of its own, but torch sees 1 of them" in message
    assert "--cpu" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["launch", "--help"],
        ["launch", "--show-config"],
        ["config", "--help"],
        ["test", "--help"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments: list[str], alone: Path) -> None:
    command = [sys.executable, "-c", LIGHT, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=alone)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_a_report_of_a_bug_needs_is_found(
    is_broken: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_broken:
        monkeypatch.setitem(sys.modules, "trainkit.basics.device", None)
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"] != "not installed"
    assert set(facts) >= {"system", "packages", "torch", "gpus", "variables", "configuration"}
    assert isinstance(facts["gpus"]["visible"], str if is_broken else int)
