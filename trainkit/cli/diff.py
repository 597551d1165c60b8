"""`trainkit diff`: say where two runs part, and why."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.basics.formatting import count, json_value
from trainkit.basics.outputs import fetched
from trainkit.basics.terminal import print_text
from trainkit.cli.addresses import LOGS
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.cli.parting import Parting

_MOST_ROWS = 10  # that are shown of a batch

_DESCRIPTION = """Say where two runs part, and why, from their journals and checkpoints: the first
window that differs in any bit, and what differed before it. Exit code 0: they are equal as far as
both go; 1: they part."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("diff", description=_DESCRIPTION)
    where = "the `output_dir` of a run with a journal, which `Checkpoint` brings along"
    for name in ("a", "b"):
        parser.add_argument(name, metavar=f"RUN_{name.upper()}", type=Path, help=where)
    replay_help = "make that step of both once more, and name the first module that differs"
    parser.add_argument("--replay", action="store_true", help=replay_help)
    parser.add_argument("--json", action="store_true", help="all that is known, for programs")
    parser.set_defaults(run=_run, reads={"a": LOGS, "b": LOGS})


def _run(options: argparse.Namespace) -> int:
    from trainkit.cli.parting import find_parting  # torch, which `--help` needs not

    with ExitStack() as opened:
        whole = cache(lambda path: opened.enter_context(options.whole(path)))
        parting = find_parting(options.a, options.b, whole)
    replayed = None
    if options.replay:  # of an address in the folder that its program writes to
        a, b = (fetched(options.addresses.get(name, getattr(options, name))) for name in "ab")
        replayed = _compare_replays(a, b, parting)
    parts = parting.first is not None or bool(parting.causes)
    if options.json:
        known = {"a": str(options.a), "b": str(options.b), **asdict(parting), "replay": replayed}
        print(json.dumps(json_value(known), indent=2))
        return int(parts)
    runs = zip("AB", (options.a, options.b), parting.steps, strict=True)
    lines = [f"{name}: {folder}, {count(steps, 'step')}" for name, folder, steps in runs]
    lines += _told(parting)
    print_text(lines if replayed is None else [*lines, f"Replayed: {replayed}"])
    return int(parts)


def _told(parting: "Parting") -> list[str]:
    windows = f"Bit-equal over {count(parting.equal, 'window')}"
    lines = [f"{windows}{', but not in what was saved' * bool(parting.causes)}."]
    if parting.first is not None:
        lines = [f"{windows}. In window {parting.first[0].attempt}, step {parting.first[0].step}:"]
        lines += [f"  {text}" for text in parting.differs]
    for index, cause in enumerate(parting.causes):
        lines.append(f"{'Also' if index else 'Likely cause'}: {cause.kind}: {cause.text}")
    return [*lines, *parting.notes]


# Both steps made once more.


def _compare_replays(a: Path, b: Path, parting: "Parting") -> str:
    """Replay the step in which two runs part, and return what differs first in it, in words."""
    from trainkit.cli.parting import OTHER_PROCESSES

    if parting.first is None:
        return "There is no window that differs."
    if OTHER_PROCESSES in parting.notes:
        return "Runs on as many processes can be compared, as their batches are cut alike."
    if any(record.skip for record in parting.first):
        return "Only updates can be made once more, and this window was skipped."
    step = parting.first[0].step
    folders = [_replay(run, step) for run in (a, b)]
    told = []
    for name, folder in zip("AB", folders, strict=True):
        result = json.loads((folder / "replay.json").read_bytes())
        if result["is_equal"] is False:
            told.append(
                f"From step {result['differs_from']} on {name} does not come to its own losses "
                "again: what happened then is neither in its program nor in its checkpoint."
            )
    both = {path.name for path in folders[0].glob("process-*.json")}
    for file in sorted(both.intersection(path.name for path in folders[1].iterdir())):
        x, y = (json.loads((folder / file).read_bytes()) for folder in folders)
        for text in _differences(x, y, *((f / file).with_suffix(".safetensors") for f in folders)):
            return " ".join([*told, f"{text}, on process {x['process']}."])
    return " ".join([*told, "All outputs and gradients are equal this time."])


def _replay(run: Path, step: int) -> Path:
    """Make a step of a run once more; return the folder in which it lies open."""
    folder = run / "replay" / f"step-{step:08d}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier replay
    command = [sys.executable, "-m", "trainkit.cli", "replay", str(run), "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (folder / "replay.json").is_file():
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise ConfigError(f"Step {step} of `{run}` cannot be replayed. {said}")
    return folder


def _differences(x: Mapping[str, Any], y: Mapping[str, Any], a: Path, b: Path) -> Iterator[str]:
    """Yield what differs in two replays of a step, in the order in which it came to be."""
    if a.read_bytes() != b.read_bytes() or x["micro_batches"] != y["micro_batches"]:
        yield f"The batches themselves differ: {_batches(x, y, a, b)}"
    for name in _unequal(x["parameters"], y["parameters"], "value"):
        yield f"The parameter `{name}` differs before the step"
    rows = [*zip(x["modules"], y["modules"], strict=False)]
    for one, two in rows:
        if any(one[key] != two[key] for key in ("module", "what", "output")):
            yield f"The batches are equal, the first module whose output differs is {_place(one)}"
    for one, two in reversed(rows):
        if one.get("gradient") != two.get("gradient"):
            yield f"All outputs are equal, the first gradient on the way back is of {_place(one)}"
    for name in _unequal(x["parameters"], y["parameters"], "gradient"):
        yield f"All modules are equal, and the gradient of the parameter `{name}` differs"


def _batches(x: Mapping[str, Any], y: Mapping[str, Any], a: Path, b: Path) -> str:
    """Return in words what differs in the first micro-batch that does."""
    from safetensors.torch import load_file  # torch, which only this needs

    mine, theirs = load_file(a), load_file(b)
    for number, (one, two) in enumerate(zip(x["micro_batches"], y["micro_batches"], strict=False)):
        where, indices = f"in micro-batch {number}", one.get("indices", [])
        if (one["count"], indices) != (two["count"], two.get("indices", [])):
            return f"{where} are the samples {_few(one)} in A, {_few(two)} in B"
        for name in re.findall(r'"(batch\.\d+)"', json.dumps(one["data"])):
            value, other = mine[name], theirs.get(name)
            if other is None or value.shape != other.shape:
                return f"`{name}` {where} has another shape"
            unequal = (value != other) & ((value == value) | (other == other))  # NaN is itself
            if unequal.any():
                bad = unequal.reshape(len(value), -1).any(1) if value.ndim else unequal[None]
                rows = bad.nonzero().flatten().tolist()[:_MOST_ROWS]
                of = f" (samples {[indices[row] for row in rows]})" if indices else ""
                return f"rows {rows}{of} {where} have other values in `{name}`"
    return "in what has no rows"


def _few(batch: Mapping[str, Any]) -> str:
    indices = batch.get("indices")
    return f"{indices[:_MOST_ROWS]}" if indices else f"{batch['count']} of unknown numbers"


def _unequal(x: Mapping[str, Any], y: Mapping[str, Any], key: str) -> list[str]:
    return [name for name, row in x.items() if row.get(key) != y.get(name, {}).get(key)]


def _place(row: Mapping[str, Any]) -> str:
    kind = row.get("class", "the loss")
    return f"`{row['module'] or 'the model'}` ({kind}) in micro-batch {row['micro_batch']}"
