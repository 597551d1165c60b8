"""What each process sends, opens and reads as processes are added: counted, and modelled.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.scale                    # 2, 4, 8, 16 processes
    OMP_NUM_THREADS=1 python -m benchmarks.scale --processes 2 8 64

Real processes, forked from one that has everything imported, train a tiny model over the loopback
device. The kernel counts bytes and segments of each connection, torch's flight recorder the
collectives, audit events the files. What the watch sends by the clock stands in a row of its own.
The exponent e is that of W^e fitted to the figures: 0 does not grow, O(log W) is about 0.5 here.
The model takes the collectives of the largest run and counts the transfers that gloo makes for
them. It is compared with what was counted, and then asked about jobs that fit on no machine.
Exits with 1 where something grows that should not, or the model is wrong.
"""

import argparse
import gc
import json
import math
import os
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import xxhash
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, Evaluation
from trainkit.checkpoint.io import reading
from trainkit.distributed import async_flags
from trainkit.distributed.gloo_listeners import LAZY

SIZES = (2, 4, 8, 16)
BEYOND = (1024, 16384)
FEATURES, BATCH, STEPS = 64, 4, 24
FROM, TO = 4, 14  # the steps that are measured
EVALUATE, SAVE, GATHER, STOP = 16, 18, 20, 22  # after which step
PHASES = ("set-up", "step", "evaluation", "gather", "save", "resume")
SETTLE = 0.1  # seconds until the kernel has sent what was written
LIMIT = 0.6  # largest exponent
# Each process reads the small files of a checkpoint for itself; of the large ones it has a share.
LIMITS = {("resume", "hashed of all"): 0.9}
# What grows in any case: a gather returns W batches, and making a group tells all addresses to all.
# Each process writes its own streams.
EXEMPT = (
    *(("gather", name) for name in ("bytes", "messages")),
    *(("set-up", name) for name in ("bytes", "messages")),
    ("save", "files of all"),
)
FIGURES = ("bytes", "messages", "collectives", "sockets", "files", "hashed")
TOTALS = ("files", "hashed")  # of all processes; the others are of one on average
OF_MAIN = ("bytes", "messages", "hashed")
_BYTES_SENT, _SEGMENTS_SENT = (200, "Q"), (156, "I")  # in tcp_info of Linux
_LISTENS = 10
_HEADER = 48  # bytes that gloo sends to announce, to ask for, and in front of a buffer
_ITEM_BYTES = {"Byte": 1, "Int": 4, "Long": 8, "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2}

Collective = tuple[str, int, int]
"""What it is called, and the numbers that a process gives to it, and their bytes."""


@dataclass
class Counts:
    """What one process has done, up to a moment or in between two."""

    bytes: float = 0  # sent, but for those of the watch
    messages: float = 0  # the same in segments
    sockets: float = 0  # open at the end, with those of the watch
    files: float = 0  # created
    hashed: float = 0  # bytes of files that were compared with their digest
    watch_bytes: float = 0  # sent
    seconds: float = 0
    collectives: list[Collective] = field(default_factory=list)

    def since(self, begin: "Counts", parts: int = 1) -> "Counts":
        """Return what was counted in one of the equal parts of the time since `begin`."""
        names = ("bytes", "messages", "files", "hashed", "watch_bytes", "seconds")
        found = {name: (getattr(self, name) - getattr(begin, name)) / parts for name in names}
        fresh = self.collectives[len(begin.collectives) :]
        return Counts(**found, sockets=self.sockets, collectives=fresh[: len(fresh) // parts])

    def figure(self, name: str) -> float:
        """Return a number; of collectives, how many there are."""
        value = getattr(self, name)
        return float(len(value) if isinstance(value, list) else value)


Jobs = dict[int, list[dict[str, Counts]]]
"""By the number of processes what each of them has done in each phase."""

_done: Counter[str] = Counter()


class _CountedHash:
    """A digest that says how much goes into it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.hexdigest = self._hash.hexdigest

    def update(self, data: Any) -> None:
        _done["hashed"] += len(data)
        self._hash.update(data)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_EXCL:
        _done["files"] += 1


def count_now() -> Counts:
    """Return what this process has done up to now; connections that were closed are left out."""
    time.sleep(SETTLE)
    counts = Counts(files=_done["files"], hashed=_done["hashed"], seconds=time.monotonic())
    # Only the watch has connections of Python's.
    ours = {one.fileno() for one in gc.get_objects() if issubclass(type(one), socket.socket)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _count_socket(counts, int(name), is_watch=int(name) in ours)
    counts.collectives = _recorded()
    return counts


def _count_socket(counts: Counts, descriptor: int, *, is_watch: bool) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if info[0] == _LISTENS:
        return
    sent, segments = (
        struct.unpack_from(form, info, at)[0] for at, form in (_BYTES_SENT, _SEGMENTS_SENT)
    )
    counts.sockets += 1
    if is_watch:
        counts.watch_bytes += sent
    else:
        counts.bytes += sent
        counts.messages += segments


def _recorded() -> list[Collective]:
    dump: Any = torch._C._distributed_c10d  # not all of its names are declared
    entries = json.loads(dump._dump_fr_trace_json()).get("entries", [])
    return [(entry["profiling_name"].removeprefix("gloo:"), *_given(entry)) for entry in entries]


def _given(entry: dict[str, Any]) -> tuple[int, int]:
    numbers = [math.prod(size) for size in entry["input_sizes"]]
    items = [_ITEM_BYTES[dtype] for dtype in entry["input_dtypes"]]
    return sum(numbers), sum(n * item for n, item in zip(numbers, items, strict=True))


class Marks(Callback):
    """Counts at the borders of what is measured.

    Processes need not be there at the same time: what one has sent, it sent before or after.
    """

    def __init__(self) -> None:
        self.at: dict[str, Counts] = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # what is counted is of one process: a resume brings nothing back

    @override
    def on_step_start(self, run: Run) -> None:
        step = run.state.step
        if not self.at or step in (EVALUATE, SAVE):
            self.at[f"start {step}"] = count_now()
        if step == GATHER:
            self.at["gather"] = count_now()
            run.processes.gather_for_metrics(torch.zeros(BATCH, 1))
            self.at["gathered"] = count_now()

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        step = run.state.step
        if step in (FROM, TO, EVALUATE, SAVE):
            self.at[f"end {step}"] = count_now()
        if step == STOP:
            run.request_stop("all is counted", agreed=True)


class Constant(Trainer):
    """Fits a constant."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs.pow(2).mean()

    @override
    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).pow(2).mean()}


def work(rank: int, folder: str, address: str, strategy: str) -> dict[str, Counts]:
    """Be one process: train, and train on from the checkpoint."""
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "100000", "TRAINKIT_INIT_METHOD": address}
    os.environ[LAZY] = "1"  # few processes connect as many do
    sys.addaudithook(_audit)
    vars(async_flags)["SECONDS"] = 0.0  # flags are exchanged in each window: no clock takes part
    vars(reading)["xxhash"] = SimpleNamespace(xxh3_128=_CountedHash)
    begin, first, second = count_now(), Marks(), Marks()
    _fit(first, folder, strategy, None)
    middle = count_now()
    _fit(second, folder, strategy, "must")
    at = first.at
    return {
        "set-up": at["start 0"].since(begin),
        "step": at[f"end {TO}"].since(at[f"end {FROM}"], TO - FROM),
        "evaluation": at[f"start {EVALUATE}"].since(at[f"end {EVALUATE}"]),
        "gather": at["gathered"].since(at["gather"]),
        "save": at[f"start {SAVE}"].since(at[f"end {SAVE}"]),
        "resume": second.at[f"start {STOP}"].since(middle),
    }


def _fit(marks: Marks, folder: str, strategy: str, resume: str | None) -> None:
    size = int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.ones(size * BATCH * STEPS, FEATURES))
    evaluated = TensorDataset(torch.ones(size * BATCH, FEATURES))
    # Most is frozen: it fills checkpoints, and is not part of what a step sends.
    frozen = [nn.Linear(FEATURES, FEATURES).requires_grad_(False) for _ in range(8)]
    model = nn.Sequential(*frozen, nn.Linear(FEATURES, 1))
    evaluation = Evaluation(every_n_steps=EVALUATE, at_end=False)
    trainer = Constant(
        max_steps=STEPS, output_dir=folder, strategy=strategy,  # type: ignore[arg-type]
        callbacks=[marks, evaluation, Checkpoint(every_n_steps=SAVE)],
    )  # fmt: skip
    loaders = (DataLoader(data, BATCH), DataLoader(evaluated, BATCH))
    trainer.fit(model, loaders, optimizer=partial(AdamW, lr=1e-3), resume=resume)


def measure(size: int, strategy: str = "ddp") -> list[dict[str, Counts]]:
    """Return what each of `size` processes has done in each phase."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.close()
        return run_ranks(size, work, folder, f"tcp://127.0.0.1:{port}", strategy, timeout=1500.0)


def exponent(points: dict[int, float]) -> float:
    """Return e of the W^e that is fitted to figures by the number of processes."""
    pairs = [(math.log(size), math.log(value)) for size, value in points.items() if value]
    if len(pairs) < 2:
        return 0.0
    x, y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    slope: float = sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)
    return slope


def transfers(kind: str, numbers: int, given: int, size: int) -> tuple[float, float]:
    """Return how many buffers gloo sends for a collective, all together, and the bytes of each.

    Args:
        kind: Of the collective.
        numbers: That each process gives to it.
        given: The same in bytes.
        size: Processes.
    """
    others = size - 1
    if kind == "barrier":
        return size * math.ceil(math.log2(size)), 0
    if kind in ("broadcast", "gather"):
        return others, given
    if kind == "all_reduce":  # each segment goes round the ring twice, empty ones do not
        element = given // max(numbers, 1)
        length = math.ceil(numbers / (2 * size)) * element  # of a segment; the last ones are empty
        segments = math.ceil(given / max(length, 1))
        return 2 * others * segments, given / max(segments, 1)
    if kind in ("all_gather", "allgather", "_allgather_base"):
        return 2 * size * others, given / 2
    if kind in ("all_to_all", "all_to_all_single"):
        return size * others, given / size
    raise ValueError(f"The model does not know `{kind}`.")


def modelled(collectives: Sequence[Collective], size: int) -> Counts:
    """Return what collectives make a process send on average."""
    counts = Counts(collectives=list(collectives))
    for kind, numbers, given in collectives:
        number, each = transfers(kind, numbers, given, size)
        counts.messages += 3 * number / size  # to announce, to ask for, and the buffer
        counts.bytes += number * (3 * _HEADER + each) / size
    return counts


def rows(jobs: Jobs, phase: str) -> dict[str, dict[int, float]]:
    """Return the figures of a phase by their names and by the number of processes."""
    found: dict[str, dict[int, float]] = {}
    for size, ranks in jobs.items():
        for name in FIGURES:
            values = [one[phase].figure(name) for one in ranks]
            label = f"{name} of all" if name in TOTALS else name
            found.setdefault(label, {})[size] = sum(values) / (1 if name in TOTALS else size)
            if name in OF_MAIN:
                found.setdefault(f"process 0: {name}", {})[size] = values[0]
    return found


def check(jobs: Jobs) -> list[str]:
    """Return what grows that should not, and where the model is wrong."""
    found = []
    for phase in PHASES:
        figures = rows(jobs, phase)
        most = max(jobs)
        largest, many, more = (
            modelled(jobs[most][0][phase].collectives, size) for size in (most, *BEYOND)
        )
        for name, points in figures.items():
            grown = exponent(points)
            exempt = (phase, name) in EXEMPT or name == "sockets" or name.startswith("process 0")
            if name in ("bytes", "messages"):
                # A ring cuts a tiny gradient into ever more segments, until each is one number:
                # where the model is right here and ends there, there is an end.
                ends = getattr(more, name) < 1.1 * getattr(many, name)
                exempt |= ends and points[most] < 1.1 * getattr(largest, name)
            if not exempt and grown > LIMITS.get((phase, name), LIMIT):
                found.append(f"{phase}: {name} grow as W^{grown:.2f}")
        for size, ranks in jobs.items():
            model = modelled(ranks[0][phase].collectives, size)
            for name in ("bytes", "messages"):
                real, said = figures[name][size], getattr(model, name)
                if phase != "set-up" and abs(real - said) > 0.1 * real + 3 * _HEADER:
                    found.append(f"{phase}, {size} processes: {real} {name}, modelled {said}")
    return found


def show(jobs: Jobs) -> None:
    """Print what a process does on average, what process 0 does, and what the model says."""
    header = "".join(f"{size:>11,}" for size in jobs) + "       e"
    print(f"{'':>32}{header}" + "".join(f"{f'at {size:,}':>13}" for size in BEYOND))
    for phase in PHASES:
        recorded = jobs[max(jobs)][0][phase].collectives
        for name, points in rows(jobs, phase).items():
            if not any(points.values()) or (name == "sockets" and phase != PHASES[-1]):
                continue
            cells = "".join(f"{value:>11,.0f}" for value in points.values())
            line = f"{f'{phase} {name}':>32}{cells}{exponent(points):>8.2f}"
            if name in ("bytes", "messages"):
                said = [getattr(modelled(recorded, size), name) for size in BEYOND]
                line += "".join(f"{value:>13,.0f}" for value in said)
            print(line)
    for who, first in (("a process", None), ("process 0", 1)):
        sent = {
            size: sum(one[p].watch_bytes for one in ranks[:first] for p in PHASES)
            / sum(one[p].seconds for one in ranks[:first] for p in PHASES)
            for size, ranks in jobs.items()
        }
        cells = "".join(f"{value:>11,.0f}" for value in sent.values())
        print(f"{f'watch, bytes/s of {who}':>32}{cells}{exponent(sent):>8.2f}")


def main() -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    jobs = {size: measure(size) for size in arguments.processes}
    show(jobs)
    found = check(jobs)
    for line in found:
        print(f"GROWS: {line}")
    if arguments.output:
        figures = {phase: rows(jobs, phase) for phase in PHASES}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
