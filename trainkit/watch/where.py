"""Where this process is: in which collective, and at which line of the user's code."""

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.distributed import Processes
    from trainkit.distributed.watch import Progress
    from trainkit.watch.connections import Links, Message

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LONGEST_STACK = 3000  # characters

_TORCH = "torch.distributed.distributed_c10d"
# Modules whose functions wait for other processes, and what a report calls that; "": by its name.
_WAITING = {
    _TORCH: "",
    "trainkit.distributed.processes": "",
    "torch.autograd.graph": "backward",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}


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

    def __init__(self, processes: "Processes", links: "Links") -> None:
        self.rank, self.size = processes.rank, processes.size
        self.position = processes.position
        self.links = links
        self.run: Progress | None = None
        self.main = threading.main_thread().ident or 0
        self.unsent: deque[Message] = deque()
        self.ended: dict[int, str] = {}
        self._latest = processes.latest

    def send(self, message: "Message") -> None:
        """Send a message to the others, or with the key `to` to process 0; from any thread."""
        self.unsent.append(message)
        self.links.wake()

    def place(self) -> "Message":
        """Return where it is: in its run, its collectives, its code."""
        message = whereabouts(self.main, self._latest(), self.run_place())
        return {**message, "at": self.position()}

    def run_place(self) -> dict[str, Any]:
        """Return where its run is: `step`, `epoch`, `phase`, `samples`; empty without one."""
        with suppress(Exception):  # the main thread may be changing what is read
            return {} if self.run is None else self.run.place()
        return {}

    def is_first_without(self, others: tuple[int, ...] = ()) -> bool:
        """Return whether all before it have ended, as far as is known, or are among others."""
        return all(rank in self.ended or rank in others for rank in range(self.rank))


def whereabouts(thread: int, latest: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a thread is.

    Args:
        latest: The collective of trainkit's that it has begun last.

    Returns:
        `inside` which collective, and that `of_torch` if the user's code called torch's own
        function; `latest`; `line` of the user's code; `phase` and `step`; `stack`; `text`, where
        it is in words.
    """
    innermost = sys._current_frames().get(thread)
    frames = [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]
    outer, inside = next(
        ((f, name) for f in reversed(frames) if (name := _collective(f))), (None, "")
    )
    is_torch = outer is not None and outer.f_globals["__name__"] == _TORCH
    own = next((f for f in frames if _is_users(f.f_code.co_filename)), innermost)
    line = "" if own is None else _shown(own)
    last = f" (latest of trainkit's: {latest})" if latest else ""
    run = f" (phase {place['phase']}, after step {place['step']})" if place else ""
    return {
        "inside": inside,
        "of_torch": inside if is_torch else "",
        "latest": latest,
        "line": line,
        "phase": place.get("phase"),
        "step": place.get("step"),
        "text": (f"in `{inside}`{last}, called at {line}" if inside else f"at {line}") + run,
        "stack": "".join(traceback.format_stack(innermost))[-_LONGEST_STACK:],
    }


def call_of(error: BaseException) -> str:
    """Return what a process had called, as its user would, when a collective raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Those of `config` only check the arguments of a call.
    ours = [
        frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_filename.startswith(_PACKAGE)
        and frame.f_globals.get("__name__") != "trainkit.basics.config"
    ]
    waits = [name for frame in frames if (name := _collective(frame))]
    return f"`{[*ours, *waits][0]}`" if ours or waits else "a collective"


def raised_at(error: BaseException) -> str:
    """Return the last line of the user's code on the way of an error, as a `SyntaxError` has it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _is_users(f.filename) and not f.filename.startswith("<")]
    if isinstance(error, SyntaxError) or not own:
        return ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def _collective(frame: FrameType) -> str:
    """Return what a frame waits for, empty where it is not one that waits for others."""
    known, name = _WAITING.get(frame.f_globals.get("__name__", "")), frame.f_code.co_name
    return "" if known is None or (not known and name.startswith("_")) else known or name


def _is_users(file: str) -> bool:
    libraries = any(part in file for part in _INSTALLED)
    return not (libraries or file.startswith((_PACKAGE, _LIBRARY, "<frozen")))


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in `{code.co_name}`" + (
        f": {text}" if text else ""
    )
