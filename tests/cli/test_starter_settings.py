"""`trainkit launch` as what a starter runs on each machine: it knows its place, or says why not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.launcher import Launcher, free_port
from tests.cli.test_launch import alone, output, planned, shown
from tests.cli.test_launch_processes import ACTS
from tests.processes.test_starters import POD, TORCHRUN, of_mpirun, of_srun

assert alone is not None  # a fixture: an empty folder, no settings from outside
Say = Callable[[dict[str, str]], None]

PET = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip
PLACE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_torchruns_variables_come_last(
    say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say({**PET, "PET_TEE": "3"})
    rows = shown(capsys)
    assert [rows[name][0] for name in PLACE] == ["2", "1", "job-0.job", "29400"]
    assert rows["machine_rank"][1] == "environment (PET_NODE_RANK)"
    assert rows["num_processes"] == ("8", "environment (PET_NPROC_PER_NODE)")
    assert rows["tee"] == ("3", "environment (PET_TEE)")
    monkeypatch.setenv("TRAINKIT_MACHINE_RANK", "0")
    rows = shown(capsys, "--num_processes", "2")
    assert rows["machine_rank"] == ("0", "environment (TRAINKIT_MACHINE_RANK)")
    assert rows["num_processes"] == ("2", "command line")
    rows = shown(capsys, "--num_machines", "1")
    assert [rows[name][0] for name in PLACE] == ["1", "0", "-", "-"]
    assert rows["num_processes"][0] == "4"


def test_an_endpoint_names_host_and_port(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    elastic = {"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d"}
    say({**PET, **elastic, "PET_NPROC_PER_NODE": "auto"})
    rows = shown(capsys)
    assert [rows[name][0] for name in PLACE] == ["2", "1", "job-worker-0", "23456"]
    assert (rows["rdzv_backend"][0], rows["num_processes"][0]) == ("c10d", "-")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (of_srun(1, "1(x2)"), ["2", "1", "gpu07"]),
        (POD, ["2", "1", "job-master-0"]),
        ({**of_mpirun(1, 2, 1), "MASTER_ADDR": "a"}, ["2", "1", "a"]),
        (of_srun(0, "2") | {"SLURM_STEP_NUM_TASKS": "1"}, ["1", "0", "-"]),
        ({"WORLD_SIZE": "2"}, ["1", "0", "-"]),
        (TORCHRUN, ["1", "0", "-"]),
    ],
)
def test_a_launcher_on_each_machine_knows_its_place(
    variables: dict[str, str], place: list[str], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(variables)
    rows = shown(capsys)
    assert [rows[name][0] for name in PLACE[:3]] == place


@pytest.mark.parametrize("variables", [of_srun(1, "2"), of_mpirun(3, 4, 2)])
def test_several_launchers_on_a_machine_are_refused(
    variables: dict[str, str], say: Say, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(variables)
    (alone / "job.yaml").write_text("num_machines: 1\n")
    told: tuple[str, ...]
    for told in ((), ("--config_file", "job.yaml")):
        text = output(capsys, "--dry-run", *told, "script.py", code=1)
        assert "each would start a job of its own" in text
        assert "srun --ntasks-per-node=1 trainkit launch" in text
    for explicit in (("--num_machines", "1"), ("--standalone",)):
        environment, _ = planned(capsys, *explicit, "script.py")
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]


def test_a_first_machine_that_nobody_names_is_asked_for(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(of_mpirun(1, 2, 1))
    text = output(capsys, "--dry-run", "script.py", code=1)
    assert "each needs `main_process_ip`" in text


@pytest.mark.e2e
def test_launchers_as_tasks_of_srun_are_one_job(tmp_path: Path) -> None:
    (tmp_path / "acts.py").write_text(ACTS)
    port = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    # What torchrun would read besides is not obeyed: the launchers have decided.
    others = {"PET_STANDALONE": "1", "PET_RDZV_BACKEND": "static", "PET_RDZV_ID": "x"}
    launchers = [
        Launcher(
            ("launch", "--cpu", "acts.py", "ends"),
            tmp_path,
            output=f"output-{rank}",
            environment={**of_srun(rank, "1(x2)"), **port, **others},
        )
        for rank in range(2)
    ]
    assert [launcher.wait() for launcher in launchers] == [0, 0], launchers[0].output
    assert ["ready 0" in launchers[0].output, "ready 1" in launchers[1].output] == [True, True]
