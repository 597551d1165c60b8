"""One trial each: a run that is killed, stopped or signalled, resumed, and compared."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.harness import TIME_LIMIT, Job, running
from tests.system.toys import Saving, Settings, Training, read_journal
from trainkit import Callback, Run
from trainkit.basics.signals import Interrupted
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import CheckpointError
from trainkit.journal import read

RAISED = 7  # exit code of a run that a trial let fail


@dataclass(kw_only=True)
class Reference:
    """The run that nobody disturbed."""

    outcome: dict[str, Any]
    seconds: float
    journal: list[Any]


@dataclass(kw_only=True)
class Report:
    """What a trial came to; good if `problems` is empty."""

    kills: int = 0
    resumed: int = 0  # kills after which a checkpoint was there
    lost: int = 0  # acknowledged checkpoints that were gone
    different: int = 0  # runs whose outcome was another one
    most_folders: int = 0
    places: Counter[str] = field(default_factory=Counter)  # of the kills
    problems: list[str] = field(default_factory=list)


def whole_run(settings: Settings, saving: Saving, *more: Callback) -> Callable[..., int]:
    """Return the body of a rank that trains to the end and keeps the outcome."""

    def body(folder: Path, rank: int, pipe: int) -> int:
        training = settings.begin(rank, folder, saving, pipe, *more)
        try:
            training.fit()
        except StopHere:
            return RAISED
        training.keep_outcome()
        training.close()
        return 0

    return body


_references: dict[Settings, Reference] = {}


def reference(settings: Settings, folder: Path) -> Reference:
    """Return the undisturbed run of some settings; made once."""
    if settings not in _references:
        shutil.rmtree(folder, ignore_errors=True)
        body = whole_run(settings, settings.reference_saving)
        start = time.monotonic()
        with running(settings.size, folder, lambda *rank: body(folder, *rank)) as job:
            assert job.wait(), job.log()
            assert set(job.codes.values()) == {0}, job.log()
        _references[settings] = Reference(
            outcome=settings.outcome(folder),
            seconds=time.monotonic() - start,
            journal=read_journal(folder / "journal-0"),
        )
        shutil.rmtree(folder)
    return _references[settings]


def compare(report: Report, expected: Reference, folder: Path, settings: Settings) -> None:
    """Note everything in which a run differs from the undisturbed one."""
    names = settings.differences(expected.outcome, settings.outcome(folder))
    if names:
        report.different += 1
        report.problems.append(f"different: {names}")


def check_folder(
    report: Report, folder: Path, settings: Settings, saving: Saving, acked: int
) -> None:
    """Note what is wrong with the checkpoints of a run that was just killed (D1, D2)."""
    if (newest := settings.newest(folder)) < acked:
        report.lost += 1
        report.problems.append(f"lost: step {acked} was acknowledged, {newest} is the newest")
    store = CheckpointStore(folder / "checkpoints")
    entries = store.checkpoints()
    for entry in entries:
        try:
            counters = store.open(entry.path).read("trainer")["counters"]
        except CheckpointError as error:
            report.problems.append(f"visible but broken: {error}")
            continue
        windows = counters["step"] + counters["skipped_steps"]
        found = [record.attempt for record in read(folder).records][:windows]
        if found != [*range(1, windows + 1)]:
            report.problems.append(f"the journal lacks windows of step {entry.step}: {found}")
    report.most_folders = max(report.most_folders, len(entries) - saving.keep_last)


def check_end(report: Report, job: Job, folder: Path) -> None:
    """Note what a run that ended by itself should not have left."""
    if set(job.codes.values()) != {0}:
        report.problems.append(f"exit codes {job.codes}\n{job.log()}")
    if job.left_behind():
        report.problems.append("processes were left behind")
    left = [path.name for path in folder.glob("checkpoints/.*")]
    if left:
        report.problems.append(f"left in the folder: {left}")


AIMS = (None, None, "update", "evaluation", "epoch end", "save")  # of a kill; None: any moment


def survive_kills(
    settings: Settings, saving: Saving, folder: Path, chance: random.Random, most_kills: int = 4
) -> Report:
    """Kill a run at random moments until `most_kills`, let it end, and compare."""
    expected = reference(settings, folder / "reference")
    report, acked, folder = Report(), -1, folder / "killed"
    body, may_kill = whole_run(settings, saving), True
    while True:
        may_kill = may_kill and report.kills < most_kills
        size = chance.choice(settings.sizes) if may_kill else settings.size
        with running(size, folder, lambda *rank: body(folder, *rank)) as job:
            ended = job.wait(chance.uniform(0, 0.7 * expected.seconds) if may_kill else TIME_LIMIT)
            if not ended and not may_kill:
                job.send(signal.SIGQUIT)
                job.wait(1.0)
                report.problems.append(f"did not end\n{job.log()}")
            aim = chance.choice(AIMS)
            if not ended and may_kill and aim is not None:
                ended = job.wait_for(aim, expected.seconds)
                ended = ended or job.wait(chance.uniform(0, 0.01))
            if not ended and chance.random() < 0.3:
                job.send(signal.SIGKILL, chance.randrange(size))
                job.wait(chance.uniform(0, 0.1))
        acked = max([acked, *job.acked])
        check_folder(report, folder, settings, saving, acked)
        if not may_kill:
            break
        if -signal.SIGKILL not in job.codes.values():
            if size == settings.size:
                break
            may_kill = False  # ended on another number of processes: once more, as it is compared
            continue
        report.kills += 1
        report.places[job.place] += 1
        report.resumed += settings.newest(folder) >= 0
    check_end(report, job, folder)
    compare(report, expected, folder, settings)
    return report


class StopHere(Exception):
    """Ends a run in mid-epoch."""


class Stop(Callback):
    """Ends every process of a run at one place, by an error or by a kill."""

    def __init__(self, attempt: int, hook: str, *, kills: bool) -> None:
        self.attempt = attempt
        self.hook = hook
        self.kills = kills

    def on_step_start(self, run: Run) -> None:
        self.stop("on_step_start", run.state.attempts)

    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        self.stop("on_microbatch_end", run.state.attempts)

    def on_step_end(self, run: Run, result: Any) -> None:
        self.stop("on_step_end", run.state.attempts - 1)

    def on_step_skipped(self, run: Run, result: Any) -> None:
        self.stop("on_step_end", run.state.attempts - 1)

    def stop(self, hook: str, attempt: int) -> None:
        if (hook, attempt) == (self.hook, self.attempt):
            if self.kills:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            raise StopHere


def survive_stop(settings: Settings, saving: Saving, folder: Path, chance: random.Random) -> Report:
    """Stop a run once in mid-epoch at a random place, let it end, and compare."""
    expected = reference(settings, folder / "reference")
    report, folder = Report(kills=1), folder / "stopped"
    epochs = {row[1]: row[0] for row in expected.journal}  # attempt -> epoch
    inside = [a for a, epoch in epochs.items() if epochs.get(a + 1) == epoch]  # not the last
    attempts = [a for a in inside if a > (saving.every_n_steps or 0)] or inside
    hook = chance.choice(["on_step_start", "on_microbatch_end", "on_step_end"])
    stop = Stop(chance.choice(attempts), hook, kills=chance.random() < 0.5)
    body = whole_run(settings, saving, stop)
    with running(settings.size, folder, lambda *rank: body(folder, *rank)) as job:
        if not job.wait():
            report.problems.append(f"did not end\n{job.log()}")
    if set(job.codes.values()) != {-signal.SIGKILL if stop.kills else RAISED}:
        report.problems.append(f"was to stop, but ended with {job.codes}\n{job.log()}")
    check_folder(report, folder, settings, saving, max([-1, *job.acked]))
    report.resumed += settings.newest(folder) >= 0
    body = whole_run(settings, saving)
    with running(settings.size, folder, lambda *rank: body(folder, *rank)) as job:
        if not job.wait():
            report.problems.append(f"did not end\n{job.log()}")
    check_end(report, job, folder)
    compare(report, expected, folder, settings)
    return report


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Which signals come, when, and to whom.

    Args:
        place: A hook, "save" (while the state is collected), "vote" (between the last vote and
            the end), "time limit", or "any" for a moment `fraction` of the run after its begin.
        to_all: To all processes with their workers, else to one rank.
        again: A second signal comes a micro-batch later.
    """

    signum: int = signal.SIGTERM
    place: str = "any"
    count: int = 3  # at which call of the hook
    rank: int = 0
    to_all: bool = False
    again: bool = False
    fraction: float = 0.3


class Sender(Callback):
    """Sends signals to its own process, or to all, at a hook."""

    def __init__(self, signals: Signals, rank: int) -> None:
        self.signals = signals
        self.rank = rank
        self.calls = 0
        self.sent = False

    def reached(self, place: str) -> None:
        if place != self.signals.place or self.rank != self.signals.rank or self.sent:
            return
        self.calls += 1
        if self.calls == self.signals.count:
            self.send()

    def send(self) -> None:
        self.sent = True
        if self.signals.to_all:
            os.killpg(os.getpgrp(), self.signals.signum)
        else:
            os.kill(os.getpid(), self.signals.signum)

    def on_fit_start(self, run: Run) -> None:
        self.reached("on_fit_start")

    def on_epoch_start(self, run: Run) -> None:
        self.reached("on_epoch_start")

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        if self.sent and self.signals.again:
            self.send()
        self.reached("on_microbatch_start")

    def on_gradients(self, run: Run) -> None:
        self.reached("on_gradients")

    def on_evaluation_batch_end(self, run: Run) -> None:
        self.reached("on_evaluation_batch_end")

    def on_epoch_end(self, run: Run) -> None:
        self.reached("on_epoch_end")

    def on_fit_end(self, run: Run) -> None:
        self.reached("on_fit_end")


def interrupted_run(settings: Settings, saving: Saving, signals: Signals) -> Callable[..., int]:
    """Return the body of a rank that is signalled; it ends with the code of the interruption."""

    def body(folder: Path, rank: int, pipe: int) -> int:
        chained: list[int] = []
        before = {signum: lambda number, _: chained.append(number) for signum in _CAUGHT}
        for signum, handler in before.items():
            signal.signal(signum, handler)
        sender = Sender(signals, rank)
        minutes = 0.05 * signals.fraction / 60 if signals.place == "time limit" else None
        training = Training(rank, folder, settings, saving, pipe, sender, minutes=minutes)
        training.ema.on_save = lambda: sender.reached("save")
        code = 0
        try:
            training.fit()
        except Interrupted as interrupted:
            code = int(interrupted.code or 0)
        if any(signal.getsignal(signum) is not before[signum] for signum in before):
            print("handlers were not put back")
            return 98
        if len(chained) > 1 or (sender.sent and len(chained) != 1):
            print(f"handlers from before fit were called {len(chained)} times")
            return 97
        run = training.trainer.run
        assert run is not None
        (folder / f"step-of-{rank}").write_text(str(run.state.step))
        (folder / f"heard-by-{rank}").write_text(str(run.internals.interrupts.received))
        training.keep_outcome()
        training.trainer.close()
        return code

    return body


_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 75}


def survive_signals(
    settings: Settings, saving: Saving, signals: Signals, folder: Path, delay: float | None = None
) -> Report:
    """Signal a run, check that it saved once and left as it should, resume, and compare.

    Args:
        delay: Seconds from its begin to a signal from outside; None: a hook sends it.
    """
    expected = reference(settings, folder / "reference")
    report, folder = Report(kills=1), folder / "signalled"
    body = interrupted_run(settings, saving, signals)
    with running(settings.size, folder, lambda *rank: body(folder, *rank)) as job:
        if delay is not None:
            if not job.wait_for_begin():
                report.problems.append(f"never began\n{job.log()}")
            job.wait(delay)
            job.send(signals.signum, None if signals.to_all else signals.rank)
        if not job.wait():
            job.send(signal.SIGQUIT)
            job.wait(1.0)
            report.problems.append(f"did not end\n{job.log()}")
        elif job.left_behind():
            report.problems.append("processes were left behind")
    if delay is not None and _was_late(job, folder):
        return Report()  # this run was faster than the undisturbed one: no trial
    _check_interruption(report, job, settings, signals, folder)
    check_folder(report, folder, settings, saving, max([-1, *job.acked]))
    report.resumed += settings.newest(folder) >= 0
    after = whole_run(settings, saving)
    with running(settings.size, folder, lambda *rank: after(folder, *rank)) as job:
        if not job.wait():
            report.problems.append(f"did not end\n{job.log()}")
    check_end(report, job, folder)
    compare(report, expected, folder, settings)
    return report


def _was_late(job: Job, folder: Path) -> bool:
    """Return whether the signal came when `fit` was over on every process."""
    heard = {path.read_text() for path in folder.glob("heard-by-*")}
    return heard == {"0"} and set(job.codes.values()) == {0}


def _check_interruption(
    report: Report, job: Job, settings: Settings, signals: Signals, folder: Path
) -> None:
    code = 75 if signals.place == "time limit" else CODES[signal.Signals(signals.signum)]
    if signals.again:
        first = [job.codes[signals.rank]] if not signals.to_all else [*job.codes.values()]
        if code not in first:
            report.problems.append(f"second signal: exit codes {job.codes}\n{job.log()}")
        return
    if set(job.codes.values()) != {code}:
        report.problems.append(f"exit codes {job.codes}, expected {code}\n{job.log()}")
        return
    steps = {(folder / f"step-of-{rank}").read_text() for rank in range(settings.size)}
    entries = CheckpointStore(folder / "checkpoints").checkpoints()
    if [str(entry.step) for entry in entries] != [*steps]:
        report.problems.append(f"ended at steps {steps}, saved {[e.path.name for e in entries]}")
    if list(folder.glob("checkpoints/.*")):
        report.problems.append("scratch folders were left")
