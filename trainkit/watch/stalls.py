"""Where the processes of a job that stands still are."""

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit.errors import MOST_NAMED
from trainkit.watch.member import Member, stat_of

__all__ = [
    "Stillness",
    "Unanswered",
    "Verdict",
    "call_of",
    "examples",
    "judge",
    "raised_at",
    "stands",
    "where",
]

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LONGEST_STACK = 6000  # characters
_OWN_SECONDS = 1.0  # of the processor, in which a process could have answered
_CALM_SECONDS = 2.0  # in which none of its threads waited for a processor or a disk

_TORCH = "torch.distributed.distributed_c10d"
# Modules whose functions wait for other processes, and what a report calls that; "": by its name.
_WAITING = {
    _TORCH: "",
    "trainkit.distributed.processes": "",
    "torch.autograd.graph": "backward",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}

_UNUSED = (
    ". Perhaps parameters are frozen on some processes only, or a step uses other parameters on "
    "some processes than on others: then pass `strategy=DDP(find_unused_parameters=True)`"
)


def where(thread: int) -> dict[str, str]:
    """Return where a thread is: `inside` which collective, `line` of the user's code, `stack`.

    `of_torch` is that collective too, where the user's code called torch's own function.
    """
    innermost = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    frame = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    outer, inside = next(
        ((f, name) for f in reversed(frames) if (name := _collective(f))), (None, "")
    )
    is_torch = outer is not None and outer.f_globals["__name__"] == _TORCH
    own = next((f for f in frames if _is_users(f.f_code.co_filename)), innermost)
    stack = "".join(traceback.format_stack(innermost)) if innermost is not None else ""
    return {
        "inside": inside,
        "of_torch": inside if is_torch else "",
        "line": "" if own is None else _shown(own),
        "stack": stack[-_LONGEST_STACK:],
    }


class Stillness:
    """For how long the main thread has not moved nor wanted to run, as far as was looked.

    Args:
        thread: Its number.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._place = (0, 0)
        self._since = 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds up to `now`, on the clock of time.monotonic."""
        frame = sys._current_frames().get(self._thread)
        place = (id(frame), frame.f_lasti if frame is not None else 0)
        # On a busy machine a thread may wait for its turn: the kernel knows that it could run.
        if place != self._place or stat_of(os.getpid())[:1] == ["R"]:
            self._place, self._since = place, now
        return now - self._since


class Unanswered:
    """A process of this machine that was asked something, and may be too starved to answer.

    Args:
        member: The process.
        now: On the clock of time.monotonic.
    """

    def __init__(self, member: Member, now: float) -> None:
        self._member = member
        self._used = member.used()
        self._waited = now

    def could_answer(self, now: float) -> bool:
        """Return whether it had the processor, or wanted none for long; to be called often."""
        tasks = Path(f"/proc/{self._member.pid}/task")
        threads: list[str] = []
        with suppress(OSError):  # it may end while it is looked at
            threads = os.listdir(tasks)
        states = [stat_of(f"{self._member.pid}/task/{thread}")[:1] for thread in threads]
        if not states or ["R"] in states or ["D"] in states:
            self._waited = now
        return (
            self._member.used() - self._used >= _OWN_SECONDS or now - self._waited > _CALM_SECONDS
        )


def call_of(error: BaseException) -> str:
    """Return what a process had called, as its user would, when a collective raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Those of `config` only check the arguments of a call.
    ours = [
        frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_filename.startswith(_PACKAGE)
        and frame.f_globals.get("__name__") != "trainkit.config"
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a job stands still.

    Args:
        text: In a sentence.
        process: The first one that the others wait for; None where they wait for each other.
        frozen: The processes that do not answer.
    """

    text: str
    process: int | None = None
    frozen: tuple[int, ...] = ()


def judge(states: Mapping[int, Mapping[str, Any]], silent: Mapping[int, str]) -> Verdict:
    """Return why a job stands still.

    Args:
        states: Of the processes that answered.
        silent: Of those that did not, who they are and why not.
    """
    if silent:
        reasons = [f"process {rank} {why}" for rank, why in sorted(silent.items())]
        return Verdict(_listed(reasons), min(silent), tuple(sorted(silent)))
    ordered = sorted(states.items())
    free = [rank for rank, state in ordered if not state.get("inside")]
    if free and len(free) < len(states):
        reasons = [f"process {rank} is at {states[rank].get('line')}" for rank in free]
        return Verdict(f"{_listed(reasons)}, and the others wait for it", free[0])
    if free:
        text = "no process is in a collective"
    elif len({tuple(map(state.get, ("inside", "phase", "step"))) for _, state in ordered}) > 1:
        text = "the processes wait in different places"
    else:
        text = "all processes wait in the same place"
    shown = [f"process {r} {_standing(states[r])}" for r in examples(states)]
    more = f"; and {len(states) - len(shown)} more" if len(states) > len(shown) else ""
    # In a backward of the same step and line of the user's code, which others have left.
    if len({(state.get("line"), state.get("step")) for _, state in ordered}) == 1:
        more += _UNUSED if "backward" in {state.get("inside") for _, state in ordered} else ""
    return Verdict(f"{text}: {'; '.join(shown)}{more}")


def examples(states: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the processes to be shown: all if they are few, else the first in each place."""
    if len(states) <= MOST_NAMED:
        return sorted(states)
    first: dict[str, int] = {}
    for rank, state in sorted(states.items()):
        first.setdefault(_standing(state), rank)
    return list(first.values())[:MOST_NAMED]


def _listed(reasons: list[str]) -> str:
    more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
    return "; ".join(reasons[:MOST_NAMED]) + more


def stands(state: Mapping[str, Any]) -> str:
    """Return in words where a process is: in which collective, at which line."""
    if not state.get("inside"):
        return f"at {state.get('line')}"
    latest = f" (latest of trainkit's: {state['latest']})" if state.get("latest") else ""
    return f"in `{state['inside']}`{latest}, called at {state.get('line')}"


def _standing(state: Mapping[str, Any]) -> str:
    if not state.get("inside"):
        return stands(state)
    return f"{stands(state)} (phase {state.get('phase')}, after step {state.get('step')})"
