"""Lines between the processes of a job, over which they hear of each other's end at once.

Every process has one connection to process 0, which passes on what it hears. The kernel closes the
connection of a process that ends, however it ends, so nobody has to ask whether it lives.
"""

import json
import os
import secrets
import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

from typing_extensions import override

__all__ = ["GONE", "Address", "Client", "Links", "Message", "Server", "open_server", "reach_server"]

Message: TypeAlias = dict[str, Any]
"""What travels: a JSON object with the keys `kind` and, once passed on, `from`.

One with the key `to` is for process 0 alone.
"""

GONE = "gone"
"""The kind of the message that stands for the end of a connection."""

_LARGEST = 1 << 20  # bytes of a message
_SEND_SECONDS = 0.3  # for one message: a process that is stopped must not hold up the others
_REACH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where process 0 listens, and the word that its callers must know."""

    hosts: tuple[str, ...]
    port: int
    token: str


class _Line:
    """One connection, cut into messages.

    Args:
        connection: Owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None  # of the other end, once it has said so
        self._read = b""
        connection.settimeout(_SEND_SECONDS)
        with suppress(OSError):  # a machine that loses power says nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def send(self, message: Message) -> None:
        """Send a message, if the other end takes it in time."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have come, and whether the connection is over."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return [], False
        except OSError:
            data = b""
        *lines, self._read = (self._read + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], True
        sound = all(isinstance(m, dict) and isinstance(m.get("kind"), str) for m in messages)
        over = not data or not sound or len(self._read) > _LARGEST
        return (messages if sound else []), over

    def close(self) -> None:
        self.connection.close()


class Links:
    """The connections of this process; one thread alone calls its methods, but for `wake`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        _open.add(self)

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with suppress(OSError):
            self._waking.send(b".")

    def poll(self, seconds: float | None) -> list[tuple[int, Message]]:
        """Wait for messages, at most `seconds`; return them with the process they come from."""
        heard: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with suppress(OSError):
                    self._woken.recv(1 << 12)
            else:
                heard += self._hear(key.data)
        return heard

    def send(self, message: Message) -> None:
        """Tell every other process."""
        raise NotImplementedError

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

    def _hear(self, line: _Line | None) -> list[tuple[int, Message]]:
        raise NotImplementedError


class Server(Links):
    """The end of process 0: it passes on what each process says to all others.

    Args:
        listening: Its socket; owned from now on.
        token: The word that callers must know.
        size: Processes in all.
    """

    def __init__(self, listening: socket.socket, token: str, size: int) -> None:
        super().__init__()
        listening.setblocking(False)
        self._listening = listening
        self._token = token
        self._size = size
        self._lines: dict[int, _Line] = {}
        self._selector.register(listening, selectors.EVENT_READ, None)

    @override
    def send(self, message: Message) -> None:
        """Tell every other process."""
        self._pass_on(0, message)

    @override
    def _hear(self, line: _Line | None) -> list[tuple[int, Message]]:
        if line is None:
            with suppress(OSError):
                connection, _ = self._listening.accept()
                line = _Line(connection)
                self._selector.register(connection, selectors.EVENT_READ, line)
            return []
        messages, over = line.receive()
        if line.rank is None and messages:
            over = not self._admit(line, messages.pop(0)) or over
        heard = [] if line.rank is None else [(line.rank, message) for message in messages]
        if over:
            self._selector.unregister(line.connection)
            line.close()
            if line.rank is not None:
                del self._lines[line.rank]
                heard.append((line.rank, {"kind": GONE}))
        for rank, message in heard:
            if "to" not in message:
                self._pass_on(rank, message)
        return heard

    def _admit(self, line: _Line, hello: Message) -> bool:
        """Take in a caller that knows the word, and say so."""
        rank = hello.get("rank")
        known = secrets.compare_digest(str(hello.get("token")).encode(), self._token.encode())
        if not known or not isinstance(rank, int) or not 0 < rank < self._size:
            return False
        if rank in self._lines:
            return False
        line.rank = rank
        self._lines[rank] = line
        line.send({"kind": "welcome", "from": 0})
        return True

    def _pass_on(self, source: int, message: Message) -> None:
        for rank, line in self._lines.items():
            if rank != source:
                line.send({**message, "from": source})


class Client(Links):
    """The end of every other process.

    Args:
        line: The connection to process 0.
        early: What has come over it already.
    """

    def __init__(self, line: _Line, early: list[Message]) -> None:
        super().__init__()
        self._line = line
        self._early = early
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    @override
    def send(self, message: Message) -> None:
        """Tell every other process."""
        self._line.send(message)

    @override
    def _hear(self, line: _Line | None) -> list[tuple[int, Message]]:
        messages, over = self._line.receive()
        messages, self._early = self._early + messages, []
        heard = [(int(message.get("from", 0)), message) for message in messages]
        if over:
            self._selector.unregister(self._line.connection)
            self._line.close()
            heard.append((0, {"kind": GONE}))
        return heard


def open_server(size: int, *, one_machine: bool) -> tuple[Server, Address]:
    """Listen for the others; on the loopback only where all are on this machine.

    Raises:
        OSError: There is no port.
    """
    if one_machine:
        listening, hosts = socket.create_server(("127.0.0.1", 0), backlog=size), ["127.0.0.1"]
    else:
        hosts = _own_names()
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=size, dualstack_ipv6=True
            )
        else:
            listening = socket.create_server(("", 0), backlog=size)
    token = secrets.token_hex(16)
    return Server(listening, token, size), Address(tuple(hosts), listening.getsockname()[1], token)


def reach_server(address: Address, rank: int) -> Client | None:
    """Return the connection to process 0; None where it cannot be reached."""
    for host in address.hosts:
        with suppress(OSError, ValueError):
            connection = socket.create_connection((host, address.port), timeout=_REACH_SECONDS)
            line = _Line(connection)
            line.send({"kind": "hello", "token": address.token, "rank": rank})
            connection.settimeout(_REACH_SECONDS)
            messages, over = line.receive()
            connection.settimeout(_SEND_SECONDS)
            if messages and not over and messages[0]["kind"] == "welcome":
                return Client(line, messages[1:])
            line.close()
    return None


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
