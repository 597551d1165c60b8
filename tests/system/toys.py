"""The run that the tests of this folder kill, signal and resume, and all that it came to."""

import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, Combined, Run, Trainer
from trainkit.callbacks import (
    EMA,
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    FreezeUntil,
    JSONLLogger,
    LRMonitor,
    TimeLimit,
)
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format.manifest import read_manifest
from trainkit.journal import read
from trainkit.precision import FP16
from trainkit.strategies import FSDP

BEGUN = -1  # what a process says when it catches signals; from 0 on: a step that is committed
PLACES = {-2: "update", -3: "evaluation", -4: "epoch end", -5: "save"}  # what it does from now on
_MESSAGE = struct.Struct("<qq")  # rank and number: short enough for one write of several processes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the outcome of a run; two runs with the same settings are the same run."""

    size: int = 1  # processes
    strategy: str = "auto"  # or fsdp, model_parallel
    workers: int = 0
    evaluation_workers: int = 0
    accumulation: int = 1
    precision: str = "fp32"  # with fp16, one sample overflows
    samples: int = 30
    batch_size: int = 2
    max_epochs: int | None = 3
    max_steps: int | None = None
    evaluate_every: int | None = 6  # steps; None: epochs only
    shuffle: bool = True
    drop_last: bool = False
    drop_last_window: bool = False
    persistent: bool = False
    optimizer: str = "adamw"  # or fused, sgd
    scheduler: str = "lambda"  # or cycle, none
    log_every: int = 2
    seed: int = 0
    policy: str | None = None  # of two training loaders; "weights" for some
    gallery: bool = False  # whether callbacks that change the training run along

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of processes that it may go on with after a kill."""
        return (self.size,)

    @property
    def reference_saving(self) -> "Saving":
        """When the run saves that nobody disturbs."""
        return Saving()

    def begin(
        self, rank: int, folder: Path, saving: "Saving", pipe: int, *more: Callback
    ) -> "Training":
        """Return one process's part."""
        return Training(rank, folder, self, saving, pipe, *more)

    def program(self, folder: Path) -> "Program":
        """Return what is trained on what."""
        model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 1))
        data = Augmented(self.samples, overflows=self.precision == "fp16")
        options: dict[str, Any] = {
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_workers": self.workers,
            "persistent_workers": self.persistent,
        }
        train: Any = DataLoader(data, self.batch_size, **options)
        if self.policy is not None:
            few = Augmented(self.samples // 3, overflows=False)
            both = {"a": train, "b": DataLoader(few, self.batch_size, **options)}
            train = Combined(both, {"a": 2, "b": 1} if self.policy == "weights" else self.policy)
        held_out = DataLoader(Augmented(7, overflows=False), 4, num_workers=self.evaluation_workers)
        gallery: list[Callback] = []
        if self.gallery:
            stopping = EarlyStopping("eval/loss", patience=5, mode="min", min_delta=9.0)
            freezing = FreezeUntil(step={"0.weight": 4}, epoch={"*.bias": 1})
            finder = [] if self.strategy == "fsdp" else [BatchSizeFinder()]
            gallery = [EMA(0.9), stopping, freezing, *finder]
        return Program(
            model=model,
            callbacks=gallery,
            loaders=(train, held_out),
            arguments={
                "optimizer": _OPTIMIZERS[self.optimizer],
                "lr_scheduler": _SCHEDULERS[self.scheduler],
            },
        )

    def newest(self, folder: Path) -> int:
        """Return the step of the newest checkpoint; -1: there is none."""
        entries = CheckpointStore(folder / "checkpoints").checkpoints()
        return entries[-1].step if entries else -1

    def outcome(self, folder: Path) -> dict[str, Any]:
        """Return all that a run left, by name."""
        return read_outcome(folder, self.size)

    def differences(self, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
        """Return the names of what is not the same in two outcomes."""
        return [n for n in expected | found if found.get(n) != expected.get(n)]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When a run saves, which must not change its outcome."""

    every_n_steps: int | None = 3
    keep_last: int = 1
    background: bool = False
    keep_best: tuple[str, str, int] | None = None
    frozen: str = "save"


@dataclass(kw_only=True)
class Program:
    """A model, its data, and how it is trained."""

    model: nn.Module
    loaders: Any
    arguments: dict[str, Any]  # more ones of `fit`
    trainer: "type[Trainer] | None" = None  # None: `Noisy`
    settings: dict[str, Any] = field(default_factory=dict)  # more ones of the trainer
    sharded: type[nn.Module] = nn.Linear  # what FSDP shards by itself
    callbacks: list[Callback] = field(default_factory=list)
    cut: Callable[[nn.Module], Any] = lambda model: model  # over a mesh, in place


class Augmented(Dataset[tuple[int, Tensor, Tensor]]):
    """Noise on every sample, drawn from all three global generators."""

    def __init__(
        self, samples: int, *, overflows: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        self.samples = samples
        self.overflows = overflows
        self.dtype = dtype

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(index))
        noise = 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * numpy.random.random()
        target = inputs.sum().reshape(1)
        if self.overflows and index == self.samples // 3:
            target = target * 1e18
        return index, (inputs + noise).to(self.dtype), target.to(self.dtype)


class Ema:
    """An average of the weights, registered for checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.average: list[Tensor] = []  # made when the parameters are where they stay
        self.updates = 0
        self.on_save: Callable[[], None] = lambda: None

    def update(self) -> None:
        self.updates += 1
        self.average = self._now()
        for average, parameter in zip(self.average, self.module.parameters(), strict=True):
            if parameter.is_floating_point():  # not one in 4 or 8 bits
                average.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        self.on_save()
        return {"average": self._now(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self.module.parameters()  # what a checkpoint holds comes on the CPU
        self.average = [
            tensor.to(parameter.device, copy=True)
            for tensor, parameter in zip(state["average"], parameters, strict=True)
        ]
        self.updates = state["updates"]

    def _now(self) -> list[Tensor]:
        return self.average or [p.detach().clone() for p in self.module.parameters()]


class Journal(Callback):
    """Writes what each micro-batch holds; a resumed run first cuts what it does again."""

    def __init__(self, path: Path, ema: Ema) -> None:
        self.path = path
        self.ema = ema

    def on_fit_start(self, run: Run) -> None:
        others = self.path.parent.glob("journal-[0-9]") if run.is_main_process else ()
        size = run.strategy.processes.size
        # Also those of processes that there are no more.
        for path in [self.path, *(p for p in others if int(p.name[-1]) >= size)]:
            kept = [row for row in read_journal(path) if row[1] < run.state.attempts]
            scratch = path.with_suffix(".new")
            scratch.write_text("".join(json.dumps(row) + "\n" for row in kept))
            scratch.replace(path)
        self.file = self.path.open("a", buffering=1)

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        if isinstance(batch, dict) and not isinstance(next(iter(batch.values())), Tensor):
            for each in batch.values():
                self.on_microbatch_start(run, each)
            return
        first, second, *_ = batch.values() if isinstance(batch, dict) else batch
        values = [value.hex() for value in second.double().reshape(len(second), -1).sum(1).tolist()]
        row = [run.state.epoch, run.state.attempts, first.tolist(), values]
        self.file.write(json.dumps(row) + "\n")

    def on_step_end(self, run: Run, result: Any) -> None:
        self.ema.update()


class Announcer(Callback):
    """Tells the process that started the run what is committed, when it is."""

    def __init__(self, rank: int, pipe: int) -> None:
        self.rank = rank
        self.pipe = pipe

    def say(self, number: int) -> None:
        os.write(self.pipe, _MESSAGE.pack(self.rank, number))

    def on_fit_start(self, run: Run) -> None:
        self.say(BEGUN)

    def on_gradients(self, run: Run) -> None:
        self.at("update")

    def on_evaluation_start(self, run: Run) -> None:
        self.at("evaluation")

    def on_epoch_end(self, run: Run) -> None:
        self.at("epoch end")

    def on_checkpoint_start(self, run: Run) -> None:
        self.at("save")

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.say(read_manifest(path).step)

    def at(self, place: str) -> None:
        self.say(next(number for number, name in PLACES.items() if name == place))


class Draws(Callback):
    """Draws from the run's streams at its end: they show where these are."""

    found: Sequence[Any] = ()

    def on_fit_end(self, run: Run) -> None:
        self.found = [torch.rand(3), random.random(), float(numpy.random.random())]


class Noisy(Trainer):
    most_samples: int | None = None  # for which there is memory

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, dict):
            return {name: self.training_step(model, each) for name, each in batch.items()}
        most = self.most_samples
        if most is not None and model.training and len(batch[1]) > most:
            raise torch.OutOfMemoryError("the test wants smaller micro-batches")
        return nn.functional.mse_loss(model(batch[1]), batch[2])

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(model, batch).nan_to_num(posinf=1e9)}


class Training:
    """One process's part of a run, ready to begin."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        settings: Settings,
        saving: Saving,
        pipe: int,
        *more: Callback,
        minutes: float | None = None,
    ) -> None:
        self.rank, self.folder, self.settings = rank, folder, settings
        torch.manual_seed(settings.seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.program = program = settings.program(folder)
        self.ema = Ema(program.model)
        self.draws = Draws()
        callbacks = [
            Announcer(rank, pipe),
            Journal(folder / f"journal-{rank}", self.ema),
            Evaluation(every_n_steps=settings.evaluate_every, every_n_epochs=1),
            JSONLLogger(),
            LRMonitor(),
            *program.callbacks,
            self.draws,
            Checkpoint(**asdict(saving), every_n_epochs=None if saving.every_n_steps else 1000),
            *([] if minutes is None else [TimeLimit(minutes)]),
            *more,
        ]
        fp16 = settings.precision == "fp16"
        strategy: Any = settings.strategy
        self.trainer = (program.trainer or Noisy)(
            strategy=FSDP(wrap_policy=[program.sharded]) if strategy == "fsdp" else strategy,
            max_epochs=settings.max_epochs,
            max_steps=settings.max_steps,
            precision=FP16(init_scale=256.0, growth_interval=7) if fp16 else settings.precision,  # type: ignore[arg-type]
            gradient_accumulation_steps=settings.accumulation,
            drop_last_window=settings.drop_last_window,
            max_grad_norm=1.0,
            callbacks=callbacks,
            output_dir=folder,
            log_every_n_steps=settings.log_every,
            seed=settings.seed,
            **program.settings,
        )
        program.cut(program.model)  # now that the processes have met
        self.trainer.register_for_checkpointing(ema=self.ema)
        if isinstance(self.trainer, Noisy) and settings.gallery and settings.strategy != "fsdp":
            self.trainer.most_samples = (settings.batch_size + 1) // 2

    def fit(self) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        program = self.program
        self.trainer.fit(program.model, program.loaders, **program.arguments, resume="auto")

    def outcome(self) -> Any:
        """Return all that the run came to on this process, so that `==` means bit by bit."""
        run = self.trainer.run
        assert run is not None
        schedule = run.lr_schedule
        with run.strategy.whole_state(run.optimizer):
            return plain(
                {
                    "model": self.program.model.state_dict(),
                    "optimizer": run.optimizer.state_dict(),
                    "scheduler": schedule and _without_functions(schedule.scheduler.state_dict()),
                    "scaler": run.precision.state_dict(),
                    "counters": run.state.state_dict(),
                    "ema": self.ema.state_dict(),
                    "metrics": [run.metrics, run.best_metrics],
                    "callbacks": [
                        each.state_dict()
                        for each in self.program.callbacks
                        if isinstance(each, EMA | EarlyStopping)
                    ],
                    "stop": run.stop_reason,
                    "draws": self.draws.found,
                }
            )

    def keep_outcome(self) -> None:
        """Leave the outcome for the process that started the run."""
        (self.folder / f"outcome-{self.rank}").write_bytes(pickle.dumps(self.outcome()))

    def close(self) -> None:
        """Leave the process group."""
        self.trainer.close()


_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2),
    "fused": partial(AdamW, lr=1e-2, fused=True),
    "sgd": partial(SGD, lr=1e-2, momentum=0.9),
}
_SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step)),
    "cycle": partial(OneCycleLR, max_lr=1e-2, total_steps=400),
    "none": None,
}


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "lr_lambdas"}


def plain(value: Any) -> Any:
    """Return a value in which tensors are their bytes and floats their exact digits."""
    if isinstance(value, DTensor):
        return plain(value.to_local())
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value.hex() if isinstance(value, float) else value


def read_journal(path: Path) -> list[Any]:
    """Return the complete lines of a journal."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return what was logged, without wall times."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def read_outcome(folder: Path, size: int) -> dict[str, Any]:
    """Return all that a run of `size` processes left, by name."""
    windows = [record.line() for record in read(folder).records]
    found: dict[str, Any] = {"metrics.jsonl": read_metrics(folder), "journal.txt": windows}
    for rank in range(size):
        path = folder / f"outcome-{rank}"
        outcome = pickle.loads(path.read_bytes()) if path.exists() else {"outcome": "missing"}
        found |= {f"{name} of process {rank}": value for name, value in outcome.items()}
        found[f"samples of process {rank}"] = read_journal(folder / f"journal-{rank}")
    return found


def messages(data: bytes) -> list[tuple[int, int]]:
    """Return the ranks and numbers that announcers wrote."""
    whole = len(data) // _MESSAGE.size * _MESSAGE.size
    return list(_MESSAGE.iter_unpack(data[:whole]))
