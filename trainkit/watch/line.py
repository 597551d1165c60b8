"""One connection between two processes of a job, cut into messages."""

import errno
import json
import socket
import time
from contextlib import suppress
from typing import Any, TypeAlias

from trainkit.watch.member import Member

__all__ = ["SEND_SECONDS", "UNREACHABLE_SECONDS", "Line", "Message"]

Message: TypeAlias = dict[str, Any]
"""What travels: a JSON object with the keys `kind` and `from`, the process that says it.

One with the key `to` is for process 0 alone, others are for all. Of the news that a process has
failed or is gone, the first goes on, because it ends the job. That a process ends in order is told
to process 0, and to all only of process 0 and of the first that does.
"""

UNREACHABLE_SECONDS = 40
"""After which the kernel gives up a connection on which nothing that was sent is acknowledged."""

SEND_SECONDS = 0.3
"""For one message: a process that is stopped must not hold up the others."""

_LARGEST = 1 << 20  # bytes of a message
_LARGEST_OF_STRANGERS = 1 << 10
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


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
        self.since = time.monotonic()  # when it began, or was lost
        self.silent = 0.0  # seconds in which this process listened, and heard nothing
        self.used = 0.0  # seconds of a processor, by a process that is silent
        self.is_noted = False  # that it is
        self.is_unreachable = False  # the network, or the machine at the other end, is gone
        self._read = b""
        connection.settimeout(SEND_SECONDS)
        with suppress(OSError, AttributeError):  # a machine that loses power says nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            milliseconds = 1000 * UNREACHABLE_SECONDS
            # The same where something was sent meanwhile, which else is tried for a quarter hour.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def send(self, message: Message) -> None:
        """Send a message, if the other end takes it in time."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self._note(error)

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have come, and whether the connection is over."""
        largest = _LARGEST if self.trusted else _LARGEST_OF_STRANGERS
        try:
            data = self.connection.recv(min(largest, 1 << 16))
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # of this call alone
                return [], False
            self._note(error)
            data = b""
        self.silent = self.silent if not data else 0.0
        *lines, self._read = (self._read + data).split(b"\n")
        if max(map(len, [*lines, self._read])) > largest:
            return [], True
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return [], True
        sound = all(isinstance(m, dict) and isinstance(m.get("kind"), str) for m in messages)
        return (messages if sound else []), not data or not sound

    def is_lost(self, seconds: float) -> bool:
        """Return whether the process behind a line that is over, since `since`, is lost, too.

        The kernel knows it of this machine; on another one the process has seconds to come again.
        """
        if self.member is not None and self.member.is_here():
            return not self.member.lives()
        return time.monotonic() - self.since > seconds

    def close(self) -> None:
        self.connection.close()

    def _note(self, error: OSError) -> None:
        self.is_unreachable = self.is_unreachable or error.errno in _NO_WAY
