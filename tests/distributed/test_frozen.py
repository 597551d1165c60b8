"""A process that is frozen, a connection that breaks, a machine that is gone (rule 32)."""

import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import pbkdf2_hmac
from pathlib import Path

import pytest
import torch

from tests.cli.launcher import Launcher
from tests.helpers.tiers import with_few
from tests.system.faults import FAULTS, inject
from tests.system.harness import Job, running
from trainkit import Accelerator
from trainkit.distributed import Processes
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.launch import workers
from trainkit.watch import connections, timing
from trainkit.watch.connections import Line
from trainkit.watch.exit import EXIT_STALLED
from trainkit.watch.job_watch import JobWatch
from trainkit.watch.member import Member, started_at
from trainkit.watch.report import first_of, read_all
from trainkit.watch.stall import is_frozen

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def _hurry() -> None:
    """Let a watch find out in seconds what takes it a minute."""
    timing.BEAT, timing.TICK, timing.LONGEST_PAUSE = 0.3, 0.1, 0.5
    timing.STOPPED, timing.SILENT = 2.0, 6.0


def _apart(rank: int) -> None:
    """Let each process believe that it has a machine of its own."""
    here = Member.this()
    there = replace(here, machine=f"{here.machine} {rank}", host=f"m{rank}", number=str(rank))
    Member.this = staticmethod(lambda: there)  # type: ignore[method-assign]


def _links(processes: Processes) -> connections.Links:
    assert isinstance(processes.watch, JobWatch)
    return processes.watch._this.links


def _run(size: int, folder: Path, body: Callable[[int], None], seconds: float = 200.0) -> Job:
    def run(rank: int, pipe: int) -> int:
        os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
        _hurry()
        body(rank)
        return 0

    with running(size, folder, run) as job:
        assert job.wait(seconds), job.log()
        assert not job.left_behind()
    return job


def _stop_in_a_loop(rank: int, who: int, apart: bool) -> None:
    if apart:
        _apart(rank)
    accelerator = Accelerator(cpu=True)
    for step in range(10**9):
        accelerator.reduce(torch.ones(1))
        if step == 5 and rank == who:
            os.kill(os.getpid(), signal.SIGSTOP)


@LINUX
@pytest.mark.parametrize("who", with_few([1], [0, 1, 2]))
def test_a_frozen_process_ends_a_loop_of_the_users_own(who: int, tmp_path: Path) -> None:
    job = _run(3, tmp_path, partial(_stop_in_a_loop, who=who, apart=False))
    others = {code for rank, code in job.codes.items() if rank != who}
    # 99 is what the harness says of one whose collective broke first.
    assert EXIT_STALLED in others <= {EXIT_STALLED, EXIT_OTHER_FAILED, 99}, job.log()
    assert job.codes[who] == -signal.SIGKILL
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert first[1].process == who, job.log()
    assert f"process {who} (pid " in first[1].cause
    assert "it is stopped (SIGSTOP)" in first[1].cause


def _stop_and_let_the_last_find_it(rank: int) -> None:
    timing.STOPPED += 0.5 * (rank == 1)
    _stop_in_a_loop(rank, who=0, apart=False)


@pytest.mark.e2e
@LINUX
def test_why_it_ended_is_told_where_the_last_process_finds_it_earlier(tmp_path: Path) -> None:
    job = _run(3, tmp_path, _stop_and_let_the_last_find_it)
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert "it is stopped (SIGSTOP)" in first[1].cause, job.log()


@LINUX
@pytest.mark.e2e
def test_one_that_is_alone_on_its_machine_is_found_too(tmp_path: Path) -> None:
    with running(2, tmp_path, partial(_stop_apart, folder=tmp_path)) as job:
        end = time.monotonic() + 120
        while 0 not in job.codes and time.monotonic() < end:
            job.wait(0.2)
        assert job.codes == {0: EXIT_STALLED}, job.log()  # the other is for its launcher to kill
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert "process 1 (pid " in first[1].cause
    assert "does not answer since" in first[1].cause


def _stop_apart(rank: int, pipe: int, folder: Path) -> int:
    os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
    _hurry()
    timing.SILENT, timing.ANSWER = 3.0, 2.0
    _stop_in_a_loop(rank, who=1, apart=True)
    return 0


def _hold_while_others_compute(rank: int) -> None:
    timing.TICK, timing.WAITS, timing.ANSWER, timing.BEAT = 0.2, 1.0, 5.0, 6.0
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if rank == 2:
        ctypes.PyDLL(None).sleep(300)  # keeps the interpreter lock, and uses no processor
    working = threading.Thread(target=_work_without_the_lock, daemon=True)
    working.start()
    if rank == 0:
        accelerator.gather(torch.ones(1))
    accelerator.wait_for_everyone()


def _work_without_the_lock() -> None:
    while True:
        pbkdf2_hmac("sha256", b"works", b"without the interpreter lock", 1_000_000)


@LINUX
@pytest.mark.e2e
def test_who_asks_and_computes_meanwhile_is_not_blamed(tmp_path: Path) -> None:
    job = _run(3, tmp_path, _hold_while_others_compute)
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert first[1].process == 2, job.log()
    assert "holds the interpreter lock" in first[1].cause


@LINUX
@pytest.mark.e2e
def test_who_holds_the_lock_and_computes_is_found_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "ANSWER", 1000.0)
    monkeypatch.setattr(timing, "LOST", 1000.0)
    (fault,) = (each for each in FAULTS if (each.act, each.place) == ("hold", "backward"))
    assert not inject(fault, tmp_path, 100.0).problems


def _stop_all(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if rank == 0:
        child = os.fork()
        if child == 0:
            time.sleep(4.0)
            os.killpg(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.setpgid(child, child)
        os.killpg(0, signal.SIGSTOP)
        os.waitpid(child, 0)
    for _ in range(5):
        time.sleep(0.2)
        accelerator.wait_for_everyone()


@LINUX
@pytest.mark.e2e
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    job = _run(3, tmp_path, _stop_all)
    assert job.codes == {0: 0, 1: 0, 2: 0}, job.log()
    assert not (tmp_path / "reports").exists()


@pytest.fixture
def program() -> Iterator[tuple[subprocess.Popen[bytes], Line]]:
    """Give a process of this machine that says nothing, and a line to it."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = Line(ours, trusted=True)
    here = Member.this()
    found.rank = 1
    found.member = replace(here, pid=process.pid, started=started_at(process.pid))
    found.silent = timing.STOPPED + 1
    while "S" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[:1]:
        time.sleep(0.01)
    yield process, found
    process.kill()
    process.communicate()
    for end in (ours, theirs):
        end.close()


def _state(pid: int, state: str) -> None:
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end
        time.sleep(0.01)


@LINUX
def test_who_is_silent_is_looked_at_before_it_is_blamed(
    program: tuple[subprocess.Popen[bytes], Line],
) -> None:
    process, found = program
    assert not is_frozen(found)  # it has used a processor since it was looked at last
    assert found.silent == 0.0
    found.silent = timing.STOPPED + 1
    assert not is_frozen(found)  # nor need it be blamed for long where it has not
    found.silent = timing.SILENT + 1
    assert is_frozen(found)
    found.silent = timing.STOPPED - 1
    process.send_signal(signal.SIGSTOP)
    _state(process.pid, "T")
    assert not is_frozen(found)
    found.silent = timing.STOPPED + 1
    assert is_frozen(found)


@pytest.mark.e2e
@LINUX
def test_a_debugger_ends_nothing(program: tuple[subprocess.Popen[bytes], Line]) -> None:
    process, found = program
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    if libc.ptrace(attach, process.pid, None, None):
        pytest.skip("nobody may debug here")
    try:
        _state(process.pid, "t")
        found.used = found.member.used() if found.member else 0.0
        found.silent = timing.SILENT + 1
        assert not is_frozen(found)
    finally:
        os.waitpid(process.pid, os.WUNTRACED)
        libc.ptrace(detach, process.pid, None, None)


@LINUX
@pytest.mark.e2e
def test_the_launcher_kills_one_that_nobody_else_can_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LOOK_PAUSE", 0.2)
    script = tmp_path / "stop.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    launcher = Launcher(["launch", "--cpu", "--num_processes", "1", script], tmp_path, forked=True)
    assert launcher.wait() == 128 + signal.SIGKILL
    assert "process 0 was stopped (SIGSTOP), and has been killed" in launcher.output


# Connections.


def _break(rank: int) -> None:
    _apart(rank)
    processes = Processes.start()
    processes.barrier()
    cut = _links(processes).parent
    if rank == 1 and cut is not None:
        cut.connection.shutdown(socket.SHUT_RDWR)
    time.sleep(100)


@LINUX
def test_a_connection_that_breaks_ends_the_job(tmp_path: Path) -> None:
    job = _run(3, tmp_path, _break)
    assert set(job.codes.values()) == {EXIT_OTHER_FAILED}, job.log()
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert "or cut off" in first[1].cause


def _deafen(found: socket.socket) -> None:
    """Let the kernel drop whatever comes for a socket, as a network does that is gone."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter: return 0
    program = struct.pack("HL", 1, ctypes.addressof(drop))
    found.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def _vanish(rank: int) -> None:
    timing.UNREACHABLE = 2
    _apart(rank)
    processes = Processes.start()
    links = _links(processes)
    processes.barrier()
    for key in links._selector.get_map().values():
        if isinstance(key.fileobj, socket.socket) and key.fileobj.family != socket.AF_UNIX:
            _deafen(key.fileobj)
    time.sleep(100)


@LINUX
@pytest.mark.e2e
def test_a_machine_that_is_gone_is_not_called_killed(tmp_path: Path) -> None:
    job = _run(2, tmp_path, _vanish)
    assert job.codes == {0: EXIT_OTHER_FAILED, 1: EXIT_OTHER_FAILED}, job.log()
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    assert re.search(r"unreachable for \d+ s: machine, network or power \(process", first[1].cause)
    assert "machine 1 (m1)" in first[1].cause or "machine 0 (m0)" in first[1].cause
    assert "killed" not in job.log()
