"""What all kinds of workload have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from benchmarks.compare.meter import Meter

__all__ = ["Outcome", "Unsupported", "Workload"]


class Unsupported(Exception):
    """Raised by a peer that cannot do a workload; the message says why, for the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run came to.

    Args:
        seconds: Of one unit of the workload.
        calls: Python and C calls for each unit, where they were counted.
        syncs: Reads of a device tensor by the host for each unit, where they were counted.
        product: What must be the same for all peers, such as the final weights.
    """

    seconds: float
    calls: float | None = None
    syncs: float | None = None
    product: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """Something that every peer does in its own way.

    Args:
        name: Short, for the command line and the table.
        about: What is done, in one line.
        processes: How many processes share the work, as torchrun would start them.
        bound: How far the product may be from that of the loop by hand: the largest difference of
            two elements, as a share of the largest element. 0: bit by bit equal.
        full: Left out of the small run.
    """

    kind: ClassVar[str]  # the function of a peer's module that does it
    unit: ClassVar[str]  # what the time is of

    name: str
    about: str
    processes: int = 1
    bound: float = 0.0
    full: bool = False

    @abstractmethod
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        """Let a peer's function work once, in this process, and return what it came to.

        Args:
            work: The function of the peer's module that `kind` names.
            meter: Entered already; `stamp` it where a unit ends.
        """
