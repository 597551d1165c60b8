"""Several files at once: the disk takes one while the next is made, and no failure is lost."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.checkpoint import files


def test_a_file_is_synced_while_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    sync = files.sync

    def waiting_sync(descriptor: int) -> None:
        begun.set()
        assert may_end.wait(30)
        sync(descriptor)

    def second() -> Iterator[bytes]:
        assert begun.wait(30)  # the first one is on its way to the disk
        may_end.set()
        yield b"second"

    monkeypatch.setattr(files, "sync", waiting_sync)
    files.write_files([(tmp_path / "1", [b"fir", memoryview(b"st")]), (tmp_path / "2", second())])
    assert [(tmp_path / name).read_bytes() for name in "12"] == [b"first", b"second"]


def test_a_sync_that_fails_is_raised_with_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = files.sync

    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_size == 1:
            raise OSError(errno.EIO, "the disk is tired")
        sync(descriptor)

    monkeypatch.setattr(files, "sync", failing)
    with pytest.raises(OSError, match="tired") as raised:
        files.write_files([(tmp_path / "1", [b"1"]), (tmp_path / "2", [b"22"])])
    assert raised.value.filename == str(tmp_path / "1")


def test_what_cannot_be_made_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"begun"
        raise ValueError("no more")

    before = os.listdir("/dev/fd")
    with pytest.raises(ValueError, match="no more"):
        files.write_files([(tmp_path / "1", [b"1"]), (tmp_path / "2", broken())])
    assert os.listdir("/dev/fd") == before
