"""Research projects that are killed at random moments, and must end as if they never had been.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.research --kills 50

Each project is trained without a disturbance, once in each way. Then it is killed again and again,
all of its processes or one first, at any moment or while it is in a forward, a save or its journal,
and goes on from its checkpoints. After each kill the journal must have each window of each
checkpoint once, as the undisturbed run has it to the last bit; in the end so must parameters,
states of optimizers, counters, loss scales and logged values be. It prints a table, and exits with
1 if anything differs.
"""

import argparse
import hashlib
import json
import mmap
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.system.harness import Job, running
from trainkit import Alternating, Callback, Combined, Run, Trainer
from trainkit.callbacks import Checkpoint, Journal, JSONLLogger
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import ConfigError
from trainkit.journal import read
from trainkit.precision import FP16
from trainkit.strategies import DDP

sys.path.append("examples")
import actor_critic
import gan
import multi_task
import muon

actor_critic.MOMENTS = 5  # of an episode: each is a forward, and a collective under FSDP

Fit = Callable[[dict[str, Any]], Trainer]
"""Makes a trainer of the settings, fits it with `resume="auto"`, and returns it."""


def fit_gan(settings: dict[str, Any]) -> Trainer:
    """Two networks in turns of two and one, on windows of two micro-batches, the last one short."""
    points = torch.randn(90, 64, generator=torch.Generator().manual_seed(1)).tanh()
    torch.manual_seed(0)
    trainer = gan.GANTrainer(
        max_epochs=4, gradient_accumulation_steps=2, max_grad_norm=1.0, **settings
    )
    trainer.fit(
        gan.GAN(width=8),
        DataLoader(TensorDataset(points), batch_size=6, shuffle=True),
        optimizer=Alternating(gan.OPTIMIZERS, {"discriminator": 2, "generator": 1}),
        lr_scheduler="linear",
        resume="auto",
    )
    return trainer


def fit_actor_critic(settings: dict[str, Any]) -> Trainer:
    """One step that plays and gives each optimizer a loss with a weight."""
    torch.manual_seed(0)
    trainer = actor_critic.ActorCriticTrainer(max_epochs=6, max_grad_norm=1.0, **settings)
    trainer.fit(
        actor_critic.ActorCritic(width=8),
        DataLoader(actor_critic.Episodes(26), batch_size=8),
        optimizer={"actor": actor_critic.ACTOR, "critic": actor_critic.CRITIC},
        lr_scheduler={"actor": "linear"},
        resume="auto",
    )
    return trainer


def fit_muon(settings: dict[str, Any]) -> Trainer:
    """Muon and AdamW on one loss."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(90, 64, generator=generator), torch.randint(10, (90,), generator=generator)
    )
    torch.manual_seed(0)
    trainer = muon.Split(max_epochs=3, gradient_accumulation_steps=2, max_grad_norm=1.0, **settings)
    trainer.fit(
        muon.make_model(width=8, layers=2),
        DataLoader(data, batch_size=6, shuffle=True),
        lr_scheduler="cosine",
        loss_fn=torch.nn.CrossEntropyLoss(),
        resume="auto",
    )
    return trainer


class Tasks(multi_task.MultiTask):
    """Takes the steps in which one loader alone takes part too."""

    @override
    def training_step(self, model: torch.nn.Module, batch: Any) -> dict[str, Tensor]:
        if len(batch) == 2:
            return super().training_step(model, batch)
        ((task, (pictures, *digits)),) = batch.items()
        output = model({task: pictures + torch.randn_like(pictures)})[task]
        return {task: cross_entropy(output, *digits) if digits else mse_loss(output, pictures)}


POLICIES: dict[str, Any] = {name: name for name in ("min", "max_cycle", "sequential")}
POLICIES["weights"] = {"named": 1, "drawn": 2}


def fit_multi_task(policy: str, settings: dict[str, Any]) -> Trainer:
    """One trunk with two heads, and a loader for each, of three and of four windows."""
    generator = torch.Generator().manual_seed(1)
    named = torch.rand(18, 64, generator=generator), torch.randint(10, (18,), generator=generator)
    drawn = torch.rand(70, 64, generator=generator)
    torch.manual_seed(0)
    trainer = Tasks(max_steps=24, gradient_accumulation_steps=2, max_grad_norm=1.0, **settings)
    loaders = {
        "named": DataLoader(TensorDataset(*named), batch_size=4, shuffle=True),
        "drawn": DataLoader(TensorDataset(drawn), batch_size=10, shuffle=True),
    }
    trainer.fit(
        multi_task.Digits(width=8),
        Combined(loaders, POLICIES[policy]),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        lr_scheduler="cosine",
        resume="auto",
    )
    return trainer


PROJECTS: dict[str, tuple[Fit, tuple[str, ...]]] = {
    "GAN": (fit_gan, ("single", "ddp", "fsdp", "fp16")),
    "actor-critic": (fit_actor_critic, ("single", "ddp", "fsdp", "fp16")),
    "Muon + AdamW": (fit_muon, ("single", "ddp", "fsdp", "fp16")),
    **{
        f"multi-task {policy}": (partial(fit_multi_task, policy), ("single", "unused", "fsdp"))
        for policy in POLICIES
    },
}
"""What is killed, and in which of the ways below."""

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "unused": (2, {"strategy": lambda: DDP(find_unused_parameters=True)}),  # a head, in some steps
    "fsdp": (2, {"strategy": "fsdp"}),
    # So large a scale that windows overflow now and then, of one optimizer before the other.
    "fp16": (1, {"precision": lambda: FP16(init_scale=2.0**24, growth_interval=3)}),
}


def digest(value: Any) -> Any:
    """Return a value in which tensors are replaced by digests of their bits."""
    if isinstance(value, Tensor):
        local: Any = value.to_local() if hasattr(value, "to_local") else value
        data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()
    if isinstance(value, dict):
        return {str(key): digest(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [digest(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


PLACES = ("start", "forward", "update", "journal", "save")
AIMS = ("", "", "forward", "journal", "save")  # of a kill; "": none
_marks = mmap.mmap(-1, 2)  # by process the number of its place; outlives a process that is killed


class Marks(Callback):
    """Notes where this process is, as nobody could ask it once it is killed."""

    def __init__(self, rank: int, at_save: str) -> None:
        self.rank, self.at_save, self.name = rank, at_save, f"Marks to {at_save}"

    def mark(self, place: str) -> None:
        _marks[self.rank] = PLACES.index(place)

    def on_step_start(self, run: Run) -> None:
        self.mark("forward")

    def on_gradients(self, run: Run) -> None:
        self.mark("update")

    def on_checkpoint_start(self, run: Run) -> None:
        self.mark(self.at_save)


def train(fit: Fit, way: str, folder: Path, rank: int) -> int:
    """Be one process of a run; what it came to is written down."""
    settings = {name: v() if callable(v) else v for name, v in WAYS[way][1].items()}
    journal = [Marks(rank, "journal"), Journal(), Marks(rank, "save")]
    trainer = fit(
        {
            "split_batches": True,
            "output_dir": folder,
            "log_every_n_steps": 1,
            "max_consecutive_skips": 10**6,
            "callbacks": [JSONLLogger(), *journal, Checkpoint(every_n_steps=3, keep_last=2)],
            **settings,
        }
    )
    run = trainer.run
    assert run is not None
    optimizer: Any = run.optimizer
    found = {
        "model": run.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "several": getattr(optimizer, "training_state", dict)(),
        "schedule": run.lr_schedule and run.lr_schedule.scheduler.state_dict(),
        "precision": run.precision.state_dict(),
        "counters": run.state.state_dict(),
    }
    (folder / f"outcome-{rank}").write_text(json.dumps(digest(found), sort_keys=True))
    trainer.close()
    return 0


def windows(folder: Path) -> list[str]:
    """Return the windows of a run's journal; none of a run that was killed before it had one."""
    try:
        return [record.line() for record in read(folder).records]
    except ConfigError:
        return []


def outcome(folder: Path, size: int) -> dict[str, Any]:
    """Return what each process came to, the journal, and what was logged but for times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    logged = [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows]
    found = [json.loads((folder / f"outcome-{rank}").read_text()) for rank in range(size)]
    parts = {f"{k} of process {rank}": v for rank, own in enumerate(found) for k, v in own.items()}
    return {**parts, "journal": windows(folder), "metrics": logged}


def journal_problems(folder: Path, expected: list[str]) -> Iterator[str]:
    """Yield what is wrong with the journal of a run that was just killed."""
    found = windows(folder)
    if found != expected[: len(found)]:
        yield f"the journal has other windows: {found} instead of {expected}"
    store = CheckpointStore(folder / "checkpoints")
    for entry in store.checkpoints():
        counters = store.open(entry.path).read("trainer")["counters"]
        if len(found) < counters["step"] + counters["skipped_steps"]:
            yield f"the journal has {len(found)} windows, but there is {entry.path.name}"


def strike(job: Job, size: int, seconds: float, chance: random.Random) -> int:
    """Kill a run at a random moment, or when it is next where we aim; return the process."""
    rank, aim = chance.randrange(size), chance.choice(AIMS)
    rank = 0 if aim == "journal" else rank  # which alone writes it
    ended, patience = job.wait(chance.uniform(0.1, seconds)), time.monotonic() + seconds
    while not ended and aim and PLACES[_marks[rank]] != aim and time.monotonic() < patience:
        time.sleep(1e-4)
        ended = job.wait(0)
    if chance.random() < 0.5:  # one process alone, then the others
        job.send(signal.SIGKILL, rank)
        job.wait(chance.uniform(0, 0.1))
    job.send(signal.SIGKILL)
    return rank


def start(fit: Fit, way: str, place: Path) -> AbstractContextManager[Job]:
    """Start a run in a folder, or let it go on there."""
    _marks[:] = bytes(len(_marks))
    return running(WAYS[way][0], place, lambda rank, pipe: train(fit, way, place, rank))


def undisturbed(fit: Fit, way: str, folder: Path) -> tuple[float, dict[str, Any]]:
    """Return how long a run takes, in seconds, and what it comes to."""
    begin = time.monotonic()
    with start(fit, way, folder) as job:
        assert job.wait(), job.log()
        assert set(job.codes.values()) == {0}, job.log()
    seconds, found = time.monotonic() - begin, outcome(folder, WAYS[way][0])
    counters = found["counters of process 0"]
    numbers = range(1, counters["step"] + counters["skipped_steps"] + 1)
    assert [record.attempt for record in read(folder).records] == [*numbers], found["journal"]
    return seconds, found


def survive(fit: Fit, way: str, folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill a run so many times in all, a few times each until it has ended, and compare."""
    size, (seconds, expected) = WAYS[way][0], undisturbed(fit, way, folder / "whole")
    several = expected["several of process 0"]
    skips = {n: each["skipped_steps"] for n, each in several.get("by_name", {}).items()}
    done: dict[str, Any] = dict.fromkeys(("kills", "resumed", "ends", "different"), 0)
    done |= {"skips": skips, "at": Counter()}
    while done["kills"] < kills:
        place, left = folder / f"killed-{done['ends']}", chance.randint(2, 5)
        problems: list[str] = []
        while True:
            may_kill = left > 0 and done["kills"] < kills
            with start(fit, way, place) as job:
                rank = strike(job, size, seconds, chance) if may_kill else 0
                job.wait()
            problems += journal_problems(place, expected["journal"])
            if not may_kill or -signal.SIGKILL not in job.codes.values():
                break
            left, done["kills"] = left - 1, done["kills"] + 1
            done["resumed"] += bool([*place.glob("checkpoints/[!.]*")])
            done["at"][PLACES[_marks[rank]]] += 1
        if set(job.codes.values()) == {0}:
            found = outcome(place, size)
            problems += [f"other {name}" for name in expected if found[name] != expected[name]]
        else:
            problems.append(f"ended with {job.codes}\n{job.log()}")
        if problems:
            print(f"{way}, run {done['ends']}:", *problems, sep="\n", file=sys.stderr, flush=True)
        done["different"] += bool(problems)
        done["ends"] += 1
        shutil.rmtree(place)
    return done


def main() -> int:
    """Kill all projects in all ways, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each project (default: 50)")
    parser.add_argument("--only", nargs="*", choices=[*PROJECTS], help="projects (default: all)")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, wrong = random.Random(arguments.seed), 0
    line = "{:<21} {:<7} {:>6} {:>8} {:>5} {:>10} {:>8}  {}"
    names = ("kills", "resumed", "ends", "different")
    print(line.format("project", "way", *names, "seconds", "killed at; skips"), flush=True)
    for name in arguments.only or PROJECTS:
        fit, ways = PROJECTS[name]
        for number, way in enumerate(ways):
            kills = arguments.kills // len(ways) + (number < arguments.kills % len(ways))
            if way not in arguments.ways:
                continue
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="research-") as folder:
                found = survive(fit, way, Path(folder), kills, chance)
            wrong += found["different"]
            row = [*(found[key] for key in names), round(time.monotonic() - begin)]
            told = [f"{place} {found['at'][place]}" for place in PLACES if found["at"][place]]
            told += [f"; {found['skips']}"] * any(found["skips"].values())
            print(line.format(name, way, *row, " ".join(told)), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
