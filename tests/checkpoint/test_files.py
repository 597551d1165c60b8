"""Files as they are written, several at once, and read: in chunks, and hashed."""

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from trainkit.checkpoint.io import files, reading
from trainkit.errors import CheckpointCorrupt


def test_a_file_is_synced_while_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    sync = files.sync

    def waiting_sync(descriptor: int) -> None:
        begun.set()
        assert may_end.wait(240)
        sync(descriptor)

    def second() -> Iterator[bytes]:
        assert begun.wait(240)  # the first one is on its way to the disk
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


def test_no_more_than_a_few_files_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, most = threading.Event(), 0

    def slow_sync(descriptor: int) -> None:
        slow.wait(0.005)

    def content() -> Iterator[bytes]:
        nonlocal most
        most = max(most, len(os.listdir("/dev/fd")))
        yield b"some"

    monkeypatch.setattr(files, "sync", slow_sync)
    before = len(os.listdir("/dev/fd"))
    files.write_files((tmp_path / str(number), content()) for number in range(60))
    assert len(os.listdir(tmp_path)) == 60
    assert most <= before + 10


def test_files_are_read_and_removed_while_python_shuts_down(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(5 << 20))
    (tmp_path / "many").mkdir()
    for number in range(40):
        (tmp_path / "many" / str(number)).touch()
    script = f"""
import pathlib, threading
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.reading import open_directory, open_file

def late():
    threading.main_thread().join()
    folder = pathlib.Path({str(tmp_path)!r})
    with open_directory(folder) as directory, open_file(directory, "large", folder) as file:
        file.skip_rest()
    files.remove_tree(folder / "many")

threading.Thread(target=late).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_files_are_written_while_python_shuts_down(tmp_path: Path) -> None:
    script = f"""
import pathlib, threading, time
from trainkit.checkpoint.io import files

def late():
    threading.main_thread().join()
    files.write_files([(pathlib.Path({str(tmp_path / "late")!r}), [b"late"])])

threading.Thread(target=late).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "late").read_bytes() == b"late"


def test_what_cannot_be_made_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"begun"
        raise ValueError("no more")

    before = os.listdir("/dev/fd")
    with pytest.raises(ValueError, match="no more"):
        files.write_files([(tmp_path / "1", [b"1"]), (tmp_path / "2", broken())])
    assert os.listdir("/dev/fd") == before


def test_what_is_read_in_chunks_is_what_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_CHUNK", 1000)
    monkeypatch.setattr(reading, "_AHEAD", 3000)
    content = random.Random(0).randbytes(20_500)
    (tmp_path / "data").write_bytes(content)
    with (
        reading.open_directory(tmp_path) as directory,
        reading.open_file(directory, "data", tmp_path) as file,
    ):
        file.narrow("inner", 100, 20_000)
        assert file.read(7) == content[100:107]
        file.skip(2500)
        assert file.read(9999) == content[2607:12606]
        digest = file.skip_rest().digest()
        assert digest == xxhash.xxh3_128_hexdigest(content[100:20_100])
        with pytest.raises(CheckpointCorrupt, match="it is cut"):
            file.read(1000)
