"""Several launchers of one box stand for several machines: they train together, or say why not."""

from pathlib import Path

import pytest
import torch

from tests.cli.launcher import Launcher
from tests.cli.test_launch_processes import ACTS, TRAINS
from trainkit.cli.machine import free_port


def launch(folder: Path, machines: int, rank: int, port: int, *arguments: object) -> Launcher:
    place = ["--num_machines", machines, "--machine_rank", rank, "--main_process_port", port]
    command = ["launch", "--cpu", *place, "--main_process_ip", "127.0.0.1", *arguments]
    return Launcher(command, folder, output=f"output-{machines}-{rank}")


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


def test_machines_that_were_told_different_things_say_so(folder: Path) -> None:
    port = free_port()
    launchers = [
        launch(folder, 2, 0, port, "--num_processes", 2, "acts.py", "ends"),
        launch(folder, 2, 1, port, "--num_processes", 4, "--mixed_precision", "bf16", "acts.py",
               "ends"),
    ]  # fmt: skip
    for launcher in launchers:
        assert launcher.wait() == 1
        assert "num_processes: 2 (machine 0), 4 (machine 1)" in launcher.output
        assert "MIXED_PRECISION: no (machine 0), bf16 (machine 1)" in launcher.output
        assert "ready" not in launcher.output


@pytest.mark.e2e
def test_the_failure_of_one_machine_ends_both(folder: Path) -> None:
    port = free_port()
    options = ("--num_processes", 2, "trains.py", "fails")
    launchers = [launch(folder, 2, rank, port, *options) for rank in range(2)]
    assert [launcher.wait() != 0 for launcher in launchers] == [True, True]
    assert "boom" in launchers[1].output
