"""Faults planted at places that chance draws, and found by replays.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.planted_faults --rounds 1

Each trial is a job of two processes that breaks in its course, then the same program as `trainkit
replay --until-nonfinite` starts it, which knows nothing but the folder of the run. Step, process,
module and sample that it names are compared with what the fault itself has noted when it struck. It
exits with 1 if one is another.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.testing.processes import ProcessFailed, on_processes

SAMPLES, FEATURES, CLASSES, BATCH = 96, 12, 5, 4
PROCESSES = 2
Rows = Callable[[Tensor], Tensor]

# What happens in a layer to the rows of one sample.
LAYERS: dict[str, Rows] = {
    "nan": lambda x: x * torch.nan,
    "exp": lambda x: torch.exp(x.float() * 0 + 1000),
    "log": lambda x: x + torch.log(x * 0),
    "divide": lambda x: x / (x - x).abs(),
    "sqrt": lambda x: x + torch.sqrt((x * 0).abs()),  # finite, but its gradient is not
    "huge": lambda x: (x + 1e38) * 1e38,
    "fp16": lambda x: x.half() * 0 + torch.full_like(x, 6e4).half() * 2,
}
OTHERS = ("sample", "loss", "label", "bit", "update")
KINDS = (*LAYERS, *OTHERS)


class Block(nn.Module):
    """Norm, two products, dropout and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 2 * FEATURES)
        self.down, self.drop = nn.Linear(2 * FEATURES, FEATURES), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def make_model() -> nn.Module:
    """Return a classifier whose modules have names."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), *blocks, nn.Linear(FEATURES, CLASSES))


class Faulty(Trainer):
    """Trains well until the fault strikes.

    Args:
        fault: What chance has drawn.
        folder: Where the fault notes that it has struck; None: it does not.
    """

    def __init__(self, fault: dict[str, Any], folder: Path | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.fault, self.folder, self.ids = fault, folder, torch.zeros(0)

    def strikes(self) -> bool:
        """Return whether it is time; a late fault has a checkpoint before it."""
        assert self.run is not None
        epoch = self.run.state.epoch
        if self.fault["kind"] == "fp16":  # whose windows are skipped, and forgotten
            return bool(epoch == self.fault["epoch"])
        return bool(epoch >= self.fault["epoch"])

    def note(self) -> None:
        """Note once where the run is."""
        rank = self.processes.process_index
        path = None if self.folder is None else self.folder / f"struck-{rank}.json"
        if path is not None and not path.exists():
            assert self.run is not None
            about = {"step": self.run.state.step + 1, "process": rank}
            path.write_text(json.dumps(about))

    def rows(self) -> Tensor:
        """Return which rows of the batch are of the sample."""
        return self.ids == self.fault["sample"]

    def plant(self, module: nn.Module) -> None:
        """Let a layer treat the rows of the sample in another way."""
        forward, change = module.forward, LAYERS[self.fault["kind"]]

        def planted(x: Tensor) -> Tensor:
            y: Tensor = forward(x)
            hit = self.rows()
            if not (hit.any() and self.strikes()):
                return y
            self.note()
            y = y.clone()
            y[hit] = change(y[hit]).to(y.dtype)
            return y

        module.forward = planted  # type: ignore[method-assign]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        x, labels, self.ids = batch
        kind, hit = self.fault["kind"], self.rows()
        hits = bool(hit.any()) and self.strikes()
        if hits and kind in ("sample", "loss", "label"):
            self.note()
        losses = nn.functional.cross_entropy(model(x), labels, reduction="none")
        if kind == "loss" and hits:
            losses = losses / (1 - hit.float())
        return losses.mean()


class Data(TensorDataset):
    """Samples with their numbers; one of them may be bad."""

    def __init__(self, fault: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        super().__init__(x, labels, torch.arange(SAMPLES))
        self.fault, self.epoch = fault, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: Any) -> Any:
        x, label, number = super().__getitem__(index)
        if index == self.fault["sample"] and self.epoch >= self.fault["epoch"]:
            x = x.clone()
            if self.fault["kind"] == "sample":
                x[self.fault["place"] % FEATURES] = self.fault["value"]
            elif self.fault["kind"] == "label":
                label = label + CLASSES
        return x, label, number


class Breaks(Checkpoint):
    """Flips the highest bit of the exponent of a weight once it is loaded, or makes it infinite."""

    def __init__(self, trainer_of: Callable[[], Faulty], **settings: Any) -> None:
        super().__init__(**settings)
        self.trainer_of = trainer_of

    def on_checkpoint_loaded(self, run: Run, path: Path) -> None:
        broken_before = run.state.step > SAMPLES // (PROCESSES * BATCH)  # saved so, and replayed
        if self.trainer_of().fault["kind"] == "bit" and not broken_before:
            weight = self._weight(run)
            with torch.no_grad():
                weight.view(torch.int32).bitwise_or_(1 << 30)
            self.trainer_of().note()

    def on_step_start(self, run: Run) -> None:
        trainer = self.trainer_of()
        if trainer.fault["kind"] == "update" and run.state.step == trainer.fault["step"]:
            with torch.no_grad():
                self._weight(run).fill_(torch.inf)
            trainer.note()

    def _weight(self, run: Run) -> Tensor:
        fault = self.trainer_of().fault
        weight = run.module.get_submodule(fault["module"]).weight
        assert isinstance(weight, Tensor)
        small = (weight.detach().abs() < 1).flatten().nonzero().flatten()
        return weight.detach().view(-1)[small[fault["place"] % len(small)] :][:1]


def train(fault: dict[str, Any], folder: Path) -> None:
    """Be one process of the job."""
    in_replay = "TRAINKIT_REPLAY" in os.environ
    struck: Path | None = None if in_replay else folder
    made: list[Faulty] = []
    trainer = Faulty(
        fault,
        struck,
        max_epochs=fault["epochs"],
        output_dir=folder / "run",
        precision="fp16" if fault["kind"] == "fp16" else "fp32",
        max_grad_norm=1.0 if fault["place"] % 2 else None,
        callbacks=[Breaks(lambda: made[0], every_n_steps=fault["every"], keep_last=None)],
    )
    made.append(trainer)
    model = make_model()
    if fault["kind"] in LAYERS:
        trainer.plant(model.get_submodule(fault["module"]))
    trainer.fit(
        model,
        DataLoader(Data(fault), batch_size=BATCH, shuffle=True),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        resume="auto",
        schedule="rescale",
    )
    trainer.close()


def draw(kind: str, seed: int) -> dict[str, Any]:
    """Return a fault at a place that nobody has chosen."""
    chance = random.Random(f"{kind} {seed}")
    modules = ["0", "4", *(f"{b}{m}" for b in (1, 2, 3) for m in ("", ".norm", ".up", ".down"))]
    weighted = [name for name in modules if name not in ("1", "2", "3")]
    return {
        "kind": kind,
        "module": chance.choice(modules if kind in LAYERS else weighted),
        "sample": chance.randrange(SAMPLES),
        "epoch": chance.choice([0, 1, 1, 2]),
        "epochs": 3,
        "place": chance.randrange(10_000),
        "value": chance.choice([float("nan"), float("inf"), float("-inf")]),
        "every": chance.choice([1, 2, 5, 7]),
        "step": chance.randrange(3, 30),
    }


def start(fault: dict[str, Any], folder: Path, **variables: str) -> str:
    """Run the program on two processes to its end, whatever that is; return what went wrong."""

    def body(rank: int) -> None:
        os.environ.update(variables)
        with (folder / f"log-{rank}").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            train(fault, folder)
        except SystemExit as end:
            if end.code:
                raise

    try:
        on_processes(PROCESSES, body)
    except ProcessFailed as error:
        return str(error)
    return ""


def trial(kind: str, seed: int, folder: Path) -> list[str]:
    """Return in what a replay was wrong that knows the folder of the run and nothing else."""
    fault = draw(kind, seed)
    if kind == "bit":  # one that is resumed, and loads
        start({**fault, "epochs": 1, "kind": "none"}, folder)
    log = start(fault, folder)
    struck = [json.loads(path.read_bytes()) for path in sorted(folder.glob("struck-*.json"))]
    if not struck:
        return [f"the fault did not strike\n{log}"]
    asked = {"run": str(folder / "run"), "until_nonfinite": True, "leaves": str(folder / "answer")}
    log = start(fault, folder, TRAINKIT_REPLAY=json.dumps(asked))
    log += "".join(path.read_text() for path in folder.glob("log-*"))
    answers = [*folder.glob("run/replay/*/replay.json")]
    if len(answers) != 1:
        return [f"{len(answers)} answers\n{log}"]
    answer = json.loads(answers[0].read_bytes())
    found, first = answer["fault"], min(struck, key=lambda each: each["step"])
    expected = {"step": first["step"], **_expected(fault)}
    told = {"step": answer["step"], **{name: found[name] for name in ("module", "indices")}}
    if kind == "bit":  # a weight that is only large may give finite losses for some steps
        expected["step"] = max(expected["step"], told["step"])
    if kind not in ("bit", "update"):
        expected["process"], told["process"] = first["process"], found["process"]
    if answer["is_equal"] is False:
        return [f"not the recorded run\n{log}"]
    wrong = [f"{n}: {told[n]} instead of {expected[n]}" for n in expected if told[n] != expected[n]]
    return [f"{'; '.join(wrong)}\n{fault}\n{log}"] if wrong else []


def _expected(fault: dict[str, Any]) -> dict[str, Any]:
    """Return what must be found; of what is outside of the model, the training step."""
    outside = fault["kind"] in ("sample", "loss", "label")
    module = "training_step" if outside else fault["module"]
    of_sample = [] if fault["kind"] in ("bit", "update") else [fault["sample"]]
    return {"module": module, "indices": of_sample}


def main() -> int:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="how often each kind is planted")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round")
    parser.add_argument("--only", choices=KINDS, help="one kind")
    options = parser.parse_args()
    found = total = 0
    for seed in range(options.seed, options.seed + options.rounds):
        for kind in KINDS if options.only is None else [options.only]:
            with tempfile.TemporaryDirectory(prefix="planted-") as place:
                begin = time.monotonic()
                problems = trial(kind, seed, Path(place))
            total, found = total + 1, found + (not problems)
            print(f"{kind:8} {seed}: {time.monotonic() - begin:4.0f} s", *problems or ["found"])
            sys.stdout.flush()
    print(f"{found} of {total} found")
    return int(found < total)


if __name__ == "__main__":
    sys.exit(main())
