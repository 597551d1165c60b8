"""Messages between the harness and its workers: one JSON object a line, over a socket pair."""

import json
import socket
from typing import Any

__all__ = ["Channel", "Closed", "Message"]

Message = dict[str, Any]


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socket pair.

    Args:
        end: The socket; it belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._lines = end.makefile("r", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send one message."""
        try:
            self.socket.sendall(self.encode(message))
        except OSError as error:
            raise Closed from error

    def receive(self) -> Message:
        """Wait for one message.

        Raises:
            Closed: None can come any more, or none came within the time limit of the socket.
        """
        try:
            line = self._lines.readline()
        except OSError as error:
            raise Closed(f"no answer within {self.socket.gettimeout()} s") from error
        if not line:
            raise Closed("the process is gone")
        return self.decode(line.encode())

    @staticmethod
    def encode(message: Message) -> bytes:
        """Return a message as it travels."""
        return json.dumps(message).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Message:
        """Return a message that travelled."""
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Tell the other side that nothing more will come."""
        self._lines.close()
        self.socket.close()
