"""Runs jobs for a probe: in forked processes, with limits, and killed where the probe says so."""

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.behaviour import toys
from benchmarks.behaviour.job import Framework, Job, NotOffered, Variant
from benchmarks.behaviour.toys import TAPE, Tape
from tests.helpers.ranks import RanksError, run_ranks

RAISES, ERROR = "raises", "error"
LIMIT = 90.0  # seconds for one job: it takes one or two on a quiet machine
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a probe saw: whether that is right, and in figures."""

    right: bool
    figure: str


@dataclass(frozen=True)
class Heard:
    """What a training said, and how far it came.

    Attributes:
        errors: The exception of each process; none if it ran to its end.
        updated: Whether there was an update on any process.
        said: All that was printed, logged and warned.
        tapes: What each process has seen; none after an exception.
    """

    errors: list[str]
    updated: bool
    said: str
    tapes: list[Tape]

    def refusal(self, *words: str) -> str | None:
        """Return the error that has one of `words`; None if there is none.

        Raises:
            RuntimeError: It ended with another error.
        """
        for error in self.errors:
            if _has(error, words):
                return error
        if self.errors:
            raise RuntimeError(f"it ended otherwise: {self.errors[0][:120]}")
        return None

    def names(self, *words: str) -> bool:
        """Whether it said one of `words`, in an error or elsewhere."""
        return _has(self.said, words) or any(_has(error, words) for error in self.errors)


def _has(text: str, words: tuple[str, ...]) -> bool:
    return any(word.lower() in text.lower() for word in words)


class Bench:
    """One framework, one variant of it, and a folder to work in."""

    def __init__(self, framework: Framework, variant: Variant | None, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        self._changes = {} if variant is None else dict(variant.changes)

    def job(self, **fields: Any) -> Job:
        """Return a job with the changes of the variant."""
        options = fields.pop("options", {}) | self._changes.get("options", {})
        return Job(**(fields | self._changes | {"options": options}))

    def new_folder(self) -> Path:
        """Return an empty folder."""
        path = self.folder / f"{len(list(self.folder.iterdir()))}"
        path.mkdir()
        return path

    def tapes(
        self, job: Job, size: int = 1, method: str = "train", *args: Any, before: Any = None
    ) -> list[Tape]:
        """Do `job` on `size` processes; return what each has seen.

        Raises:
            RanksError: A process raised, died or did not end in time.
        """
        arguments = (self.framework, method, job, args, _free_port(), before)
        tapes: list[Tape] = run_ranks(size, _play, *arguments, timeout=LIMIT)
        for tape in tapes:
            if isinstance(tape.result, NotOffered):
                raise tape.result
        return tapes

    def listen(self, job: Job, size: int = 1) -> Heard:
        """Train on `size` processes, with everything switched on that may be logged or warned."""
        folder = self.new_folder()
        tapes: list[Tape] = []
        errors: list[str] = []
        try:
            tapes = self.tapes(job, size, before=partial(_be_heard, folder))
        except RanksError as failure:
            if in_short(failure)[0] != RAISES:
                raise
            errors = [_message(text) for text in failure.failures.values()]
        said = "".join(path.read_text(errors="replace") for path in folder.glob("said-*"))
        return Heard(errors, (folder / "updated").exists(), said, tapes)

    def start(self, job: Job, size: int, before: Callable[[], None] | None = None) -> "Started":
        """Start `job` on `size` processes that nobody watches over, as `srun` does."""
        return Started(self.framework, job, size, self.folder / "log", before)

    def command(self, job_name: str, size: int) -> "Ended":
        """Run a job of `script` by the framework's launcher."""
        script = [
            str(ROOT / "benchmarks" / "behaviour" / "script.py"),
            self.framework.key,
            job_name,
        ]
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        begin = time.monotonic()
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *self.framework.command(size), *script],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        family = psutil.Process(process.pid)
        seen: set[psutil.Process] = set()
        while process.poll() is None and time.monotonic() - begin < LIMIT:
            seen.update(family.children(recursive=True))
            time.sleep(0.2)
        code, seconds = process.poll(), time.monotonic() - begin
        alive = _alive_after(5.0, seen)
        for left in alive:
            left.kill()
        if code is None:
            process.kill()
            process.wait()
        return Ended(code, seconds, len(alive), (self.folder / "log").read_text(errors="replace"))


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; None: it had to be killed.
        seconds: It took so long.
        stayed: How many of its processes were still there 5 s later.
        output: What it said.
    """

    code: int | None
    seconds: float
    stayed: int
    output: str


class Started:
    """Processes under way.

    Args:
        log: Where their output goes.
        before: Called in each process before its training.
    """

    def __init__(
        self, framework: Framework, job: Job, size: int, log: Path, before: Any = None
    ) -> None:
        context = multiprocessing.get_context("fork")
        port = _free_port()
        arguments = (framework, job, size, port, log, before)
        self.processes: list[BaseProcess] = [
            context.Process(target=_be, args=(rank, *arguments)) for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> list[int | None]:
        """Return the exit codes after at most so many seconds; None for what had to be killed."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def send(self, number: int) -> None:
        """Send a signal to all."""
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)


def _play(
    rank: int, framework: Framework, method: str, job: Job, args: Any, port: int, before: Any
) -> Tape:
    """Be one process of a job."""
    _surround(port)
    if before is not None:
        before()
    try:
        TAPE.result = getattr(framework, method)(job, *args)
    except NotOffered as reason:
        TAPE.result = reason
    return TAPE


def _be(
    rank: int, framework: Framework, job: Job, size: int, port: int, log: Path, before: Any
) -> None:
    """Be one process that nobody watches over; ends as a script would."""
    file = os.open(log.with_suffix(f".{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    _surround(port)
    if before is not None:
        before()
    try:
        framework.train(job)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _be_heard(folder: Path) -> None:
    """Let this process write all that it says to a file, and note its first update."""
    sys.stdout = sys.stderr = file = (folder / f"said-{os.environ['RANK']}").open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    warnings.resetwarnings()
    warnings.simplefilter("always")
    warnings.showwarning = _write_warning
    logging.disable(logging.NOTSET)
    logging.basicConfig(level=logging.INFO)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).setLevel(logging.INFO)
    toys.AFTER_UPDATE.append(lambda done: (folder / "updated").touch() if done else None)


def _write_warning(message: Any, category: Any, *_: Any) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)


def in_short(error: RanksError) -> tuple[str, str]:
    """Return a mark, and the exception of the first failure."""
    texts = [text for text in error.failures.values() if not text.startswith("still running")]
    if not texts:
        return ERROR, "does not end"
    mark = RAISES if texts[0].startswith("raised") else ERROR
    return mark, _message(texts[0])[:200]


def _message(text: str) -> str:
    """Return what stands behind the last frame of a traceback: the exception and its notes."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    behind = lines[frames[-1] + 1 :] if frames else []
    return " ".join(" ".join(behind or lines[-1:]).split())


def _surround(port: int) -> None:
    """Set what torchrun sets, besides the ranks; fold nothing over from the parent."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
    os.environ.update(GROUP_RANK="0", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()


def _alive_after(seconds: float, processes: set[psutil.Process]) -> list[psutil.Process]:
    """Return which processes still run, when all have ended or after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        alive = [process for process in processes if _runs(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def short(value: float) -> str:
    """Return a number as a table has it."""
    return f"{value:.3g}"


def weights(step: list[float]) -> dict[int, float]:
    """Return for each sample of an update the weight with which it counts."""
    return {sample: value for sample, value in enumerate(step) if value}


def updates(tape: Tape) -> list[dict[int, float]]:
    """Return `weights` of every update."""
    return [weights(step) for step in tape.steps]
