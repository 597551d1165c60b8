"""Faults that are put into one process of a job, and what must come of each (rule 32)."""

import ctypes
import faulthandler
import os
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from tests.system.harness import running
from trainkit import Callback, Run, Trainer, Watchdog
from trainkit.callbacks import Checkpoint, Evaluation
from trainkit.watch.report import first_of, read_all

STEP = 3  # updates before the fault
BATCH = 2
BUSY_SECONDS = 60.0  # until all are gone, on a machine that does much else
LIMIT = 3.0  # of the watchdog, where the fault is a stall
GENEROUS = 240.0


class Awkward(Exception):
    """Cannot be made again from its text."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"bang, code {code}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, where, and what the report must say.

    Args:
        place: When it happens; see `Injector`.
        act: What happens; see `ACTS`.
        cause: A pattern for the report.
        size: Processes of the job.
        who: The process that it happens on.
        workers: Of the training loader.
        stalls: Whether only the watchdog can notice.
        named: Whether one process can be told to be at fault.
    """

    place: str
    act: str
    cause: str
    size: int = 2
    who: int = 1
    workers: int = 0
    stalls: bool = False
    named: bool = True

    @property
    def name(self) -> str:
        """What it is called in tests and tables."""
        workers = f", {self.workers} workers" if self.workers else ""
        return f"{self.act} in {self.place}, process {self.who} of {self.size}{workers}"


@dataclass
class Injector:
    """Makes the fault happen: called at every place, by every process and worker."""

    fault: Fault
    rank: int
    folder: Path
    steps: int = 0

    def at(self, place: str) -> None:
        """Do it, if this is the place, the time and the process."""
        fault = self.fault
        if place != fault.place or (place != "setup" and self.steps < STEP):
            return
        act = fault.act
        if self.rank == fault.who:
            self.mark()
        elif act not in EVERYWHERE:
            return
        ACTS[act](self.rank == fault.who)

    def mark(self) -> None:
        """Note when it happened, once."""
        scratch = self.folder / f".injected-{os.getpid()}"
        scratch.write_bytes(struct.pack("d", time.monotonic()))
        if not (self.folder / "injected").exists():
            scratch.rename(self.folder / "injected")


def _raise(_: bool) -> None:
    raise ValueError("bang")


def _raise_awkward(_: bool) -> None:
    raise Awkward(code=7)


def _stop_iteration(_: bool) -> None:
    raise StopIteration


def _signal(signum: int, _: bool) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(600)


def _spin(_: bool) -> None:
    while True:
        pass


def _hold(_: bool) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for years


def _crash(_: bool) -> None:
    ctypes.string_at(0)


def _allocate(_: bool) -> None:
    torch.empty(1 << 50)


def _exhaust(_: bool) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


def _different(is_culprit: bool) -> None:
    if is_culprit:
        torch.distributed.all_reduce(torch.ones(3))
    else:
        torch.distributed.barrier()


def _lonely(_: bool) -> None:
    torch.distributed.barrier()


ACTS: dict[str, Callable[[bool], None]] = {
    "raise": _raise,
    "raise awkwardly": _raise_awkward,
    "StopIteration": _stop_iteration,
    "exit 0": lambda _: os._exit(0),
    "exit 1": lambda _: os._exit(1),
    "quit": lambda _: sys.exit(5),
    "kill": partial(_signal, signal.SIGKILL),
    "crash": _crash,
    "stop": partial(_signal, signal.SIGSTOP),
    "spin": _spin,
    "hold": _hold,
    "sleep": lambda _: time.sleep(600),
    "allocate": _allocate,
    "exhaust": _exhaust,
    "different collective": _different,
    "lonely collective": _lonely,
}
EVERYWHERE = ("different collective",)  # in which all processes have a part


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Numbers, with a fault at the first sample of one process in the step of the fault."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        fault = injector.fault
        self.bad = STEP * BATCH * fault.size + BATCH * fault.who

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            self.injector.steps = STEP
            self.injector.at("data")
        inputs = torch.full((5,), float(index % 7))
        return inputs, inputs[:1]


class Collate:
    """Makes batches, with a fault in that of the bad sample."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        self.made = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.made += 1
        if self.made > STEP:
            self.injector.steps = STEP
            self.injector.at("collate")
        return default_collate(samples)


class Hooks(Callback):
    """Calls the injector wherever callbacks are called, and counts the steps for it."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def on_step_start(self, run: Run) -> None:
        self.injector.steps = run.state.step
        self.injector.at("step start")

    def on_step_end(self, run: Run, result: Any) -> None:
        self.injector.at("step end")

    def on_evaluation_batch_end(self, run: Run) -> None:
        self.injector.at("evaluation")

    def on_checkpoint_start(self, run: Run) -> None:
        self.injector.at("save")

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.injector.at("saved")


class State:
    """Registered for checkpointing; its state is asked for while a checkpoint is saved."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def state_dict(self) -> dict[str, Any]:
        self.injector.at("state")
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Faulty(Trainer):
    """A trainer with a fault."""

    injector: Injector

    def configure_optimizer(self, model: nn.Module, optimizer: object) -> Optimizer:
        self.injector.at("setup")
        return SGD(model.parameters(), lr=0.1)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.injector.at("training step")
        outputs = model(batch[0])
        outputs.register_hook(lambda _: self.injector.at("backward"))
        return nn.functional.mse_loss(outputs, batch[1])

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}


def body(fault: Fault, folder: Path, rank: int, pipe: int) -> int:
    """Be one process of the job; what is not caught is treated as Python does."""
    os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
    faulthandler.disable()  # that of the process that started this one
    injector = Injector(fault, rank, folder)
    try:
        train(fault, injector, folder)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        sys.last_value = sys.exc_info()[1]
        sys.ps1 = ""  # as in a session: what the parent wants to do at its exit is not for us
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def train(fault: Fault, injector: Injector, folder: Path) -> None:
    """Train until the fault."""
    limit = LIMIT if fault.stalls else GENEROUS
    trainer = Faulty(
        max_epochs=1,
        callbacks=[Hooks(injector), Evaluation(every_n_steps=4), Checkpoint(every_n_steps=4)],
        output_dir=folder / "run",
        watchdog=Watchdog(
            step=limit, first_step=limit, evaluation=limit, save=limit, end=limit, setup=GENEROUS
        ),
    )
    trainer.injector = injector
    trainer.register_for_checkpointing(state=State(injector))
    data = Data(injector)
    train_loader = DataLoader(
        data,
        BATCH,
        collate_fn=Collate(injector),
        num_workers=fault.workers,
    )
    held_out = DataLoader(Subset(data, [0, 1, 2]), 1)
    trainer.fit(nn.Linear(5, 1), (train_loader, held_out))
    trainer.close()


@dataclass(kw_only=True)
class Outcome:
    """What a fault came to; good if `problems` is empty."""

    seconds: float = 0.0  # from the fault until every process was gone
    problems: list[str] = field(default_factory=list)


def inject(fault: Fault, folder: Path, within: float = BUSY_SECONDS) -> Outcome:
    """Run a job with a fault, and check its end: at most `within` seconds after it is known."""
    outcome = Outcome()
    with running(fault.size, folder, partial(body, fault, folder)) as job:
        ended = job.wait()
        now = time.monotonic()
        injected = folder / "injected"
        if not injected.exists():
            outcome.problems.append(f"the fault did not happen\n{job.log()}")
            return outcome
        outcome.seconds = now - struct.unpack("d", injected.read_bytes())[0]
        if not ended:
            outcome.problems.append(f"did not end\n{job.log()}")
            return outcome
        if outcome.seconds > within + (LIMIT if fault.stalls else 0.0):
            outcome.problems.append(f"took {outcome.seconds:.1f} s\n{job.log()}")
        codes = {rank: code for rank, code in job.codes.items() if fault.act != "exit 0"}
        codes |= {rank: code for rank, code in job.codes.items() if rank != fault.who}
        if 0 in codes.values():
            outcome.problems.append(f"exit codes {job.codes}\n{job.log()}")
        if job.left_behind():
            outcome.problems.append("processes were left behind")
        check_report(fault, outcome, folder, job.log())
    return outcome


def check_report(fault: Fault, outcome: Outcome, folder: Path, log: str) -> None:
    """Note what the first report of a job does not say."""
    reports = read_all(folder / "reports")
    first = first_of(reports)
    if first is None:
        outcome.problems.append(f"no report\n{log}")
        return
    report = first[1]
    text = report.describe()
    primary = [r for _, r in reports if not r.secondary]
    if len(primary) != 1:
        outcome.problems.append(f"{len(primary)} reports tell the cause: {primary}")
    if fault.named and report.process != fault.who:
        outcome.problems.append(f"names process {report.process}: {text}")
    if not re.search(fault.cause, text):
        outcome.problems.append(f"does not tell the cause `{fault.cause}`: {text}")
    step = report.place.get("step")
    if fault.workers and fault.place == "data":  # fetched ahead, or not, when the worker ends
        step = None if step is None else max(step, STEP - 1)
    if fault.place != "setup" and step not in (STEP - 1, STEP, STEP + 1):
        outcome.problems.append(f"names step {step}: {text}")


_DIED = "ended without a word"
_BANG = r"ValueError: bang"

FAULTS = [
    Fault(place="training step", act="raise", cause=_BANG),
    Fault(place="training step", act="raise", cause=_BANG, size=3, who=0),
    Fault(place="backward", act="raise", cause=_BANG),
    Fault(place="step start", act="raise", cause=rf"{_BANG}(.|\n)*on_step_start.*`Hooks`"),
    Fault(place="step end", act="raise", cause=rf"{_BANG}(.|\n)*on_step_end", size=3, who=2),
    Fault(place="data", act="raise", cause=rf"{_BANG}(.|\n)*sample 14 of the data set `Data`"),
    Fault(place="data", act="raise", cause=r"bang(.|\n)*sample 14 .*`Data`, epoch 0", workers=2),
    Fault(place="data", act="raise awkwardly", cause=r"bang, code 7", workers=1),
    Fault(place="data", act="StopIteration", cause=r"StopIteration", size=3, who=1),
    Fault(place="data", act="StopIteration", cause=r"StopIteration", workers=2),
    Fault(place="collate", act="raise", cause=rf"{_BANG}(.|\n)*made a batch", workers=1),
    Fault(place="collate", act="raise", cause=_BANG, size=3, who=0),
    Fault(place="evaluation", act="raise", cause=rf"phase evaluate(.|\n)*{_BANG}"),
    Fault(place="evaluation", act="raise", cause=rf"phase evaluate(.|\n)*{_BANG}", size=3, who=0),
    Fault(place="save", act="raise", cause=rf"phase save(.|\n)*{_BANG}"),
    Fault(place="state", act="raise", cause=rf"phase save(.|\n)*{_BANG}", size=3, who=0),
    Fault(place="saved", act="raise", cause=rf"{_BANG}(.|\n)*on_checkpoint_saved"),
    Fault(place="setup", act="raise", cause=_BANG),
    Fault(place="training step", act="quit", cause=r"SystemExit: 5"),
    Fault(place="training step", act="exit 0", cause=_DIED, who=0),
    Fault(place="step end", act="exit 1", cause=_DIED, size=3, who=1),
    Fault(place="training step", act="kill", cause=_DIED),
    Fault(place="backward", act="kill", cause=_DIED, size=3, who=0, workers=2),
    Fault(place="evaluation", act="kill", cause=_DIED),
    Fault(place="save", act="kill", cause=_DIED, size=3, who=2),
    Fault(place="saved", act="kill", cause=_DIED),
    Fault(place="training step", act="crash", cause=_DIED, workers=1),
    Fault(place="training step", act="allocate", cause=r"(?i)out of memory: use smaller"),
    Fault(place="step start", act="exhaust", cause=r"MemoryError(.|\n)*address space limit"),
    Fault(place="data", act="kill", cause=r"killed by.*(SIGKILL|Killed)", workers=2),
    Fault(place="data", act="exit 1", cause=r"exit code 1|exited unexpectedly", workers=1),
    Fault(place="training step", act="stop", cause=r"stopped \(SIGSTOP\)", stalls=True),
    Fault(place="save", act="stop", cause=r"SIGSTOP", stalls=True, size=3, who=0, workers=1),
    Fault(place="training step", act="spin", cause=r"in `_spin`", stalls=True, size=3, who=2),
    Fault(place="backward", act="hold", cause=r"holds the interpreter lock", stalls=True),
    Fault(place="step end", act="hold", cause=r"interpreter lock", stalls=True, who=0),
    Fault(place="data", act="sleep", cause=r"process 1 is at", stalls=True, workers=1),
    Fault(place="evaluation", act="sleep", cause=r"process 0 is at", stalls=True, who=0),
    Fault(
        place="step end",
        act="different collective",
        cause=r"different places|different collectives",
        stalls=True,
        named=False,
    ),
    Fault(
        place="step end",
        act="lonely collective",
        cause=r"process 1 in `barrier`",
        stalls=True,
        named=False,
    ),
]
