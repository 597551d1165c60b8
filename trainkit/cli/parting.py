"""Where two runs part, and why, as far as their journals and checkpoints tell it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import count
from trainkit.basics.hparams import flat
from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.listing import Entry, committed
from trainkit.cli.contents import Contents, TensorSummary, read_contents
from trainkit.data.order_facts import changed_facts
from trainkit.errors import CheckpointError, ConfigError, quoted
from trainkit.journal import JOURNAL, Journal, Record, read

__all__ = ["OTHER_PROCESSES", "Cause", "Parting", "find_parting"]

Pair = tuple[Entry, Entry]
Facts = Mapping[str, Any]
Made = dict[str, dict[str, Any]]

_LIKELY = (
    "settings", "model", "environment", "code", "command", "data", "parameters",
    "optimizer", "random streams", "state", "machine", "unknown",
)  # fmt: skip
"""Kinds of causes: what was chosen, before what follows from it."""

OTHER_PROCESSES = (
    "On another number of processes a run is equal to rounding only, and the loss is that of "
    "process 0, which has other samples."
)
_HARMLESS = ("log_every_n_steps", "limit_eval_batches", "max_consecutive_skips", "dry_run")
_HORIZON = ("max_epochs", "max_steps", "planned steps")  # which only a schedule looks at
_OF_RUN = {  # facts of the run, by what they are
    "settings": ("optimizer", "lr scheduler", "precision", "window", "planned steps"),
    "model": ("model", "parameters", "trainable parameters"),
    "environment": ("strategy", "processes", "device", "batch size of one process"),
    "data": ("samples per epoch", "training loaders"),
}
_WORDS = ("in A", "in B")
_STREAMS = {"python": "Python", "numpy": "NumPy", "torch": "torch", "device": "the device"}
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


def find_parting(a: Path, b: Path) -> Parting:
    """Compare the runs in two directories, window by window, and what they were made of.

    Raises:
        ConfigError: One is no such run, or they have no window in common.
    """
    if realpath(a) == realpath(b):
        raise ConfigError(f"`{a}` and `{b}` are one run. Pass two.")
    journals = _journal(a), _journal(b)
    pairs, notes = _aligned(*journals)
    equal = next((i for i, (x, y) in enumerate(pairs) if _in_words(x, y)), len(pairs))
    first = pairs[equal] if equal < len(pairs) else None
    reached = min(r.step - (r.skip is None) for r in first) if first else pairs[-1][0].step
    try:
        before, after = _common_checkpoints(a, b, reached)
    except CheckpointError as error:
        before, after = [], []
        notes.append(str(error))
    causes, told = _state_causes(before)
    headers = [j.header_of(r) for j, r in zip(journals, first or pairs[-1], strict=True)]
    made, harmless = _made_differences(*map(_made, headers, (a, b)))
    if first:
        causes += [*made, *_order_differences([*before, *after]), *_late_settings(after)]
        if all(cause.kind == "machine" for cause in causes):
            causes.append(Cause("unknown", _unexplained(first, headers)))
        if len({header["run"]["processes"] for header in headers}) > 1:
            notes.append(OTHER_PROCESSES)
    else:
        harmless += [f"What changed nothing: {cause.kind}: {cause.text}" for cause in made]
    return Parting(
        equal=equal,
        steps=(journals[0].records[-1].step, journals[1].records[-1].step),
        first=first,
        differs=_in_words(*first) if first else [],
        causes=sorted(causes, key=lambda cause: _LIKELY.index(cause.kind)),
        notes=[*told, *harmless, *notes],
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


def _aligned(a: Journal, b: Journal) -> tuple[list[tuple[Record, Record]], list[str]]:
    """Return the windows that both journals have, and which of them has more."""
    x, y = ({record.attempt: record for record in journal.records} for journal in (a, b))
    pairs = [(x[number], y[number]) for number in x if number in y]
    if not pairs:
        have = [f"`{j.path.parent}` has {min(own)} to {max(own)}" for j, own in ((a, x), (b, y))]
        raise ConfigError(f"The runs have no window in common: {' and '.join(have)}.")
    if more := max(x) - max(y):
        return pairs, [f"{'A' if more > 0 else 'B'} goes on for {count(abs(more), 'window')}."]
    return pairs, []


def _common_checkpoints(a: Path, b: Path, reached: int) -> tuple[list[Pair], list[Pair]]:
    """Return the newest checkpoints up to a step that both runs have, and the first after it."""
    x, y = ({entry.step: entry for entry in committed(run / CHECKPOINTS)} for run in (a, b))
    steps = sorted(x.keys() & y.keys())
    pairs = [(x[step], y[step]) for step in steps]
    late = next((i for i, step in enumerate(steps) if step > reached), len(steps))
    return pairs[:late][-1:], pairs[late:][:1]


def _state_causes(before: Sequence[Pair]) -> tuple[list[Cause], list[str]]:
    """Return what differs in the states that two runs saved, and what was compared."""
    if not before:
        return [], ["Up to there they have no checkpoints of the same step to compare."]
    try:
        found = [*_state_differences(before[0])]
    except CheckpointError as error:
        return [], [f"The checkpoints cannot be compared. {error}"]
    step = before[0][0].step
    equal = f"The checkpoints of step {step} are equal: parameters, optimizer, random streams."
    return found, [] if found else [equal]


def _in_words(x: Record, y: Record) -> list[str]:
    if x == y:
        return []
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
    return changed_facts(a, b, _WORDS)


# What the runs were made of.


def _made_differences(left: Made, right: Made) -> tuple[list[Cause], list[str]]:
    """Return the differences in how two processes were started, and those that change no update."""
    made = left, right
    for kind in ("model", "command"):  # which count
        for one in made:
            one[kind] = dict.fromkeys([*left[kind], *right[kind]], 0) | one[kind]
    has_schedule = any(one["settings"].get("lr scheduler") for one in made)
    idle = (*_HARMLESS, *(() if has_schedule else _HORIZON))
    mine, theirs = ({name: one["settings"].pop(name, None) for name in idle} for one in made)
    found = {kind: changed_facts(left[kind], right[kind], _WORDS) for kind in left}
    told = changed_facts(mine, theirs, _WORDS)
    return [Cause(kind, _listed(texts)) for kind, texts in found.items() if texts], [
        f"What changes no update: {_listed(told)}"
    ] * bool(told)


def _made(header: Facts, folder: Path) -> Made:
    """Return what a process was started with, by kind of cause and name."""
    run, start, files = header["run"], header["start"], dict[str, list[str]]()
    for path, digest in header["files"].items():
        files.setdefault(Path(path).name, []).append(digest)
    found = {kind: {n: run[n] for n in names if n in run} for kind, names in _OF_RUN.items()}
    found["settings"] |= header["config"]
    found["settings"] |= {f"optimizer.{n}": v for n, v in flat(header["optimizer"]).items()}
    found["settings"] |= {f"hparams.{n}": v for n, v in flat(header["hparams"]).items()}
    found["model"] |= header["modules"]
    found["environment"] |= {"CPU threads": start["threads"], **header["versions"]}
    found["code"] = {name: " ".join(sorted(digests)) for name, digests in files.items()}
    words = [word for word in start.get("command", ())[1:] if word != "-u"]  # of a launcher
    place, own = Path(start["folder"]), realpath(folder)
    given = (w for w in words if realpath(place / w.rpartition("=")[2]) != own)
    found["command"] = dict(Counter(f"`{word}`" for word in given))
    found["machine"] = {"host": header["started"].get("host")}
    return found


def _listed(found: Sequence[str]) -> str:
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more + "."


def _unexplained(first: tuple[Record, Record], headers: Sequence[Facts]) -> str:
    """Return what may be the cause where nothing that is recorded differs."""
    words = ["nothing that is recorded differs before it."]
    if first[0].attempt == 1:
        words.append("Seed the first weights: `torch.manual_seed` before the model is made.")
    run, config = headers[0]["run"], headers[0]["config"]
    if run["device"] != "cpu" and not config.get("deterministic"):
        words.append("On accelerators runs repeat only with `Trainer(deterministic=True)`.")
    if repr(first[0].loss) == repr(first[1].loss):
        words.append("The loss of process 0 is equal: its backward differs, or another process.")
    words.append(
        "Left are the contents of the data, an operation whose order is not fixed, what the code "
        "reads from outside, and the hardware."
    )
    return " ".join(words)


# What the checkpoints hold.


def _order_differences(pairs: Sequence[Pair]) -> Iterator[Cause]:
    """Yield what tells the order of the samples in two runs apart, by the first pair that does."""
    for pair in pairs:
        a, b = (entry.manifest.metadata.get("order") or {} for entry in pair)
        if a != b:
            found = changed_facts(a.get("facts", {}), b.get("facts", {}), _WORDS)
            where = f"the samples come in another order up to step {pair[0].step}"
            yield Cause("data", _listed([*found, where]))
            return


def _state_differences(pair: Pair) -> Iterator[Cause]:
    """Yield what differs in the states of two checkpoints, but for what holds times."""
    digests = [{n: f.xxh3_128 for n, f in entry.manifest.files.items()} for entry in pair]
    if digests[0] == digests[1]:
        return
    a, b = (read_contents(entry.path) for entry in pair)
    place = f"in the checkpoints of step {pair[0].step}."
    if names := _differing(a, b, "model"):
        amount = _amount(pair, names[0], *(side.tensors["model"].get(names[0]) for side in (a, b)))
        yield Cause("parameters", f"{_named(names, amount)} {place}")
    if names := _differing(a, b, "optimizer"):
        yield Cause("optimizer", f"{_named(names)} {place}")
    processes = sorted({*a.tensors, *a.values} & {*b.tensors, *b.values})
    streams = dict.fromkeys(
        f"{_STREAMS[_top(name)]} on process {int(part[8:])}"
        for part in processes
        if part.startswith("process-") and "shard" not in part
        for name in _differing(a, b, part)
        if _top(name) in _STREAMS
    )
    if streams:
        yield Cause("random streams", f"those of {', '.join(streams)} differ {place}")
    tensors = {*a.tensors.get("trainer", {}), *b.tensors.get("trainer", {})}
    names = [
        name
        for name in _differing(a, b, "trainer")
        if _top(name) in _SHARED or (_top(name) in _OWNED and name in tensors)
    ]
    if names:
        yield Cause("state", f"{_named(names)} {place}")


def _late_settings(after: Sequence[Pair]) -> Iterator[Cause]:
    """Yield what differs in the settings of the optimizer soon after two runs have parted."""
    for pair in after:
        try:
            a, b = (read_contents(entry.path) for entry in pair)
        except CheckpointError:
            return  # what is broken is told elsewhere
        names = [n for n in _differing(a, b, "optimizer") if n.startswith("groups[")]
        x, y = ({n: side.values["optimizer"].get(n) for n in names} for side in (a, b))
        if found := changed_facts(x, y, _WORDS):
            where = f"in the checkpoints of step {pair[0].step}."
            yield Cause("optimizer", f"{_listed(found)[:-1]}, {where}")


def _differing(a: Contents, b: Contents, part: str) -> list[str]:
    """Return the names of what differs in a part, tensors first, in the order of the file."""
    x, y = (side.tensors.get(part, {}) | side.values.get(part, {}) for side in (a, b))
    return [name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name)]


def _top(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _named(names: Sequence[str], amount: str = "") -> str:
    others = f"; so do {count(len(names) - 1, 'more value')}," if len(names) > 1 else ""
    return f"`{names[0]}` differs{amount}{others}"


def _amount(pair: Pair, name: str, *kinds: TensorSummary | None) -> str:
    """Return in how much a tensor of the model differs."""
    if None in kinds or len({(kind.dtype, kind.shape) for kind in kinds if kind}) > 1:
        return " in kind"
    x, y = (Checkpoint(e.path, e.manifest).read_tensor("model", name) for e in pair)
    apart = float((x.cdouble() - y.cdouble()).abs().max())
    return f" in {int((x != y).sum())} of {count(x.numel(), 'element')}, by at most {apart:.3g},"
