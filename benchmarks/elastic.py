"""One training whose machines are lost and come back at random: nothing is lost or done twice.

Run it in the root of the repository:

    OMP_NUM_THREADS=1 python -m benchmarks.elastic --losses 20

Machines are launchers of this one; a lost machine is a launcher that is killed (SIGKILL) with all
its processes. They meet at a store that this program holds, so each of them may be lost. It prints
each loss with the seconds from the kill to the first update after it, then what was trained: every
sample once in each epoch, the final weights beside those of a run on one process, and where the
time went. Exits with 1 if anything was lost, done twice or different.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once: every forked process would pay for it
import torch.distributed.run
from torch._C._distributed_c10d import TCPStore

from tests.cli.launcher import Launcher
from trainkit.inspect.report import read_run
from trainkit.inspect.report.goodput import PARTS, goodput

SAMPLES, BATCH = 240, 24  # ten updates an epoch; 24 is divided by 1, 2, 3 and 4 machines
REST_SECONDS = 1200.0  # for what is left of the training after the last loss
PATIENCE = 300.0  # seconds in which the others must go on
RENDEZVOUS = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"

SCRIPT = """
import json, os, sys, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger

SAMPLES, BATCH, EPOCHS, PAUSE = {samples}, {batch}, int(sys.argv[2]), float(sys.argv[3])

class Notes(Callback):
    # What each process trains on, and when; one file for each process.
    def on_fit_start(self, run):
        started = time.time_ns() if run.processes.is_main_process else 0
        self.session = run.strategy.processes.broadcast_object(started)
        self.file = open(f"notes-{{self.session}}-{{os.getpid()}}.jsonl", "w", buffering=1)
        self.write(step=run.state.step, size=run.processes.num_processes, kind="start")

    def write(self, **what):
        what |= {{"session": self.session, "time": time.time()}}
        self.file.write(json.dumps(what) + "\\n")

    def on_step_end(self, run, result):
        self.write(step=run.state.step, kind="step")

class Mine(Trainer):
    def training_step(self, model, batch):
        inputs, targets, numbers = batch
        time.sleep(PAUSE)
        while self.run.processes.num_processes == 1 and os.path.exists("wait-for-others"):
            time.sleep(0.05)
        if not self.run.zero_weight:
            state = self.run.state
            place = dict(step=state.step, epoch=state.epoch)
            notes.write(**place, samples=numbers.tolist(), kind="samples")
        return nn.functional.mse_loss(model(inputs), targets)

torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 8, dtype=torch.float64)
targets = inputs.sum(1, keepdim=True).sin()
data = TensorDataset(inputs, targets, torch.arange(SAMPLES))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
notes = Notes()
trainer = Mine(
    max_epochs=EPOCHS, split_batches=True, output_dir="run",
    callbacks=[notes, Checkpoint(every_n_steps=5, keep_last=2), JSONLLogger()],
)
trainer.fit(
    model, DataLoader(data, BATCH, shuffle=True), resume="auto",
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
)
if trainer.processes.is_main_process:
    torch.save(model.state_dict(), sys.argv[1])
"""


def prepare(folder: Path) -> None:
    """Write the script of the training."""
    (folder / "script.py").write_text(SCRIPT.format(samples=SAMPLES, batch=BATCH))


@dataclass(slots=True)
class Machine:
    """A launcher of this machine, with all that it has started."""

    launcher: Launcher

    def processes(self) -> list[int]:
        """Return the launcher, then what it started."""
        parents = dict(_parents())
        found = [self.launcher.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def lose(self) -> None:
        """Kill all at once: nobody is told anything."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(self.launcher.pid, 0)


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), int(fields[1])


@dataclass(slots=True)
class Job:
    """One training, of at most `most` machines, which meet by the settings `rendezvous`."""

    folder: Path
    most: int
    port: int
    epochs: int
    pause: float
    rendezvous: str = RENDEZVOUS
    started: int = 0
    machines: list[Machine] = field(default_factory=list)

    def add(self) -> None:
        """Let a machine come, or come back."""
        self.started += 1
        command = [
            "launch", "--cpu", "--num_machines", f"1:{self.most}", "--num_processes", self.most,
            "--max_restarts", 1000, "--main_process_ip", "127.0.0.1",
            "--main_process_port", self.port, "--rdzv_conf", self.rendezvous,
            "--shutdown_timeout", 20,
            "script.py", "elastic.pt", self.epochs, self.pause,
        ]  # fmt: skip
        launcher = Launcher(command, self.folder, output=f"machine-{self.started}")
        self.machines.append(Machine(launcher))

    def wait(self, since: float, size: int, times: int = 1) -> float:
        """Return when an update came after `since`, in a session that began after it.

        Args:
            since: Seconds since 1970.
            size: The machines of that session; 0: any number.
            times: Updates to wait for.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = []
            for notes in _sessions(self.folder, since):
                steps = [n["time"] for n in notes if n["kind"] == "step"]
                if notes[0]["time"] > since and len(steps) >= times:
                    found += steps[times - 1 :][:1] if size in (0, notes[0]["size"]) else []
            if found:
                return float(min(found))
            time.sleep(0.1)
        said = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("machine-*"))
        raise TimeoutError(f"no update in {PATIENCE:g} s after a loss\n{said}")

    def lose(self, number: int) -> float:
        """Lose a machine; return when."""
        lost = time.time()
        self.machines.pop(number).lose()
        return lost

    def end(self) -> None:
        """Lose all machines that are left."""
        for machine in self.machines:
            with suppress(ChildProcessError):  # it has ended by itself
                machine.lose()

    def is_over(self) -> bool:
        """Return whether the training has ended by itself."""
        return (self.folder / "elastic.pt").exists()


def _sessions(folder: Path, since: float = 0.0) -> list[list[dict[str, Any]]]:
    """Return the notes of the processes that wrote since then, a list for each of a session."""
    found = []
    for path in folder.glob("notes-*"):
        if path.stat().st_mtime < since:
            continue
        notes = []
        for line in path.read_text().splitlines():
            try:
                notes.append(json.loads(line))
            except json.JSONDecodeError:  # the process was killed while it wrote
                continue
        if notes:
            found.append(notes)
    return found


def _trained(folder: Path, epochs: int) -> list[str]:
    """Return what is wrong with the samples that counted: each is used once in an epoch."""
    by_session: dict[int, list[dict[str, Any]]] = {}
    for notes in _sessions(folder):
        by_session.setdefault(notes[0]["session"], []).extend(notes)
    begins = {session: min(n["step"] for n in notes if n["kind"] == "start")
              for session, notes in by_session.items()}  # fmt: skip
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    end = epochs * (SAMPLES // BATCH)
    for session in sorted(begins, reverse=True):  # what a later one did again does not count
        for note in by_session[session]:
            if note["kind"] == "samples" and begins[session] <= note["step"] < end:
                used[note["epoch"]].update(note["samples"])
        end = min(end, begins[session])
    once = Counter(range(SAMPLES))
    return [
        f"epoch {epoch}: {len(once - count)} samples missing, {len(count - once)} more than once"
        for epoch, count in used.items()
        if count != once
    ]


def _reference(folder: Path, epochs: int) -> dict[str, torch.Tensor]:
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "script.py", alone)
    launcher = Launcher(["launch", "--cpu", "script.py", "alone.pt", epochs, 0], alone)
    if launcher.wait():
        raise SystemExit(f"FAILED  the run without losses\n{launcher.output}")
    weights: dict[str, torch.Tensor] = torch.load(alone / "alone.pt", weights_only=True)
    return weights


def _lose_and_return(job: Job, losses: int, chance: random.Random) -> list[float]:
    """Lose machines one after the other; return the seconds from each kill to the next update."""
    seconds = []
    for loss in range(1, losses + 1):
        killed = job.lose(chance.randrange(len(job.machines)))
        returns = time.monotonic() + chance.choice((0.0, 0.0, chance.uniform(0, 15)))
        while time.monotonic() < returns:
            time.sleep(0.1)
            after = [n for n in _sessions(job.folder, killed) if n[0]["time"] > killed]
            if any(notes[-1]["kind"] == "step" for notes in after):
                break  # the others go on without it: it comes into a running training
        job.add()
        seconds.append(job.wait(killed, 0) - killed)
        job.wait(killed, job.most, times=chance.randint(1, 8))
        print(f"loss {loss:3}: {seconds[-1]:5.1f} s to the next update", flush=True)
        if job.is_over():
            raise SystemExit("FAILED  the training was over before the losses; use more --epochs")
    return seconds


def judge(folder: Path, epochs: int, codes: list[int]) -> list[str]:
    """Print what a training has come to, and return what is wrong with it.

    Args:
        folder: That of the job.
        epochs: Which it was to train.
        codes: Those that the launchers ended with.
    """
    problems = [f"a launcher ended with {code}" for code in codes if code]
    problems += _trained(folder, epochs)
    print(f"samples: {'FAILED' if problems else 'each once in each epoch'}")
    elastic = torch.load(folder / "elastic.pt", weights_only=True)
    pairs = [(elastic[name], alone) for name, alone in _reference(folder, epochs).items()]
    largest = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    print(f"final weights: differ by at most {largest:.1e} of the largest (float64)")
    if not largest < 1e-9:
        problems.append("the weights differ by more than rounding")
    split = goodput(read_run(folder / "run"))
    for name, spent in split.seconds.items() if split else ():
        print(f"  {PARTS[name]:32} {spent:7.1f} s")
    return problems


def main() -> int:
    """Run the training with losses and the one without; return 0 if they are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--machines", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds that a step takes more")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the machines end too
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    prepare(folder)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(folder, options.machines, store.port, options.epochs, options.pause)
    for _ in range(options.machines):
        job.add()
    try:
        job.wait(0.0, options.machines, times=5)
        seconds = _lose_and_return(job, options.losses, random.Random(options.seed))
        codes = [machine.launcher.wait(REST_SECONDS) for machine in job.machines]
    finally:
        job.end()
    print(f"{options.losses} losses and returns: to the next update {min(seconds):.1f} s to "
          f"{max(seconds):.1f} s, median {statistics.median(seconds):.1f} s")  # fmt: skip
    problems = judge(folder, options.epochs, codes)
    for problem in problems:
        print(f"FAILED  {problem}\n        ({folder})")
    if not problems:
        shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
