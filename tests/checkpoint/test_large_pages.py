"""Large pages are asked for, and change no byte."""

import mmap
from pathlib import Path

import pytest
import torch

from trainkit.checkpoint.format.tensors import empty, use_large_pages
from trainkit.device import memory_of

MIB = 1 << 20


def _advised(address: int) -> bool:
    """Return whether the kernel notes that large pages were asked for at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return " hg" in line
    return False


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has large pages")
def test_a_large_tensor_gets_large_pages() -> None:
    tensor = empty("F32", (16 * MIB,))
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no large pages")
    assert _advised(tensor.data_ptr() + 32 * MIB)


@pytest.mark.parametrize("size", [0, 1, 4095, 2 * MIB + 1, 5 * MIB + 3])
def test_no_byte_changes(size: int) -> None:
    around = torch.arange(3 * MIB, dtype=torch.int32)
    before = around.clone()
    use_large_pages(around.data_ptr() + 5, size)
    assert torch.equal(around, before)
    target = empty("U8", (size,))
    memory_of(target)[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert target.numel() == size
