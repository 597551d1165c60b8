"""The key-value store by which the processes of a job find each other."""

import os
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainkit.basics import starters
from trainkit.distributed.world import World
from trainkit.errors import ConfigError, DistributedError

INIT_METHOD = "TRAINKIT_INIT_METHOD"
"""Environment variable with the rendezvous to use instead of `env://`."""

_JOINED = "TRAINKIT_JOINED"  # what a process says to those that it starts
_MEET_SECONDS = 1800  # pods of one job may start long after each other
_TASK_SECONDS = 300  # tasks are started together
_ANSWER_SECONDS = 60  # of process 0, once its port is open


class Rendezvous:
    """The key-value store of this process's job, and how many groups were made through it."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.method = ""
        self.pid = -1
        self.groups = 0

    def next_store(self, world: World) -> Store:
        """Return a store that no earlier group has written to; equal on all processes.

        Raises:
            ConfigError: Nobody says where the processes meet, or others meet there.
            DistributedError: Process 0 does not come.
        """
        method = os.environ.get(INIT_METHOD, "env://")
        if self.store is None or (self.method, self.pid) != (method, os.getpid()):
            self.store = _store(method, world)
            self.method, self.pid, self.groups = method, os.getpid(), 0
            for key in (f"trainkit/joined/{world.rank}", "trainkit/joined"):
                self.store.set(key, "")  # the launcher looks: nobody waits for who has ended
        self.groups += 1
        return PrefixStore(f"trainkit/{self.groups}", self.store)


def _store(method: str, world: World) -> Store:
    if method == "env://":
        host, port = _address(world)
        _join(f"number {world.rank} of the job at {host}:{port}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the launcher's own
            own = _open(host, port) if world.is_main else _connect(host, port)
            _claim(own, world, f"{host}:{port}")
            own.set_timeout(timedelta(seconds=_MEET_SECONDS))
            return own
    store: Store = next(rendezvous(method, world.rank, world.size))[0]
    return store


def _address(world: World) -> tuple[str, int]:
    """Return where process 0 listens, and say it to whatever reads torchrun's variables."""
    said = starters.in_torchrun_words(os.environ)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in said]
    if missing:
        raise ConfigError(
            f"The job asks for {world.size} processes, but "
            f"{' and '.join(f'`{name}`' for name in missing)} is not set, so they cannot find each "
            "other. Start it with torchrun, or name the machine of process 0 and a free port of "
            "it: `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...` with Open MPI, `mpirun "
            "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...` with others."
        )
    os.environ.update({name: said[name] for name in ("MASTER_ADDR", "MASTER_PORT")})
    port = said["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"`MASTER_PORT` must be the number of a port, but is {port!r}.")
    return said["MASTER_ADDR"], int(port)


def _join(as_what: str) -> None:
    """Note who this is for the programs that it starts; raise in one that takes its place."""
    pid, _, joined = os.environ.get(_JOINED, "").partition(" ")
    if joined == as_what and pid != str(os.getpid()):
        raise ConfigError(
            f"Process {pid}, which started this program, is {as_what} already: this one would wait "
            "for ever. Start it without `RANK` and `WORLD_SIZE` in its environment, and it is "
            "alone, or by `trainkit launch`, as a job of its own."
        )
    os.environ[_JOINED] = f"{os.getpid()} {as_what}"


def _open(host: str, port: int) -> Store:
    try:
        return TCPStore(host, port, is_master=True, multi_tenant=True, wait_for_workers=False)
    except RuntimeError as error:
        raise _not_ours(f"{host}:{port}", _first_line(error)) from None


def _connect(host: str, port: int) -> Store:
    seconds = _MEET_SECONDS if starters.find_task(os.environ) is None else _TASK_SECONDS
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise DistributedError(
                    f"Process 0 has not come to port {port} of `{host}` in {seconds} s: {error}. "
                    "Look at what it says; is `MASTER_ADDR` its machine?"
                ) from None
            time.sleep(0.2)
    answers: list[Store | RuntimeError] = []

    def ask() -> None:
        try:
            answers.append(TCPStore(host, port, is_master=False, wait_for_workers=False))
        except RuntimeError as error:
            answers.append(error)

    # In a thread: torch waits for ever for a program that listens and never answers.
    thread = threading.Thread(target=ask, name="rendezvous", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    answer = answers[0] if answers else RuntimeError("what listens there does not answer")
    if isinstance(answer, RuntimeError):
        raise _not_ours(f"{host}:{port}", _first_line(answer))
    return answer


def _claim(store: Store, world: World, where: str) -> None:
    """Raise where this is the store of other processes: each number is given once in a job."""
    job = f"trainkit/job/{starters.job_number(os.environ)}/{world.size}"
    if world.is_main:
        store.set(job, "")
    try:
        store.wait([job], timedelta(seconds=_ANSWER_SECONDS))
    except RuntimeError:
        raise _not_ours(where, "it belongs to another job.") from None
    mine = f"process {os.getpid()} of {socket.gethostname()}"
    first = store.compare_set(f"{job}/{world.rank}", "", mine).decode()
    if first != mine:
        raise _not_ours(where, f"both {first} and {mine} say that they are number {world.rank}.")


def _not_ours(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"The processes cannot meet at {where} (`MASTER_ADDR`, `MASTER_PORT`): {why} Is another "
        "program using the port? Set `MASTER_PORT` to another port, the same for all processes, "
        "and `RANK` to a number of its own for each."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") + "."
