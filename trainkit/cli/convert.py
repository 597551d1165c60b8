"""`trainkit checkpoint export` and `import`: to and from the files of other programs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["add_to"]


def add_to(
    commands: Any,
    add: Callable[..., argparse.ArgumentParser],
    find: Callable[[Path], Path],
) -> None:
    """Add both commands.

    Args:
        commands: Those of `trainkit checkpoint`.
        add: Adds one command with its positional arguments and returns its parser.
        find: Returns the one checkpoint that a path stands for.
    """
    export = add(
        commands,
        "export",
        lambda options: _export(options, find(options.ckpt)),
        "write the weights as model.safetensors, which transformers and others read",
        CKPT="the folder of one checkpoint; for a run's directory the newest",
        DIR="where the files go; an earlier export there is replaced",
    )
    export.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of a file; 5GB by default"
    )
    export.add_argument(
        "--part", metavar="NAME", default="model", help="what to write; the model by default"
    )
    load = add(
        commands,
        "import",
        _import,
        "take over a checkpoint that Accelerate's save_state wrote",
        SRC="the folder that save_state wrote",
        DIR="the folder for the new checkpoint",
    )
    load.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="FILE",
        help="leave this file out; may be given more than once",
    )
    load.add_argument("--step", type=int, metavar="N", help="of the new checkpoint")


def _export(options: argparse.Namespace, checkpoint: Path) -> int:
    from trainkit.export.from_checkpoint import export_checkpoint  # torch; other commands need none

    layout = export_checkpoint(
        checkpoint, options.dir, part=options.part, max_shard_size=options.max_shard_size
    )
    for name in [*layout.files, *([layout.index] if layout.index else [])]:
        print(f"wrote {options.dir / name}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from trainkit.export.from_accelerate import import_accelerate

    path = import_accelerate(options.src, options.dir, skip=options.skip, step=options.step)
    print(f"wrote {path}")
    return 0
