"""Standard output and error: whoever reads them may leave, and no training ends for that."""

import atexit
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["lasting", "lost", "put"]

_lost: dict[str, str] = {}


class _Lasting:
    """A standard stream that is written to as before when nobody can read it any more.

    Args:
        stream: The real one; all but writing is left to it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; what cannot be written is left out."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            _lose(self._stream, error)
        return len(text)

    def flush(self) -> None:
        """Pass on what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            _lose(self._stream, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Let `print` go on inside when the reader of the standard streams has left."""
    ours: dict[str, Any] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            ours[name] = _Lasting(stream)
            setattr(sys, name, ours[name])
    try:
        yield
    finally:
        for name, stream in ours.items():
            if name in _lost:  # what is left in it would fail at the next `print`
                stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, stream._stream)


def put(*values: Any, file: Any = None, **options: Any) -> None:
    """Print as `print` does; a standard stream that nobody reads any more is no error."""
    stream = sys.stdout if file is None else file
    is_standard = stream is not None and any(stream is each for each in (sys.stdout, sys.stderr))
    print(*values, file=_Lasting(stream) if is_standard else stream, **options)


def lost() -> dict[str, str]:
    """Return the standard streams that could not be written to, with the reasons."""
    return dict(_lost)


def _lose(stream: Any, error: Exception, *, ends: bool = False) -> None:
    """Note once that a stream cannot be written to; what is still written to it goes nowhere."""
    if isinstance(error, ValueError) and not stream.closed:
        raise error  # text that the encoding does not have
    name = "stderr" if stream is sys.__stderr__ else "stdout"
    known = name in _lost
    _lost.setdefault(name, str(error))
    if isinstance(error, OSError):
        # A full disk may take more later; whoever has left does not come back.
        _drain(stream, for_good=ends or error.errno != errno.ENOSPC)
    if not known and name == "stdout":
        note = f"trainkit: stdout cannot be written to ({error}); the program goes on without it.\n"
        with suppress(OSError):
            os.write(2, note.encode())


def _drain(stream: Any, *, for_good: bool) -> None:
    """Let what a stream holds go nowhere, else it fails again; `for_good`: all that follows too."""
    with suppress(OSError, ValueError):
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        real = os.dup(number)
        os.dup2(nowhere, number)
        stream.flush()
        if not for_good:
            os.dup2(real, number)
        os.close(real)
        os.close(nowhere)


def _finish() -> None:
    """Write what is left; where Python itself fails to, it ends with the code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            _lose(stream, error, ends=True)
        except ValueError:  # closed
            continue


def _occupy() -> None:
    """Open the standard descriptors that are closed, lest a file gets what others print there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest that is free


_occupy()
atexit.register(_finish)
