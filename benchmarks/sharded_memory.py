"""Memory of each process of FSDP against DDP: training, saving and loading a large model.

Run it in the root of the repository; it needs about 10 GB of memory and 4 GB of disk:

    OMP_NUM_THREADS=1 python -m benchmarks.sharded_memory

Prints the resident set at the end of a phase and its peak inside of it, in MiB, above what a
process has before it builds the model; and writes them as JSON with `--output`.
"""

import argparse
import ctypes
import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, so that it is not part of the figures
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.strategies import DDP, FSDP, Strategy

MIB = 2**20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
STRATEGIES: dict[str, Callable[[], Strategy]] = {"ddp": DDP, "fsdp": FSDP}
PHASES = ("train", "save", "background save", "load", "train on")


class Blocks(nn.Module):
    """Equal blocks, so that most of the model can be sharded block by block."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


class Regression(Trainer):
    """Fits the inputs to themselves."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[0])


class Memory:
    """The resident set of this process, above that of when it was made."""

    def __init__(self) -> None:
        self.first = _status("VmRSS")
        self.phases: dict[str, tuple[float, float]] = {}  # at the end, at most

    def begin(self) -> None:
        """Forget the peak so far."""
        Path("/proc/self/clear_refs").write_text("5")

    def end(self, phase: str) -> None:
        """Keep the figures of a phase."""
        self.phases[phase] = _status("VmRSS") - self.first, _status("VmHWM") - self.first
        self.begin()


def _status(name: str) -> float:
    """Return a line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Watch(Callback):
    """Tells the phases of a run apart."""

    def __init__(self, memory: Memory, saving: str) -> None:
        self.memory = memory
        self.saving = saving

    def on_checkpoint_loaded(self, run: Run, path: Path) -> None:
        self.memory.end("load")

    def on_checkpoint_start(self, run: Run) -> None:
        self.memory.end("train" if run.checkpoints.resumed_from is None else "train on")

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.memory.end(self.saving)


def train(rank: int, folder: Path, arguments: argparse.Namespace, name: str, phase: str) -> Any:
    """Train two steps and save, or resume and do so; return the figures."""
    memory = Memory()
    memory.begin()
    torch.manual_seed(0)
    model = Blocks(arguments.width, arguments.blocks)
    count = sum(p.numel() for p in model.parameters())
    resume, background = ("must", True) if phase == "load" else (None, False)
    trainer = Regression(
        max_steps=4 if resume else 2,
        strategy=STRATEGIES[name](),
        callbacks=[
            Watch(memory, "background save" if background else "save"),
            Checkpoint(every_n_steps=2, background=background),
        ],
        output_dir=folder,
    )
    rows = DataLoader(TensorDataset(torch.randn(64, arguments.width)), 2)
    trainer.fit(
        model,
        rows,
        optimizer=partial(AdamW, lr=1e-4),
        resume=resume,
        schedule="keep" if resume else None,
    )
    trainer.close()
    return count, memory.phases


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each process of a strategy."""
    folder = Path(tempfile.mkdtemp(prefix="trainkit-memory-", dir=arguments.folder))
    try:
        first, second = (
            run_ranks(arguments.processes, train, folder, arguments, name, phase, timeout=1200)
            for phase in ("save", "load")
        )
    finally:
        shutil.rmtree(folder)
    return {
        "parameters": first[0][0],
        "phases": [a | b for (_, a), (_, b) in zip(first, second, strict=True)],
    }


def main() -> None:
    """Print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=18)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    # What a freed tensor had goes back to the system at once: the figures are of what is in use.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    results: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in STRATEGIES:
        results[name] = found = measure(name, arguments)
        size = found["parameters"] * 4 / MIB
        print(
            f"\n{name} x {arguments.processes}: {found['parameters'] / 1e6:.0f} M parameters, ",
            end="",
        )
        print(f"weights {size:.0f} MiB, with the state of AdamW {3 * size:.0f} MiB")
        print(f"{'MiB, at the end / at most':28}" + "".join(f"{phase:>20}" for phase in PHASES))
        for rank, phases in enumerate(found["phases"]):
            cells = [f"{phases[p][0]:.0f} / {phases[p][1]:.0f}" for p in PHASES]
            print(f"{f'process {rank}':28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
