"""How the processes of a machine ended, as codes and in words."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.signals import exit_code
from trainkit.watch.exit import EXIT_OTHER_FAILED

__all__ = ["Outcome", "described", "not_told", "shell_code"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the processes of this machine ended.

    Args:
        code: What the launcher exits with.
        reports: The folder with the reports of the last attempt.
        failures: Rank to what happened, for processes that failed.
        endings: The same for processes that have ended with code 0.
        was_asked: Whether a signal to this launcher ended them.
    """

    code: int
    reports: Path
    failures: Mapping[int, str] = field(default_factory=dict)
    endings: Mapping[int, str] = field(default_factory=dict)
    was_asked: bool = False


def not_told(codes: Mapping[int, int]) -> dict[int, int]:
    """Return the codes of processes that were not told to end."""
    told = (-signal.SIGTERM, exit_code(signal.SIGTERM), EXIT_OTHER_FAILED)
    return {rank: code for rank, code in codes.items() if code not in told}


def shell_code(code: int | None) -> int:
    """Return an exit code as a shell gives it: 128 + N for a process that signal N killed."""
    return 1 if code is None else code if code >= 0 else 128 - code


def described(code: int | None) -> str:
    """Return how a process ended, in words; None where it has not."""
    if code is None:
        return "did not end"
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (often: this machine ran out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
