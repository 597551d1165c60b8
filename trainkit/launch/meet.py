"""The machines of a job meet, before any process is started, and say what keeps them apart.

Machine 0 opens a store of torch. Each of the others finds it, leaves a card there, connects to the
launcher of machine 0, and waits for the verdict, which is the same for all.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainkit.errors import DistributedError, listed
from trainkit.launch.link import Link
from trainkit.launch.meeting import BACKLOG, PREFIX, PROBE_SECONDS, Card, Meeting, open_store, probe
from trainkit.launch.network import addresses_of, is_own, kernel_ports, reach
from trainkit.launch.plan import port_of, ports_of
from trainkit.launch.settings import JobSettings
from trainkit.version import __version__
from trainkit.watch.connections import Address, Links
from trainkit.watch.listening import listen
from trainkit.watch.member import Member

__all__ = ["meet"]

_LATE_SECONDS = 5.0  # for those who come after something was found wrong, to hear of it
_HEARD_SECONDS = 5.0  # in which they hear it
_STORE_SECONDS = 5.0  # in which a store answers
_PAUSE = 0.1

_Answer = TypeVar("_Answer")


def meet(job: JobSettings, told: Mapping[str, str], fault: str = "") -> Meeting:
    """Meet the other machines; all go on, or all raise the same.

    Args:
        told: What must be equal on all machines, by name.
        fault: Why this machine cannot do its part.

    Raises:
        DistributedError: They do not come together; says why.
    """
    here, end = Member.this(), time.monotonic() + job.meeting_timeout
    card = {"host": here.host, "who": str(here), "told": {**told, "num_machines": job.num_machines}}
    found: list[str] | None = None
    if job.machine_rank == 0:
        with suppress(OSError):
            found = addresses_of(str(job.main_process_ip), port_of(job))
        if found is None or any(map(is_own, found)):
            return _Host(job, card, end, found).meet(fault)
    # As long as `_Guest._hear` waits, and a little more.
    seconds = 2 * job.meeting_timeout + 5 * PROBE_SECONDS
    return _in_time(_Guest(job, card, end).meet, fault, seconds=seconds)


def _in_time(call: Callable[..., _Answer], *arguments: Any, seconds: float) -> _Answer:
    """Return what a call returns, on a thread: torch waits for a server that is silent for ever.

    Raises:
        DistributedError: It does not return in time.
    """
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise DistributedError(
            f"what listens at the port of machine 0 has said nothing for {seconds:g} s: it is no "
            "launcher of trainkit, or machine 0 is frozen or gone. Perhaps the port is taken by "
            "another program: pass another `--main_process_port`, the same on all machines"
        ) from None


def _listen(host: str, allowed: Sequence[int], setting: str) -> socket.socket:
    try:
        return listen(host, allowed, BACKLOG)
    except OSError as error:
        raise DistributedError(
            f"None of the ports of this machine in {setting} is free: {error}. Give the job more"
        ) from None


def _open_door(host: str, job: JobSettings) -> socket.socket:
    return _listen(host, ports_of(job), f"`--ports` {job.ports or 'any'}")


def _open_trial(host: str, card: Card) -> list[socket.socket]:
    """Listen for the others at the ends of where gloo and NCCL will, and note it on the card."""
    free = kernel_ports()
    card["range"] = f"{free[0]}-{free[-1]}"
    setting = f"`net.ipv4.ip_local_port_range` {card['range']}"
    trial = [_listen(host, ports, setting) for ports in (free, free[::-1])]
    card["trial"] = [one.getsockname()[1] for one in trial]
    return trial


class _Host:
    """Machine 0 at the meeting: it waits for the others, and judges."""

    def __init__(
        self, job: JobSettings, card: Card, end: float, found: Sequence[str] | None
    ) -> None:
        self._job = job
        self._end = end
        self._cards: dict[int, Card] = {0: card}
        self._port = port_of(job)
        self._link: Link | None = None
        self._trial: list[socket.socket] = []
        own = [address for address in found or () if is_own(address)]
        # Debian's name for itself is a loopback address: how others come is seen when they do.
        is_loopback = any(each.startswith("127.") or each == "::1" for each in own)
        is_meant = job.main_process_ip in (*own, "localhost")
        self._address = own[0] if is_meant or (len(own) == 1 and not is_loopback) else ""
        self._hint = "" if found is not None else ", a name that it does not know itself"
        try:
            self._server = open_store(self._address, (self._port,))
        except OSError:
            raise DistributedError(
                f"Port {self._port} of this machine, machine 0, is taken by another program, such "
                "as another job. Pass another `--main_process_port`, the same on all machines; or "
                "another `--machine_rank`, if this is not machine 0."
            ) from None
        self._store = PrefixStore(PREFIX, self._server)
        self._store.set("host", json.dumps([job.num_machines, card["who"]]))

    def meet(self, fault: str) -> Meeting:
        if fault:
            self._store.compare_set("fault", "", f"machine 0 ({self._cards[0]['host']}): {fault}")
        try:
            fault = self._wait()
            self._store.set("verdict", json.dumps([fault, self._cards]))
            if fault or self._link is None:
                end = time.monotonic() + _HEARD_SECONDS
                # More may have come than have a card: two of one number.
                while time.monotonic() < end:
                    if self._store.add("heard", 0) >= self._store.add("guests", 0):
                        break
                    time.sleep(_PAUSE)
                raise DistributedError(fault)
        except BaseException:
            if self._link is not None:
                self._link.close()
            raise
        finally:
            for one in self._trial:
                one.close()
        return Meeting(
            machine=0,
            cards=self._cards,
            address=self._address,
            port=self._port,
            link=self._link,
            store=self._server,
        )

    def _wait(self) -> str:
        """Wait for the cards of all machines; return what is wrong."""
        end, size = self._end, self._job.num_machines
        while True:
            for machine in (m for m in range(1, size) if m not in self._cards):
                if self._store.check([f"machine/{machine}"]):
                    self._welcome(machine, json.loads(self._store.get(f"machine/{machine}")))
            fault = self._fault()
            if fault:
                end = min(end, time.monotonic() + _LATE_SECONDS)
            if len(self._cards) == size and self._link and len(self._link.present) == size - 1:
                return fault or self._try_ways()
            if time.monotonic() > end:
                return fault or self._missing()
            time.sleep(_PAUSE)

    def _welcome(self, machine: int, card: Card) -> None:
        self._cards[machine] = card
        if self._link is None:
            self._address = self._address or card["at"]
            listening = _open_door(self._address, self._job)
            port, token = listening.getsockname()[1], os.urandom(16).hex()
            self._cards[0] |= {"address": self._address, "port": port}
            self._trial = _open_trial(self._address, self._cards[0])
            size, address = self._job.num_machines, Address((), port, token)
            self._link = Link(0, size, Links(0, size, address, [listening]))
            self._link.names[0] = self._cards[0]["host"]
            self._store.set("link", json.dumps([port, token]))
        self._link.names[machine] = card["host"]

    def _try_ways(self) -> str:
        """Let each machine connect to others; return what is wrong."""
        self._store.set("cards", json.dumps(self._cards))
        wrong, end = probe(0, self._cards), time.monotonic() + 2 * PROBE_SECONDS
        while not wrong and self._store.add("probed", 0) < len(self._cards) - 1:
            if time.monotonic() > end:
                return "machines could not say in time whether they reach each other"
            time.sleep(_PAUSE)
            wrong = self._fault()
        return wrong or self._fault()

    def _fault(self) -> str:
        if self._store.check(["fault"]):
            return self._store.get("fault").decode()
        lost = None if self._link is None else self._link.end
        return _difference(self._cards) or ("" if lost is None else lost.cause)

    def _missing(self) -> str:
        present = set() if self._link is None else self._link.present
        absent = [m for m in range(1, self._job.num_machines) if m not in present]
        return (
            f"machine {listed(absent)} did not come in {self._job.meeting_timeout:g} s. Start "
            "the same command there, each with its own `--machine_rank`; its output says whether "
            f"it reaches machine 0 ({self._cards[0]['host']}) at {self._job.main_process_ip}"
            f"{self._hint}, port {self._port}"
        )


class _Guest:
    """Another machine at the meeting: it goes to machine 0, and hears what that says."""

    def __init__(self, job: JobSettings, card: Card, end: float) -> None:
        self._job = job
        self._card = card
        self._end = end
        self._rank = job.machine_rank
        self._place = f"{job.main_process_ip}, port {port_of(job)}"
        self._name = f"machine {self._rank} ({card['host']})"

    def meet(self, fault: str) -> Meeting:
        address, own = self._reach()
        door = _open_door(own, self._job)
        self._card |= {"address": own, "at": address, "port": door.getsockname()[1]}
        link: Link | None = None
        trial: list[socket.socket] = []
        try:
            trial += _open_trial(own, self._card)
            store = PrefixStore(PREFIX, _in_time(self._open, address, seconds=2 * _STORE_SECONDS))
            fault = self._conflict(store) or (fault and f"{self._name}: {fault}")
            if not fault:
                link, fault = self._connect(store, address)
            if fault:
                store.compare_set("fault", "", fault)
            cards = self._hear(store, link)
            assert link is not None  # else there was a fault
        except BaseException as error:
            door.close()
            if link is not None:
                link.close()
            if isinstance(error, DistributedError) or not isinstance(error, RuntimeError):
                raise
            text = str(error).split("\n", 1)[0]  # torch's come with frames of C++
            raise DistributedError(
                f"machine 0 at {self._place} broke off while the machines met, or is no launcher "
                f"of trainkit {__version__}: {text}"
            ) from None
        finally:
            for one in trial:
                one.close()
        link.names |= {machine: card["host"] for machine, card in cards.items()}
        port = port_of(self._job)
        return Meeting(
            machine=self._rank, cards=cards, address=address, port=port, link=link, door=door
        )

    def _open(self, address: str) -> TCPStore:
        waits = timedelta(seconds=_STORE_SECONDS)
        return TCPStore(address, port_of(self._job), is_master=False, timeout=waits)

    def _reach(self) -> tuple[str, str]:
        host, left = str(self._job.main_process_ip), max(1.0, self._end - time.monotonic())
        if self._rank:
            return reach(host, port_of(self._job), left)
        try:
            return reach(host, port_of(self._job), left / 2)  # the true machine 0
        except DistributedError:
            raise DistributedError(
                f"`main_process_ip` {host} is no address of this machine ({self._card['host']}), "
                "which is machine 0, and nobody answers there. Pass an address of this machine, or "
                "another `--machine_rank`"
            ) from None

    def _conflict(self, store: PrefixStore) -> str:
        """Leave the card of this machine; return why that cannot be."""
        size, known = json.loads(store.get("host"))
        if store.check(["verdict"]):
            raise DistributedError(
                f"the job at {self._place} (machine 0: {known}) has begun without this machine, or "
                "ends. Another job needs another `--main_process_port`"
            )
        store.add("guests", 1)
        mine = self._card["who"]
        if size != self._job.num_machines:
            return f"num_machines: {size} (machine 0), {self._job.num_machines} ({self._name})"
        if self._rank:
            said = store.compare_set(f"machine/{self._rank}", "", json.dumps(self._card))
            known = json.loads(said)["who"]
        if known == mine:
            return ""
        return (
            f"machine_rank {self._rank} is there twice: {known} and {mine}. Give each machine a "
            "number of its own by `--machine_rank`, counted from 0"
        )

    def _connect(self, store: PrefixStore, address: str) -> tuple[Link | None, str]:
        """Connect to the launcher of machine 0; return why that cannot be."""
        port, token = json.loads(store.get("link"))
        size = self._job.num_machines
        links = Links(self._rank, size, Address((address,), port, token))
        try:
            reach(address, port, PROBE_SECONDS, "machine 0 at")
            if links.reach_root():
                return Link(self._rank, size, links), ""
            wrong = "it lets nobody in"
        except DistributedError as error:
            wrong = str(error)
        links.close()
        return None, f"{self._name} comes to machine 0, but to no other port there: {wrong}"

    def _hear(self, store: PrefixStore, link: Link | None) -> dict[int, Card]:
        """Return the cards of all machines; raise what machine 0 finds wrong."""
        # Machine 0 has begun to wait before this one came to it.
        end = time.monotonic() + self._job.meeting_timeout + 3 * PROBE_SECONDS
        has_probed = False
        while time.monotonic() < end:
            if store.check(["verdict"]):
                fault, cards = json.loads(store.get("verdict"))
                store.add("heard", 1)
                if fault:
                    raise DistributedError(fault)
                return {int(machine): card for machine, card in cards.items()}
            if not has_probed and link is not None and store.check(["cards"]):
                has_probed = True
                cards = {int(m): card for m, card in json.loads(store.get("cards")).items()}
                cards[0]["address"] = self._card["at"]  # as this machine reaches it
                if wrong := probe(self._rank, cards):
                    store.compare_set("fault", "", wrong)
                store.add("probed", 1)
            time.sleep(_PAUSE)
        raise DistributedError(f"machine 0 at {self._place} has not said whether all have come")


def _difference(cards: Mapping[int, Card]) -> str:
    """Return which machines were told what, where it is not the same."""
    told = {machine: cards[machine]["told"] for machine in sorted(cards)}
    found = []
    for name in sorted({name for each in told.values() for name in each}):
        machines: dict[str, list[int]] = {}
        for machine, each in told.items():
            machines.setdefault(str(each.get(name, "-")), []).append(machine)
        if len(machines) > 1:
            values = (f"{value} (machine {listed(who)})" for value, who in machines.items())
            found.append(f"{name}: {', '.join(values)}")
    return f"The machines were told different things: {'; '.join(found)}" if found else ""
