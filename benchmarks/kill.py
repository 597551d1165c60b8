"""The long version of `tests/system`: runs that are killed, stopped and signalled, many times.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.kill --kills 1000 --mid-epoch 500 --signals 300

It prints a table, and exits with 1 if anything was lost or different. Each trial has a number; a
failed one is repeated by `--seed` with that number and a count of 1. `--features all --kills 300`
kills programs with the features that people put together, each drawn with others, and prints a row
for each feature: a run counts in the rows of all that it has.
"""

import argparse
import json
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
import torch.distributed.fsdp
import torch.distributed.tensor

from tests.system.features import KINDS, LACKING, draw
from tests.system.toys import Saving, Settings
from tests.system.trials import (
    Report,
    Signals,
    reference,
    survive_kills,
    survive_signals,
    survive_stop,
)

SHARES = {1: 0.6, 2: 0.28, 3: 0.12}  # of the kills, by number of processes
MATRIX = [*product((0, 2), (1, 3), ("fp32", "bf16", "fp16"))]
POLICIES = ("min", "max_cycle", "sequential", "weights")
MOST_KILLS = 6  # of one run
PLACES = (
    "any",
    "on_fit_start",
    "on_epoch_start",
    "on_microbatch_start",
    "on_gradients",
    "on_evaluation_batch_end",
    "on_epoch_end",
    "save",
    "time limit",
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: its kind, the number that all that is random in it comes from, and its row."""

    kind: str
    seed: int
    rows: list[str]
    settings: Settings
    saving: Saving
    signals: Signals | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What all trials have: a strategy, callbacks with states, a number of processes or any."""

    strategy: str = "auto"
    gallery: bool = False
    processes: int | None = None
    policy: str | None = None  # of two training loaders; "any": one of them by chance
    kinds: tuple[str, ...] = ()  # of programs with features

    def draw_policy(self, chance: random.Random) -> str | None:
        """Return how two training loaders make an epoch; None: there is one."""
        return chance.choice(POLICIES) if self.policy == "any" else self.policy

    def draw_size(self, chance: random.Random, shares: dict[int, float]) -> int:
        """Return a number of processes; sharding is tried on two where none is given."""
        size = chance.choices([*shares], [*shares.values()])[0]
        return self.processes or (size if self.strategy == "auto" else 2)


def kill_trials(seed: int, choice: Choice) -> Iterator[Trial]:
    """Yield trials of `survive_kills`, over the whole matrix again and again."""
    for number in count(seed):
        chance = random.Random(number)
        size = choice.draw_size(chance, SHARES)
        workers, accumulation, precision = MATRIX[number % len(MATRIX)]
        yield Trial(
            kind="kills",
            seed=number,
            rows=[f"{size} x {precision}, workers {workers}, accumulation {accumulation}"],
            settings=Settings(
                size=size,
                strategy=choice.strategy,
                workers=workers,
                accumulation=accumulation,
                precision=precision,
                policy=choice.draw_policy(chance),
                gallery=choice.gallery,
            ),
            saving=Saving(
                every_n_steps=chance.choice([1, 2, 3, 5]),
                keep_last=chance.choice([1, 3]),
                background=chance.random() < 0.5,
            ),
        )


def feature_trials(seed: int, choice: Choice) -> Iterator[Trial]:
    """Yield trials of `survive_kills` of programs with features."""
    for number in count(seed):
        mix = draw(number, choice.kinds, choice.processes)
        yield Trial(kind="kills", seed=number, rows=mix.features, settings=mix, saving=mix.saving)


def mid_epoch_trials(seed: int, choice: Choice) -> Iterator[Trial]:
    """Yield trials of `survive_stop`, each with a configuration of its own."""
    for number in count(seed):
        chance = random.Random(number)
        size = choice.draw_size(chance, {1: 0.7, 2: 0.22, 3: 0.08})
        workers, ends = chance.choice([0, 0, 0, 1, 2]), chance.random() < 0.7
        samples, batch_size = chance.randint(24, 60), chance.randint(1, 3)
        # At least two windows an epoch: else it has no middle.
        accumulation = chance.randint(1, max(1, min(4, samples // (2 * size * batch_size))))
        settings = Settings(
            size=size,
            strategy=choice.strategy,
            workers=workers,
            accumulation=accumulation,
            precision=chance.choice(["fp32", "bf16", "fp16"]),
            samples=samples,
            batch_size=batch_size,
            max_epochs=chance.randint(1, 3) if ends else None,
            max_steps=None if ends else chance.randint(5, 40),
            evaluate_every=chance.choice([None, 3, 7]),
            shuffle=chance.random() < 0.8,
            drop_last=chance.random() < 0.3,
            drop_last_window=chance.random() < 0.3 and choice.policy is None,  # one may be short
            persistent=workers > 0 and chance.random() < 0.5,
            optimizer=chance.choice(["adamw", "fused", "sgd"]),
            scheduler=chance.choice(["lambda", "cycle", "none"]),
            log_every=chance.choice([1, 2, 5]),
            seed=number,
            policy=choice.draw_policy(chance),
            gallery=choice.gallery,
        )
        saving = Saving(
            every_n_steps=chance.randint(1, 6),
            keep_last=chance.choice([1, 2]),
            background=chance.random() < 0.4,
        )
        row = f"{size} x {settings.precision}, workers {'0' if workers == 0 else '1-2'}"
        yield Trial(kind="mid-epoch", seed=number, rows=[row], settings=settings, saving=saving)


def signal_trials(seed: int, choice: Choice) -> Iterator[Trial]:
    """Yield trials of `survive_signals`, over places, signals and targets."""
    for number in count(seed):
        chance = random.Random(number)
        place = PLACES[number % len(PLACES)]
        size = choice.draw_size(chance, {1: 0.5, 2: 0.4, 3: 0.1})
        signals = Signals(
            signum=chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]),
            place=place,
            count=1 if place.endswith(("_start", "_end")) and "epoch" in place else 2,
            rank=chance.randrange(size),
            to_all=chance.random() < 0.5,
            again=place == "on_microbatch_start" and chance.random() < 0.4,
            fraction=chance.random(),
        )
        if place == "on_fit_start":
            signals = Signals(**asdict(signals) | {"count": 1})
        if place in ("save", "time limit"):  # process 0 alone looks at the clock
            signals = Signals(**asdict(signals) | {"count": 1, "rank": 0})
        saves = place == "save" or chance.random() < 0.3
        yield Trial(
            kind="signals",
            seed=number,
            rows=[f"{place}{', twice' if signals.again else ''}"],
            settings=Settings(
                size=size,
                strategy=choice.strategy,
                workers=chance.choice([0, 2]),
                accumulation=chance.choice([1, 3]),
                precision=chance.choice(["fp32", "fp16"]),
                samples=60,
                evaluate_every=chance.choice([None, 4]),
                policy=choice.draw_policy(chance),
                gallery=choice.gallery,
            ),
            saving=Saving(
                every_n_steps=chance.choice([2, 5]) if saves else None,
                background=chance.random() < 0.3,
            ),
            signals=signals,
        )


TRIALS: dict[str, Callable[[int, Choice], Iterator[Trial]]] = {
    "kills": kill_trials,
    "mid-epoch": mid_epoch_trials,
    "signals": signal_trials,
}


def run_trial(trial: Trial) -> Report:
    """Do one trial in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="trainkit-kill-"))
    chance = random.Random(f"{trial.kind} {trial.seed}")
    try:
        if trial.kind == "kills":
            return survive_kills(trial.settings, trial.saving, folder, chance, MOST_KILLS)
        if trial.kind == "mid-epoch":
            return survive_stop(trial.settings, trial.saving, folder, chance)
        assert trial.signals is not None
        delay = None
        if trial.signals.place == "any":
            seconds = reference(trial.settings, folder / "reference").seconds
            delay = 0.5 * trial.signals.fraction * seconds
        return survive_signals(trial.settings, trial.saving, trial.signals, folder, delay)
    except Exception as error:
        return Report(problems=[f"the trial itself failed: {error!r}"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def warm_up() -> None:
    """Import in the process that forks what a run imports late."""
    torch.set_num_threads(1)
    run_trial(next(kill_trials(0, Choice())))
    import trainkit.checkpoint.saver  # noqa: F401  # forked runs would import it one by one


def run_trials(
    pool: ProcessPoolExecutor,
    kind: str,
    wanted: int,
    seed: int,
    jobs: int,
    deadline: float,
    choice: Choice,
) -> dict[str, Counter[str]]:
    """Do trials until `wanted` kills, stops or signals, or the deadline; return rows of counts."""
    rows: dict[str, Counter[str]] = {}
    trials = TRIALS[kind](seed, choice)
    pending: dict[Future[Report], Trial] = {}
    done, places = 0, Counter[str]()
    while pending or (done < wanted and time.monotonic() < deadline):
        while len(pending) < jobs and done + len(pending) < wanted and time.monotonic() < deadline:
            trial = next(trials)
            pending[pool.submit(run_trial, trial)] = trial
        finished, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            trial, report = pending.pop(future), future.result()
            done += report.kills
            for row in ("all", *trial.rows):
                counts = rows.setdefault(row, Counter())
                counts.update(
                    runs=1,
                    kills=report.kills,
                    resumed=report.resumed,
                    lost=report.lost,
                    different=report.different,
                    failed=bool(report.problems),
                )
                counts["over"] = max(counts["over"], report.most_folders)
            places.update(report.places)
            for problem in report.problems:
                print(f"{trial}\n    {problem}", flush=True)
    if places:
        print("killed after:", ", ".join(f"{place} {n}" for place, n in places.most_common()))
    return rows


def show(kind: str, rows: dict[str, Counter[str]]) -> None:
    """Print the rows of a table, and their sum."""
    columns = ("runs", "kills", "resumed", "lost", "different", "failed", "over")
    print(f"\n{kind:44}" + "".join(f"{name:>10}" for name in columns))
    for row in (*sorted(rows.keys() - {"all"}), "all"):
        print(f"{row:44}" + "".join(f"{rows[row][name]:10}" for name in columns), flush=True)


def main() -> None:
    """Print a table for each kind of trial, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs at random moments")
    parser.add_argument("--mid-epoch", type=int, default=0, help="random configurations, stopped")
    parser.add_argument("--signals", type=int, default=0, help="signals and time limits")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--strategy", choices=("auto", "fsdp", "deepspeed"), default="auto")
    parser.add_argument(
        "--gallery",
        action="store_true",
        help="with EMA, EarlyStopping, FreezeUntil and BatchSizeFinder",
    )
    parser.add_argument("--policy", choices=(*POLICIES, "any"), help="train on two loaders")
    parser.add_argument(
        "--features",
        nargs="+",
        choices=(*KINDS, "all"),
        default=(),
        help="kill programs with these, which --strategy, --gallery and --policy say nothing of",
    )
    parser.add_argument("--processes", type=int, help="of each run; else drawn from 1 to 3")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new trial after these")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not (arguments.kills or arguments.mid_epoch or arguments.signals):
        parser.error("nothing is asked for: give --kills, --mid-epoch or --signals a number")
    choice = Choice(
        strategy=arguments.strategy,
        gallery=arguments.gallery,
        processes=arguments.processes,
        policy=arguments.policy,
        kinds=KINDS if "all" in arguments.features else tuple(arguments.features),
    )
    if choice.kinds:
        TRIALS["kills"] = feature_trials
        import datasets  # noqa: F401  # here once, as above
        import tensorboard.backend.event_processing.plugin_event_accumulator  # noqa: F401
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401
        from torch.utils.tensorboard import writer  # noqa: F401

        if LACKING:
            print(f"left out, as their packages are not installed: {', '.join(LACKING)}")
    deadline = time.monotonic() + 60 * arguments.minutes
    results: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    context = get_context("fork")
    failed = 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, initializer=warm_up) as pool:
        for kind in TRIALS:
            wanted = getattr(arguments, kind.replace("-", "_"))
            if not wanted:
                continue
            start = time.monotonic()
            rows = run_trials(
                pool,
                kind,
                wanted,
                arguments.seed,
                arguments.jobs,
                deadline,
                choice,
            )
            show(kind, rows)
            print(f"{time.monotonic() - start:.0f} s")
            results[kind] = rows
            failed += rows["all"]["failed"]
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
