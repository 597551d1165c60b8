"""Every state that a power cut can leave on the disk, out of a record of file operations.

`Recorder` writes down what `trainkit.checkpoint.io.files` does. `Trace` turns that into operations
on inodes, and `states` yields, for every prefix, the disk with un-synced data kept, zeroed, halved
and lost, and with un-synced changes of names undone: none, one, two and all of them.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.io import files

DATA_MODES = ("kept", "zeroed", "halved", "lost")

Disk = frozenset[tuple[str, bytes | None]]
"""Paths below the root with the content of files; None for folders."""


@dataclass(frozen=True)
class Event:
    """One operation, or an acknowledgement, as the code saw it."""

    kind: str
    path: Path
    target: Path | None = None
    data: bytes = b""
    fact: Any = None  # what is acknowledged: ("step", 3, path) or ("pins", {3})


class Recorder:
    """Records what `files` does while it is active."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._paths: dict[int, Path] = {}
        self._lock = threading.RLock()

    def acknowledge(self, *fact: Any) -> None:
        """Note that the caller was told so."""
        with self._lock:
            self.events.append(Event("ack", Path(), fact=fact))

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Put recording functions in the place of those of `files`."""
        originals = {name: getattr(files, name) for name in _EVENTS}
        for name in _EVENTS:
            setattr(files, name, self._recording(name, originals[name]))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(files, name, original)

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._lock:  # so that the order of the record is the order of the disk
                result = original(*arguments)
                event = _EVENTS[name](self._paths, result, *arguments)
                if event is not None:
                    self.events.append(event)
                return result

        return call


def _create(paths: dict[int, Path], result: int, path: Path) -> Event:
    paths[result] = path
    return Event("create", path)


def _close(paths: dict[int, Path], _: None, descriptor: int) -> None:
    del paths[descriptor]


_EVENTS: dict[str, Callable[..., Event | None]] = {
    "make_directory": lambda _, __, path: Event("mkdir", path),
    "create": _create,
    "write": lambda paths, _, fd, data: Event("write", paths[fd], data=bytes(data)),
    "sync": lambda paths, _, fd: Event("sync", paths[fd]),
    "close": _close,
    "sync_directory": lambda _, __, path: Event("sync_directory", path),
    "rename": lambda _, __, source, target: Event("rename", source, target),
    "remove_file": lambda _, __, ___, name, path: Event("unlink", path / name),
    "remove_directory": lambda _, __, path: Event("unlink", path),
}


@dataclass(frozen=True)
class Op:
    """One operation on inodes; `role` says what it is for, so that a test can take it out."""

    kind: str  # names, write, sync, sync_directory, ack
    inode: int  # the file, or the folder whose names change
    role: str
    removed: tuple[tuple[str, int], ...] = ()
    added: tuple[tuple[str, int], ...] = ()
    data: bytes = b""
    fact: Any = None
    trashed: int = -1  # a checkpoint's inode that is on its way out


@dataclass
class Trace:
    """The operations of a recording, on inodes; 0 is the root, which a power cut spares."""

    ops: list[Op]
    folders: set[int]

    @classmethod
    def of(cls, events: list[Event], root: Path) -> "Trace":
        """Follow the paths of `events` below `root`."""
        return _Follower(root).follow(events)


class _Follower:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[int, dict[str, int]] = {0: {}}
        self.next_inode = itertools.count(1)
        self.last_change: dict[int, str] = {}

    def follow(self, events: list[Event]) -> Trace:
        ops = [self._op(event) for event in events]
        return Trace(ops, set(self.names))

    def _resolve(self, path: Path) -> int:
        inode = 0
        for name in path.relative_to(self.root).parts:
            inode = self.names[inode][name]
        return inode

    def _op(self, event: Event) -> Op:
        if event.kind == "ack":
            what, *facts = event.fact
            if what == "step":
                facts[1] = self._resolve(facts[1])
            return Op("ack", -1, "ack", fact=(what, *facts))
        if event.kind in ("write", "sync"):
            role = f"{event.kind} {_role_of_file(event.path)}"
            return Op(event.kind, self._resolve(event.path), role, data=event.data)
        if event.kind == "sync_directory":
            inode = self._resolve(event.path)
            return Op("sync_directory", inode, f"sync after {self.last_change.get(inode)}")
        return self._change_names(event)

    def _change_names(self, event: Event) -> Op:
        folder = self._resolve(event.path.parent)
        names = self.names[folder]
        removed: tuple[tuple[str, int], ...] = ()
        added: tuple[tuple[str, int], ...] = ()
        trashed = -1
        if event.kind in ("mkdir", "create"):
            inode = next(self.next_inode)
            added = ((event.path.name, inode),)
            if event.kind == "mkdir":
                self.names[inode] = {}
        else:
            removed = ((event.path.name, names.pop(event.path.name)),)
        if event.target is not None:
            added = ((event.target.name, removed[0][1]),)
            trashed = removed[0][1] if event.target.name.startswith(".trash") else -1
        names.update(added)
        role = _role_of_change(event)
        self.last_change[folder] = role
        return Op("names", folder, role, removed, added, trashed=trashed)


def _role_of_file(path: Path) -> str:
    if path.name.startswith(".tmp-pins"):
        return "pins"
    return "manifest" if path.name == "manifest.json" else path.suffix[1:]


def _role_of_change(event: Event) -> str:
    if event.kind != "rename":
        return {"mkdir": "mkdir", "create": f"create {_role_of_file(event.path)}"}.get(
            event.kind, "unlink"
        )
    assert event.target is not None
    if event.target.name == "pins.json":
        return "pinning"
    return "removal" if event.target.name.startswith(".trash") else "commit"


@dataclass(frozen=True)
class Promise:
    """What the code had promised before the power was cut."""

    steps: frozenset[int] = frozenset()  # acknowledged, and not on their way out
    newest: int | None = None
    pins: frozenset[int] = frozenset()


@dataclass
class _Promises:
    inodes: dict[int, int] = field(default_factory=dict)
    newest: int | None = None
    pins: frozenset[int] = frozenset()

    def learn(self, op: Op) -> None:
        if op.kind == "ack" and op.fact[0] == "step":
            _, step, inode = op.fact
            self.inodes[step] = inode
            self.newest = step if self.newest is None else max(self.newest, step)
        elif op.kind == "ack":
            self.pins = frozenset(op.fact[1])
        elif op.trashed >= 0:
            self.inodes = {s: inode for s, inode in self.inodes.items() if inode != op.trashed}

    def now(self) -> Promise:
        return Promise(frozenset(self.inodes), self.newest, self.pins)


def states(trace: Trace) -> Iterator[tuple[Disk, Promise]]:
    """Yield each disk that a power cut after some prefix can leave, and what was promised."""
    promises = _Promises()
    for length in range(len(trace.ops) + 1):
        if length:
            promises.learn(trace.ops[length - 1])
        prefix = trace.ops[:length]
        open_changes = _open_changes(prefix)
        undone: list[tuple[int, ...]] = [(), tuple(open_changes)]
        undone += [(one,) for one in open_changes]
        undone += itertools.combinations(open_changes, 2)
        contents = {mode: _contents(prefix, mode) for mode in DATA_MODES}
        modes = [m for m in DATA_MODES if m == "kept" or contents[m] != contents["kept"]]
        safe = min(open_changes, default=length)
        before, promise = _names(prefix[:safe]), promises.now()
        for dropped in dict.fromkeys(undone):
            rest = [op for i, op in enumerate(prefix[safe:], safe) if i not in dropped]
            names = _names(rest, before)
            for mode in modes:
                yield frozenset(_walk(0, "", names, contents[mode], trace.folders)), promise


def _open_changes(prefix: list[Op]) -> list[int]:
    """Return the changes of names that no sync of their folder has followed."""
    found: list[int] = []
    for index, op in enumerate(prefix):
        if op.kind == "names":
            found.append(index)
        elif op.kind == "sync_directory":
            found = [i for i in found if prefix[i].inode != op.inode]
    return found


def _names(
    ops: list[Op], before: dict[int, dict[str, int]] | None = None
) -> dict[int, dict[str, int]]:
    """Return the names in each folder after `ops`, where those of `before` had been."""
    names = {inode: {**folder} for inode, folder in (before or {}).items()}
    for op in ops:
        if op.kind != "names":
            continue
        folder = names.setdefault(op.inode, {})
        for name, inode in op.removed:
            if folder.get(name) == inode:
                del folder[name]
        folder.update(op.added)
    return names


def _contents(prefix: list[Op], mode: str) -> dict[int, bytes]:
    written: dict[int, bytes] = {}
    safe: dict[int, int] = {}
    for op in prefix:
        if op.kind == "write":
            written[op.inode] = written.get(op.inode, b"") + op.data
        elif op.kind == "sync":
            safe[op.inode] = len(written.get(op.inode, b""))
    return {inode: _damaged(data, safe.get(inode, 0), mode) for inode, data in written.items()}


def _damaged(data: bytes, safe: int, mode: str) -> bytes:
    lost = len(data) - safe
    return {
        "kept": data,
        "zeroed": data[:safe] + bytes(lost),
        "halved": data[: safe + lost // 2],
        "lost": data[:safe],
    }[mode]


def _walk(
    inode: int,
    path: str,
    names: dict[int, dict[str, int]],
    contents: dict[int, bytes],
    folders: set[int],
) -> Iterator[tuple[str, bytes | None]]:
    for name, child in names.get(inode, {}).items():
        place = f"{path}/{name}" if path else name
        if child in folders:
            yield place, None
            yield from _walk(child, place, names, contents, folders)
        else:
            yield place, contents.get(child, b"")


def materialise(disk: Disk, root: Path) -> None:
    """Make the files and folders of a state below `root`."""
    for place, content in sorted(disk, key=lambda item: item[0]):
        if content is None:
            (root / place).mkdir()
        else:
            (root / place).write_bytes(content)
