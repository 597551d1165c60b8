"""What a launcher and `Accelerator` read from a command line, a file or the environment.

Each reader returns the value, or raises ValueError with what it must be, as those of `parsing` do.
"""

import re
from collections.abc import Callable
from contextlib import suppress

_PAIRS = re.compile(r"\w+=[^=,\s]+(,\w+=[^=,\s]+)*", re.ASCII)
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)


def whole(at_least: int) -> Callable[[object], int]:
    """Return the reader of whole numbers from `at_least` on."""

    def read(value: object) -> int:
        expected = f"a whole number of at least {at_least}"
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(expected)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(expected) from None
        if number < at_least:
            raise ValueError(expected)
        return number

    return read


def listen_port(value: object) -> int:
    """Read the number of a TCP port; 0 lets the system choose one."""
    with suppress(ValueError):
        number = whole(0)(value)
        if number <= 65535:
            return number
    raise ValueError("the number of a port, from 0 to 65535")


def port_range(value: object) -> str:
    """Read the first and the last of some TCP ports, with a hyphen between them."""
    with suppress(ValueError):
        first, last = map(whole(1), str(value).replace(" ", "").split("-"))
        if first <= last <= 65535:
            return f"{first}-{last}"
    raise ValueError("the first and the last of some ports, such as 29500-29520")


def seconds(value: object) -> float:
    """Read a time in seconds, more than 0."""
    expected = "a number of seconds above 0"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(expected)
    try:
        number = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 < number < float("inf"):
        raise ValueError(expected)
    return number


def text(value: object) -> str:
    """Read a text that is not empty."""
    if isinstance(value, bool | list | dict) or not str(value).strip():
        raise ValueError("a text")
    return str(value).strip()


def gpu_ids(value: object) -> str:
    """Read `all`, or the numbers or names of GPUs with commas between them."""
    items = value if isinstance(value, list) else str(value).split(",")
    names = [str(item).strip() for item in items]
    if [name.lower() for name in names] == ["all"]:
        return "all"
    if not all(_GPU.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise ValueError("`all`, or different GPUs such as 0,1")
    return ",".join(names)


def pairs(value: object) -> str:
    """Read `key=value` pairs with commas between them."""
    if not _PAIRS.fullmatch(str(value)):
        raise ValueError("pairs such as timeout=60,join_timeout=30")
    return str(value)
