"""Data parallelism against plain `DistributedDataParallel`: time, bytes on the wire, operations.

Run it in the root of the repository, on Linux, with no more processes than cores where times count:

    OMP_NUM_THREADS=1 python -m benchmarks.ddp --processes 2 3 4 8

A model of 4 M parameters is trained by a loop by hand around torch's wrapper, by the same loop
around trainkit's (`DDP().wrap`), and by `Trainer.fit`, in turns and in the same processes. Times
are ratios to the first within a round, the median with the range. Bytes are those of all processes
that the kernel counts as arrived (`TCP_INFO`); operations are those of the profiler on process 0. A
`Trainer` has one more collective about every 0.25 s, of 40 bytes. Exits with 1 where a step sends
5 % more bytes than torch's, or the wrapper makes 5 % more collectives.
"""

import argparse
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._dynamo  # here, so that it is not part of the figures
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, StepResult, Trainer
from trainkit.precision import FP32
from trainkit.strategies import DDP

WIDTH, LAYERS, BATCH = 1024, 4, 16
WARM, STEPS = 3, 13  # the steps between are measured
BYTES_ACKED = 120  # where `tcp_info` has them
MOST = 1.05


@dataclass
class Meter:
    """What was done from one mark to the next."""

    counts_operations: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start to measure."""
        if self.counts_operations:
            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.start()
        self._bytes, self._start = _bytes_acknowledged(), time.perf_counter()

    def end(self) -> None:
        """Note what one step took."""
        steps = STEPS - WARM
        seconds = time.perf_counter() - self._start
        self.figures = {
            "ms": 1e3 * seconds / steps,
            "KiB": (_bytes_acknowledged() - self._bytes) / 1024 / steps,
        }
        if self.counts_operations:
            self._profiler.stop()
            names = [event.name for event in self._profiler.events() or ()]
            collectives = sum(name.startswith("gloo:") for name in names)
            operations = sum(name.startswith("aten::") for name in names)
            self.figures = {"collectives": collectives / steps, "operations": operations / steps}


class Marks(Callback):
    """Begins and ends the measurement of a `Trainer`."""

    def __init__(self, meter: Meter) -> None:
        self._marks = {WARM: meter.begin, STEPS: meter.end}

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if (mark := self._marks.get(run.state.step)) is not None:
            mark()


def _bytes_acknowledged() -> int:
    """Return how many bytes the peers of this process's connections have taken so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the list itself is gone; others are no TCP
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("=Q", info, BYTES_ACKED)[0]
    return total


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def by_hand(wrap: Callable[[nn.Module], nn.Module], data: TensorDataset, meter: Meter) -> None:
    """Train with a plain loop."""
    model = wrap(_model())
    optimizer = SGD(model.parameters(), lr=1e-3)
    for step, (inputs, targets) in enumerate(DataLoader(data, BATCH), start=1):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM:
            meter.begin()
    meter.end()


def by_trainer(strategy: DDP, data: TensorDataset, meter: Meter) -> None:
    """Train with a `Trainer`, which deals the samples out."""
    size = strategy.processes.size
    everything = TensorDataset(*(t.repeat(size, 1) for t in data.tensors))
    trainer = Trainer(max_steps=STEPS, strategy=strategy, callbacks=[Marks(meter)])
    trainer.fit(
        _model(),
        DataLoader(everything, BATCH),
        optimizer=partial(SGD, lr=1e-3),
        loss_fn=nn.functional.mse_loss,
    )


def measure(rank: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Return the figures of each way, of each round; the last round counts operations."""
    strategy = DDP(device="cpu")
    strategy.setup()
    data = TensorDataset(torch.randn(STEPS * BATCH, WIDTH), torch.randn(STEPS * BATCH, WIDTH))
    wrap = partial(strategy.wrap, precision=FP32())
    ways: dict[str, Callable[[Meter], None]] = {
        "torch": partial(by_hand, DistributedDataParallel, data),
        "wrapped": partial(by_hand, wrap, data),
        "Trainer": partial(by_trainer, strategy, data),
    }
    results: list[dict[str, dict[str, float]]] = []
    for turn in range(rounds + 2):  # the first one warms up
        order = [*ways]
        found = {}
        for name in order[turn % 3 :] + order[: turn % 3]:
            meter = Meter(counts_operations=turn == rounds + 1)
            strategy.processes.barrier()
            ways[name](meter)
            found[name] = meter.figures
        results.append(found)
    return results[1:]


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print("processes  way       time of torch's      ms   KiB sent  collectives  operations")
    wrong = False
    for size in arguments.processes:
        ranks: list[Any] = run_ranks(size, measure, arguments.rounds, timeout=1800.0)
        *rounds, counted = ranks[0]
        for way in counted:
            ratios = sorted(each[way]["ms"] / each["torch"]["ms"] for each in rounds)
            ms = statistics.median(each[way]["ms"] for each in rounds)
            sent = {
                name: statistics.median(
                    sum(rank[turn][name]["KiB"] for rank in ranks) for turn in range(len(rounds))
                )
                for name in ("torch", way)
            }
            calls = counted[way]
            wrong |= sent[way] > MOST * sent["torch"]
            if way == "wrapped":
                wrong |= calls["collectives"] > MOST * counted["torch"]["collectives"]
            print(
                f"{size:9}  {way:8}  {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
                f"{ratios[-1]:.2f})  {ms:6.1f}  {sent[way]:9,.0f}  {calls['collectives']:11.2f}  "
                f"{calls['operations']:10.1f}",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
