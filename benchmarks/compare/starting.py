"""How long it takes until work begins: imports, and the first update of a new process.

A worker has its peer imported already, so both are measured in processes of their own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from benchmarks.compare.meter import Meter
from benchmarks.compare.workload import Outcome, Workload

__all__ = ["FirstStep", "Importing"]

ROOT = Path(__file__).resolve().parents[2]
TORCH = "import torch"
IMPORTS = {
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning.fabric import Fabric",
    "ignite": "from ignite.engine import Engine",
    "lightning": "from lightning import Trainer",
    "pytorch_accelerated": "from pytorch_accelerated import Trainer",
    "torchtnt": "from torchtnt.framework import AutoUnit, train",
    "trainkit": (
        "from trainkit import Accelerator, Trainer\n"
        "from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, ProgressBar"
    ),
    "transformers": "from transformers import Trainer",
}
TIMED_IMPORT = """
import time
{before}
start = time.{clock}()
{after}
print(time.{clock}() - start)
"""
FIRST_STEP = """
import tempfile, time
from pathlib import Path
from benchmarks.compare.peers import {peer} as peer
from benchmarks.compare.training import Training
from torch.optim.optimizer import register_optimizer_step_post_hook
task = Training(name="first", about="", steps=1, epochs=1)
register_optimizer_step_post_hook(lambda *_: print("\\nFIRST", time.time()))
with tempfile.TemporaryDirectory() as folder:
    peer.training(task, task.make(Path(folder)))
"""


@dataclass(frozen=True, kw_only=True)
class Importing(Workload):
    """Imports what a user imports, after torch; by hand that is torch itself.

    Of trainkit that is both of its faces, and some callbacks. The garbage collector stays as it is:
    torch leaves it close to a collection of all that torch has made, a tenth of a second of work,
    which the import of anything that makes 15,000 objects runs into.
    """

    kind: ClassVar[str] = "training"  # which all have; it is not called
    unit: ClassVar[str] = "import"

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        peer = _name(work)
        before = "" if peer == "raw" else TORCH
        after, clock = IMPORTS.get(peer, TORCH), meter.clock.__name__
        code = TIMED_IMPORT.format(before=before, after=after, clock=clock)
        return Outcome(seconds=float(_python(code)))


@dataclass(frozen=True, kw_only=True)
class FirstStep(Workload):
    """Starts Python, imports, sets up and makes one update of the tiny MLP."""

    kind: ClassVar[str] = "training"
    unit: ClassVar[str] = "start"

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        start = time.time()
        output = _python(FIRST_STEP.format(peer=_name(work)))
        lines = [line for line in output.splitlines() if line.startswith("FIRST ")]
        return Outcome(seconds=float(lines[0].removeprefix("FIRST ")) - start)


def _name(work: Callable[..., Any]) -> str:
    return work.__module__.rpartition(".")[2]


def _python(code: str) -> str:
    """Return what a new Python prints that runs `code` in the root of the repository.

    All packages are compiled before they are timed: those that pip installed are, and what is
    imported from a checkout is compiled by the round that is not counted.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout
