"""One process of a job, as the other processes of its machine see it."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a job, as it was when the job began.

    Args:
        host: The name of its machine.
        machine: Equal for processes that can see and signal each other.
        pid: Its number there.
        started: When it began, so that no later process of the same number is meant.
        number: Of its machine in the job, where a launcher has counted them.
    """

    host: str
    machine: str
    pid: int
    started: str
    number: str = ""

    @classmethod
    def this(cls) -> "Member":
        parts = [socket.gethostname()]
        with suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
            parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
        number = os.environ.get("GROUP_RANK", "")
        return cls(parts[0], " ".join(parts), os.getpid(), started_at(os.getpid()), number)

    @classmethod
    def parse(cls, message: Any) -> "Member | None":
        """Return the process that another one is, by what it has told; None where that is none."""
        kinds = [type(part) for part in message] if isinstance(message, list) else []
        return cls(*message) if kinds == [str, str, int, str, str] else None

    def as_list(self) -> list[Any]:
        """Return what travels: the arguments of `Member`."""
        return [self.host, self.machine, self.pid, self.started, self.number]

    @override
    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def place(self) -> str:
        """Return which machine it runs on, in words."""
        return f"machine {self.number} ({self.host})" if self.number else f"machine {self.host}"

    def is_here(self) -> bool:
        """Return whether it runs on this machine, where this process can look at it."""
        return self.machine == Member.this().machine

    def lives(self) -> bool:
        """Return whether this process of the own machine has not ended; not if unknown."""
        return started_at(self.pid) == self.started and stat_of(self.pid)[:1] != ["Z"]

    def used(self) -> float:
        """Return for how many seconds this process of the own machine has used a processor."""
        ticks = [*map(int, stat_of(self.pid)[11:13])]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0

    def doing(self) -> str:
        """Return why a process of this machine does not answer, in words."""
        return {
            "T": "it is stopped (SIGSTOP)",
            "t": "a debugger holds it",
            "D": "it waits for a disk or a file system",
            "Z": "it has ended",
            "R": "it holds the interpreter lock, or the machine is too busy to run it",
        }.get("".join(stat_of(self.pid)[:1]), "it holds the interpreter lock, and lets nobody in")

    def is_stopped(self, state: str = "T") -> bool:
        """Return whether this process of the own machine does not run; "t": for a debugger."""
        return stat_of(self.pid)[:1] == [state]

    def kill(self, signum: int) -> bool:
        """Send a signal to this process of the own machine, if it still is the one."""
        if started_at(self.pid) != self.started:
            return False
        with suppress(OSError):
            os.kill(self.pid, signum)
            return True
        return False


def started_at(pid: int) -> str:
    """Return when a process of this machine began, in the kernel's own count."""
    fields = stat_of(pid)
    return fields[19] if len(fields) > 19 else ""


def stat_of(pid: int | str) -> list[str]:
    """Return what the kernel says of a process or thread, from its state on."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
