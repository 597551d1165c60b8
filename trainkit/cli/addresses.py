"""Addresses of storage as arguments of commands, which read what they need of it."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainkit.basics.outputs import absolute, is_address

LOGS, OUTLINE = True, False
"""Whether a command reads logs of a run, or its checkpoints alone."""


@contextmanager
def local_copies(options: argparse.Namespace) -> Iterator[None]:
    """Let arguments that are addresses be outlines inside: those that `options.reads` names.

    An outline is a folder with all but the contents of checkpoints, which `options.whole(path)`
    brings of one. `options.addresses` then has the folder of this machine that is mirrored to each
    address.
    """
    options.addresses = dict[str, Path]()
    outlines: dict[Path, Any] = {}

    @contextmanager
    def whole(path: Path) -> Iterator[Path]:
        """Give the folder of a checkpoint with its contents, inside."""
        outline = next((each for each in outlines if path.is_relative_to(each)), path)
        if outline == path:  # of this machine, or an address of one, which was brought whole
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="trainkit-") as temporary:
            target = Path(temporary) / path.name
            outlines[outline].copy(path.relative_to(outline).as_posix(), target)
            yield target

    options.whole = whole
    with ExitStack() as stack:

        def outlined(name: str, given: Path, logs: bool) -> Path:
            if not is_address(given):
                return given
            from trainkit.storage.addresses import outline  # only addresses need it

            options.addresses[name] = folder = absolute(given, name, stored=True)
            temporary = tempfile.TemporaryDirectory(prefix="trainkit-")
            target = Path(stack.enter_context(temporary)) / folder.name
            outlines[target] = outline(folder, target, logs=logs)
            return target

        for name, logs in getattr(options, "reads", {}).items():
            given: Any = getattr(options, name)
            several = isinstance(given, list)
            copies = [outlined(name, each, logs) for each in (given if several else [given])]
            setattr(options, name, copies if several else copies[0])
        yield
