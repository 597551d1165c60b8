"""Time, calls and host syncs of a piece of work, between two stamps."""

import sys
import threading
import time
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, Self
from unittest import mock

from torch import Tensor

__all__ = ["Meter", "Mode", "Stamp"]

Mode = Literal["time", "cpu", "calls", "syncs"]

READS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__",
)  # fmt: skip
"""Methods of a tensor that make the host wait for an accelerator.

Only those of floating-point tensors are counted: indices, lengths and keys live on the host.
"""


class Stamp(NamedTuple):
    """The state of the meter at one moment."""

    seconds: float
    calls: int
    syncs: int


class Meter:
    """Counts while it is entered. Timing and each kind of count are runs of their own.

    Args:
        mode: "time": nothing but the clock. "cpu": the processor time of this process instead.
            "calls": Python and C calls, of all threads that start from now on. "syncs": what
            `READS` names.
    """

    def __init__(self, mode: Mode = "time") -> None:
        self.mode = mode
        self.clock = time.process_time if mode == "cpu" else time.perf_counter
        self.stamps: list[Stamp] = []
        self._calls = 0
        self._syncs = 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        if self.mode == "calls":
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)
        elif self.mode == "syncs":
            for name in READS:
                self._patches.enter_context(mock.patch.object(Tensor, name, self._counted(name)))
        return self

    def __exit__(self, *error: object) -> None:
        if self.mode == "calls":
            sys.setprofile(None)
            threading.setprofile(None)
        self._patches.close()

    def stamp(self, *_: object) -> None:
        """Note the present state."""
        self.stamps.append(Stamp(self.clock(), self._calls, self._syncs))

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" or event == "c_call":
            self._calls += 1

    def _counted(self, name: str) -> Any:
        original = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._syncs += tensor.is_floating_point()
            return original(tensor, *args, **kwargs)

        return counted
