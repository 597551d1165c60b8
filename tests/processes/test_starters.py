"""Tasks of srun and mpirun, and pods, find their place; where they cannot, nothing trains alone."""

import os
import runpy
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from trainkit.basics.starters import find_task, in_torchrun_words, sees_own_devices
from trainkit.distributed import rendezvous
from trainkit.distributed.world import World
from trainkit.errors import ConfigError

Variables = dict[str, str]


def of_srun(rank: int, per_node: str = "2(x2),1", hosts: str = "gpu[07-09]") -> Variables:
    """Return what `srun` sets in a task, as Slurm 22.05 does."""
    nodes = {"2(x2),1": (0, 0, 1, 1, 2), "1(x2)": (0, 1), "2": (0, 0)}[per_node]
    local = nodes[:rank].count(nodes[rank])
    return {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local), "SLURM_NODEID": str(nodes[rank]),
        "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_STEP_NODELIST": hosts,
    }  # fmt: skip


def of_mpirun(rank: int, size: int, local_size: int) -> Variables:
    """Return what Open MPI's `mpirun` sets in a task."""
    return {
        "PMIX_NAMESPACE": "prterun-host-5@1", "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }  # fmt: skip


HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
                "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1, 0, 1)),
        (of_srun(0), (0, 5, 0, 2)),
        (of_srun(3), (3, 5, 1, 2)),
        (of_srun(4), (4, 5, 0, 1)),
        (BATCH_SCRIPT, (0, 1, 0, 1)),
        ({**of_srun(0, "2"), "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0, 1)),
        (of_mpirun(3, 4, 2), (3, 4, 1, 2)),
        ({**of_srun(1, "1(x2)"), **of_mpirun(3, 4, 2)}, (3, 4, 1, 2)),  # mpirun in a batch script
        (HYDRA, (3, 4, 1, 2)),
        ({**of_srun(3), **TORCHRUN}, (0, 1, 0, 1)),  # torchrun in a task
        ({**of_srun(3), "RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),  # alone, as it asks to be
        ({**of_srun(3), "WORLD_SIZE": "5"}, (3, 5, 1, 2)),
        (POD, (1, 2, 0, 1)),
        ({**POD, "MASTER_ADDR": "127.0.0.1"}, (1, 2, 1, 2)),
    ],
)
def test_a_process_finds_its_place(variables: Variables, place: tuple[int, ...]) -> None:
    world = World.from_env(variables)
    assert (world.rank, world.size, world.local_rank, world.local_size) == place


def test_tasks_meet_where_the_first_one_is() -> None:
    first = in_torchrun_words(of_srun(0))
    assert first["MASTER_ADDR"] == "gpu07"
    assert in_torchrun_words(of_srun(4))["MASTER_PORT"] == first["MASTER_PORT"]
    other = in_torchrun_words({**of_srun(0), "SLURM_STEP_ID": "1"})
    assert other["MASTER_PORT"] != first["MASTER_PORT"]
    hosts = {"login1,gpu[1-2]": "login1", "r[1-2]n[03,05]": "r1n03", "tux[1,3]-ib,x": "tux1-ib"}
    for listed, host in hosts.items():
        assert in_torchrun_words(of_srun(0, "1(x2)", listed))["MASTER_ADDR"] == host
    assert in_torchrun_words(of_srun(1, "2"))["MASTER_ADDR"] == "127.0.0.1"
    assert in_torchrun_words(of_mpirun(1, 2, 2))["MASTER_ADDR"] == "127.0.0.1"
    assert "MASTER_ADDR" not in in_torchrun_words(of_mpirun(1, 4, 2))
    assert in_torchrun_words({**of_srun(0), "MASTER_ADDR": "x"})["MASTER_ADDR"] == "x"


def test_only_a_task_may_see_devices_of_its_own() -> None:
    assert sees_own_devices(of_srun(1, "2"))
    assert not sees_own_devices(POD)
    assert not sees_own_devices({**of_srun(1, "2"), "TORCHELASTIC_RUN_ID": "none"})


MACHINE = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (MACHINE, r"one of 2 machines.*`trainkit launch SCRIPT`"),
        ({**MACHINE, "PET_NNODES": "1:4"}, r"one of 1:4 machines"),
        ({**MACHINE, **POD, "PET_NPROC_PER_NODE": "8"}, r"one of 2 machines"),
        ({"WORLD_SIZE": "4"}, r"asks for 4 processes, but `RANK`"),
        ({**of_srun(3), "WORLD_SIZE": "4"}, r"asks for 4 processes, but `RANK`"),
        ({**of_srun(3), "SLURM_NODEID": "3"}, r"node '3' of a step with '2\(x2\),1'"),
    ],
)
def test_what_would_train_alone_or_wait_is_refused(variables: Variables, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        World.from_env(variables)


@pytest.mark.parametrize(
    "variables",
    [{**MACHINE, "PET_NNODES": "1"}, {**MACHINE, **TORCHRUN}, {**MACHINE, **POD},
     {**MACHINE, **of_srun(1)}],
)  # fmt: skip
def test_what_has_a_place_is_not(variables: Variables) -> None:
    World.from_env(variables)


def test_a_terminal_of_several_tasks_is_refused_but_not_the_step_that_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = {**of_srun(0), "SLURM_PTY_PORT": "4242"}
    reader, writer = os.openpty()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, flags: os.dup(writer))  # it has a terminal
        with pytest.raises(ConfigError, match="write `srun --overlap python SCRIPT`"):
            World.from_env(shell)
        assert World.from_env({**shell, "SLURM_STEP_NUM_TASKS": "1"}).size == 1
        assert World.from_env({**shell, "RANK": "0", "WORLD_SIZE": "1"}).size == 1
        assert find_task(shell) is None  # a launcher may be started in it
    os.close(reader)
    os.close(writer)
    monkeypatch.setattr(os, "open", _no_terminal)
    assert World.from_env({**shell, "SLURM_STEP_ID": "1"}).size == 5


def _no_terminal(path: str, flags: int) -> int:
    raise OSError(6, "No such device or address")


def test_a_task_alone_is_none() -> None:
    assert find_task(of_mpirun(0, 1, 1)) is None
    assert find_task({}) is None


TRAINS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Trainer

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
trainer = Trainer(max_epochs=2, callbacks=[], strategy=sys.argv[1])
model = nn.Linear(4, 1)
trainer.fit(model, DataLoader(data, batch_size=24 // trainer.processes.num_processes),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss_fn=nn.MSELoss())
print(trainer.processes.num_processes, *model.weight.flatten().tolist())
"""


class Tasks:
    """Processes that run one script with variables of their own, as a starter starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text(TRAINS)

    def run(self, *variables: Mapping[str, str]) -> list[tuple[int, str]]:
        """Return exit code and output of each process, in order."""
        fork = get_context("fork")
        processes = [
            fork.Process(target=self._be, args=(number, each))
            for number, each in enumerate(variables)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [-1 if process.exitcode is None else process.exitcode for process in processes]
        for process in processes:
            process.kill()
        return [(code, self._output(number).read_text()) for number, code in enumerate(codes)]

    def _output(self, number: int) -> Path:
        return self.folder / f"output-{number}"

    def _be(self, number: int, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        sys.argv = ["script.py", "auto"]
        with self._output(number).open("w") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                runpy.run_path(str(self.folder / "script.py"), run_name="__main__")
            except ConfigError as error:
                print(f"ConfigError: {error}", flush=True)
                os._exit(1)
            file.flush()
        os._exit(0)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 2)
    return Tasks(tmp_path)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A program that listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_tasks_of_srun_are_one_training(tasks: Tasks) -> None:
    ended = tasks.run(of_srun(0, "2"), of_srun(1, "2"))
    assert [code for code, _ in ended] == [0, 0], ended
    (alone,) = tasks.run({})
    weights = [[float(word) for word in text.split()] for _, text in (*ended, alone)]
    assert [each[0] for each in weights] == [2, 2, 1]
    assert weights[0] == weights[1]
    torch.testing.assert_close(weights[0][1:], weights[2][1:])  # sums in another order


@pytest.mark.e2e
def test_tasks_of_mpirun_are_one_training(tasks: Tasks) -> None:
    for each in tasks.run(of_mpirun(0, 2, 2), of_mpirun(1, 2, 2)):
        assert each[0] == 0
        assert each[1].startswith("2 ")


def test_a_port_that_is_taken_is_an_error_for_all(tasks: Tasks, listening: socket.socket) -> None:
    port = {"MASTER_PORT": str(listening.getsockname()[1])}
    first, second = tasks.run({**of_srun(0, "2"), **port}, {**of_srun(1, "2"), **port})
    assert (first[0], second[0]) == (1, 1)
    assert "The processes cannot meet at 127.0.0.1" in first[1]
    assert "The processes cannot meet at 127.0.0.1" in second[1]


@pytest.mark.e2e
def test_the_port_of_another_job_is_an_error_for_all(tasks: Tasks) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = {"MASTER_PORT": str(store.port)}
    first, second = tasks.run({**of_srun(0, "2"), **port}, {**of_srun(1, "2"), **port})
    assert "The processes cannot meet at 127.0.0.1" in first[1]
    assert "it belongs to another job" in second[1]
    assert (first[0], second[0]) == (1, 1)


def test_a_number_that_two_processes_have_is_an_error(tasks: Tasks) -> None:
    port = {"MASTER_PORT": str(_free_port())}
    places = [{**of_srun(0, "2"), **port, "RANK": number} for number in ("0", "1", "1")]
    ended = tasks.run(*places)
    # One that comes when the other two have met hears that it met nobody.
    said = ("say that they are number 1", "`RANK` to a number of its own for each")
    assert any(each in text for _, text in ended for each in said), ended


def test_a_program_that_a_process_starts_takes_no_place_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TRAINKIT_JOINED": ""}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    members = [World(rank=rank, size=2) for rank in (0, 1)]
    kept = rendezvous.Rendezvous()
    kept.next_store(members[0])
    kept.next_store(members[0])
    with get_context("fork").Pool(1) as pool:
        said = pool.map(_meet, members)
    assert "started this program, is number 0 of the job" in said[0]
    assert "Start it without `RANK` and `WORLD_SIZE`" in said[0]
    assert said[1] == "met"


def _meet(world: World) -> str:
    try:
        rendezvous.Rendezvous().next_store(world)
    except ConfigError as error:
        return str(error)
    return "met"


def test_machines_whose_first_one_is_unknown_get_the_line_to_write(tasks: Tasks) -> None:
    for code, text in tasks.run(of_mpirun(0, 4, 2), HYDRA):
        assert code == 1
        assert "asks for 4 processes, but `MASTER_ADDR`" in text
        assert "-x MASTER_ADDR=HOST" in text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
