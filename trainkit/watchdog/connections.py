"""Lines between the processes of a job, over which they hear of each other's end at once.

They are a tree. Where all are on one machine, each has one connection to process 0. On every
further machine the first process that comes has it, and the others there have one to that process.
The kernel closes the connection of a process that ends, however it ends, so nobody has to ask
whether it lives.
"""

import errno
import json
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
from typing import Any, TypeAlias
from weakref import WeakSet

from trainkit.watchdog.listening import ADDRESS_VARIABLE, listen, ports
from trainkit.watchdog.stalls import Member

__all__ = [
    "GONE",
    "LOST_SECONDS",
    "Address",
    "Line",
    "Links",
    "Message",
    "open_server",
    "reach_server",
]

Message: TypeAlias = dict[str, Any]
"""What travels: a JSON object with the keys `kind` and `from`, the process that says it.

One with the key `to` is for process 0 alone, others are for all. Of the news that a process has
failed or is gone, the first goes on, because it ends the job. That a process ends in order is told
to process 0, and to all only of process 0 and of the first that does.
"""

GONE = "gone"
"""The kind of the message that stands for the end of a connection."""

LOST_SECONDS = 50
"""After which the kernel gives up a connection whose other end acknowledges nothing."""

_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

_LARGEST = 1 << 20  # bytes of a message
_LARGEST_OF_STRANGERS = 1 << 10
_STRANGER_SECONDS = 5.0  # in which a caller must say the word
_SEND_SECONDS = 0.3  # for one message: a process that is stopped must not hold up the others
_REACH_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where process 0 listens, and the word that its callers must know."""

    hosts: tuple[str, ...]
    port: int
    token: str


class Line:
    """One connection, cut into messages.

    Args:
        connection: Owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None  # of the other end, once it has said so
        self.member: Member | None = None  # the process at the other end
        self.has_ended = False  # it said so, or that it failed: its end is no news
        self.since = time.monotonic()
        self.is_unreachable = False  # the network, or the machine at the other end, is gone
        self._read = b""
        connection.settimeout(_SEND_SECONDS)
        with suppress(OSError, AttributeError):  # a machine that loses power says nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            # The same where something was sent meanwhile, which else is tried for a quarter hour.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)

    def send(self, message: Message) -> None:
        """Send a message, if the other end takes it in time."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have come, and whether the connection is over."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # of this call alone
                return [], False
            self.is_unreachable, data = error.errno in _NO_WAY, b""
        *lines, self._read = (self._read + data).split(b"\n")
        largest = _LARGEST_OF_STRANGERS if self.rank is None else _LARGEST
        if max(map(len, [*lines[: self.rank is None], self._read])) > largest:
            return [], True
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return [], True
        sound = all(isinstance(m, dict) and isinstance(m.get("kind"), str) for m in messages)
        return (messages if sound else []), not data or not sound

    def close(self) -> None:
        self.connection.close()


class Links:
    """The connections of this process; one thread alone calls its methods, but for `wake`.

    Args:
        rank: Of this process.
        size: Processes in all.
        address: Of process 0.
        listening: Where others connect to this process; owned from now on.
    """

    def __init__(
        self, rank: int, size: int, address: Address, listening: Sequence[socket.socket] = ()
    ) -> None:
        self.parent: Line | None = None  # to process 0, or to who passes on what it says
        self.children: dict[int, Line] = {}
        self._rank = rank
        self._size = size
        self._address = address
        self._told: set[object] = set()  # the news that this process has passed on
        self._strangers: list[Line] = []
        self._early: list[Message] = []  # what came from the parent with its welcome
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for one in listening:
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, one)
        _open.add(self)

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with suppress(OSError):
            self._waking.send(b".")

    def poll(self, seconds: float | None) -> list[tuple[int, Message]]:
        """Wait for messages, at most `seconds`; return them with the process they come from."""
        heard: list[tuple[int, Message]] = []
        for line in self._strangers[:]:
            if line.rank is not None or time.monotonic() - line.since > _STRANGER_SECONDS:
                self._strangers.remove(line)
                if line.rank is None:
                    self._drop(line)
        if self._strangers:
            seconds = _STRANGER_SECONDS if seconds is None else min(seconds, _STRANGER_SECONDS)
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

    def reach(self, addresses: Iterable[Any]) -> bool:
        """Connect to the parent at the first address that answers; return whether one does."""
        for address in addresses:
            with suppress(OSError, ValueError):
                line = Line(_connect(address))
                hello = {"kind": "hello", "token": self._address.token, "rank": self._rank}
                line.send({**hello, "who": Member.this().as_list()})
                line.connection.settimeout(_REACH_SECONDS)
                messages, over = line.receive()
                line.connection.settimeout(_SEND_SECONDS)
                if messages and not over and messages[0]["kind"] == "welcome":
                    line.rank, line.member = messages[0]["from"], Member(*messages[0]["who"])
                    self.parent, self._early = line, messages[1:]
                    self._selector.register(line.connection, selectors.EVENT_READ, line)
                    return True
                line.close()
        return False

    def reach_root(self) -> bool:
        """Connect to process 0; return whether it answers."""
        return self.reach((host, self._address.port) for host in self._address.hosts)

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
        self._waking.close()
        self._selector.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            line = Line(connection)
            self._strangers.append(line)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> list[tuple[int, Message]]:
        """Take in what has come over a line, and pass it on."""
        messages, over = line.receive()
        if line is self.parent:
            messages, self._early = self._early + messages, []
        if line.rank is None and messages:
            over = not self._admit(line, messages.pop(0)) or over
        if line.rank is None:
            if over:
                self._drop(line)
            return []
        if over:
            messages += self._lose(line)
        for message in messages:
            origin = message.setdefault("from", line.rank)
            if origin == line.rank and message["kind"] in ("done", "failed"):
                line.has_ended = True
            self._route(message, line)
        return [(int(message["from"]), message) for message in messages]

    def _lose(self, line: Line) -> list[Message]:
        """Forget a line that is over; return what that means."""
        self._drop(line)
        if line is not self.parent:
            del self.children[line.rank or 0]
        else:
            self.parent = None
            if line.rank and line.has_ended and self.reach_root():
                return []  # who passed on what process 0 says has ended, but process 0 has not
        gone = {"kind": GONE, "from": line.rank, "who": str(line.member)}
        gone["unreachable"] = line.is_unreachable
        return [{**gone, "to": self._rank} if line.has_ended else gone]

    def _admit(self, line: Line, hello: Message) -> bool:
        """Take in a caller that knows the word, and say so."""
        rank, token = hello.get("rank"), str(hello.get("token")).encode("utf-8", "replace")
        known = secrets.compare_digest(token, self._address.token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self._size:
            return False
        who = hello.get("who")
        if rank in self.children or rank == self._rank or not isinstance(who, list):
            return False
        line.rank, line.member = rank, Member(*who)
        self.children[rank] = line
        welcome = {"kind": "welcome", "from": self._rank, "who": Member.this().as_list()}
        line.send(welcome)
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


def open_server(size: int, *, one_machine: bool) -> tuple[Links, Address]:
    """Listen, as process 0, for the others; on the loopback only where all are on this machine.

    Raises:
        OSError: There is no port.
    """
    host = "127.0.0.1" if one_machine else os.environ.get(ADDRESS_VARIABLE, "")
    listening = listen(host, ports(), size)
    hosts = [host] if host else _own_names()
    address = Address(tuple(hosts), listening.getsockname()[1], secrets.token_hex(16))
    local = None if one_machine else _listen_here(_local_name(address), size)
    return Links(0, size, address, [listening, *([] if local is None else [local])]), address


def reach_server(address: Address, rank: int, size: int, *, one_machine: bool) -> Links | None:
    """Return the connections of another process; None where process 0 cannot be reached.

    On another machine than process 0 the first that calls this serves the others there.
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
    except OSError:
        listening.close()
        return None
    return listening


def _connect(address: Any) -> socket.socket:
    """Return a connection to a host and port, or to a name of this machine."""
    if not isinstance(address, bytes):
        return socket.create_connection(address, timeout=_REACH_SECONDS)
    end = time.monotonic() + _REACH_SECONDS
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
