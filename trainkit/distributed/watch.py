"""What the core knows of the watch over a job (rule 32), which is handed in where it is joined."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainkit.basics.config import Watchdog

EXIT_OTHER_FAILED = 69
"""Exit code of a process that left because of another: EX_UNAVAILABLE of sysexits.h."""


class Progress(Protocol):
    """What is watched for progress: a run."""

    watchdog: Watchdog
    output_dir: Path | None

    def progress(self) -> tuple[str, bool, tuple[object, ...]]:
        """Return the phase, whether no step was made yet, and what changes with progress."""

    def place(self) -> dict[str, Any]:
        """Return `step`, `epoch`, `phase` and `samples`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What process 0 says of a call.

    Args:
        missing: The processes that do not make it.
        result: What process 0 returned, where it acted alone.
        failure: The class and the text of what process 0 raised instead.
    """

    missing: tuple[int, ...] = ()
    result: str | None = None
    failure: tuple[str, str] | None = None


class Callers(Protocol):
    """Finds out which processes make a call, before any waits in a collective for the others."""

    def missing(self, name: str, key: str, seconds: float) -> tuple[int, ...]:
        """Return, on process 0, who does not make the call it is in; waits until that is known."""

    def answer(self, answer: Answer) -> None:
        """Tell, on process 0, all that make the call it is in what comes of it."""

    def ask(self, name: str, key: str, seconds: float) -> Answer:
        """Say, on another process, that it makes a call; return what comes of it."""


class Watch(Protocol):
    """Ends this process when another one of the job fails, and tells the others when it fails."""

    @property
    def callers(self) -> Callers:
        """The calls that not all processes may make."""

    def following(self, watched: Progress) -> AbstractContextManager[None]:
        """Watch the progress of a run too, inside."""

    def fail_for_good(self, error: BaseException) -> None:
        """Report an error that nobody will catch, and tell the others."""

    def close(self, outcome: str = ...) -> None:
        """Tell the others that this process ends in order, and `outcome`; stop to watch."""
