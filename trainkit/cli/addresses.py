"""Addresses of storage as arguments of commands, which read copies of what is there."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainkit.basics.outputs import absolute, is_address

WHOLE, OUTLINE = True, False
"""Whether a command reads what checkpoints hold, or their manifests and sizes alone."""


@contextmanager
def local_copies(options: argparse.Namespace) -> Iterator[None]:
    """Let arguments that are addresses be copies inside: those that `options.reads` names.

    `options.addresses` then has the folder of this machine that is mirrored to each address.
    """
    options.addresses = dict[str, Path]()
    with ExitStack() as copies:

        def copied(name: str, given: Path, contents: bool) -> Path:
            if not is_address(given):
                return given
            from trainkit.storage.addresses import copy  # only addresses need it

            options.addresses[name] = folder = absolute(given, name, stored=True)
            place = tempfile.TemporaryDirectory(prefix="trainkit-")
            target = Path(copies.enter_context(place)) / folder.name
            copy(folder, target, contents=contents)
            return target

        for name, contents in getattr(options, "reads", {}).items():
            given: Any = getattr(options, name)
            several = isinstance(given, list)
            found = [copied(name, each, contents) for each in (given if several else [given])]
            setattr(options, name, found if several else found[0])
        yield
