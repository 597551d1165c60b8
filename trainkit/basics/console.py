"""Standard output and error: whoever reads them may leave, and no training ends for that."""

import atexit
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")
_lost: dict[str, str] = {}


class _Lasting:
    """A standard stream that is written to as before when nobody can read it any more.

    Args:
        stream: The real one, or what a program has put in its place; all but writing is left to it.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write; what cannot be written is left out."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            _lose(self._stream, self._name, error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on what was written, where the stream knows how."""
        try:
            _flush(self._stream)
        except (OSError, ValueError) as error:
            _lose(self._stream, self._name, error)

    def isatty(self) -> bool:
        """Return whether it is a terminal; what a program has made may not know, or be closed."""
        try:
            return bool(self._stream.isatty())
        except (AttributeError, OSError, ValueError):
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Let `print` go on inside when the reader of the standard streams has left."""
    ours: dict[str, _Lasting] = {}
    for name in _NAMES:
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Lasting):
            ours[name] = _Lasting(stream, name)
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
    for name in _NAMES:
        if stream is not None and stream is getattr(sys, name):
            stream = _Lasting(stream, name)
    print(*values, file=stream, **options)


def lost() -> dict[str, str]:
    """Return the standard streams that could not be written to, with the reasons."""
    return dict(_lost)


def _lose(stream: Any, name: str, error: Exception, *, ends: bool = False) -> None:
    """Note once that a stream cannot be written to; what is still written to it goes nowhere."""
    if isinstance(error, UnicodeError):
        raise error  # text that the encoding does not have
    is_known, is_real = name in _lost, stream is getattr(sys, f"__{name}__")
    _lost.setdefault(name, str(error))
    if is_real and isinstance(error, OSError):
        # A full disk may take more later; whoever has left does not come back.
        _drain(stream, for_good=ends or error.errno != errno.ENOSPC)
    if not is_known and not (is_real and name == "stderr"):
        note = f"trainkit: {name} cannot be written to ({error}); the program goes on without it.\n"
        with suppress(OSError):
            os.write(2, note.encode())


def _flush(stream: Any) -> None:
    if hasattr(stream, "flush"):  # which little programs leave out
        stream.flush()


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
    for name in _NAMES:
        for stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            try:
                _flush(stream)
            except OSError as error:
                _lose(stream, name, error, ends=True)
                if stream is not getattr(sys, f"__{name}__"):
                    setattr(sys, name, None)  # Python would fail where this has
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
