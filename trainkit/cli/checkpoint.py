"""`trainkit checkpoint`: list, verify, show, compare, thin out, export and import checkpoints."""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from trainkit.basics.formatting import readable_size
from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import absolute, address_of, is_address
from trainkit.basics.terminal import print_table, print_text
from trainkit.checkpoint.checkpoint import check_sizes, verify
from trainkit.checkpoint.format.manifest import Manifest
from trainkit.checkpoint.format.names import CHECKPOINTS, MANIFEST, PINS, WEIGHTS
from trainkit.checkpoint.listing import Entry, broken_folders
from trainkit.checkpoint.retention import Best, KeepPolicy, best_of, removable
from trainkit.checkpoint.store import CheckpointStore
from trainkit.cli.addresses import OUTLINE
from trainkit.cli.contents import Contents, leaves, read_contents
from trainkit.errors import CheckpointError, ConfigError

_MOST_METRICS = 5  # that `ls` prints
_MOST_VALUES = 20  # of one part that `show` prints


def add_to(commands: Any) -> None:
    """Add the command and its own commands to the parser's `commands`."""
    help_text = "list, verify, show, compare, thin out, export and import checkpoints"
    parser = commands.add_parser("checkpoint", help=help_text, description=help_text)
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    where = "a run's directory, or the folder with its checkpoints"
    one = "the folder of one checkpoint; for a run's directory the newest"
    listing = _add(own, "ls", _list, "list the checkpoints", DIR=where)
    listing.set_defaults(reads={"dir": OUTLINE})
    verifying = _add(own, "verify", _verify, "read and check every byte", DIR=f"{where}, or of one")
    verifying.set_defaults(reads={"dir": OUTLINE})
    show = _add(own, "show", _show, "show what is in a checkpoint", CKPT=one)
    show.set_defaults(reads={"ckpt": OUTLINE})
    diff_help = "compare two checkpoints; exit with 1 if they differ"
    diff = _add(own, "diff", _diff, diff_help, A=one, B=one)
    diff.set_defaults(reads={"a": OUTLINE, "b": OUTLINE})
    prune = _add(own, "prune", _prune, "remove checkpoints that no option keeps", DIR=where)
    prune.add_argument("--keep-last", type=int, metavar="N", required=True, help="the newest N")
    best_help = "such as eval/accuracy:max:2; by default what the run kept as the best"
    prune.add_argument("--keep-best", type=_best, metavar="METRIC:MODE:M", help=best_help)
    prune.add_argument("--keep-every", type=int, metavar="N", help="steps that are multiples of N")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    export_help = "write the weights as model.safetensors, which transformers and others read"
    to = "where the files go; an earlier export there is replaced"
    export = _add(own, "export", _export, export_help, CKPT=one, DIR=to)
    export.set_defaults(reads={"ckpt": OUTLINE})
    size_help = "of a file; 5GB by default"
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help=size_help)
    part_help = "what to write; by default the model with the weights that were evaluated"
    export.add_argument("--part", metavar="NAME", help=part_help)
    which_help = "for a run's directory the best checkpoint instead of the newest"
    export.add_argument("--best", action="store_true", help=which_help)
    import_help = "take over a checkpoint that Accelerate's save_state wrote"
    source, new = "the folder that save_state wrote", "the folder for the new checkpoint"
    load = _add(own, "import", _import, import_help, SRC=source, DIR=new)
    skip_help = "leave this file out; may be given more than once"
    load.add_argument("--skip", action="append", default=[], metavar="FILE", help=skip_help)
    load.add_argument("--step", type=int, metavar="N", help="of the new checkpoint")


def _add(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
    **positional: str,
) -> argparse.ArgumentParser:
    parser = cast(
        argparse.ArgumentParser, commands.add_parser(name, help=help_text, description=help_text)
    )
    for argument, meaning in positional.items():
        parser.add_argument(argument.lower(), metavar=argument, type=Path, help=meaning)
    parser.set_defaults(run=run)
    return parser


def _best(text: str) -> Best:
    metric, mode, count = (["", "", "", *text.rsplit(":", 2)])[-3:]
    if not metric or mode not in ("min", "max") or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must look like eval/accuracy:max:2")
    return metric, "min" if mode == "min" else "max", int(count)


def _store(directory: Path) -> CheckpointStore:
    """Return the checkpoints in a run's directory, or in the folder itself."""
    inside = directory / CHECKPOINTS
    if not directory.is_dir():
        raise ConfigError(f"`{directory}` is no folder. Pass a run's directory.")
    return CheckpointStore(inside if inside.is_dir() else directory)


def _stores(directory: Path) -> list[CheckpointStore]:
    """Return the checkpoints as `_store` does, and the weights that a run kept alone."""
    store, weights = _store(directory), CheckpointStore(directory / WEIGHTS)
    return [store, weights] if weights.directory.is_dir() else [store]


def _entries(directory: Path) -> list[Entry]:
    return [entry for store in _stores(directory) for entry in store.checkpoints()]


def _single(path: Path, *, best: bool = False) -> Path:
    """Return the folder of one checkpoint: the one passed, or the newest or best of a run."""
    if (path / MANIFEST).exists():
        if best:
            raise ConfigError(f"`--best` chooses of a run, but `{path}` is one checkpoint.")
        return path
    entries = best_of(_entries(path))[1][:1] if best else _store(path).checkpoints()
    if not entries:
        why = " that `Checkpoint(keep_best=...)` calls the best" if best else ""
        raise CheckpointError(f"There is no checkpoint in `{path}`{why}.", path=path)
    return entries[-1].path


@contextmanager
def _noted(broken: dict[str, str], name: str) -> Iterator[None]:
    """Note what is wrong with something, and go on."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        broken[name] = str(error)


def _list(options: argparse.Namespace) -> int:
    listed = [(store, store.checkpoints()) for store in _stores(options.dir)]
    entries = [entry for _, in_store in listed for entry in in_store]
    broken: dict[str, str] = {}
    metric, best = "", list[Entry]()
    with _noted(broken, "keep_best"):
        metric, best = best_of(entries)
    last = [entry for entry in entries if entry.manifest.is_resumable][-1:]
    others = {name for entry in entries for name in entry.manifest.metrics} - {metric}
    names = [*([metric] if metric else []), *sorted(others)][:_MOST_METRICS]
    rows: list[tuple[object, ...]] = []
    for store, in_store in listed:
        prefix = "" if store is listed[0][0] else f"{WEIGHTS}/"
        broken |= {prefix + path.name: str(why) for path, why in broken_folders(store.directory)}
        pinned = frozenset[int]()
        with _noted(broken, prefix + PINS):
            pinned = store.pinned()
        for entry in in_store:
            manifest, folder = entry.manifest, prefix + entry.path.name
            with _noted(broken, folder):
                check_sizes(entry.path)
            rank = best.index(entry) if entry in best else -1
            notes = [f"best {rank + 1}" if rank else "best"] * (rank >= 0)
            notes += ["last"] * (entry in last) + ["pinned"] * (entry.step in pinned)
            notes += ["BROKEN"] * (folder in broken) + ["NOT FINITE"] * (not manifest.is_finite)
            size, values = readable_size(manifest.size), manifest.metrics
            columns = (entry.step, manifest.created, size, len(manifest.sizes()))
            shown = [f"{values[name]:.6g}" if name in values else "-" for name in names]
            rows.append((*columns, manifest.world_size, *shown, folder, ", ".join(notes)))
    if not rows and not broken:
        print(f"There is no checkpoint in `{listed[0][0].directory}`.")
        return 0
    print_table(("STEP", "CREATED", "SIZE", "FILES", "PROCESSES", *names, "FOLDER", ""), rows)
    for name, problem in broken.items():
        print(f"BROKEN {name}: {problem}")
    return int(bool(broken))


def _verify(options: argparse.Namespace) -> int:
    path: Path = options.dir
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        paths = [path]
    else:
        paths = []
        for store in _stores(path):
            paths += [broken for broken, _ in broken_folders(store.directory)]
            paths += [entry.path for entry in store.checkpoints()]
    if not paths:
        raise CheckpointError(f"There is no checkpoint in `{path}`.", path=path)
    broken: dict[str, str] = {}
    for each in paths:
        name = _shown(each)
        with _noted(broken, name), options.whole(each) as whole:
            verify(whole)
        print(f"BROKEN {name}: {broken[name]}" if name in broken else f"ok {name}")
    return int(bool(broken))


def _shown(path: Path) -> str:
    return f"{WEIGHTS}/{path.name}" if path.parent.name == WEIGHTS else path.name


def _show(options: argparse.Namespace) -> int:
    path = _single(options.ckpt)
    with options.whole(path) as whole:
        contents = read_contents(whole)
    manifest = contents.manifest
    made = f"made {manifest.created} by {manifest.world_size} process(es)"
    of = f"of the run {manifest.run_id!r}, {readable_size(manifest.size)}"
    print_text([f"{path}: step {manifest.step}, {made} {of}"])
    _print_values("metadata", _metadata(contents))
    rows = [
        (part, name, tensor.dtype, list(tensor.shape), readable_size(tensor.size))
        for part, tensors in contents.tensors.items()
        for name, tensor in tensors.items()
    ]
    print_table(("PART", "TENSOR", "DTYPE", "SHAPE", "SIZE"), rows)
    for part, values in contents.values.items():
        _print_values(part, values)
    return 0


def _metadata(contents: Contents) -> dict[str, Any]:
    return dict(leaves(dict(contents.manifest.metadata)))


def _print_values(part: str, values: Mapping[str, Any]) -> None:
    shown = list(values.items())[:_MOST_VALUES]
    print_table((part.upper(), ""), [(name, _short(value)) for name, value in shown])
    if len(values) > len(shown):
        print(f"... and {len(values) - len(shown)} more")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _diff(options: argparse.Namespace) -> int:
    with options.whole(_single(options.a)) as one, options.whole(_single(options.b)) as other:
        a, b = (_described(read_contents(path)) for path in (one, other))
    rows = []
    for part in dict.fromkeys([*a, *b]):
        if part not in a or part not in b:
            sizes = (f"{len(side[part])} values" if part in side else "-" for side in (a, b))
            rows.append((part, "(all of it)", *sizes))
            continue
        for name in dict.fromkeys([*a[part], *b[part]]):
            left, right = a[part].get(name, "-"), b[part].get(name, "-")
            rows += [(part, name, left, right)] if left != right else []
    if not rows:
        print("The checkpoints hold the same.")
        return 0
    print_table(("PART", "NAME", "A", "B"), rows)
    return 1


def _described(contents: Contents) -> dict[str, dict[str, str]]:
    """Return what a checkpoint holds as text, by part and name; two runs may have other ids."""
    about = {name: value for name, value in _metadata(contents).items() if name != "run_id"}
    described = {"metadata": {name: _short(value) for name, value in about.items()}}
    for part, tensors in contents.tensors.items():
        described[part] = {n: f"{t.dtype} {[*t.shape]} {t.digest[:8]}" for n, t in tensors.items()}
    for part, values in contents.values.items():
        described.setdefault(part, {}).update({n: _short(value) for n, value in values.items()})
    return described


def _prune(options: argparse.Namespace) -> int:
    policy = KeepPolicy(keep_last=options.keep_last, keep_every=options.keep_every)
    pruned: list[Entry] = []
    with _prunable(options) as (directory, check, remove):
        _, best = best_of(_entries(directory), options.keep_best)
        for store in _stores(directory):
            kept = {entry.step for entry in best if entry.path.parent == store.directory}
            # Of weights alone the best stay, as in the run.
            own = KeepPolicy() if store.directory.name == WEIGHTS else policy
            gone = removable(store, own, kept, check)
            for entry in () if options.dry_run else gone:
                remove(store, entry)
            pruned += gone
    for entry in pruned:
        print(f"{'would remove' if options.dry_run else 'removed'} {_shown(entry.path)}")
    if not pruned:
        print("Nothing to remove.")
    return 0


@contextmanager
def _prunable(
    options: argparse.Namespace,
) -> Iterator[tuple[Path, Callable[[Path], Manifest], Callable[[CheckpointStore, Entry], None]]]:
    """Give a folder to thin out, how its checkpoints are checked, and what removes one.

    Of an address it is an outline: what is there was compared when it was sent.
    """
    if not is_address(options.dir):
        folder = _store(options.dir).directory.resolve()
        run = folder.parent if folder.name in (CHECKPOINTS, WEIGHTS) else folder
        with nullcontext() if options.dry_run else RunLock(run):
            yield options.dir, verify, CheckpointStore.remove
        return
    from trainkit.storage.addresses import outline, writing  # only addresses need it

    folder = absolute(options.dir, "DIR", stored=True)
    is_inside = folder.name in (CHECKPOINTS, WEIGHTS) and address_of(folder.parent)
    run = folder.parent if is_inside else folder
    with (
        nullcontext() if options.dry_run else writing(run) as lease,
        tempfile.TemporaryDirectory(prefix="trainkit-") as temporary,
    ):
        target = Path(temporary) / folder.name
        remote = outline(folder, target, logs=False)

        def remove(_: CheckpointStore, entry: Entry) -> None:
            assert lease is not None
            lease.require()
            remote.remove(entry.path.relative_to(target).as_posix())

        yield target, check_sizes, remove


def _export(options: argparse.Namespace) -> int:
    from trainkit.cli.checkpoint_export import export_checkpoint  # torch; other commands need none

    with options.whole(_single(options.ckpt, best=options.best)) as path:
        layout = export_checkpoint(
            path, options.dir, part=options.part, max_shard_size=options.max_shard_size
        )
    for name in [*layout.files, *([layout.index] if layout.index else [])]:
        print(f"wrote {options.dir / name}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from trainkit.accelerate_compat.saved_states import import_accelerate

    path = import_accelerate(options.src, options.dir, skip=options.skip, step=options.step)
    print(f"wrote {path}")
    return 0
