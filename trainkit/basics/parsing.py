"""Turn what a command line, a file or the environment says into the value of a setting.

Each reader returns the value, or raises ValueError with what it must be.
"""

import difflib
from collections.abc import Callable, Iterable

_TRUE = {"true", "yes", "on", "1", "y", "t"}
_FALSE = {"false", "no", "off", "0", "n", "f"}


def boolean(value: object) -> bool:
    """Read yes or no."""
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("true or false")


def one_of(*names: str) -> Callable[[object], str]:
    """Return the reader of one of these names, in any case."""
    spellings = {name.lower(): name for name in names}

    def read(value: object) -> str:
        # An unquoted `no` is a boolean in YAML 1.1.
        word = "no" if value is False else str(value).strip().lower()
        if word not in spellings:
            raise ValueError(f"one of {', '.join(names)}" if len(names) > 1 else names[0])
        return spellings[word]

    return read


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence that names the known name nearest to this one; empty without one."""
    matches = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean `{matches[0]}`?" if matches else ""
