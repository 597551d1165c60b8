"""Large files: the disk begins early, and what it is told early is never what counts."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.checkpoint import files

AHEAD = 64  # bytes, in place of megabytes


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what happens to a file: bytes written, begun to be synced, and the sync itself."""
    seen: list[tuple[str, int]] = []
    write, sync = files.write, files.sync

    def noting_write(descriptor: int, data: Any) -> None:
        seen.append(("write", len(data)))
        write(descriptor, data)

    def noting_sync(descriptor: int) -> None:
        seen.append(("sync", os.fstat(descriptor).st_size))
        sync(descriptor)

    monkeypatch.setattr(files, "_SYNCED_AHEAD", AHEAD)
    monkeypatch.setattr(files, "write", noting_write)
    monkeypatch.setattr(files, "sync", noting_sync)
    monkeypatch.setattr(files, "begin_sync", lambda _, begin, end: seen.append(("begin", end)))
    return seen


def test_the_disk_begins_while_the_rest_is_written(
    tmp_path: Path, events: list[tuple[str, int]]
) -> None:
    content: list[bytes | memoryview] = [bytes(range(100)), b"", b"x" * 10, memoryview(b"y" * 70)]
    files.write_file(tmp_path / "large", content)
    assert (tmp_path / "large").read_bytes() == b"".join(content)
    begun = [end for what, end in events if what == "begin"]
    assert begun == [64, 174]  # after each 64 bytes or more; the last ones are left to `sync`
    assert events[-1] == ("sync", 180)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_a_file_system_that_takes_no_advice_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no advice here")

    monkeypatch.setattr(files, "_SYNCED_AHEAD", AHEAD)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    files.write_file(tmp_path / "large", [b"z" * 1000])
    assert (tmp_path / "large").read_bytes() == b"z" * 1000
