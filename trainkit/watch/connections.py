"""Lines between the processes of a job, over which they hear of each other's end at once.

They are a tree. Where all are on one machine, each has one connection to process 0. On every
further machine the first process that comes has it, and the others there have one to that process.
The kernel closes the connection of a process that ends, however it ends, so nobody has to ask
whether it lives.
"""

import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

from trainkit.watch.exit import say
from trainkit.watch.line import SEND_SECONDS, Line, Message
from trainkit.watch.listening import ADDRESS_VARIABLE, listen, ports
from trainkit.watch.member import Member

__all__ = ["GONE", "Address", "Links", "open_server", "reach_server"]

GONE = "gone"
"""The kind of the message that stands for the end of a connection.

It has `who`, `place`, and `unreachable`: for how many seconds the machine was silent before packets
were known to be lost; 0 where the process has ended.
"""

_STRANGER_SECONDS = 5.0  # in which a caller must say the word
_MOST_STRANGERS = 64  # at a time; others wait until some have said it, or were turned away
_REST_SECONDS = 1.0  # in which nobody is let in, where there is no descriptor left
_REACH_SECONDS = 20.0
_RETURN_SECONDS = 3.0  # for a process of another machine to connect again
_BEAT_SECONDS = 3.0  # between two signs of life
_LONGEST_PAUSE = 6.0  # that counts as time: in a longer one this process did not run, but slept
_LOOK_SECONDS = 0.2  # between two looks at what is to end by itself


@dataclass(frozen=True, slots=True)
class Address:
    """Where process 0 listens, and the word that its callers must know."""

    hosts: tuple[str, ...]
    port: int
    token: str


class Links:
    """The connections of this process; one thread alone calls its methods, but for `wake`.

    Args:
        address: Of process 0.
        listening: Where others connect to this process; owned from now on.
    """

    def __init__(
        self, rank: int, size: int, address: Address, listening: Sequence[socket.socket] = ()
    ) -> None:
        self.parent: Line | None = None  # to process 0, or to who passes on what it says
        self.children: dict[int, Line] = {}
        self.is_patient = True
        """Whether a process of another machine whose connection broke may connect again."""
        self._rank = rank
        self._size = size
        self._address = address
        self._told: set[object] = set()  # the news that this process has passed on
        self._strangers: list[Line] = []
        self.away: dict[int, Line] = {}  # whose connection broke, and who may come again
        self._early: list[Message] = []  # what came from the parent with its welcome
        self._listening = listening
        self._rests_until = 0.0
        self._polled = time.monotonic()
        self._unsaid = 0.0  # seconds since the last sign of life
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen()
        _open.add(self)

    @property
    def lines(self) -> list[Line]:
        """The connections to other processes of the job."""
        return [*self.children.values(), *([] if self.parent is None else [self.parent])]

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with suppress(OSError):
            self._waking.send(b".")

    def poll(self, seconds: float | None) -> list[tuple[int, Message]]:
        """Wait for messages, at most `seconds`; return them with the process they come from."""
        heard = self._look()
        if self._early and self.parent is not None:
            early, self._early = self._early, []
            heard += self._take(self.parent, early)
        if self._strangers or self.away or self._rests_until:
            seconds = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with suppress(OSError):
                    self._woken.recv(1 << 12)
            elif isinstance(key.data, Line):
                heard += self._hear(key.data)
            else:
                self._accept(key.data)
        return heard

    def send(self, message: Message) -> None:
        """Tell every other process, or process 0."""
        self._route({**message, "from": self._rank}, None)

    def reach(self, addresses: Iterable[Any], seconds: float = _REACH_SECONDS) -> bool:
        """Connect to the parent at the first address that answers; return whether one does."""
        for address in addresses:
            with suppress(OSError, ValueError):
                line = Line(_connect(address, seconds), trusted=True)
                hello = {"kind": "hello", "token": self._address.token, "rank": self._rank}
                line.send({**hello, "who": Member.this().as_list()})
                line.connection.settimeout(_REACH_SECONDS)
                messages, over = line.receive()
                welcome = messages[0] if messages and not over else {}
                line.rank, line.member = welcome.get("from"), Member.parse(welcome.get("who"))
                if isinstance(line.rank, int) and line.member is not None:
                    line.connection.settimeout(SEND_SECONDS)
                    self.parent, self._early = line, messages[1:]
                    self._selector.register(line.connection, selectors.EVENT_READ, line)
                    return True
                line.close()
        return False

    def reach_root(self, seconds: float = _REACH_SECONDS) -> bool:
        """Connect to process 0; return whether it answers."""
        return self.reach(((host, self._address.port) for host in self._address.hosts), seconds)

    def leave_parent(self) -> bool:
        """Connect to process 0 in place of a parent that is frozen; return whether it answers."""
        assert self.parent is not None
        self._drop(self.parent)
        self.parent = None
        return self.reach_root()

    def close(self) -> None:
        """Close all connections; also in a fork, which must not keep them open."""
        if self not in _open:
            return
        _open.discard(self)
        for key in list(self._selector.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        for one in self._listening:
            one.close()
        self._waking.close()
        self._selector.close()

    def _look(self) -> list[tuple[int, Message]]:
        """Do what is time for; return what it says of lost processes."""
        now = time.monotonic()
        passed = min(now - self._polled, _LONGEST_PAUSE)
        self._polled = now
        self._unsaid += passed
        for line in self.lines:
            line.silent += passed
            if self._unsaid > _BEAT_SECONDS:
                line.send({"kind": "beat"})
        self._unsaid %= _BEAT_SECONDS
        for line in [line for line in self._strangers if now - line.since > _STRANGER_SECONDS]:
            self._strangers.remove(line)
            self._drop(line)
        if self._rests_until and now > self._rests_until and len(self._strangers) < _MOST_STRANGERS:
            self._listen()
        lost = [line for line in self.away.values() if self._is_lost(line)]
        self.away = {rank: line for rank, line in self.away.items() if line not in lost}
        return [heard for line in lost for heard in self._take(line, [_gone(line, self._rank)])]

    def _listen(self) -> None:
        self._rests_until = 0.0
        for one in self._listening:
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, one)

    def _accept(self, listening: socket.socket) -> None:
        """Let a caller in; nobody for a while where that cannot be, or where many say nothing."""
        try:
            line = Line(listening.accept()[0])
            self._strangers.append(line)
            self._selector.register(line.connection, selectors.EVENT_READ, line)
            full = len(self._strangers) >= _MOST_STRANGERS
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # no descriptor is left: `select` would return at once, again and again
            full = True
        if full and not self._rests_until:
            self._rests_until = time.monotonic() + _REST_SECONDS
            for one in self._listening:
                self._selector.unregister(one)

    def _hear(self, line: Line) -> list[tuple[int, Message]]:
        """Take in what has come over a line."""
        if line.connection.fileno() < 0:  # dropped after `select` had found it
            return []
        messages, over = line.receive()
        if line.rank is None:
            if not messages and not over:
                return []
            self._strangers.remove(line)
            if over or not self._admit(line, messages.pop(0)):
                self._drop(line)
                return []
        if over:
            messages += self._lose(line)
        return self._take(line, messages)

    def _take(self, line: Line, messages: list[Message]) -> list[tuple[int, Message]]:
        """Pass on what was said over a line; return it."""
        messages = [message for message in messages if message["kind"] != "beat"]
        for message in messages:
            origin = message.setdefault("from", line.rank)
            if origin == line.rank and message["kind"] in ("done", "failed"):
                line.has_ended = True
            self._route(message, line)
        return [(int(message["from"]), message) for message in messages]

    def _lose(self, line: Line) -> list[Message]:
        """Forget a line that is over; return what that means."""
        self._drop(line)
        line.since = time.monotonic()
        if line is not self.parent:
            del self.children[line.rank or 0]
            if line.has_ended or self._is_lost(line):
                return [_gone(line, self._rank)]
            self.away[line.rank or 0] = line
            return []
        self.parent = None
        if line.has_ended:  # who passed on what process 0 says has, but process 0 may have not
            returned = line.rank and self.reach_root()
        else:
            returned = not self._is_lost(line) and self.reach_root(_RETURN_SECONDS)
            if returned:
                who = f"process {line.rank} ({line.member})"
                say(f"trainkit: the watch lost its connection to {who}, and has connected again.")
        return [] if returned else [_gone(line, self._rank)]

    def _is_lost(self, line: Line) -> bool:
        return line.is_lost(_RETURN_SECONDS if self.is_patient else 0.0)

    def _admit(self, line: Line, hello: Message) -> bool:
        """Take in a caller that knows the word, and say so."""
        rank, token = hello.get("rank"), str(hello.get("token")).encode("utf-8", "replace")
        known = secrets.compare_digest(token, self._address.token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self._size:
            return False
        member = Member.parse(hello.get("who"))
        before = self.children.get(rank) or self.away.get(rank)
        if rank == self._rank or member is None or (before and before.member != member):
            return False
        if before:  # it has come again, perhaps before this end has heard that it was away
            self._drop(before)
            self.away.pop(rank, None)
        line.rank, line.member, line.trusted = rank, member, True
        self.children[rank] = line
        line.send({"kind": "welcome", "from": self._rank, "who": Member.this().as_list()})
        return True

    def _drop(self, line: Line) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.close()

    def _route(self, message: Message, source: Line | None) -> None:
        """Send a message to where it must go from here, but not back."""
        kind, origin = message["kind"], message["from"]
        up = [] if self.parent is None else [self.parent]
        down = [*self.children.values()]
        if "to" in message:
            down = []
        elif kind == "done" and source is not None and source is not self.parent and up:
            down = []  # process 0 decides who else hears it
        elif kind in ("done", "failed", GONE):
            news = (kind, message.get("fit"), origin if origin in (0, self._rank) else None)
            if news in self._told:
                return
            self._told.add(news)
        for line in [*up, *down]:
            if line is not source and message.get("to") != self._rank:
                line.send(message)


def _gone(line: Line, rank: int) -> Message:
    """Return what process `rank` says of one whose line is over for good."""
    assert line.member is not None
    gone: Message = {"kind": GONE, "from": line.rank, "who": str(line.member)}
    gone |= {"place": line.member.place(), "unreachable": line.is_unreachable * round(line.silent)}
    return {**gone, "to": rank} if line.has_ended else gone


def open_server(size: int, *, one_machine: bool) -> tuple[Links, Address]:
    """Listen, as process 0, for the others; on the loopback only where all are on this machine.

    Raises:
        OSError: There is no port.
    """
    host = "127.0.0.1" if one_machine else os.environ.get(ADDRESS_VARIABLE, "")
    listening = listen(host, ports(), size + _MOST_STRANGERS)
    hosts = [host] if host else _own_names()
    address = Address(tuple(hosts), listening.getsockname()[1], secrets.token_hex(16))
    local = None if one_machine else _listen_here(_local_name(address), size)
    return Links(0, size, address, [listening, *([] if local is None else [local])]), address


def reach_server(address: Address, rank: int, size: int, *, one_machine: bool) -> Links | None:
    """Return the connections of another process; None where process 0 cannot be reached.

    On another machine than process 0 the first that calls this serves the others there.

    Raises:
        OSError: There is no descriptor left.
    """
    name = _local_name(address)
    listening = None if one_machine else _listen_here(name, size)
    links = Links(rank, size, address, [] if listening is None else [listening])
    is_alone = one_machine or listening is not None or not _HAS_LOCAL_NAMES
    reached = links.reach_root() if is_alone else links.reach([name])
    if not reached:
        links.close()
    return links if reached else None


_HAS_LOCAL_NAMES = sys.platform == "linux"


def _local_name(address: Address) -> bytes:
    """Return the name of a socket that only processes of this machine and job know."""
    known = f"{address.token} {Member.this().machine}"
    return b"\0trainkit-" + blake2b(known.encode(), digest_size=16).hexdigest().encode()


def _listen_here(name: bytes, size: int) -> socket.socket | None:
    """Listen for processes of this machine; None where another one does so already."""
    if not _HAS_LOCAL_NAMES:
        return None
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(name)
        listening.listen(size)
    except OSError:  # it is bound already
        listening.close()
        return None
    return listening


def _connect(address: Any, seconds: float) -> socket.socket:
    """Return a connection to a host and port, or to a name of this machine."""
    if not isinstance(address, bytes):
        return socket.create_connection(address, timeout=seconds)
    end = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except ConnectionRefusedError:  # bound, and about to listen
            connection.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return connection


def _own_names() -> list[str]:
    """Return by what names other machines may know this one, the likeliest first."""
    name = socket.gethostname()
    names: Iterable[str] = [os.environ.get("MASTER_ADDR", ""), name]
    with suppress(OSError):
        names = [*names, *socket.gethostbyname_ex(name)[2]]
    return [n for n in dict.fromkeys(names) if n and not n.startswith("127.")] or [name]


_open: WeakSet[Links] = WeakSet()


def _close_in_fork() -> None:
    # A fork that kept a connection open would hide the end of its parent.
    for links in list(_open):
        links.close()


os.register_at_fork(after_in_child=_close_in_fork)
