"""The side of the harness: starts the workers, and asks them."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.compare.channel import Channel, Closed, Message
from benchmarks.compare.meter import Mode
from benchmarks.compare.workload import Unsupported, Workload

__all__ = ["Failed", "Peer", "Team"]

LIMIT_SECONDS = 180.0  # for one run
ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A run gave no figures; the message says why."""


class Peer:
    """The process that has a peer imported and forks for each job.

    Args:
        name: Of the peer's module.

    Attributes:
        version: Of its package; None where it is not installed.
        missing: Why it cannot be imported.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_SECONDS)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | os.environ
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare.worker", name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
        )
        theirs.close()
        self._channel = Channel(ours)
        self.version: str | None = None
        self.missing = ""

    def wait(self) -> None:
        """Wait until the import is over; the attributes then tell how it went."""
        try:
            hello = self._channel.receive()
        except Closed as error:
            hello = {"missing": str(error)}
        self.version = hello.get("version")
        self.missing = hello.get("missing", "")

    def start(self, workload: Workload, environment: dict[str, str], log: Path) -> Channel:
        """Start one process of a job; return the channel to it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_SECONDS)
        job = {"workload": workload.name, "environment": environment, "log": str(log)}
        socket.send_fds(self._channel.socket, [Channel.encode(job)], [theirs.fileno()])
        theirs.close()
        return Channel(ours)

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.wait()


@dataclass
class Team:
    """The processes that do one workload for one peer; they wait until they are asked."""

    channels: list[Channel]
    log: Path

    @classmethod
    def start(cls, peer: Peer, workload: Workload, logs: Path) -> Self:
        """Start them, with the environment that torchrun would set."""
        size = workload.processes
        shared = {} if size == 1 else {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RUN_ID": "compare",
        }  # fmt: skip
        log = logs / f"{workload.name}-{peer.name}.log"
        channels = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            place = log if rank == 0 else log.with_suffix(f".{rank}.log")
            channels.append(peer.start(workload, shared | own, place))
        return cls(channels, log)

    def run(self, mode: Mode, product: Path | None = None) -> Message:
        """Let them work once; return the answer of the first, with the seconds of the slowest.

        Raises:
            Unsupported: The peer cannot do it.
            Failed: It raised, died or took too long.
        """
        for rank, channel in enumerate(self.channels):
            path = str(product) if product is not None and rank == 0 else None
            channel.send(mode=mode, product=path)
        answers = []
        for channel in self.channels:
            try:
                answers.append(channel.receive())
            except Closed as error:
                raise Failed(f"{error}; see {self.log}") from error
            if "error" in answers[-1]:
                raise Failed(answers[-1]["error"])
            if "unsupported" in answers[-1]:
                raise Unsupported(answers[-1]["unsupported"])
        return answers[0] | {"seconds": max(answer["seconds"] for answer in answers)}

    def close(self) -> None:
        """Let them end."""
        for channel in self.channels:
            channel.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
