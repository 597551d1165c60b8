"""Programs and what is drawn beside them, for runs that are killed and resumed."""

import csv
import random
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.system.own_loop import OwnLoop, loop_outcome
from tests.system.programs import BATCH, PROGRAMS
from tests.system.toys import Augmented, Program, Saving, Settings, read_journal
from trainkit import Callback
from trainkit.callbacks import EMA, CSVLogger, FreezeUntil, TensorBoardLogger
from trainkit.training.lr_schedule import LRSchedule

__all__ = ["KINDS", "LACKING", "Mix", "draw"]

OWN_LOOPS = ("own loop",)
"""Programs that are no `Trainer`."""

PACKAGES = {"StatefulDataLoader": "torchdata", "torchdata.nodes": "torchdata"}
PACKAGES |= {"webdataset": "webdataset", "adapter by reference": "peft"}
PACKAGES |= dict.fromkeys(("adapter on 4 bits", "adapter on 8 bits"), "bitsandbytes")
LACKING = [kind for kind, package in PACKAGES.items() if find_spec(package) is None]
KINDS = tuple(kind for kind in (*PROGRAMS, *OWN_LOOPS) if kind not in LACKING)
REFERRING = ("adapter by reference", "adapter on 4 bits", "adapter on 8 bits")
RESIZED = (
    "optimizers in turns",
    "optimizers, run.optimize",
    "optimizers on one loss",
    "StatefulDataLoader",
    "webdataset",
    "loss with parameters",
)
"""Those that go on with other numbers of processes."""


@dataclass(frozen=True, kw_only=True)
class Mix(Settings):
    """A program and what is drawn beside it."""

    kind: str  # of `PROGRAMS`
    saving: Saving
    ema: bool = False
    thaws: bool = False
    by_epoch: bool = False  # the schedule
    resized: bool = False  # goes on with another number of processes: equal to rounding

    @property
    @override
    def sizes(self) -> tuple[int, ...]:
        return (1, 2, 3) if self.resized else (self.size,)

    @property
    @override
    def reference_saving(self) -> Saving:
        return self.saving  # so that the checkpoints that stay are the same too

    @property
    def dtype(self) -> torch.dtype:
        """That of the model and its data."""
        return torch.float64 if self.resized else torch.float32

    @property
    def features(self) -> list[str]:
        """All that a kill of this run is a trial of."""
        found = [self.kind, "loggers: JSONL, CSV, TensorBoard"]
        place = {"auto": "single" if self.size == 1 else "ddp"}.get(self.strategy, self.strategy)
        found += [f"{self.size} x {place} {self.precision}", f"{self.size} processes"]
        flags = {
            "EMA": self.ema,
            "EMA, FSDP, fp16": self.ema and self.strategy == "fsdp" and self.precision == "fp16",
            "FreezeUntil": self.thaws,
            "schedule by epoch": self.by_epoch,
            "other numbers of processes": self.resized,
            "keep_best": self.saving.keep_best is not None,
            "saves in the background": self.saving.background,
            "workers": self.workers > 0,
            "accumulation": self.accumulation > 1,
        }
        return found + [name for name, is_on in flags.items() if is_on]

    @override
    def begin(self, rank: int, folder: Path, saving: Saving, pipe: int, *more: Callback) -> Any:
        warnings.simplefilter("ignore")  # of packages that use what another one gave up
        if self.kind in OWN_LOOPS:
            return OwnLoop(rank, folder, self, pipe)
        return super().begin(rank, folder, saving, pipe, *more)

    @override
    def program(self, folder: Path) -> Program:
        program = PROGRAMS[self.kind](self, folder)
        program.model.to(self.dtype)
        program.callbacks += [CSVLogger(), TensorBoardLogger()]
        if self.ema:
            program.callbacks.append(EMA(0.9))
        if self.thaws:
            names = [name for name, p in program.model.named_parameters() if p.requires_grad]
            program.callbacks.append(FreezeUntil(step={names[0]: 4}, epoch={names[-1]: 1}))
        if self.by_epoch:
            program.arguments["lr_scheduler"] = lambda optimizer: LRSchedule(
                StepLR(optimizer, 1, 0.7), every="epoch"
            )
        program.settings |= {"split_batches": self.resized, "max_consecutive_skips": 10**6}
        return program

    def loader(self, data: Any, **options: Any) -> DataLoader[Any]:
        """Return a loader of training data."""
        size = BATCH if self.resized else self.batch_size
        return DataLoader(data, size, **{"num_workers": self.workers, **options})

    def noise(self) -> Augmented:
        """Return data whose samples are drawn anew in each epoch."""
        overflows = self.precision == "fp16"
        return Augmented(self.samples, overflows=overflows, dtype=self.dtype)

    def held_out(self) -> DataLoader[Any]:
        """Return what is evaluated."""
        return DataLoader(Augmented(7, overflows=False, dtype=self.dtype), 4)

    @override
    def newest(self, folder: Path) -> int:
        if self.kind not in OWN_LOOPS:
            return super().newest(folder)
        states = folder.glob("checkpoints/checkpoint_*/[!.]*/manifest.json")
        return max((int(path.parts[-3].rpartition("_")[2]) for path in states), default=-1)

    @override
    def outcome(self, folder: Path) -> dict[str, Any]:
        if self.kind in OWN_LOOPS:
            found = loop_outcome(folder, self.size)
        else:
            found = super().outcome(folder) | {
                "metrics.csv": read_csv(folder),
                "tensorboard": read_tensorboard(folder),
                "kept": sorted(path.name for path in folder.glob("checkpoints/*")),
            }
        if self.resized:
            return to_be_rounded(found, folder)
        return found

    @override
    def differences(self, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
        if not self.resized:
            return super().differences(expected, found)
        return [n for n in expected | found if not near(expected.get(n), found.get(n))]


def to_be_rounded(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return of an outcome what does not depend on the number of processes."""
    per_process = ("journal.txt", "draws of", "samples of")
    rows = [row for path in folder.glob("journal-[0-9]") for row in read_journal(path)]
    samples: dict[int, list[int]] = {}
    for _, attempt, indices, _ in rows:
        samples.setdefault(attempt, []).extend(indices)
    return {name: v for name, v in found.items() if not name.startswith(per_process)} | {
        "samples": {attempt: sorted(indices) for attempt, indices in samples.items()}
    }


def near(expected: Any, found: Any) -> bool:
    """Return whether two plain values are equal to rounding in fp64."""
    if isinstance(expected, tuple) and expected and isinstance(expected[-1], bytes):
        if expected[:2] != found[:2]:
            return False
        dtype = getattr(torch, expected[0].removeprefix("torch."))
        pair = [torch.frombuffer(bytearray(v[2]), dtype=dtype) for v in (expected, found) if v[2]]
        return not pair or torch.allclose(pair[0].double(), pair[1].double(), 1e-9, 1e-12)
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(near(expected[k], found[k]) for k in found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(near, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found) <= 1e-9 * max(1.0, abs(expected))
    if isinstance(expected, str) and isinstance(found, str) and "." in expected + found:
        try:  # as they are written
            hexadecimal = "0x" in expected
            numbers = [float.fromhex(v) if hexadecimal else float(v) for v in (expected, found)]
        except ValueError:
            return expected == found
        return near(*numbers)
    return bool(expected == found)


def read_csv(folder: Path) -> list[dict[str, str]]:
    """Return the rows of `metrics.csv`, without times."""
    rows = csv.DictReader((folder / "metrics.csv").open())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each curve, as TensorBoard draws it."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [
            (event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)
        ]
        for tag in sorted(events.Tags()["tensors"])
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        and not tag.startswith(("train/time", "time"))
    }


def draw(seed: int, kinds: tuple[str, ...] = KINDS, size: int | None = None) -> Mix:
    """Return the mix of a seed; the kinds come one after the other."""
    chance, kind = random.Random(f"mix {seed}"), kinds[seed % len(kinds)]
    size = size or chance.choices([1, 2, 3], [0.4, 0.35, 0.25])[0]
    is_cut = kind == "cut over a mesh"
    size = chance.choice([2, 2, 4]) if is_cut else size
    resized = kind in RESIZED and chance.random() < 0.4
    strategy = chance.choice(["ddp", "fsdp"]) if size > 1 else "single"
    if "bits" in kind and size > 1:
        strategy = "ddp"  # torch shards no whole numbers
    strategy = "auto" if resized and strategy != "fsdp" else strategy
    strategy = "model_parallel" if is_cut else strategy
    precision = "fp32" if resized else chance.choice(["fp32", "bf16", "fp16"])
    if precision == "fp16" and (is_cut or kind == "adapter on 8 bits"):
        precision = "bf16"  # the one refuses it, the other's library breaks its graph on a CPU
    if kind == "gradient checkpointing, batch norm" and strategy == "fsdp":
        precision = "fp32"  # torch computes no batch statistics in mixed dtypes
    has_workers = chance.random() < 0.4 and kind != "torchdata.nodes"
    trains = kind not in OWN_LOOPS
    return Mix(
        kind=kind,
        samples=20,
        size=size,
        strategy=strategy,
        precision=precision,
        accumulation=chance.choice([1, 1, 2]),
        workers=chance.choice([1, 2]) if has_workers else 0,
        evaluate_every=chance.choice([None, 3, 6]),
        log_every=chance.choice([1, 2, 5]),
        seed=seed,
        resized=resized,
        ema=trains and chance.random() < 0.5,
        thaws=trains and chance.random() < 0.3,
        by_epoch=trains and chance.random() < 0.4,
        saving=Saving(
            every_n_steps=chance.choice([1, 2, 3, 5]),
            keep_last=chance.choice([1, 3]),
            background=trains and chance.random() < 0.5,
            keep_best=("eval/loss", "min", 2) if trains and chance.random() < 0.5 else None,
            frozen="reference" if kind in REFERRING else "save",
        ),
    )
