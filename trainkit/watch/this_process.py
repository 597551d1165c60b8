"""This process, as the parts of its watch know it."""

import threading
from collections import deque
from contextlib import suppress
from typing import Any

from trainkit.distributed import Processes
from trainkit.distributed.watch import Progress
from trainkit.watch.connections import Links, Message
from trainkit.watch.where import whereabouts

__all__ = ["ThisProcess"]


class ThisProcess:
    """Which one of the job it is, where it is, and how it talks to the others.

    Args:
        links: Its connections to the others; owned from now on, by the thread of the watch.

    Attributes:
        position: Returns how many collectives it has begun in each group.
        run: Whose progress is watched; None without one.
        main: The main thread.
        unsent: What the thread is to send.
        ended: The processes that said that they end in order, and how: on process 0 all.
    """

    def __init__(self, processes: Processes, links: Links) -> None:
        self.rank, self.size = processes.rank, processes.size
        self.position = processes.position
        self.links = links
        self.run: Progress | None = None
        self.main = threading.main_thread().ident or 0
        self.unsent: deque[Message] = deque()
        self.ended: dict[int, str] = {}
        self._latest = processes.latest

    def send(self, message: Message) -> None:
        """Send a message to the others, or with the key `to` to process 0; from any thread."""
        self.unsent.append(message)
        self.links.wake()

    def place(self) -> Message:
        """Return where it is: in its run, its collectives, its code."""
        place = whereabouts(self.main, self._latest(), self.run_place())
        return {**place, "at": self.position()}

    def run_place(self) -> dict[str, Any]:
        """Return where its run is: `step`, `epoch`, `phase`, `samples`; empty without one."""
        with suppress(Exception):  # the main thread may be changing what is read
            return {} if self.run is None else self.run.place()
        return {}

    def is_first_without(self, others: tuple[int, ...] = ()) -> bool:
        """Return whether all before it have ended, as far as is known, or are among others."""
        return all(rank in self.ended or rank in others for rank in range(self.rank))
