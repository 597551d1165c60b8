"""Checkpoints: how their bytes are written, found, checked and kept (DESIGN 2.22 to 2.28).

Importing this package, listing and verifying need no torch; values are turned into bytes and
back in `codec`, which asks for it only where a value does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.checkpoint.codec import check_encodable
    from trainkit.checkpoint.listing import Entry
    from trainkit.checkpoint.lock import RunLock
    from trainkit.checkpoint.manifest import FileInfo, Manifest
    from trainkit.checkpoint.opened import Checkpoint
    from trainkit.checkpoint.retention import KeepPolicy, Retention, rotate
    from trainkit.checkpoint.store import CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Entry",
    "FileInfo",
    "KeepPolicy",
    "Manifest",
    "Retention",
    "RunLock",
    "check_encodable",
    "rotate",
]

_HOME = {
    "Checkpoint": "opened",
    "CheckpointStore": "store",
    "Entry": "listing",
    "FileInfo": "manifest",
    "KeepPolicy": "retention",
    "Manifest": "manifest",
    "Retention": "retention",
    "RunLock": "lock",
    "check_encodable": "codec",
    "rotate": "retention",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module `trainkit.checkpoint` has no attribute {name!r}")
    return getattr(import_module(f"trainkit.checkpoint.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
