"""The watch over several machines: each process has one connection to process 0 (rule 32)."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.system.harness import Job, running
from trainkit import Callback, Run, StepResult, Trainer, Watchdog
from trainkit.distributed import Processes, check_called_by_all
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.watch.exit import EXIT_STALLED
from trainkit.watch.job_watch import JobWatch
from trainkit.watch.member import Member
from trainkit.watch.report import first_of, read_all

PER_MACHINE = 2


def pretend(rank: int) -> None:
    """Let every two processes believe that they have a machine of their own."""
    here = Member.this()
    there = replace(here, machine=f"{here.machine} {rank // PER_MACHINE}", host=f"m{rank // 2}")
    Member.this = staticmethod(lambda: there)  # type: ignore[method-assign]


def _connect(rank: int) -> tuple[int, int | None]:
    pretend(rank)
    processes = Processes.start()
    for _ in range(2):  # what only process 0 decides comes back to all
        check_called_by_all(processes, "this")
        processes.barrier()
    assert isinstance(processes.watch, JobWatch)
    links = processes.watch._this.links
    counted = len(links.children), None if links.parent is None else links.parent.rank
    processes.barrier()
    return counted


@pytest.mark.e2e
def test_each_process_has_one_connection_to_process_0() -> None:
    assert run_ranks(4, _connect) == [(3, None), (0, 0), (0, 0), (0, 0)]


class At(Callback):
    """Does something to one process after a step."""

    def __init__(self, who: int, act: Callable[[], None]) -> None:
        self.who, self.act = who, act

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 1 and run.strategy.processes.rank == self.who:
            self.act()


def _train(rank: int, pipe: int, folder: Path, who: int, act: Callable[[], None]) -> int:
    pretend(rank)
    os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
    limits = Watchdog(step=4, first_step=60, evaluation=60, save=60, end=60, setup=120)
    trainer = Trainer(max_epochs=1, callbacks=[At(who, act)], watchdog=limits)
    data = DataLoader(TensorDataset(torch.ones(32, 3), torch.ones(32, 1)), 2)
    trainer.fit(
        nn.Linear(3, 1), data, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=nn.MSELoss()
    )
    return 0


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CASES = [(who, act) for who in (0, 1, 2) for act in (_die, _stop)]


@pytest.mark.parametrize(("who", "act"), with_few([(2, _die)], CASES))
def test_a_process_of_any_machine_ends_all(
    who: int, act: Callable[[], None], tmp_path: Path
) -> None:
    job: Job
    with running(4, tmp_path, partial(_train, folder=tmp_path, who=who, act=act)) as job:
        stays = who if act is _stop and who // PER_MACHINE else None  # for its launcher to kill
        end = time.monotonic() + 120
        while len(job.codes) < 4 - (stays is not None) and time.monotonic() < end:
            job.wait(0.2)
        expected = EXIT_OTHER_FAILED if act is _die else EXIT_STALLED
        others = {rank: code for rank, code in job.codes.items() if rank != who}
        assert len(others) == 3, job.log()
        assert set(others.values()) <= {expected, 1, EXIT_OTHER_FAILED}, job.log()
        assert expected in others.values(), job.log()
        assert stays is not None or not job.left_behind()
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None, job.log()
    assert first[1].process == who, job.log()
    words = "ended without a word" if act is _die else "does not answer"
    assert words in first[1].cause, job.log()


def _end_in_turn(rank: int, pipe: int, first: tuple[int, ...]) -> int:
    pretend(rank)
    processes = Processes.start()
    processes.barrier()
    if rank not in first:
        time.sleep(3)
    processes.close()
    return 0


@pytest.mark.parametrize(
    "first", [(0,), *(pytest.param(each, marks=pytest.mark.e2e) for each in [(2,), (1, 2, 3)])]
)
def test_processes_of_several_machines_may_end_in_any_order(
    first: tuple[int, ...], tmp_path: Path
) -> None:
    with running(4, tmp_path, partial(_end_in_turn, first=first)) as job:
        assert job.wait(), job.log()
    assert set(job.codes.values()) == {0}, job.log()
    assert "trainkit" not in job.log()


def _break_for_one(rank: int, pipe: int, folder: Path) -> int:
    os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
    pretend(rank)
    processes = Processes.start()
    processes.barrier()
    if rank == 2:
        time.sleep(0.5)  # as if what process 1 hears came late
        _die()
    if rank == 1:
        assert isinstance(processes.watch, JobWatch)
        processes.watch.fail_for_good(
            RuntimeError("[../gloo/pair.cc:547] Read error: Connection reset by peer")
        )
        return 0
    time.sleep(120)  # process 0 is in no collective that breaks
    return 0


def test_who_hears_of_a_loss_only_by_process_0_names_the_process_too(tmp_path: Path) -> None:
    with running(4, tmp_path, partial(_break_for_one, folder=tmp_path)) as job:
        assert job.wait(), job.log()
    assert sorted(map(int, job.codes.values())) == [-signal.SIGKILL, 69, 69, 69], job.log()
    assert "none has said why" not in job.log()
