"""What the machines of a job have agreed on in their meeting, and the store of its processes."""

import gc
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainkit.distributed.group import SECRET
from trainkit.errors import DistributedError
from trainkit.launch.link import Link
from trainkit.launch.network import job_interface, reach
from trainkit.launch.plan import Plan, ports_of
from trainkit.launch.settings import JobSettings
from trainkit.version import __version__
from trainkit.watch.listening import listen
from trainkit.watch.member import Member

__all__ = [
    "BACKLOG",
    "PREFIX",
    "PROBE_SECONDS",
    "Card",
    "Meeting",
    "alone",
    "open_store",
    "probe",
    "to_compare",
]

Card: TypeAlias = dict[str, Any]
"""Of a machine: `host`, `who` (a process), `told` (settings), `address`, `port` (see `Meeting`),
`range` (where gloo will listen), `trial` (the ports there that others try)."""

PREFIX = "trainkit/meeting"
_STORE_SECONDS = 5.0  # in which a store answers
PROBE_SECONDS = 4.0  # in which a port answers, where the machine is known to live
_MOST_PROBED = 64  # other machines that each one tries to connect to
BACKLOG = 2048
_PAUSE = 0.1


@dataclass(kw_only=True, slots=True)
class Meeting:
    """The machines of a job, which have found each other.

    Args:
        cards: What each has said of itself; others can connect to its `port` as long as it lives.
        address: Of machine 0, as this one reaches it.
        port: Of the store there.
        link: Between the launchers.
        store: Through which the processes meet; on machine 0 alone.
        door: What listens at the port of this machine's card.
    """

    machine: int
    cards: Mapping[int, Card]
    address: str
    port: int
    link: Link
    store: TCPStore | None = None
    door: socket.socket | None = None

    @property
    def size(self) -> int:
        """How many machines there are."""
        return len(self.cards)

    @property
    def own(self) -> str:
        """The address by which others reach this machine."""
        return str(self.cards[self.machine]["address"])

    @property
    def interface(self) -> str | None:
        """The interface by which it reaches them; None where nobody says it."""
        others = (card["address"] for machine, card in self.cards.items() if machine)
        return job_interface([self.address, *others])

    def begin(self, attempt: int) -> None:
        """Wait until all machines are ready for an attempt; each has a store of its own.

        Raises:
            JobEnded: They will not be.
        """
        is_first = attempt == 0 and self.size == 1
        self.link.come_to(attempt, (lambda: None) if is_first else self._renew_store)

    def _renew_store(self) -> None:
        """Open a new store, at the address of the job; what was said in the last one goes."""
        self.store = None
        end = time.monotonic() + _STORE_SECONDS
        while self.store is None:
            try:
                self.store = open_store(self.own, (self.port,))
            except OSError:  # torch has not closed the last one yet
                if time.monotonic() > end:
                    raise
                gc.collect()  # an error of the meeting may hold frames that know the last one
                time.sleep(_PAUSE)
        said = PrefixStore(PREFIX, self.store)  # to those who come too late
        said.set("host", json.dumps([self.size, self.cards[0]["who"]]))
        said.set("verdict", "")

    def has_joined(self, rank: int | None = None) -> bool:
        """Return whether a process, or any, has come to the others; known on machine 0."""
        key = "trainkit/joined" if rank is None else f"trainkit/joined/{rank}"
        return self.store is not None and self.store.check([key])

    def reaches(self, machine: int) -> bool:
        """Return whether another machine lives, though its launcher may have ended."""
        place = self.cards[machine]["address"], self.cards[machine]["port"]
        try:
            socket.create_connection(place, PROBE_SECONDS / 2).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return True

    def cut_off(self) -> str:
        """Return why this machine cannot connect to others; empty where it can."""
        for step in range(1, min(self.size, _MOST_PROBED + 1)):
            other = (self.machine + step) % self.size
            if other and not self.reaches(other):
                return f"{self.link.name(self.machine)} cannot reach {self.link.name(other)}"
        return ""

    def close(self) -> None:
        """Leave the other machines."""
        self.link.close()
        if self.door is not None:
            self.door.close()


def alone(job: JobSettings, port: int) -> Meeting:
    """Return the meeting of a machine that is the only one; all stays on its loopback."""
    here, host = Member.this(), "127.0.0.1"
    store = open_store(host, (port, *ports_of(job)))  # somebody may have been quicker
    card = {"host": here.host, "who": str(here), "address": host}
    link = Link(0, 1, None)
    link.names[0] = here.host
    return Meeting(
        machine=0, cards={0: card}, address=host, port=store.port, link=link, store=store
    )


def to_compare(plan: Plan) -> dict[str, str]:
    """Return what all machines must have alike: settings, versions, the script."""
    script = plan.script
    name = Path(script.path).name
    if not script.is_module and not script.is_program:
        name += f" ({hashlib.sha256(Path(script.path).read_bytes()).hexdigest()[:12]})"
    python = platform.python_version()
    found = {"Python": python, "torch": torch.__version__, "trainkit": __version__, "script": name}
    return {**plan.agreed, **found, SECRET: "set" if os.environ.get(SECRET) else "not set"}


def open_store(host: str, ports: Iterable[int]) -> TCPStore:
    """Return a store whose server listens at an address of this machine; empty: at all.

    Raises:
        OSError: The ports are taken.
    """
    listening = listen(host, ports, BACKLOG)
    return TCPStore(
        host or "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=listening.detach(),
    )


def probe(machine: int, cards: Mapping[int, Card]) -> str:
    """Return why a machine cannot connect to others, at the ports of launchers or of gloo."""
    own = f"machine {machine} ({cards[machine]['host']})"
    for step in range(1, min(len(cards), _MOST_PROBED + 1)):
        other = (machine + step) % len(cards)
        card, name = cards[other], f"machine {other} ({cards[other]['host']})"
        for port in (card["port"], *card["trial"]):
            try:
                reach(card["address"], port, PROBE_SECONDS, name)
            except DistributedError as error:
                if port == card["port"]:
                    return f"{own} is cut off: {error}"
                return (
                    f"{own} reaches {name} at port {card['port']}, but not at {port}, and gloo, as "
                    f"torch's other back ends, listens at any of {card['range']} there, whatever "
                    "`--ports` says. Open these ports between all machines, or name open ones on "
                    'each, as root: `sysctl -w net.ipv4.ip_local_port_range="FIRST LAST"`'
                )
    return ""
