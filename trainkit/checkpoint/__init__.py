"""Checkpoints: how their bytes are written, found, checked and kept (rules 22 to 28).

Importing this package, listing and verifying need no torch; values are turned into bytes and
back in `codec`, which asks for it only where a value does.

What cannot be saved, found or removed raises `CheckpointError`; what is broken, or of a form that
trainkit does not write, its subclass `CheckpointCorrupt`, which names the file. Docstrings tell
errors where they are others, or where all processes raise them.
"""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.checkpoint.checkpoint import Checkpoint as Checkpoint
    from trainkit.checkpoint.format.manifest import FileInfo as FileInfo, Manifest as Manifest
    from trainkit.checkpoint.listing import Entry as Entry
    from trainkit.checkpoint.retention import (
        KeepPolicy as KeepPolicy,
        Retention as Retention,
        rotate as rotate,
    )
    from trainkit.checkpoint.store import CheckpointStore as CheckpointStore

__all__, __getattr__, __dir__ = lazy_exports(__name__)
