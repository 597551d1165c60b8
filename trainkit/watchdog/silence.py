"""Find a process that is frozen: it does not say any more that it lives (rule 32).

All say so to their neighbours in the tree, every few seconds, also where no run with limits of its
own is watched. Who is on the machine of a silent process looks at it before it blames it.
"""

from trainkit.watchdog.exit import say
from trainkit.watchdog.line import UNREACHABLE_SECONDS, Line

__all__ = ["is_frozen", "silence"]

_STOPPED_SECONDS = 40.0  # of silence, after which one that the kernel does not run is frozen
_UNKNOWN_SECONDS = 300.0  # after which another one is: it may only hold the interpreter lock
_NOTED_SECONDS = 30.0 + UNREACHABLE_SECONDS  # after which one of another machine is spoken of


def is_frozen(line: Line) -> bool:
    """Return whether the process at the other end is frozen; says once that it is silent.

    One of this machine that uses a processor, or that a debugger holds, is not.
    """
    member = line.member
    here = member is not None and member.is_here() and line.silent > _STOPPED_SECONDS
    if member is None or line.has_ended or not (here or line.silent > _NOTED_SECONDS):
        return False
    if here and member.is_stopped():
        return True
    if not line.is_noted:
        line.is_noted = True
        say(f"trainkit: process {line.rank} {silence(line)}. The job goes on.")
    used, line.used = line.used, member.used() if here else 0.0
    if here and (line.used != used or member.is_stopped("t")):
        line.silent = 0.0
    return line.silent > _UNKNOWN_SECONDS


def silence(line: Line) -> str:
    """Return in words that the process at the other end does not answer, and what it does."""
    member = line.member
    if member is not None and member.is_here():
        return f"({member}) does not answer: {member.doing()}"
    return (
        f"({member}) does not answer since {line.silent:.0f} s: it is frozen, or holds the "
        "interpreter lock, or its machine cannot be reached"
    )
