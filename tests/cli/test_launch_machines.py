"""Several launchers of one box stand for several machines: they train together, or say why not."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.cli.launcher import Launcher, free_port, lives
from tests.cli.test_launch_processes import ACTS, TRAINS
from tests.helpers.tiers import with_few
from trainkit.distributed.group import SECRET
from trainkit.launch import supervisor


def launch(
    folder: Path,
    machines: int,
    rank: int,
    port: int,
    *arguments: object,
    output: str = "",
    environment: dict[str, str] | None = None,
) -> Launcher:
    place = ["--num_machines", machines, "--machine_rank", rank, "--main_process_port", port]
    command = ["launch", "--cpu", *place, "--main_process_ip", "127.0.0.1", *arguments]
    output = output or f"output-{machines}-{rank}"
    return Launcher(command, folder, output=output, environment=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "acts.py").write_text(ACTS)
    (tmp_path / "trains.py").write_text(TRAINS)
    return tmp_path


@pytest.mark.e2e
def test_two_machines_give_the_weights_of_one(folder: Path) -> None:
    port = free_port()
    options = ("--num_processes", 2, "trains.py")
    launchers = [launch(folder, 2, rank, port, *options, "two.pt") for rank in range(2)]
    assert [launcher.wait() for launcher in launchers] == [0, 0], launchers[0].output
    assert "on 2" in launchers[0].output
    assert "on 2" not in launchers[1].output
    alone = launch(folder, 1, 0, free_port(), *options, "one.pt")
    assert alone.wait() == 0, alone.output
    one, two = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "case",
    with_few(["script"], ["twice", "missing", "taken", "script"]),
)
def test_what_keeps_machines_apart_is_said_on_each(case: str, folder: Path) -> None:
    """Each of them ends, and names the machine and what is wrong with it."""
    (folder / "other").mkdir()
    (folder / "other" / "acts.py").write_text("other = 1")
    port, words = free_port(), []
    options: tuple[object, ...] = ("--num_processes", 3, "--meeting_timeout", 4)
    starts: list[tuple[int, tuple[str, ...]]] = [(rank, ("acts.py", "ends")) for rank in range(3)]
    if case == "twice":
        starts[2] = (1, ("acts.py", "ends"))
        words = ["machine_rank 1 is there twice: pid "]
    elif case == "missing":
        del starts[1]
        words = ["machine 1 did not come in 4 s"]
    elif case == "taken":
        starts = starts[:1]
        words = [f"Port {port} of this machine", "is taken"]
    elif case == "script":
        starts[2] = (2, ("other/acts.py", "ends"))
        words = ["script: acts.py (", "(machine 0, 1), acts.py ("]
    with socket.create_server(("", port if case == "taken" else 0)):
        launchers = [
            launch(folder, 3, rank, port, *options, *script, output=f"output-{place}")
            for place, (rank, script) in enumerate(starts)
        ]
        for launcher in launchers:
            assert launcher.wait() == 1
            assert [word for word in words if word not in launcher.output] == [], launcher.output
            assert "ready" not in launcher.output


@pytest.mark.e2e
def test_machines_that_were_told_different_things_say_so(folder: Path) -> None:
    port = free_port()
    launchers = [
        launch(folder, 2, 0, port, "--num_processes", 2, "acts.py", "ends"),
        launch(folder, 2, 1, port, "--num_processes", 4, "--mixed_precision", "bf16", "acts.py",
               "ends", environment={SECRET: "one word"}),
    ]  # fmt: skip
    for launcher in launchers:
        assert launcher.wait() == 1
        assert "num_processes: 2 (machine 0), 4 (machine 1)" in launcher.output
        assert "MIXED_PRECISION: no (machine 0), bf16 (machine 1)" in launcher.output
        assert f"{SECRET}: not set (machine 0), set (machine 1)" in launcher.output
        assert "one word" not in launcher.output
        assert "ready" not in launcher.output


@pytest.mark.e2e
def test_the_failure_of_one_machine_ends_both(folder: Path) -> None:
    port = free_port()
    options = ("--num_processes", 2, "trains.py", "fails")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    assert [launcher.wait() for launcher in launchers] == [1, 1]
    assert "boom" in launchers[1].output
    told = launchers[0].output.rpartition("trainkit: machine 1 (")[2]
    assert "ValueError: boom" in told
    last = launchers[1].output.splitlines()[-1]
    assert "ValueError: boom" in last
    assert "machine 0 (" in last


@pytest.mark.e2e
def test_an_error_before_trainkit_is_imported_is_told_on_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LEAVE_SECONDS", 0.5)  # none of these processes would leave
    (folder / "wrong.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    nothing\ntime.sleep(60)\n"
    )
    port = free_port()
    options = ("--num_processes", 2, "wrong.py")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    assert [launcher.wait() for launcher in launchers] == [1, 1]
    for launcher in launchers:
        told = "NameError: name 'nothing' is not defined (wrong.py, line 3)"
        assert told in launcher.output.rpartition("\ntrainkit: ")[2], launcher.output


@pytest.mark.e2e
def test_a_job_of_two_machines_starts_again_after_a_failure(folder: Path) -> None:
    port = free_port()
    ports = ("--ports", f"{port}-{port + 20}")  # the first one is taken, by the meeting itself
    options = ("--num_processes", 2, "--max_restarts", 1, *ports, "acts.py", "once")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    assert [launcher.wait() for launcher in launchers] == [0, 0], launchers[1].output
    for launcher in launchers:
        assert launcher.output.count("restart 1 of at most 1") == 1
    secrets = re.findall(r"secret=(\w*)", "".join(each.output for each in launchers))
    assert len(secrets) == 4
    assert [len(secret) for secret in set(secrets)] == [32]  # that of machine 0, for all


@pytest.mark.e2e
@pytest.mark.parametrize("gone", [0, 1])
def test_the_death_of_a_launcher_ends_all_machines(
    gone: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LEAVE_SECONDS", 0.5)  # none of these processes would leave
    port = free_port()
    options = ("--num_processes", 4, "acts.py", "saves")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    for launcher in launchers:
        launcher.wait_for("ready", 2)
    launchers[gone].send(signal.SIGKILL)
    assert launchers[1 - gone].wait() == 1
    said = launchers[1 - gone].output
    assert f"machine {gone} (" in said
    assert "its launcher was killed" in said
    assert "report of the job: " in said
    assert said.count("saved") == 2
    pids = [int(pid) for each in launchers for pid in re.findall(r"pid=(\d+)", each.output)]
    end = time.monotonic() + 20
    while any(map(lives, pids)):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.e2e
def test_the_signal_of_one_machine_ends_both(folder: Path) -> None:
    port = free_port()
    options = ("--num_processes", 2, "trains.py", "endless")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    for launcher in launchers:
        launcher.wait_for("trains")
    launchers[1].send(signal.SIGTERM)
    assert [launcher.wait() for launcher in launchers] == [143, 143], launchers[0].output


@pytest.mark.e2e
def test_the_processes_of_all_machines_get_a_signal(folder: Path) -> None:
    port = free_port()
    options = ("--num_processes", 2, "acts.py", "saves")  # they do not know each other
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    for launcher in launchers:
        launcher.wait_for("ready")
    launchers[1].send(signal.SIGUSR1)
    assert [launcher.wait() for launcher in launchers] == [75, 75], launchers[0].output
    for launcher in launchers:
        assert launcher.output.count("saved") == 1
        assert "was asked to end (SIGUSR1)" in launcher.output
