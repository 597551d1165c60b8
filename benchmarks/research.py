"""Research projects that are killed at random moments, and must end as if they never had been.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.research --kills 50

Each project is trained without a disturbance, once in each way. Then it is killed again and again,
all of its processes or one, goes on from its checkpoints, and in the end parameters, states of
optimizers, counters, loss scales and logged values are compared to the last bit. It prints a table,
and exits with 1 if anything differs.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.system.harness import TIME_LIMIT, running
from trainkit import Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.precision import FP16

sys.path.append("examples")
import actor_critic
import gan
import muon

actor_critic.MOMENTS = 20  # of an episode: each is a forward, and a collective under FSDP

Fit = Callable[[dict[str, Any]], Trainer]
"""Makes a trainer of the settings, fits it with `resume="auto"`, and returns it."""


def fit_gan(settings: dict[str, Any]) -> Trainer:
    """Two networks in turns of two and one, on windows of two micro-batches, the last one short."""
    points = torch.randn(90, 64, generator=torch.Generator().manual_seed(1)).tanh()
    torch.manual_seed(0)
    trainer = gan.GANTrainer(
        max_epochs=8, gradient_accumulation_steps=2, max_grad_norm=1.0, **settings
    )
    trainer.fit(
        gan.GAN(width=8),
        DataLoader(TensorDataset(points), batch_size=6, shuffle=True),
        optimizer=gan.OPTIMIZERS,
        lr_scheduler="linear",
        alternate={"discriminator": 2, "generator": 1},
        resume="auto",
    )
    return trainer


def fit_actor_critic(settings: dict[str, Any]) -> Trainer:
    """One step that plays and gives each optimizer a loss with a weight."""
    torch.manual_seed(0)
    trainer = actor_critic.ActorCriticTrainer(max_epochs=10, max_grad_norm=1.0, **settings)
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
    trainer = muon.Split(max_epochs=8, gradient_accumulation_steps=2, max_grad_norm=1.0, **settings)
    trainer.fit(
        muon.make_model(width=8),
        DataLoader(data, batch_size=6, shuffle=True),
        lr_scheduler="cosine",
        loss_fn=torch.nn.CrossEntropyLoss(),
        resume="auto",
    )
    return trainer


PROJECTS: dict[str, tuple[Fit, tuple[str, ...]]] = {
    "GAN": (fit_gan, ("single", "ddp", "fsdp", "fp16")),
    "actor-critic": (fit_actor_critic, ("single", "ddp", "fsdp", "fp16")),
    "Muon + AdamW": (fit_muon, ("single", "ddp", "fsdp", "fp16")),
}
"""What is killed, and in which of the ways below."""

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
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


def train(fit: Fit, way: str, folder: Path, rank: int) -> int:
    """Be one process of a run; what it came to is written down."""
    settings = {name: v() if callable(v) else v for name, v in WAYS[way][1].items()}
    trainer = fit(
        {
            "split_batches": True,
            "output_dir": folder,
            "log_every_n_steps": 1,
            "max_consecutive_skips": 10**6,
            "callbacks": [JSONLLogger(), Checkpoint(every_n_steps=3, keep_last=2)],
            **settings,
        }
    )
    run = trainer.run
    assert run is not None
    optimizer: Any = run.optimizer
    found = {
        "model": run.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "several": optimizer.training_state(),
        "schedule": run.lr_schedule and run.lr_schedule.scheduler.state_dict(),
        "counters": run.state.state_dict(),
    }
    (folder / f"outcome-{rank}").write_text(json.dumps(digest(found), sort_keys=True))
    trainer.close()
    return 0


def outcome(folder: Path, size: int) -> list[Any]:
    """Return what each process came to, and what was logged but for times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    logged = [{k: v for k, v in row.items() if not k.startswith("time")} for row in rows]
    return [json.loads((folder / f"outcome-{rank}").read_text()) for rank in range(size)] + logged


def survive(fit: Fit, way: str, folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill a run so many times in all, a few times each until it has ended, and compare."""
    size = WAYS[way][0]

    def start(place: Path) -> Any:
        return running(size, place, lambda rank, pipe: train(fit, way, place, rank))

    begin = time.monotonic()
    with start(folder / "whole") as job:
        assert job.wait(), job.log()
        assert set(job.codes.values()) == {0}, job.log()
    seconds, expected = time.monotonic() - begin, outcome(folder / "whole", size)
    skips = {n: o["skipped_steps"] for n, o in expected[0]["several"]["by_name"].items()}
    done = {"kills": 0, "resumed": 0, "ends": 0, "different": 0, "skips": skips}
    while done["kills"] < kills:
        place, left = folder / f"killed-{done['ends']}", chance.randint(2, 5)
        while True:
            with start(place) as job:
                may_kill = left > 0 and done["kills"] < kills
                ended = job.wait(chance.uniform(0.1, seconds) if may_kill else TIME_LIMIT)
                if not ended and chance.random() < 0.5:  # one process alone, then the others
                    job.send(signal.SIGKILL, chance.randrange(size))
                    job.wait(chance.uniform(0, 0.1))
            if ended:
                break
            assert may_kill, f"did not end\n{job.log()}"
            left, done["kills"] = left - 1, done["kills"] + 1
            done["resumed"] += bool([*place.glob("checkpoints/[!.]*")])
        failed = set(job.codes.values()) != {0}
        if failed or outcome(place, size) != expected:
            done["different"] += 1
            print(job.log() if failed else f"{place} differs", file=sys.stderr)
        else:
            shutil.rmtree(place)
        done["ends"] += 1
    return done


def main() -> int:
    """Kill all projects in all ways, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each project (default: 50)")
    parser.add_argument("--only", nargs="*", choices=[*PROJECTS], help="projects (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, wrong = random.Random(arguments.seed), 0
    line = "{:<14} {:<8} {:>6} {:>8} {:>6} {:>10}  {}"
    print(line.format("project", "way", "kills", "resumed", "ends", "different", "skips"))
    for name in arguments.only or PROJECTS:
        fit, ways = PROJECTS[name]
        for number, way in enumerate(ways):
            kills = arguments.kills // len(ways) + (number < arguments.kills % len(ways))
            with tempfile.TemporaryDirectory(prefix="research-") as folder:
                found = survive(fit, way, Path(folder), kills, chance)
            wrong += found["different"]
            row = (found[key] for key in ("kills", "resumed", "ends", "different", "skips"))
            print(line.format(name, way, *map(str, row)), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
