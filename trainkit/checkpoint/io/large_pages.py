"""Large pages for memory that is about to be filled.

In pages of 4 KiB, of which the kernel hands out and clears one after the other, filling fresh
memory takes several times as long as reading the file that goes there.
"""

import ctypes
import mmap
from functools import cache
from typing import Any

__all__ = ["use_large_pages"]

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
_LEAST = 1 << 21  # bytes: one large page


def use_large_pages(address: int, size: int) -> None:
    """Ask the kernel for large pages behind `size` bytes at `address`; it may do without."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if _ADVICE is not None and end - begin >= _LEAST:
        _madvise()(begin, end - begin, _ADVICE)


@cache
def _madvise() -> Any:
    function = ctypes.pythonapi["madvise"]  # of the C library, which Python itself has open
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
