"""The long version of `tests/system/test_faults.py`: faults in jobs, and slow jobs without any.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.faults --rounds 3 --healthy 1000

It prints a table, and exits with 1 if a process stayed, a report was wrong, or a job without a
fault was ended. A failed job is run again by its number, `--only`, or by `--seed`.
"""

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.system.faults import FAULTS, Outcome, inject
from tests.system.harness import running
from trainkit import Callback, Run, Trainer, Watchdog
from trainkit.callbacks import Checkpoint, Evaluation

GONE_SECONDS = 5.0  # from a fault until all processes are gone
STALL_SECONDS = 3.0  # the same, from the watchdog's limit
SLOWEST = 1.2  # seconds, of a step, an evaluation or a save that is healthy
LIMIT = 3.0  # of the watchdog over them
NO_LIMIT = float("inf")  # minutes


class Slow(Callback):
    """Sleeps in one place of each kind, on one process or on all."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        chance = random.Random(seed)
        self.step = chance.randrange(1, 5)
        self.naps = {
            name: (chance.uniform(0.0, SLOWEST), chance.choice([rank, chance.randrange(size)]))
            for name in ("step", "evaluation", "start", "saved", "end")
        }
        self.rank = rank
        self.last = random.Random(seed * 31 + rank).uniform(0.0, SLOWEST)

    def nap(self, name: str) -> None:
        seconds, who = self.naps[name]
        if who == self.rank:
            time.sleep(seconds)

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == self.step:
            self.nap("step")

    def on_evaluation_batch_end(self, run: Run) -> None:
        self.nap("evaluation")

    def on_checkpoint_start(self, run: Run) -> None:
        self.nap("start")

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.nap("saved")

    def on_fit_end(self, run: Run) -> None:
        self.nap("end")


def slow(seed: int, folder: Path, size: int, rank: int, pipe: int) -> int:
    """Be one process of a job that is slow and healthy."""
    naps = Slow(seed, rank, size)
    trainer = Trainer(
        max_epochs=1,
        callbacks=[naps, Evaluation(every_n_epochs=1), Checkpoint(every_n_epochs=1)],
        output_dir=folder / "run",
        watchdog=Watchdog(step=LIMIT, first_step=LIMIT, evaluation=LIMIT, save=LIMIT, end=LIMIT),
    )
    inputs = torch.ones(8 * size, 3)
    data = TensorDataset(inputs, inputs[:, :1])
    workers = seed % 3
    trainer.fit(
        nn.Linear(3, 1),
        (DataLoader(data, 2, num_workers=workers), DataLoader(data, 4 * size)),
        optimizer=partial(SGD, lr=0.1),
        loss_fn=nn.MSELoss(),
    )
    if seed % 2:
        time.sleep(naps.last)  # they leave at different times
    trainer.close()
    if seed % 4 > 1:
        time.sleep(naps.last)
    return 0


def healthy(seed: int) -> Outcome:
    """Run a job that is slow and healthy."""
    outcome, size = Outcome(), 2 + seed % 2
    with tempfile.TemporaryDirectory(prefix="healthy-") as name:
        folder = Path(name)
        start = time.monotonic()
        with running(size, folder, partial(slow, seed, folder, size)) as job:
            if not job.wait(60.0) or set(job.codes.values()) != {0}:
                outcome.problems.append(f"exit codes {job.codes}\n{job.log()}")
            elif list(folder.glob("run/reports/*")) or "trainkit:" in job.log():
                outcome.problems.append(f"a report without a fault\n{job.log()}")
        outcome.seconds = time.monotonic() - start
    return outcome


def faulty(number: int) -> Outcome:
    """Run a job with one of the faults."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        fault = FAULTS[number % len(FAULTS)]
        return inject(fault, Path(folder), STALL_SECONDS if fault.stalls else GONE_SECONDS)


def campaign(
    name: str, trial: Callable[[int], Outcome], numbers: Iterator[int], jobs: int, minutes: float
) -> bool:
    """Run trials, `jobs` at a time, for at most so long; print what came of them."""
    deadline = time.monotonic() + 60 * minutes
    seconds: list[float] = []
    bad = 0
    under_way: dict[Future[Outcome], int] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        while True:
            free = jobs - len(under_way) if time.monotonic() < deadline else 0
            under_way |= {pool.submit(trial, n): n for n in islice(numbers, free)}
            if not under_way:
                break
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                number, outcome = under_way.pop(future), future.result()
                seconds.append(outcome.seconds)
                bad += bool(outcome.problems)
                for problem in outcome.problems:
                    print(f"{name} {number}: {problem}", flush=True)
    ordered = sorted(seconds)
    slowest = ordered[-1] if ordered else 0.0
    median = statistics.median(ordered) if ordered else 0.0
    print(
        f"{name}: {len(seconds) - bad} of {len(seconds)} good; seconds: median {median:.2f}, "
        f"most {slowest:.2f}",
        flush=True,
    )
    return bad == 0


def main() -> int:
    """Run the campaign that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that all faults are put in")
    parser.add_argument("--only", type=int, help="the number of one fault")
    parser.add_argument("--healthy", type=int, default=1000, help="slow jobs without a fault")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit for the slow jobs")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first slow job")
    parser.add_argument("--jobs", type=int, default=1, help="jobs with a fault at a time")
    parser.add_argument("--slow-jobs", type=int, default=6, help="slow jobs at a time")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(FAULTS)} faults")
    numbers = range(len(FAULTS)) if options.only is None else [options.only]
    stalls = [n for n in numbers if FAULTS[n].stalls]
    others = [n for n in numbers if not FAULTS[n].stalls]
    good = True
    for number in range(1, options.rounds + 1):
        name, jobs = f"round {number}", options.jobs
        good &= campaign(f"{name}, at once", faulty, iter(others), jobs, NO_LIMIT)
        good &= campaign(f"{name}, by the watchdog", faulty, iter(stalls), jobs, NO_LIMIT)
    seeds = iter(range(options.seed, options.seed + options.healthy))
    good &= campaign("healthy", healthy, seeds, options.slow_jobs, options.minutes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
