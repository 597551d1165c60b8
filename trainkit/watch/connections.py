"""Connections between the processes of a job, over which they hear of each other's end at once.

Each has one to process 0, which passes on what it hears. The kernel closes the connection of a
process that ends, however it ends, so nobody has to ask whether it lives. A store of torch would
need more: it tells nobody of an end, and who asks one whose process is stopped waits for ever.
"""

import errno
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakSet

from trainkit.basics.systems import after_fork
from trainkit.watch import timing
from trainkit.watch.listening import ADDRESS_VARIABLE, PORTS_VARIABLE, listen, ports
from trainkit.watch.member import Member

Message: TypeAlias = dict[str, Any]
"""What travels: a JSON object with the keys `kind` and `from`, the process that says it.

One with the key `to` is for process 0 alone, others are for all. Of the news that a process has
failed or is gone, the first goes on, because it ends the job.
"""

GONE = "gone"
"""The kind of the message that stands for the end of a connection.

It has `who`, `place`, and `unreachable`: for how many seconds the machine was silent before packets
were known to be lost; 0 where the process has ended.
"""

_LARGEST = 1 << 20  # bytes of a message
_LARGEST_OF_STRANGERS = 1 << 10
_MOST_STRANGERS = 64  # at a time; others wait until some have said the word, or were turned away
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


@dataclass(frozen=True, slots=True)
class Address:
    """Where process 0 listens, and the word that its callers must know."""

    host: str
    port: int
    token: str


class Line:
    """One connection, cut into messages.

    Args:
        connection: Owned from now on.
        trusted: Whether the other end is a process of the job, and not yet a stranger.
    """

    def __init__(self, connection: socket.socket, *, trusted: bool = False) -> None:
        self.connection = connection
        self.trusted = trusted
        self.rank: int | None = None  # of the other end, once it has said so
        self.member: Member | None = None  # the process at the other end
        self.has_ended = False  # it said so, or that it failed: its end is no news
        self.since = time.monotonic()
        self.silent = 0.0  # seconds in which this process listened, and heard nothing
        self.is_unreachable = False  # the network, or the machine at the other end, is gone
        self.used = 0.0  # seconds of a processor, by the other end when it was looked at
        self._read = b""
        connection.settimeout(timing.SEND)
        with suppress(OSError, AttributeError):  # a machine that loses power says nothing
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            milliseconds = 1000 * timing.UNREACHABLE
            # What is sent, as every few seconds a sign of life, is else tried for a quarter hour.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def send(self, message: Message) -> None:
        """Send a message, if the other end takes it in time."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.is_unreachable |= error.errno in _NO_WAY

    def receive(self) -> list[Message] | None:
        """Return the messages that have come; None where the connection is over."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # of this call alone
                return []
            self.is_unreachable |= error.errno in _NO_WAY
            return None
        if data:
            self.silent = 0.0
        *lines, self._read = (self._read + data).split(b"\n")
        largest = _LARGEST if self.trusted else _LARGEST_OF_STRANGERS
        if not data or max(map(len, [*lines, self._read])) > largest:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        sound = all(isinstance(m, dict) and isinstance(m.get("kind"), str) for m in messages)
        return messages if sound else None


class Links:
    """The connections of this process; one thread alone calls its methods, but for `wake`.

    Args:
        address: Of process 0.
        listening: Where others connect to process 0, if this is it; owned from now on.

    Attributes:
        parent: To process 0.
        children: On process 0, to the others.
    """

    def __init__(
        self, rank: int, size: int, address: Address, listening: socket.socket | None = None
    ) -> None:
        self.parent: Line | None = None
        self.children: dict[int, Line] = {}
        self._rank = rank
        self._size = size
        self._address = address
        self._told: set[object] = set()  # the news that this process has passed on
        self._strangers: list[Line] = []
        self._early: list[tuple[int, Message]] = []  # what the parent said with its welcome
        self._polled = time.monotonic()
        self._unsaid = 0.0  # seconds since the last sign of life
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        for one in (self._woken, *([] if listening is None else [listening])):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, one)
        self._waking.setblocking(False)
        _open.add(self)

    @property
    def lines(self) -> list[Line]:
        return [*self.children.values(), *([] if self.parent is None else [self.parent])]

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with suppress(OSError):
            self._waking.send(b".")

    def poll(self, seconds: float) -> list[tuple[int, Message]]:
        """Wait for messages, at most `seconds`; return them with the process they come from."""
        heard = self._look()
        if heard or self._strangers:
            seconds = min(seconds, 0.0 if heard else 0.2)
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

    def reach_root(self) -> bool:
        """Connect to process 0; return whether it answers."""
        address = self._address.host, self._address.port
        with suppress(OSError):
            line = Line(socket.create_connection(address, timing.CONNECT), trusted=True)
            hello = {"kind": "hello", "token": self._address.token, "rank": self._rank}
            line.send({**hello, "who": Member.this().as_list()})
            line.connection.settimeout(timing.CONNECT)
            welcome, *early = line.receive() or [{}]
            line.rank, line.member = welcome.get("from"), Member.parse(welcome.get("who"))
            if isinstance(line.rank, int) and line.member is not None:
                line.connection.settimeout(timing.SEND)
                self.parent, self._early = line, self._take(line, early)
                self._selector.register(line.connection, selectors.EVENT_READ, line)
                return True
            line.connection.close()
        return False

    def know(self, token: str) -> None:
        """Let in, from now on, who knows another word than before."""
        self._address = replace(self._address, token=token)

    def listen_again(self, listen: Callable[[], socket.socket]) -> None:
        """Listen elsewhere, perhaps at the same port; who is connected stays so."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, socket.socket) and key.data is not self._woken:
                self._selector.unregister(key.data)
                key.data.close()
        listening = listen()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, listening)

    def close(self) -> None:
        """Close all connections; also in a fork, which must not keep them open."""
        if self in _open:
            _open.discard(self)
            for key in list(self._selector.get_map().values()):
                with suppress(OSError):
                    key.fileobj.close()  # type: ignore[union-attr]
            self._waking.close()
            self._selector.close()

    def _look(self) -> list[tuple[int, Message]]:
        """Do what is time for; return what was heard early."""
        now = time.monotonic()
        passed = min(now - self._polled, timing.LONGEST_PAUSE)
        self._polled = now
        self._unsaid += passed
        for line in self.lines:
            line.silent += passed
            if self._unsaid > timing.BEAT:
                line.send({"kind": "beat"})
        self._unsaid %= timing.BEAT
        for line in [line for line in self._strangers if now - line.since > timing.STRANGER]:
            self._strangers.remove(line)
            self._drop(line)
        heard, self._early = self._early, []
        return heard

    def _accept(self, listening: socket.socket) -> None:
        """Let a caller in, if there is room."""
        try:
            if len(self._strangers) == _MOST_STRANGERS:
                raise OSError
            line = Line(listening.accept()[0])
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # as where no descriptor is left: `select` would return again and again
            time.sleep(timing.REST)
            return
        self._strangers.append(line)
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> list[tuple[int, Message]]:
        """Take in what has come over a line."""
        if line.connection.fileno() < 0:  # dropped after `select` had found it
            return []
        messages = line.receive()
        if line.rank is None and messages != []:
            self._strangers.remove(line)
            if messages is None or not self._admit(line, messages.pop(0)):
                self._drop(line)
                return []
        return self._take(line, [self._lose(line)] if messages is None else messages)

    def _take(self, line: Line, messages: list[Message]) -> list[tuple[int, Message]]:
        """Pass on what was said over a line; return it."""
        heard = []
        for message in messages:
            if message["kind"] != "beat":
                origin: Any = message.setdefault("from", line.rank)
                if origin == line.rank and message["kind"] in ("done", "failed"):
                    line.has_ended = True
                self._route(message, line)
                heard.append((int(origin), message))
        return heard

    def _lose(self, line: Line) -> Message:
        """Forget a line that is over; return what this process says of that."""
        self._drop(line)
        if line is self.parent:
            self.parent = None
        else:
            del self.children[line.rank or 0]
        gone: Message = {"kind": GONE, "from": line.rank, "who": str(line.member)}
        gone["place"] = "" if line.member is None else line.member.place()
        gone["unreachable"] = line.is_unreachable * round(line.silent)
        return {**gone, "to": self._rank} if line.has_ended else gone

    def _admit(self, line: Line, hello: Message) -> bool:
        """Take in a caller that knows the word, and say so."""
        rank, token = hello.get("rank"), str(hello.get("token")).encode("utf-8", "replace")
        known = secrets.compare_digest(token, self._address.token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self._size:
            return False
        member = Member.parse(hello.get("who"))
        if member is None or rank in self.children:
            return False
        line.rank, line.member, line.trusted = rank, member, True
        self.children[rank] = line
        line.send({"kind": "welcome", "from": self._rank, "who": Member.this().as_list()})
        return True

    def _drop(self, line: Line) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()

    def _route(self, message: Message, source: Line | None) -> None:
        """Send a message to where it must go from here, but not back."""
        if message.get("to") == self._rank:
            return
        if source is not None and message["kind"] in ("failed", GONE):
            news = message["kind"], message.get("fit")
            if news in self._told:
                return
            self._told.add(news)
        for line in self.lines:
            if line is not source:
                line.send(message)


def open_server(size: int, *, one_machine: bool) -> tuple[Links, Address]:
    """Listen, as process 0, for the others; on the loopback only where all are on this machine.

    Raises:
        OSError: There is no port.
    """
    host = "127.0.0.1" if one_machine else os.environ.get(ADDRESS_VARIABLE, "")
    allowed = ports(os.environ.get(PORTS_VARIABLE))
    listening = listen(host, allowed, size + _MOST_STRANGERS)
    # By which the others have found it already.
    name = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    address = Address(name, listening.getsockname()[1], secrets.token_hex(16))
    return Links(0, size, address, listening), address


def reach_server(address: Address, rank: int, size: int) -> Links | None:
    """Return the connections of another process; None where process 0 cannot be reached.

    Raises:
        OSError: There is no descriptor left.
    """
    links = Links(rank, size, address)
    if links.reach_root():
        return links
    links.close()
    return None


_open: WeakSet[Links] = WeakSet()


def _close_in_fork() -> None:
    # A fork that kept a connection open would hide the end of its parent.
    for links in list(_open):
        links.close()


after_fork(_close_in_fork)
