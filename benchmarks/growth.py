"""What grows with the work, and what must not: calls and time as one number rises.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.growth

Each row is one size. A step must cost the same however many callbacks override nothing; it may
cost a little for every figure that is logged and, in torch itself, for every tensor of parameters.
Set-up draws an order of all samples, but handles none of them one by one, and a resume in the
middle of an epoch reads no sample of a map-style data set again. Whoever reads what runs have
logged needs the same memory however long that is, and `trainkit runs ls`, here of 100 such runs,
the same time. Calls are Python and C calls of all threads; a step's are what a long run has more
than a short one. Exits with 1 where something grows that should not.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.types import Scalars

SHORT, LONG = 100, 300  # steps
LOG_EVERY = 50
ROUNDS = 5
MANY = 1000  # tensors of parameters, from which fewer steps will do
FEATURES, BATCH = 8, 4
RUNS = 100  # in a folder

Figures = dict[str, float]


class Logging(Callback):
    """Logs some figures each step."""

    def __init__(self, number: int) -> None:
        self._names = [f"figure {index}" for index in range(number)]

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.log(dict.fromkeys(self._names, result.loss))

    @override
    def on_log(self, run: Run, values: Scalars) -> None: ...


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Samples made when they are read, and how many were."""

    def __init__(self, length: int) -> None:
        self.length, self._reads = length, [0]  # which no resume brings back
        self._row = torch.zeros(FEATURES), torch.zeros(1)

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._reads[0] += 1
        return self._row

    @property
    def reads(self) -> int:
        """How many were read."""
        return self._reads[0]


class Split(nn.Module):
    """A linear map whose weights are spread over some tensors, all of which are used."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(FEATURES)) for _ in range(tensors))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.stack(list(self.parts)).sum(0)[:, None]


def fit(
    steps: int,
    *,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    callbacks: list[Callback] | None = None,
    **options: Any,
) -> Any:
    """Train a small model for some steps."""
    length = steps * BATCH
    data = data or TensorDataset(torch.zeros(length, FEATURES), torch.zeros(length, 1))
    trainer = Trainer(
        max_steps=steps, callbacks=callbacks or [], log_every_n_steps=LOG_EVERY,
        output_dir=options.pop("output_dir", None),
    )  # fmt: skip
    return trainer.fit(
        model or nn.Linear(FEATURES, 1),
        DataLoader(data, batch_size=BATCH, shuffle=True),
        optimizer=partial(SGD, lr=1e-3),
        loss_fn=nn.functional.mse_loss,
        **options,
    )


def count(work: Callable[[], object]) -> int:
    """Return the Python and C calls of `work`, in all threads."""
    calls = itertools.count()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(calls)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(calls)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def per_step(work: Callable[[int], object], short: int = SHORT, long: int = LONG) -> Figures:
    """Return what a step costs, for work that takes the number of steps."""
    work(short)  # warm-up
    calls = (count(partial(work, long)) - count(partial(work, short))) / (long - short)
    times = [seconds(partial(work, long)) - seconds(partial(work, short)) for _ in range(ROUNDS)]
    return {
        "calls a step": round(calls, 1),
        "us a step": round(1e6 * statistics.median(times) / (long - short), 1),
    }


def idle_callbacks(number: int) -> Figures:
    """Return what a step costs with callbacks that override nothing."""

    def work(steps: int) -> None:
        callbacks = [Callback() for _ in range(number)]
        for index, callback in enumerate(callbacks):
            callback.name = f"idle {index}"
        fit(steps, callbacks=callbacks)

    return per_step(work)


def logged_figures(number: int) -> Figures:
    """Return what a step costs where figures are logged in every one."""
    return per_step(lambda steps: fit(steps, callbacks=[Logging(number)]))


def parameter_tensors(number: int) -> Figures:
    """Return what a step costs over a loop by hand, where that pays for the tensors too."""

    def raw(steps: int) -> None:
        model, length = Split(number), steps * BATCH
        data = TensorDataset(torch.zeros(length, FEATURES), torch.zeros(length, 1))
        optimizer = SGD(model.parameters(), lr=1e-3)
        for inputs, targets in DataLoader(data, batch_size=BATCH, shuffle=True):
            torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    steps = (SHORT, LONG) if number < MANY else (LOG_EVERY // 10, LOG_EVERY // 2)
    ours = per_step(lambda steps: fit(steps, model=Split(number)), *steps)
    theirs = per_step(raw, *steps)
    return {
        **ours,
        "calls over raw": round(ours["calls a step"] - theirs["calls a step"], 1),
        "time to raw": round(ours["us a step"] / theirs["us a step"], 3),
    }


def samples(number: int) -> Figures:
    """Return what set-up and a resume in the middle of an epoch cost.

    Beside the whole set-up with its first step stands what a plain loader takes for its first
    batch: both draw an order of all samples.
    """
    steps = max(number // BATCH // 2, 1)
    with tempfile.TemporaryDirectory() as folder:

        def first_step() -> None:
            fit(1, data=Counting(number))

        def first_batch_by_hand() -> None:
            next(iter(DataLoader(Counting(number), batch_size=BATCH, shuffle=True)))

        first_step()
        setup, calls = [seconds(first_step) for _ in range(ROUNDS)], count(first_step)
        by_hand = [seconds(first_batch_by_hand) for _ in range(ROUNDS)]
        middle = Path(folder) / "checkpoints" / f"step-{steps:08d}"
        _reach(Path(folder), steps, number)
        data = Counting(number)
        resume = partial(
            fit, steps + 1, data=data, resume=middle, schedule="keep",
            output_dir=folder, callbacks=[Checkpoint()],
        )  # fmt: skip
        resumed = seconds(resume) if middle.exists() else float("nan")
    return {
        "set-up calls": calls,
        "set-up ms": round(1e3 * statistics.median(setup), 1),
        "raw loader ms": round(1e3 * statistics.median(by_hand), 1),
        "resume ms": round(1e3 * resumed, 1),
        "read on resume": data.reads,
    }


def _reach(folder: Path, steps: int, number: int) -> None:
    """Leave a checkpoint of `steps` steps in `folder`, after one real step."""

    class Jump(Callback):
        """Says that it is far already: how the steps before went is not what is measured."""

        @override
        def on_step_end(self, run: Run, result: StepResult) -> None:
            run.state.step = steps
            run.state.epoch_samples = run.state.samples_seen = steps * BATCH
            run.request_stop("far enough", agreed=True)

    fit(steps + 1, data=Counting(number), callbacks=[Jump(), Checkpoint()], output_dir=folder)


class Histories(Callback):
    """Writes lines of a long run in a short one, by the logger itself; an evaluation in 1000."""

    def __init__(self, logger: JSONLLogger, lines: int) -> None:
        self._logger, self._lines = logger, lines

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        for step in range(1, self._lines + 1):
            run.state.step = step
            if step % 1000:
                self._logger.on_log(run, {f"figure {index}": 1 / step for index in range(13)})
            else:
                self._logger.on_evaluation_end(run, {"eval/loss": 1 / step, "eval/accuracy": 0.5})
        run.request_stop("far enough", agreed=True)


def lines_of_history(number: int) -> Figures:
    """Return what it costs to read what a run logged, and to resume in the middle of that.

    The runs of a folder are links to one, whose ends are read from the cache of the disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one", Path(folder) / "many"
        logger = JSONLLogger()
        fit(number, data=Counting(8), callbacks=[logger, Histories(logger, number)], output_dir=one)
        files = [path for path in one.iterdir() if path.suffix == ".jsonl"]
        for index in range(RUNS):
            (many / f"{index}").mkdir(parents=True)
            for file in files:
                (many / f"{index}" / file.name).hardlink_to(file)
        size = sum(file.stat().st_size for file in files)
        listed = _measured(COMMAND, "runs", "ls", str(many))
        reported = _measured(COMMAND, "report", str(one), "-o", f"{folder}/page.html")
        cut = _measured(CUTS, str(one), str(number // 2))
    return {
        "MB": round(size / 1e6, 1),
        f"ls {RUNS} runs s": listed[0],
        "ls MB": listed[1],
        "report s": reported[0],
        "report MB": reported[1],
        "cut s": cut[0],
        "cut MB": cut[1],
    }


CUTS = """
import sys
from pathlib import Path
from trainkit.trackers.files import JSONLTracker
folder, step = Path(sys.argv[1]), int(sys.argv[2])
assert JSONLTracker(folder.name, folder.parent).cut(lambda values: values["step"] <= step)
"""
COMMAND = """
import sys
from trainkit.cli.main import main
assert not main(sys.argv[1:])
"""
COST = """
import time
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(time.process_time(), *peak)
"""


def _measured(code: str, *arguments: str) -> tuple[float, float]:
    """Return the seconds of a processor and the highest memory in MB that a program takes."""
    command = [sys.executable, "-c", code + COST, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    spent, peak = done.stdout.split()[-2:]
    return round(float(spent), 2), round(int(peak) * 1024 / 1e6, 1)


TABLES: dict[str, tuple[Callable[[int], Figures], tuple[int, ...]]] = {
    "callbacks that override nothing": (idle_callbacks, (0, 10, 100, 1000)),
    "figures logged each step": (logged_figures, (1, 10, 100)),
    "lines of history": (lines_of_history, (1000, 100_000, 1_000_000)),
    "samples": (samples, (8, 1_000, 100_000, 1_000_000)),
    "tensors of parameters": (parameter_tensors, (1, 10, 100, 1000, 5000)),
}


def check(tables: dict[str, dict[int, Figures]]) -> list[str]:
    """Return what grows that should not."""
    found = []
    idle = [row["calls a step"] for row in tables["callbacks that override nothing"].values()]
    if max(idle) - min(idle) > 1:
        found.append(f"a step takes {idle} calls with more and more idle callbacks")
    logged = tables["figures logged each step"]
    fewest, most = min(logged), max(logged)
    each = (logged[most]["calls a step"] - logged[fewest]["calls a step"]) / (most - fewest)
    if each > 15:
        found.append(f"a logged value takes {each:.1f} calls a step")
    for size, row in tables["lines of history"].items():
        for name in ("ls MB", "report MB", "cut MB"):
            if row[name] > 100:
                found += [f"{row[name]} {name} for {size} lines of history"]
    over = [row["calls over raw"] for row in tables["tensors of parameters"].values()]
    if max(over) > 60:
        found.append(f"a step takes {over} calls over a raw loop with more and more tensors")
    reads = {row["read on resume"] for row in tables["samples"].values()}
    if not reads <= {BATCH, 2 * BATCH}:
        found.append(f"a resume in the middle reads {sorted(reads)} samples for one step")
    calls = [row["set-up calls"] for row in tables["samples"].values()]
    if max(calls) > 2 * min(calls):
        found.append(f"set-up takes {calls} calls with more and more samples")
    return found


def main() -> int:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--small", action="store_true", help="leave out the largest sizes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, dict[int, Figures]] = {}
    for name, (measure, sizes) in TABLES.items():
        tables[name] = {}
        for size in sizes[: -1 if arguments.small else None]:
            row = tables[name][size] = measure(size)
            if size == sizes[0]:
                print(f"\n{name:>32}  " + "  ".join(f"{key:>14}" for key in row))
            cells = "  ".join(f"{value:>14,}" for value in row.values())
            print(f"{size:>32,}  {cells}", flush=True)
    found = check(tables)
    for line in found:
        print(f"GROWS: {line}")
    if arguments.output:
        facts = {"python": platform.python_version(), "torch": torch.__version__}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(facts | {"tables": tables}, indent=2) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
