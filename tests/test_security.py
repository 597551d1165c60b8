"""What strangers can do to a job over the network (docs/security.md): nothing that changes it."""

import os
import pickle
import random
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.launcher import Launcher
from tests.helpers.ranks import run_ranks
from tests.system.harness import Job, running
from trainkit import Accelerator
from trainkit.containers import wire_format
from trainkit.distributed import Processes
from trainkit.distributed.group import SECRET
from trainkit.errors import DataError, DistributedError
from trainkit.watch import connections, job_watch
from trainkit.watch.job_watch import JobWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

RANDOM_MESSAGES = 30  # to each port; `benchmarks.hosts` sends more
HELLO = b'{"kind": "hello", "token": %s, "rank": 1, "who": ["a", "b", 1, "2", ""]}\n'
CRAFTED = [
    b"[" * 60_000 + b"\n",
    b'{"a":' * 60_000 + b"\n",
    HELLO % b'"\\ud800"',
    HELLO % b'"wrong"',
    HELLO % b"null",
    HELLO % b"{}",
    HELLO % (b'"' + b"x" * 100_000 + b'"'),
    b'{"kind": "gone", "from": 1}\n{"kind": "failed", "from": 1, "text": "x", "fit": 0}\n',
    b'{"kind": "verdict", "text": "x", "process": 1, "frozen": [0]}\n',
    b'{"kind": []}\n',
    b"null\n" * 1_000,
    b"\n" * 5_000,
    b"9" * 5_000 + b"\n",
    b"1e999\n-0\nNaN\n",
    b"\xff\xfe{\x00}\x00\n\x00",
    b"\x00" * 8,
    struct.pack("<q", 1) * 64,
    struct.pack("<Q", (1 << 64) - 1) * 64,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    pickle.dumps(ValueError("x")),
]


def ports(pids: list[int]) -> dict[int, str]:
    """Return where processes of this machine listen: the address by the port."""
    listening: dict[str, tuple[int, str]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                place, _, port = fields[1].partition(":")
                raw = bytes.fromhex(place)
                raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                listening[fields[9]] = int(port, 16), socket.inet_ntop(family, raw)
    found: dict[int, str] = {}
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
                    if inode is not None and inode[1] in listening:
                        number, host = listening[inode[1]]
                        found[number] = host
    return found


def attack(host: str, port: int, count: int) -> bool:
    """Send crafted and random messages to a port of this machine; return whether it lets us in."""
    draw = random.Random(port)
    place = ("127.0.0.1" if host in ("::", "0.0.0.0") else host, port)
    try:
        socket.create_connection(place, timeout=1).close()
    except TimeoutError:
        return False
    messages = [*CRAFTED, *(draw.randbytes(draw.choice([1, 9, 300, 3000])) for _ in range(count))]
    silent = [socket.create_connection(place) for _ in range(5)]
    for message in messages:
        with suppress(OSError), socket.create_connection(place, timeout=10) as one:
            one.sendall(message)
            if draw.random() < 0.2:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for each in silent:
        each.close()
    return True


def _train(rank: int, pipe: int, folder: Path) -> int:
    store = folder / "port"
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.with_suffix(".new").write_text(str(free.getsockname()[1]))
        store.with_suffix(".new").rename(store)
    while not store.exists():
        time.sleep(0.01)
    os.environ["TRAINKIT_INIT_METHOD"] = f"tcp://127.0.0.1:{store.read_text()}"
    os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    step = 0
    while True:
        accelerator.backward(model(torch.full((1, 4), float(rank))).sum())
        step += 1
        (folder / f"step-{rank}").touch()
        if accelerator.gather(torch.tensor([(folder / "enough").exists()])).all():
            break
    gradient = model.module.weight.grad / step
    (folder / f"result-{rank}").write_text(str(gradient.tolist()))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 0


@pytest.mark.e2e
def test_messages_of_strangers_change_nothing(tmp_path: Path) -> None:
    job: Job
    with running(2, tmp_path, partial(_train, folder=tmp_path)) as job:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("step-*"))) < 2:
            assert time.monotonic() < end, job.log()
            time.sleep(0.02)
        inherited = ports([os.getpid()])  # such as a store of an earlier test
        found = {port: host for port, host in ports(job.pids).items() if port not in inherited}
        assert len(found) == 6, found  # the store, the watch, two of gloo on each process
        admitted = [attack(host, port, RANDOM_MESSAGES) for port, host in found.items()]
        assert sum(admitted) == 2, found  # gloo's let nobody in, once all are connected
        (tmp_path / "enough").touch()
        assert job.wait(120), job.log()
    assert job.codes == {0: 0, 1: 0}, job.log()
    assert "trainkit" not in job.log()
    results = {path.read_text() for path in tmp_path.glob("result-*")}
    assert results == {str([[0.5] * 4] * 4)}


class _Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def _send_a_pickle(rank: int, path: Path, asks: bool) -> str:
    accelerator = Accelerator(cpu=True)
    packet = wire_format.encode([_Planted(path)], allow_pickle=True)
    if rank == 1:
        for prefix in (b"", b"", b"", b"+", b""):
            accelerator.processes.all_gather_bytes(prefix + packet)
        return ""
    told = []
    calls: list[Callable[[], Any]] = [
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.gather_for_metrics(torch.ones(1)),
        lambda: accelerator.gather_for_metrics(["text"]),
        lambda: accelerator.processes.all_gather_objects("text"),
    ]
    for call in calls:
        with pytest.raises(DistributedError) as caught:
            call()
        told.append(str(caught.value))
    assert not path.exists()
    accelerator.processes.all_gather_bytes(b"")
    return "\n".join(told)


def test_a_pickle_runs_only_where_the_call_asked_for_one(tmp_path: Path) -> None:
    told, _ = run_ranks(2, _send_a_pickle, tmp_path / "planted", False)
    assert told.count("sent a pickled object, which runs code, and this call takes none") == 4


def _gather_objects(rank: int) -> tuple[int, str]:
    accelerator = Accelerator(cpu=True)
    samples: Any = [1, 2]
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=1))
    found, told = [], ""
    for _ in loader:
        found += accelerator.gather_for_metrics([Path("x")], use_gather_object=True)
        try:
            accelerator.gather_for_metrics([Path("x")])
        except DataError as error:
            told = str(error)
    return len(found), told


def test_objects_are_gathered_where_the_call_asks_for_it() -> None:
    for count, told in run_ranks(2, _gather_objects):
        assert count == 2
        name = f"{type(Path()).__module__}.PosixPath"  # Python 3.13 has another module for it
        assert f"`{name}` cannot be sent to other processes without pickle" in told
        assert "use_gather_object=True" in told


# The secret.


def _join(rank: int, secrets: list[str | None]) -> str:
    secret = secrets[rank]
    if secret is not None:
        os.environ[SECRET] = secret
    else:
        os.environ.pop(SECRET, None)
    try:
        Processes.start()
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("secrets", [["a", "b"], ["a", None], [None, "a"]])
def test_who_does_not_know_the_secret_is_no_member(secrets: list[str | None]) -> None:
    for told in run_ranks(2, _join, secrets):
        assert "does not know its secret (`TRAINKIT_SECRET`)" in told


@pytest.mark.e2e
@pytest.mark.parametrize("secrets", [["a", "a"], [None, None]])
def test_a_job_with_one_secret_starts(secrets: list[str | None]) -> None:
    assert run_ranks(2, _join, secrets) == ["", ""]


_SHOW = """
import os
from tests.test_security import ports
from trainkit import Accelerator

accelerator = Accelerator()
pids = accelerator.gather_object([os.getpid()]) + [os.getppid()]
if accelerator.is_main_process:
    found = ports(pids)
    print("listens at", len(found), *sorted(set(found.values())))
    print("knows", len(os.environ["TRAINKIT_SECRET"]))
    words = [open(f"/proc/{pid}/cmdline").read() for pid in pids]
    print("told", any(os.environ["TRAINKIT_SECRET"] in text for text in words))
"""


@pytest.mark.e2e
def test_a_job_of_one_machine_listens_on_its_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(_SHOW)
    root = str(Path(__file__).resolve().parent.parent)
    environment = {"PYTHONPATH": root}
    arguments = ["launch", "--cpu", "--num_processes", "2", script]
    launcher = Launcher(arguments, tmp_path, environment=environment, forked=True)
    assert launcher.wait() == 0, launcher.output
    assert re.search(r"listens at [4-9] 127\.0\.0\.1\n", launcher.output), launcher.output
    assert "knows 32\ntold False\n" in launcher.output


# Descriptors.


def _fill() -> list[int]:
    """Leave this process no descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    return taken


def _full(rank: int) -> float:
    processes = Processes.start()
    processes.barrier()
    if rank:
        processes.barrier()
        return 0.0
    assert isinstance(processes.watch, JobWatch)
    monitor = processes.watch._monitor
    port = processes.watch._this.links._address.port
    strangers = [socket.socket() for _ in range(3)]
    task = os.open(f"/proc/self/task/{monitor._thread.native_id}/stat", os.O_RDONLY)

    def used() -> float:
        fields = os.pread(task, 1000, 0).decode().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    taken = _fill()
    for one in strangers:  # the kernel takes their calls; nobody has a descriptor for them
        one.connect(("127.0.0.1", port))
    before = used()
    time.sleep(4)
    spent = used() - before
    for each in taken:
        os.close(each)
    for one in strangers:
        one.close()
    processes.barrier()
    return spent


@pytest.mark.e2e
def test_a_watch_without_descriptors_does_not_spin() -> None:
    assert run_ranks(2, _full)[0] < 1.0


def _cannot_watch(rank: int) -> bool:
    reach = connections.reach_server

    def full(*args: Any, **kwargs: Any) -> Any:
        taken = _fill()
        try:
            return reach(*args, **kwargs)
        finally:
            for each in taken:
                os.close(each)

    pytest.MonkeyPatch().setattr(job_watch, "reach_server", full)
    processes = Processes.start()
    processes.barrier()
    return processes.watch is not None


def test_who_cannot_watch_says_so_before_it_trains(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(2, _cannot_watch) == [True, False]
    told = capfd.readouterr().err
    assert "trainkit: process 1 cannot reach process 0 at 127.0.0.1," in told
    assert "Too many open files" in told


def test_strangers_take_few_descriptors() -> None:
    server, address = connections.open_server(2, one_machine=True)
    callers: list[socket.socket] = []
    try:
        for _ in range(2 * connections._MOST_STRANGERS):
            callers.append(socket.create_connection((address.host, address.port), timeout=0.5))
            server.poll(0)
            server.poll(0)
    except TimeoutError:
        pass  # the queue of the kernel is full as well
    finally:
        assert len(server._strangers) == connections._MOST_STRANGERS
        for one in callers:
            one.close()
        found: list[connections.Links | None] = []
        reach = partial(connections.reach_server, address, 1, 2)
        caller = threading.Thread(target=lambda: found.append(reach()))
        caller.start()
        while caller.is_alive():
            server.poll(0.01)
        server.close()
    assert found[0] is not None
    found[0].close()
