"""One program at a time writes to an address: an object is its lock, held by a lease."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainkit.basics.written_files import replace_file
from trainkit.errors import CheckpointError, ConfigError
from trainkit.storage.copies import TOKEN
from trainkit.storage.objects import Objects, StorageError

LOCK = ".trainkit-lock"
_CLOCK = ".trainkit-clock"
_MARGIN = 2.0  # seconds: storages tell times in whole ones


def lease_seconds() -> float:
    """Return after how many seconds without a sign of life a writer counts as gone."""
    text = os.environ.get("TRAINKIT_STORAGE_LEASE", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 3 <= seconds < 86400:
        raise ConfigError(
            f"`TRAINKIT_STORAGE_LEASE` must be seconds from 3 to 86400, but is {text!r}."
        )
    return seconds


def _clocks() -> list[float]:
    """Return times in seconds: where a machine has slept, one or the other stood still."""
    clocks = [time.monotonic(), time.time()]
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux
        clocks.append(time.clock_gettime(time.CLOCK_BOOTTIME))
    return clocks


class Lease:
    """Holds an address for a folder, whose own lock its caller holds; renewed by a thread.

    All goes by the storage's clock and conditional writes: clocks of machines may differ.
    """

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._token_file = folder / TOKEN
        self._seconds = lease_seconds()
        self._token = uuid.uuid4().hex
        self._about = {
            "token": self._token,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._beats = 0
        self._tag = ""
        self._until = [0.0] * len(_clocks())
        self._lost = ""
        self._why = ""  # it was not renewed the last time that it was not
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="trainkit-lease", daemon=True)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the address, at once or when its dead holder's time is over; `say` that it waits.

        Raises:
            CheckpointError: A living program holds it.
        """
        before = self._token_file.read_text() if self._token_file.is_file() else ""
        replace_file(self._token_file, self._token.encode())
        seen = ""
        while not (taken := self._try(before, seen)):
            if not seen:
                say(
                    f"trainkit: `{self._objects.address}` is locked. If its holder gives no sign "
                    f"of life, it is taken over in {self._seconds:g} s at most."
                )
            seen = seen or self._tag
            time.sleep(1.0)
        self._tag = taken
        self._thread.start()

    def may_write(self) -> bool:
        """Return whether nobody else can have taken the address."""
        return not self._lost and all(map(float.__lt__, _clocks(), self._until))

    def require(self) -> None:
        """Raise CheckpointError where another program may have taken the address."""
        self.check()
        if not self.may_write():
            raise StorageError(
                f"`{self._objects.address}` was not reached for so long that another run may have "
                f"taken it. Nothing is written before that is known.{self._why}"
            )

    def check(self) -> None:
        """Raise CheckpointError where another program has taken the address."""
        if self._lost:
            raise CheckpointError(
                f"`{self._objects.address}` was taken over by {self._lost}, after this run had not "
                f"reached it for {self._seconds:g} s. Nothing more is written there. Let one of "
                "both runs end."
            )

    def release(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.may_write():
            with suppress(StorageError):  # else it runs out
                self._objects.delete([LOCK])

    def _try(self, before: str, seen: str) -> str:
        """Return the tag of the lock where it could be taken; else `_tag` is that of its holder."""
        begun = _clocks()
        tag = self._objects.create(LOCK, self._content())
        if tag is None:
            try:
                held, _, written = self._objects.head(LOCK)
            except FileNotFoundError:
                return ""
            holder = self._holder()
            self._tag = held
            if holder.get("token") == self._token:
                tag = held  # written by a request whose answer was lost
            elif holder.get("token") == before or self._age(written) > self._seconds + _MARGIN:
                tag = self._objects.replace(LOCK, self._content(), held)
            elif seen and held != seen:
                raise CheckpointError(
                    f"`{self._objects.address}` is written to by {_named(holder)}. Wait for that "
                    "run to end, or choose another `output_dir`."
                )
        self._hold(begun)
        return tag or ""

    def _hold(self, begun: list[float]) -> None:
        self._until = [clock + self._seconds for clock in begun]

    def _age(self, written: datetime) -> float:
        """Return how many seconds ago something was written, by the clock of the storage."""
        self._objects.write(_CLOCK, b"")
        try:
            return float((self._objects.head(_CLOCK)[2] - written).total_seconds())
        except FileNotFoundError:
            return 0.0
        finally:
            self._objects.delete([_CLOCK])

    def _go_on(self) -> None:
        while not self._lost and not self._ended.wait(self._seconds / 3):
            begun = _clocks()
            try:
                tag = self._objects.replace(LOCK, self._content(), self._tag)
                if tag is None:
                    holder = self._holder()
                    if holder.get("token") != self._token:
                        self._lost = _named(holder)
                        return
                    tag = self._objects.head(LOCK)[0]
                self._tag = tag
                self._hold(begun)
            except StorageError as error:  # `may_write` says when that has been for too long
                self._why = f" {error}"

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps({**self._about, "beats": self._beats}).encode()

    def _holder(self) -> dict[str, Any]:
        try:
            lock = json.loads(self._objects.read(LOCK) or b"{}")
        except ValueError:
            lock = {}
        return lock if isinstance(lock, dict) else {}


def _named(holder: dict[str, Any]) -> str:
    pid, host, since = (str(holder.get(name, "?"))[:64] for name in ("pid", "host", "since"))
    return f"process {pid} on host {host} since {since}"
