"""`trainkit config` asks, or takes options, and writes a file that `launch` and accelerate read."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.main import main
from trainkit.launch import config, config_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to write, on a machine without GPUs."""
    monkeypatch.setattr(config, "gpu_count", lambda: 0)
    return tmp_path / "job.yaml"


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Sit at a terminal and give these answers."""
    terminal = io.StringIO("".join(f"{each}\n" for each in answers))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)


def written(file: Path, *arguments: object) -> dict[str, Any]:
    assert main(["config", "--config_file", str(file), *map(str, arguments)]) == 0
    return config_file.read(file).values


def test_defaults_fit_the_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = written(file, "--default")
    assert values["num_processes"] == 1
    assert values["use_cpu"] is True
    monkeypatch.setattr(config, "gpu_count", lambda: 4)
    values = written(file, "--default", "--force", "--mixed-precision", "bf16")
    assert values["num_processes"] == 4
    assert values["distributed_type"] == "MULTI_GPU"
    assert values["use_cpu"] is False
    assert values["mixed_precision"] == "bf16"
    assert written(file, "--default", "--force", "--cpu")["num_processes"] == 1


def test_options_answer_every_question(file: Path) -> None:
    values = written(
        file, "--default", "--num_machines", 2, "--machine_rank", 1, "--num_processes", 4,
        "--main_process_ip", "10.0.0.1", "--use_fsdp", "--max_restarts", 3,
        "--rdzv_backend", "c10d",
    )  # fmt: skip
    assert values["main_process_ip"] == "10.0.0.1"
    assert values["distributed_type"] == "FSDP"
    assert values["max_restarts"] == 3


def test_questions_have_defaults_and_repeat(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "", "2", "1", "10.0.0.1", "", "many", "4", "fp16", "yes")
    values = written(file)
    assert "must be a whole number" in capsys.readouterr().out
    assert (values["num_machines"], values["machine_rank"]) == (2, 1)
    assert (values["num_processes"], values["main_process_port"]) == (4, 29500)
    assert (values["mixed_precision"], values["distributed_type"]) == ("fp16", "FSDP")


def test_what_an_option_answers_is_not_asked(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "yes", "2", "no", "no")
    assert written(file, "--num_machines", 1)["distributed_type"] == "MULTI_CPU"
    assert "How many machines" not in capsys.readouterr().out


def test_an_existing_file_is_asked_about(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("num_processes: 7\n")
    assert main(["config", "--default", "--config_file", str(file)]) == 1
    answer(monkeypatch, "no")
    assert main(["config", "--config_file", str(file)]) == 1
    assert file.read_text() == "num_processes: 7\n"
    answer(monkeypatch, "yes", "", "", "2", "", "")
    assert written(file)["num_processes"] == 2


@pytest.mark.parametrize(
    ("arguments", "answers", "words"),
    [
        ([], None, "no terminal"),
        ([], ["", ""], "ended before the last answer"),
        (["--default", "--num_machines", "2", "--num_processes", "3"], None, "shared out equally"),
        (["--default", "--num_machines", "2", "--machine_rank", "2"], None, "less than"),
        (["--default", "--num_machines", "2"], None, "--main_process_ip"),
        (["--default", "--num_processes", "none"], None, "whole number"),
    ],
)
def test_what_cannot_be_is_not_written(
    arguments: list[str],
    answers: list[str] | None,
    words: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if answers is None:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
    else:
        answer(monkeypatch, *answers)
    assert main(["config", "--config_file", str(file), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert not file.exists()


def test_accelerate_reads_the_file(file: Path) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    written(file, "--default", "--num_processes", 2, "--mixed_precision", "bf16")
    loaded = args.load_config_from_file(str(file))
    assert (loaded.num_processes, loaded.mixed_precision) == (2, "bf16")


def test_env_names_versions_variables_and_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TRAINKIT_API_TOKEN", "s3cret")
    written(file, "--default")
    capsys.readouterr()
    assert main(["env", "--json", "--config_file", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert facts["variables"]["TRAINKIT_API_TOKEN"] == "(hidden)"
    assert facts["configuration"]["num_processes"] == 1
    assert "cuda" in facts["torch"]
    file.write_text("num_proceses: 1\n")
    assert main(["env", "--config_file", str(file)]) == 0
    assert "Did you mean `num_processes`" in capsys.readouterr().out
