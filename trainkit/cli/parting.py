"""Where two runs part, and why, as far as their journals and checkpoints tell it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import count, first_few
from trainkit.basics.hparams import flat
from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.listing import Entry, committed
from trainkit.cli.contents import Contents, read_contents
from trainkit.data.order_facts import changed_facts
from trainkit.errors import CheckpointError, ConfigError, quoted
from trainkit.journal import JOURNAL, Journal, Record, read

Pair = tuple[Entry, Entry]
Whole = Callable[[Path], Path]

_LIKELY = (
    "settings", "model", "environment", "code", "command", "data", "parameters",
    "optimizer", "random streams", "state", "machine", "unknown",
)  # fmt: skip
"""Kinds of causes: what was chosen, before what follows from it."""

OTHER_PROCESSES = (
    "On another number of processes a run is equal to rounding only, and the loss is that of "
    "process 0, which has other samples."
)
_UNKNOWN = (
    "nothing that is recorded differs before it. Left are first weights without a "
    "`torch.manual_seed` before the model is made, the contents of the data, operations whose "
    "order is not fixed (on accelerators without `Trainer(deterministic=True)`), what the code "
    "reads from outside, and the hardware."
)
_IDLE = ("log_every_n_steps", "limit_eval_batches", "max_consecutive_skips", "dry_run")
_HORIZON = ("max_epochs", "max_steps", "planned steps")  # which only a schedule looks at
_OF_RUN = {  # facts of the run, by what they are
    "settings": ("optimizer", "lr scheduler", "precision", "window", "planned steps"),
    "model": ("model", "parameters", "trainable parameters"),
    "environment": ("strategy", "processes", "device", "batch size of one process"),
    "data": ("samples per epoch", "training loaders"),
}
_WORDS = ("in A", "in B")
_STREAMS = ("python", "numpy", "torch", "device")  # of a process
_SHARED = ("counters", "lr_scheduler", "precision")  # in the part "trainer"
_OWNED = ("callbacks", "objects", "data")  # there too; of these only tensors: others hold times
_MOST = 5  # differences of one kind that a sentence lists


@dataclass(frozen=True, slots=True)
class Cause:
    """A difference between two runs that may be why they part; `kind` is one of `_LIKELY`."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Where two runs part."""

    equal: int  # windows that are equal to the last bit, before the first that is not
    steps: tuple[int, int]  # of A and of B, as far as their journals go
    first: tuple[Record, Record] | None  # the first window that differs, if one does
    differs: Sequence[str]  # what differs in it, in words
    causes: Sequence[Cause]  # the likely one first
    notes: Sequence[str]


def find_parting(a: Path, b: Path, whole: Whole) -> Parting:
    """Compare the runs in two directories, window by window, and what they were made of.

    Args:
        whole: Returns where the contents of a checkpoint are.
    """
    if realpath(a) == realpath(b):
        raise ConfigError(f"`{a}` and `{b}` are one run. Pass two.")
    journals = _journal(a), _journal(b)
    x, y = ({record.attempt: record for record in journal.records} for journal in journals)
    pairs = [(x[number], y[number]) for number in x if number in y]
    if not pairs:
        have = (f"`{run}` has {min(own)} to {max(own)}" for run, own in ((a, x), (b, y)))
        raise ConfigError(f"The runs have no window in common: {' and '.join(have)}.")
    equal = next((i for i, pair in enumerate(pairs) if _in_words(*pair)), len(pairs))
    first = pairs[equal] if equal < len(pairs) else None
    headers = [j.header_of(r) for j, r in zip(journals, first or pairs[-1], strict=True)]
    made = [*_made_differences(headers, (a, b), parts=first is not None)]
    reached = min(r.step - (r.skip is None) for r in first) if first else pairs[-1][0].step
    try:
        before, after = _common_checkpoints(a, b, reached)
        causes, notes = _state_causes(before, whole)
    except CheckpointError as error:
        before, after, causes = [], [], []
        notes = [f"The checkpoints cannot be compared. {error}"]
    if first:
        causes += [*made, *_later_causes([*before, *after], whole)]
        if all(cause.kind == "machine" for cause in causes):
            causes.append(Cause("unknown", _UNKNOWN))
        if len({header["run"]["processes"] for header in headers}) > 1:
            notes.append(OTHER_PROCESSES)
    else:
        notes += [f"What changed nothing: {cause.kind}: {cause.text}" for cause in made]
    if more := max(x) - max(y):
        notes.append(f"{'A' if more > 0 else 'B'} goes on for {count(abs(more), 'window')}.")
    return Parting(
        equal=equal,
        steps=(journals[0].records[-1].step, journals[1].records[-1].step),
        first=first,
        differs=_in_words(*first) if first else [],
        causes=sorted(causes, key=lambda cause: _LIKELY.index(cause.kind)),
        notes=notes,
    )


def _journal(run: Path) -> Journal:
    within = sorted(path.parent for path in run.glob(f"*/{JOURNAL}"))
    if within and not (run / JOURNAL).is_file():
        raise ConfigError(
            f"`{run}` holds several runs ({quoted([path.name for path in within])}). Pass one of "
            f"them, such as `{within[-1]}`."
        )
    journal = read(run)
    if not journal.records:
        raise ConfigError(f"The journal of `{run}` has no window yet. Wait, or pass another run.")
    return journal


def _in_words(x: Record, y: Record) -> list[str]:
    clips = None not in (x.grad_norm, y.grad_norm)  # else only one run knows its norm
    a, b = (
        {
            "update": "applied" if record.skip is None else f"skipped ({record.skip})",
            "samples": f"{record.first} to {record.stop} of epoch {record.epoch}",
            "loss": repr(record.loss),
            "norm of the gradients": repr(record.grad_norm) if clips else None,
            "updates so far": record.step,
        }
        for record in (x, y)
    )
    return [] if x == y else changed_facts(a, b, _WORDS)


def _listed(found: Sequence[str]) -> str:
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


# What the runs were made of.


def _made_differences(
    headers: Sequence[Mapping[str, Any]], folders: Sequence[Path], *, parts: bool
) -> Iterator[Cause]:
    """Yield what differs in how two processes were started.

    Args:
        parts: Whether the runs part; then settings that change no update are no cause.
    """
    left, right = map(_made, headers, folders)
    if parts:
        has_schedule = any(made["settings"].get("lr scheduler") for made in (left, right))
        for name in (*_IDLE, *(() if has_schedule else _HORIZON)):
            left["settings"].pop(name, None)
            right["settings"].pop(name, None)
    for kind, x in left.items():
        y = right[kind]
        if kind in ("model", "command"):  # which count
            x, y = (dict.fromkeys([*x, *y], 0) | side for side in (x, y))
        changed = changed_facts(x, y, _WORDS)
        if changed and kind == "code":  # of which the digests say nothing
            names = [name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name)]
            yield Cause(kind, f"{first_few(names, _MOST)} differ.")
        elif changed:
            yield Cause(kind, f"{_listed(changed)}.")


def _made(header: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a process was started with, by kind of cause and name."""
    run, start, files = header["run"], header["start"], dict[str, list[str]]()
    for path, digest in header["files"].items():
        files.setdefault(Path(path).name, []).append(digest)
    facts = {kind: {n: run[n] for n in names if n in run} for kind, names in _OF_RUN.items()}
    facts["settings"] |= header["config"]
    facts["settings"] |= {f"optimizer.{n}": v for n, v in flat(header["optimizer"]).items()}
    facts["settings"] |= {f"hparams.{n}": v for n, v in flat(header["hparams"]).items()}
    facts["model"] |= header["modules"]
    facts["environment"] |= {"CPU threads": start["threads"], **header["versions"]}
    facts["code"] = {name: " ".join(sorted(digests)) for name, digests in files.items()}
    words = [word for word in start.get("command", ())[1:] if word != "-u"]  # of a launcher
    base, own = Path(start["folder"]), realpath(folder)
    given = (w for w in words if realpath(base / w.rpartition("=")[2]) != own)
    facts["command"] = dict(Counter(f"`{word}`" for word in given))
    facts["machine"] = {"host": header["started"].get("host")}
    return facts


# What the checkpoints hold.


def _common_checkpoints(a: Path, b: Path, reached: int) -> tuple[list[Pair], list[Pair]]:
    """Return the newest checkpoints up to a step that both runs have, and the first after it."""
    x, y = ({entry.step: entry for entry in committed(run / CHECKPOINTS)} for run in (a, b))
    pairs = [(x[step], y[step]) for step in sorted(x.keys() & y.keys())]
    late = sum(pair[0].step <= reached for pair in pairs)
    return pairs[:late][-1:], pairs[late:][:1]


def _brought(pair: Pair, whole: Whole) -> Pair:
    a, b = (replace(entry, path=whole(entry.path)) for entry in pair)
    return a, b


def _state_causes(before: Sequence[Pair], whole: Whole) -> tuple[list[Cause], list[str]]:
    """Return what differs in the states that two runs saved, and what was compared."""
    if not before:
        return [], ["Up to there they have no checkpoints of the same step to compare."]
    if differing := [*_state_differences(before[0], whole)]:
        return differing, []
    step = before[0][0].step
    return [], [f"The checkpoints of step {step} are equal: parameters, optimizer, random streams."]


def _state_differences(pair: Pair, whole: Whole) -> Iterator[Cause]:
    """Yield what differs in the states of two checkpoints, but for what holds times."""
    digests = [{n: f.xxh3_128 for n, f in entry.manifest.files.items()} for entry in pair]
    if digests[0] == digests[1]:
        return
    pair = _brought(pair, whole)
    a, b = (read_contents(entry.path) for entry in pair)
    kinds = {"model": "parameters", "optimizer": "optimizer", "trainer": "state"}
    both = sorted({*a.tensors, *a.values} & {*b.tensors, *b.values})
    for part in both:
        is_process = part.startswith("process-") and "shard" not in part
        kind = "random streams" if is_process else kinds.get(part)
        names = _differing(a, b, part)
        if is_process:
            names = [name for name in names if _top(name) in _STREAMS]
        elif part == "trainer":
            tensors = {*a.tensors.get(part, {}), *b.tensors.get(part, {})}
            kept = {name for name in names if _top(name) in _OWNED and name in tensors}
            names = [name for name in names if _top(name) in _SHARED or name in kept]
        if kind and names:
            amount = _amount(pair, a, b, names[0]) if part == "model" else ""
            more = f"; so do {count(len(names) - 1, 'more value')}," if len(names) > 1 else ""
            where = f"in the checkpoints of step {pair[0].step}"
            of = f" of {part}" if is_process else ""
            yield Cause(kind, f"`{names[0]}`{of} differs{amount}{more} {where}.")


def _later_causes(pairs: Sequence[Pair], whole: Whole) -> Iterator[Cause]:
    """Yield what checkpoints around the parting tell of orders and of the optimizer's settings."""
    for pair in pairs:
        a, b = (entry.manifest.metadata.get("order") or {} for entry in pair)
        if a != b:
            changed = changed_facts(a.get("facts", {}), b.get("facts", {}), _WORDS)
            where = f"the samples come in another order up to step {pair[0].step}"
            yield Cause("data", f"{_listed([*changed, where])}.")
            break
    try:
        last = _brought(pairs[-1], whole) if pairs else ()
        left, right = (read_contents(entry.path) for entry in last) if last else ((), ())
    except CheckpointError:
        return  # what is broken is told elsewhere
    if left and right:
        names = [n for n in _differing(left, right, "optimizer") if n.startswith("groups[")]
        x, y = ({n: side.values["optimizer"].get(n) for n in names} for side in (left, right))
        if changed := changed_facts(x, y, _WORDS):
            where = f"in the checkpoints of step {pairs[-1][0].step}."
            yield Cause("optimizer", f"{_listed(changed)}, {where}")


def _differing(a: Contents, b: Contents, part: str) -> list[str]:
    """Return the names of what differs in a part, tensors first, in the order of the file."""
    x, y = (side.tensors.get(part, {}) | side.values.get(part, {}) for side in (a, b))
    return [name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name)]


def _top(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _amount(pair: Pair, a: Contents, b: Contents, name: str) -> str:
    """Return in how much a tensor of the model differs."""
    x, y = (side.tensors["model"].get(name) for side in (a, b))
    if x is None or y is None or (x.dtype, x.shape) != (y.dtype, y.shape):
        return " in kind"
    mine, theirs = (Checkpoint(e.path, e.manifest).read_tensor("model", name) for e in pair)
    apart = float((mine.cdouble() - theirs.cdouble()).abs().max())
    elements = count(mine.numel(), "element")
    return f" in {int((mine != theirs).sum())} of {elements}, by at most {apart:.3g},"
