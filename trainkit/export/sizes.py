"""Sizes of files and memories, as people write them."""

import re

from trainkit.errors import ConfigError
from trainkit.types import Size

__all__ = ["parse_size"]

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: Size, name: str) -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or text such as "5GB" (10**9 bytes) or "1GiB" (2**30 bytes).
        name: Of the argument, for the error.

    Raises:
        ConfigError: It is no size, or none above 0.
    """
    if type(size) is int and size > 0:
        return size
    match = _FORM.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        number, prefix, binary = match.groups()
        value = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
        if value > 0 and not (binary and not prefix):
            return value
    raise ConfigError(
        f'`{name}` must be a size such as "5GB", "500MB" or "1GiB", or a number of bytes above 0, '
        f"but is {size!r}."
    )
