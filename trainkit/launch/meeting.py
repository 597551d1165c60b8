"""The machines of a job meet, before any process is started, and say what keeps them apart.

Machine 0 listens. Each of the others connects to it, says what it was told, tries whether it
reaches the rest, and waits for the verdict, which is the same for all. The connections stay.
"""

import hashlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainkit.distributed.group import SECRET
from trainkit.errors import DistributedError, listed
from trainkit.launch.link import Link, open_link, reach_link
from trainkit.launch.network import addresses_of, is_own, job_interface, kernel_ports, reach
from trainkit.launch.plan import Plan, port_of
from trainkit.launch.settings import JobSettings
from trainkit.launch.workers import Attempt
from trainkit.version import __version__
from trainkit.watch.listening import listen, ports
from trainkit.watch.member import Member
from trainkit.watch.report import FOLDER_VARIABLE

Card: TypeAlias = dict[str, Any]
"""Of a machine: `machine`, `host`, `who` (a process), `told` (settings), `address` (where others
reach it), `at` (where it has reached machine 0), `range` (where gloo will listen), `trial` (ports
there to be tried)."""

_LATE_SECONDS = 5.0  # for those who come after something was found wrong, to hear of it
_PROBE_SECONDS = 4.0  # in which a port answers, where the machine is known to live
_MOST_PROBED = 64  # other machines that each one tries to connect to
_BACKLOG = 2048
_PAUSE = 0.1


class Meeting:
    """The machines of a job, which have found each other.

    Args:
        cards: What each has said of itself.
        address: Of machine 0, as this one reaches it.
        ports: Those that the store of the processes may listen at.
    """

    is_elastic = False

    def __init__(
        self,
        machine: int,
        cards: Sequence[Card],
        address: str,
        ports: Sequence[int],
        link: Link,
    ) -> None:
        self.machine, self.cards, self.address, self.link = machine, cards, address, link
        self._ports = ports
        self._store: TCPStore | None = None  # on machine 0 alone
        self._attempt = -1
        link.names |= {card["machine"]: card["host"] for card in cards}

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
        return job_interface([self.address, *(card["address"] for card in self.cards[1:])])

    def begin(self) -> Attempt:
        """Wait until all machines are ready for the next attempt.

        Raises:
            JobEnded: They will not be.
        """
        self._attempt += 1
        self.link.come_to(self._attempt, self.open_store)
        machine, size, port = self.machine, self.size, self.link.port
        return Attempt(
            number=self._attempt, machine=machine, machines=size, address=self.address, port=port
        )

    def open_store(self) -> int:
        """Open a store for an attempt on this machine; return its port."""
        self._store = None
        with _listen(self.own, self._ports, "`--ports`") as listening:
            port = int(listening.getsockname()[1])
            self._store = TCPStore(
                self.own,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=300),
                master_listen_fd=listening.detach(),
            )
        return port

    def wants_restart(self, attempt: Attempt) -> bool:
        """Return whether all start again, because of another machine."""
        return self.link.wanted > attempt.number

    def absent(self, left: Iterable[int]) -> int | None:
        """Return one of the processes that have left and did not come to the others, who wait."""
        store = self._store
        if store is None or not store.check(["trainkit/joined"]):
            return None
        return next((rank for rank in left if not store.check([f"trainkit/joined/{rank}"])), None)

    def cut_off(self) -> str:
        """Return which machine this one cannot reach any more; empty where there is none.

        At a port of the trial, which is open, the machine answers, though nobody listens.
        """
        for card in self.cards[:_MOST_PROBED] if self.size > 1 else ():
            address = card["address"], card["trial"][0]
            try:
                socket.create_connection(address, _PROBE_SECONDS / 2).close()
            except ConnectionRefusedError:
                continue
            except OSError:
                return (
                    f"{self.link.name(self.machine)} cannot reach {self.link.name(card['machine'])}"
                )
        return ""

    def shut(self) -> None:
        """Let nobody in any more."""

    def close(self) -> None:
        """Leave the other machines."""
        self.link.close()


def card_of(job: JobSettings, **more: Any) -> Card:
    """Return the card of this machine, as far as it is known."""
    here = Member.this()
    return {"machine": job.machine_rank, "host": here.host, "who": str(here), **more}


def alone(job: JobSettings) -> Meeting:
    """Return the meeting of a machine that is the only one; all stays on its loopback."""
    host = "127.0.0.1"
    first = [job.main_process_port] if job.main_process_port else []
    allowed = (*first, *ports(job.ports))
    return Meeting(0, [card_of(job, machine=0, address=host)], host, allowed, Link(0, 1))


def to_compare(plan: Plan) -> dict[str, str]:
    """Return what all machines must have alike: settings, versions, the script."""
    script, job = plan.script, plan.job
    name = Path(script.path).name
    if not script.is_module and not script.is_program:
        name += f" ({hashlib.sha256(Path(script.path).read_bytes()).hexdigest()[:12]})"
    prefixes = ("TRAINKIT_", "FSDP_", "ACCELERATE_DYNAMO_", "ACCELERATE_DEEPSPEED_")
    told = {k: v for k, v in plan.environment.items() if k.startswith(prefixes)}
    told.pop(FOLDER_VARIABLE, None)  # each has its own
    return {
        **told,
        "num_processes": str(plan.processes * job.num_machines),
        "num_machines": str(job.num_machines),
        "max_restarts": str(job.max_restarts),
        "role": job.role,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "trainkit": __version__,
        "script": name,
        SECRET: "set" if os.environ.get(SECRET) else "not set",
    }


def meet(job: JobSettings, settings: Mapping[str, str]) -> Meeting:
    """Meet the other machines; all go on, or all raise the same.

    Args:
        settings: What must be equal on all machines, by name.

    Raises:
        DistributedError: They do not come together; says why.
    """
    card, end = card_of(job, told=settings), time.monotonic() + job.meeting_timeout
    return _guest(job, card, end) if job.machine_rank else _host(job, card, end)


def _host(job: JobSettings, card: Card, end: float) -> Meeting:
    """Wait for the others, and judge."""
    port, size, hint = port_of(job), job.num_machines, ""
    own: list[str] = []
    try:
        own = [each for each in addresses_of(str(job.main_process_ip), port) if is_own(each)]
        if not own:
            raise DistributedError(
                f"`main_process_ip` {job.main_process_ip} is no address of this machine "
                f"({card['host']}), which is machine 0 by its `machine_rank`. Pass an address of "
                "this machine, or another `--machine_rank`"
            )
    except OSError:
        hint = ", a name that it does not know itself"
    # Debian's name for itself is a loopback address: how others come is seen when they do.
    is_loopback = any(each.startswith("127.") or each == "::1" for each in own)
    is_meant = job.main_process_ip in (*own, "localhost")
    address = own[0] if is_meant or (len(own) == 1 and not is_loopback) else ""
    try:
        listening = listen(address, (port,), _BACKLOG)
    except OSError:
        raise DistributedError(
            f"Port {port} of this machine, machine 0, is taken by another program, such as another "
            "job. Pass another `--main_process_port`, the same on all machines; or another "
            "`--machine_rank`, if this is not machine 0."
        ) from None
    link = open_link(size, listening)
    with _leaving(link) as trial:
        cards, fault = _wait_for_cards(job, link, card, end, hint)
        if not fault:
            if not address:
                address = cards[1]["at"]
                narrow = partial(listen, address, (port,), _BACKLOG)
                link.do(lambda links: links.listen_again(narrow))
            trial += _open_trial(address, cards[0])
            cards[0]["address"] = address
            fault = _try_ways(link, cards)
        link.share(fault=fault, word=secrets.token_hex(16))
        if fault:
            raise DistributedError(fault)
    return Meeting(0, cards, address, ports(job.ports), link)


def _wait_for_cards(
    job: JobSettings, link: Link, card: Card, end: float, hint: str
) -> tuple[list[Card], str]:
    """Return the cards of all machines when they have come, and what is wrong with them."""
    while True:
        cards = sorted([card, *link.said("card").values()], key=lambda each: each["machine"])
        link.names |= {each["machine"]: each["host"] for each in cards}
        fault = _conflict(cards) or ("" if link.end is None else link.end.cause)
        if len(cards) >= job.num_machines:
            return cards, fault
        if fault:
            end = min(end, time.monotonic() + _LATE_SECONDS)
        if time.monotonic() > end:
            break
        time.sleep(_PAUSE)
    absent = {*range(job.num_machines)} - {each["machine"] for each in cards}
    return cards, fault or (
        f"machine {listed(sorted(absent))} did not come in {job.meeting_timeout:g} s. Start the "
        "same command there, each with its own `--machine_rank`; its output says whether it "
        f"reaches machine 0 ({card['host']}) at {job.main_process_ip}{hint}, port {port_of(job)}"
    )


def _conflict(cards: Sequence[Card]) -> str:
    """Return why machines cannot be of one job."""
    for one, two in pairwise(cards):
        if one["machine"] == two["machine"]:
            return (
                f"machine_rank {one['machine']} is there twice: {one['who']} and {two['who']}. "
                "Give each machine a number of its own by `--machine_rank`, counted from 0"
            )
    wrong = difference({card["machine"]: card["told"] for card in cards}, "machine ")
    return f"The machines were told different things: {wrong}" if wrong else ""


def difference(settings: Mapping[object, Mapping[str, str]], kind: str = "") -> str:
    """Return what some were told in another way than others; empty where there is nothing."""
    texts = []
    for name in sorted({name for each in settings.values() for name in each}):
        who: dict[str, list[object]] = {}
        for one, each in settings.items():
            who.setdefault(each.get(name, "-"), []).append(one)
        if len(who) > 1:
            texts.append(f"{name}: {', '.join(f'{v} ({kind}{listed(w)})' for v, w in who.items())}")
    return "; ".join(texts)


def _try_ways(link: Link, cards: list[Card]) -> str:
    """Let each machine connect to others; return what is wrong."""
    names = ("machine", "host", "address", "range", "trial")
    link.share(cards=[{name: card[name] for name in names} for card in cards])
    told = link.said("probed")
    told[0] = probe(0, cards)
    link.wait(lambda: any(told.values()) or len(told) == len(cards), 2 * _PROBE_SECONDS)
    late = "" if len(told) == len(cards) else "machines could not say whether they reach each other"
    return next(filter(None, told.values()), late)


def _guest(job: JobSettings, card: Card, end: float) -> Meeting:
    """Go to machine 0, and hear what it says."""
    port, machine = port_of(job), job.machine_rank
    address, own = reach(str(job.main_process_ip), port, max(1.0, end - time.monotonic()))
    link = reach_link(machine, job.num_machines, address, port)
    where = f"machine 0 at {job.main_process_ip}, port {port},"
    if link is None:
        raise DistributedError(
            f"{where} lets this machine not in: a job there has begun without it, the port is "
            "taken by another program, or machine 0 is frozen. Another job needs another "
            "`--main_process_port`, the same on all machines"
        )
    with _leaving(link) as trial:
        card |= {"address": own, "at": address}
        trial += _open_trial(own, card)
        link.tell("card", card)
        # Machine 0 has begun to wait before this one came to it.
        seconds = job.meeting_timeout + _LATE_SECONDS + 2 * _PROBE_SECONDS
        link.wait(lambda: link.cards or link.fault is not None or link.end, seconds)
        cards = [
            {**each, "address": each["address"] if each["machine"] else address}
            for each in link.cards
        ]
        if cards:
            link.tell("probed", probe(machine, cards))
            link.wait(lambda: link.fault is not None or link.end, 3 * _PROBE_SECONDS)
        if link.fault is None or link.fault:
            lost = (
                f"{where} has not said whether all have come"
                if link.end is None
                else link.end.cause
            )
            raise DistributedError(link.fault or lost)
    return Meeting(machine, cards, address, (), link)


@contextmanager
def _leaving(link: Link) -> Iterator[list[socket.socket]]:
    """Leave the other machines after an error; close the sockets of the trial in any case."""
    trial: list[socket.socket] = []
    try:
        yield trial
    except BaseException:
        link.close()
        raise
    finally:
        for one in trial:
            one.close()


def _listen(host: str, allowed: Iterable[int], setting: str) -> socket.socket:
    try:
        return listen(host, allowed, _BACKLOG)
    except OSError as error:
        raise DistributedError(
            f"None of the ports of this machine in {setting} is free: {error}. Give the job more"
        ) from None


def _open_trial(host: str, card: Card) -> list[socket.socket]:
    """Listen for the others at the ends of where gloo and NCCL will, and note it on the card."""
    free = kernel_ports()
    card["range"] = f"{free[0]}-{free[-1]}"
    setting = f"`net.ipv4.ip_local_port_range` {card['range']}"
    trial = [_listen(host, each, setting) for each in (free, free[::-1])]
    card["trial"] = [one.getsockname()[1] for one in trial]
    return trial


def probe(machine: int, cards: Sequence[Card]) -> str:
    """Return why a machine cannot connect to others, at ports where gloo may listen."""
    names = [f"machine {number} ({card['host']})" for number, card in enumerate(cards)]
    for step in range(1, min(len(cards), _MOST_PROBED + 1)):
        other = (machine + step) % len(cards)
        card, name = cards[other], names[other]
        for port in card["trial"]:
            try:
                reach(card["address"], port, _PROBE_SECONDS, name)
            except DistributedError as error:
                return (
                    f"{names[machine]} is cut off from {name}: {error}. Gloo, as torch's other "
                    f"back ends, listens at any port of {card['range']} there, whatever `--ports` "
                    "says. Open these between all machines, or name open ones on each, as root: "
                    '`sysctl -w net.ipv4.ip_local_port_range="FIRST LAST"`'
                )
    return ""
