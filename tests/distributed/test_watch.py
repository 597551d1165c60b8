"""The watch: who hears of what, and who leaves when (rule 32)."""

import atexit
import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.warm import warm
from tests.system.harness import TIME_LIMIT, Job, running
from trainkit import Accelerator, Callback, Run, Trainer, Watchdog
from trainkit.distributed import Processes
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.errors import ConfigError
from trainkit.launch import failure
from trainkit.watch import timing, where
from trainkit.watch.connections import GONE, Address, Links, open_server, reach_server
from trainkit.watch.hints import hint_for
from trainkit.watch.job_watch import JobWatch
from trainkit.watch.member import Member
from trainkit.watch.report import Report, first_of, read_all
from trainkit.watch.stall import judge


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_one_process_alone_starts_no_thread() -> None:
    before = threading.active_count()
    assert Processes.start().watch is None
    assert threading.active_count() == before


def _threads(rank: int) -> list[int]:
    counts = []
    for _ in range(2):
        processes = Processes.start()
        counts.append(len(_watchers()))
        processes.barrier()  # where process 0 has ended, the others watch no more
        processes.close()
        for thread in _watchers():  # `close` itself waits for two seconds
            thread.join(60)
        counts.append(len(_watchers()))
    return counts


def test_the_thread_ends_with_close() -> None:
    assert run_ranks(2, _threads) == [[1, 0, 1, 0]] * 2


def _closing(rank: int) -> float:
    watch = Processes.start().watch
    assert isinstance(watch, JobWatch)
    if rank:
        return 0.0  # and says nothing that would wake the other
    links = watch._this.links
    wake = links.wake

    def wakes_it_at_once() -> None:
        wake()
        time.sleep(0.2)  # so the thread has done what there is before this one goes on

    links.wake = wakes_it_at_once  # type: ignore[method-assign]
    begin = time.monotonic()
    watch.close()
    return time.monotonic() - begin


def test_close_waits_for_nothing() -> None:
    assert max(run_ranks(2, _closing)) < 1.5  # the thread looks by itself every 5 s


@contextmanager
def _links(size: int) -> Iterator[tuple[Links, Address, list[Links]]]:
    """Give process 0's end, which another thread serves while the others connect."""
    server, address = open_server(size, one_machine=True)
    clients: list[Links] = []

    def connect() -> None:
        for rank in range(1, size):
            client = reach_server(address, rank, size)
            assert client is not None
            clients.append(client)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():
        server.poll(0.01)
    try:
        yield server, address, clients
    finally:
        for links in (server, *clients):
            links.close()


def _heard(links: Links, others: tuple[Links, ...] = ()) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        for other in others:
            other.poll(0.02)
        found = [(rank, message["kind"]) for rank, message in links.poll(0.02)]
    return found


def test_what_one_process_says_reaches_all_others() -> None:
    with _links(3) as (server, _, (first, second)):
        first.send({"kind": "failed"})
        assert _heard(server) == [(1, "failed")]
        assert _heard(second) == [(1, "failed")]
        server.send({"kind": "done"})
        assert _heard(first) == [(0, "done")]
        assert _heard(second) == [(0, "done")]


def test_a_connection_that_ends_is_heard_of_by_all() -> None:
    with _links(3) as (server, _, (first, second)):
        first.close()
        assert _heard(server) == [(1, GONE)]
        assert _heard(second) == [(1, GONE)]
        server.close()
        assert _heard(second) == [(0, GONE)]


@pytest.mark.parametrize(
    "words",
    [
        b"\x80\x04garbage\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "hello", "token": "wrong", "rank": 2}\n{"kind": "failed"}\n',
        b"x" * 3_000_000,
        b"[" * 1_000 + b"\n",
        b"[" * 60_000 + b"\n",
        b'{"kind": "hello", "token": "\\ud800", "rank": 1}\n',
        b"[1]\n",
        b'{"kind": "hello", "token": "\xff", "rank": 1}\n',
        b'{"kind": "hello", "token": {}, "rank": [], "who": 1}\n',
        b'{"kind": "hello", "token": 1e999, "rank": true, "who": []}\n',
        b"1" * 1_000 + b"\n",
        b"9" * 900 + b"e9999\n",
        b"null\n" * 150,
        b"\n" * 900,
        b'{"kind": 1}\n',
        b'{"kind": "beat"}\n' * 50,
        b'{"kind": "' + b"\\" * 1_000 + b'"}\n',
        b'{"a":' * 150 + b"\n",
        b"\xef\xbb\xbf{}\n",
        b"\x00" * 1_000,
        b"",
    ],
)
def test_strangers_are_turned_away(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with _links(2) as (server, address, (client,)):
        monkeypatch.setattr(timing, "STRANGER", 1.0)
        with socket.create_connection((address.host, address.port)) as stranger:
            sender = threading.Thread(target=lambda: stranger.sendall(words))
            sender.start()
            stranger.settimeout(0.01)
            closed = False
            while not closed and words:
                assert server.poll(0.01) == []
                try:
                    closed = stranger.recv(1) == b""
                except ConnectionError:
                    closed = True
                except TimeoutError:
                    continue
            with pytest.MonkeyPatch.context() as patch:  # a reset connection ends the thread
                patch.setattr(threading, "excepthook", lambda _: None)
                sender.join(5)
        assert [heard for heard in server.poll(0.01) if heard[1]["kind"] != GONE] == []
        client.send({"kind": "done"})
        assert _heard(server) == [(1, "done")]


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "STRANGER", 0.05)
    with _links(2) as (server, address, (client,)):
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.settimeout(0.01)
            closed = False
            while not closed:
                assert server.poll(0.01) == []
                with suppress(TimeoutError):
                    closed = stranger.recv(1) == b""
        client.send({"kind": "done"})
        assert _heard(server) == [(1, "done")]


def test_a_process_has_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with _links(3) as (server, address, (first, _)):
        found: list[Any] = []
        another = replace(Member.this(), pid=1)
        monkeypatch.setattr(Member, "this", lambda: another)
        thread = threading.Thread(target=lambda: found.append(reach_server(address, 1, 3)))
        thread.start()
        while thread.is_alive():
            server.poll(0.01)
        assert found == [None]
        first.send({"kind": "done"})
        assert _heard(server) == [(1, "done")]


def test_a_fork_does_not_hide_the_end_of_its_parent() -> None:
    with _links(2) as (server, _, (client,)):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            client.close()
            assert _heard(server) == [(1, GONE)]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Whole jobs.


def _run(size: int, folder: Path, body: Callable[[int], None], seconds: float = TIME_LIMIT) -> Job:
    def run(rank: int, pipe: int) -> int:
        os.environ["TRAINKIT_REPORT_DIR"] = str(folder / "reports")
        body(rank)
        return 0

    with running(size, folder, run) as job:
        assert job.wait(seconds), job.log()
    return job


def _end_one_by_one(rank: int) -> None:
    processes = Processes.start()
    processes.all_reduce(torch.ones(1))
    time.sleep((processes.size - rank) * 0.3)  # process 0 last
    processes.close()
    time.sleep(rank * 0.3)  # process 0 is gone first


def test_processes_may_end_at_different_times(tmp_path: Path) -> None:
    job = _run(3, tmp_path, _end_one_by_one)
    assert job.codes == {0: 0, 1: 0, 2: 0}
    assert not (tmp_path / "reports").exists(), job.log()


def _raise_on_all(rank: int) -> None:
    class Raiser(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            time.sleep(0.5 * rank)
            raise ValueError("agreed")

    data = DataLoader(TensorDataset(torch.ones(16, 3), torch.ones(16, 1)), 2)
    trainer = Trainer(max_epochs=1, callbacks=[Raiser()])
    for _ in range(2):  # what is caught ends nobody, and the next fit is another one
        with pytest.raises(ValueError, match="agreed"):
            trainer.fit(
                nn.Linear(3, 1), data, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=_loss
            )
    trainer.processes.wait_for_everyone()
    trainer.close()


_loss = nn.MSELoss()


def test_an_error_that_all_raise_may_be_caught(tmp_path: Path) -> None:
    job = _run(2, tmp_path, _raise_on_all)
    assert job.codes == {0: 0, 1: 0}, job.log()


def _children(rank: int, folder: Path) -> None:
    if rank == 0:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_child, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0, 0]


def _child(rank: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        TRAINKIT_INIT_METHOD=f"file://{folder}/init",
    )  # fmt: skip
    Processes.start().barrier()
    time.sleep(0.3 * rank)  # ends without a word, in order: `multiprocessing` runs no `atexit`


def test_children_of_multiprocessing_end_in_order(tmp_path: Path) -> None:
    job = _run(1, tmp_path, partial(_children, folder=tmp_path))
    assert job.codes == {0: 0}, job.log()
    assert not (tmp_path / "reports").exists(), job.log()


_OWN_LOOP = """
import os, sys, time, weakref
import torch, torch.distributed
from trainkit import Accelerator

kind = sys.argv[1]
if kind == "adopted":
    torch.distributed.init_process_group("gloo", init_method=os.environ["TRAINKIT_INIT_METHOD"],
        rank=int(os.environ["RANK"]), world_size=2)
accelerator = Accelerator(cpu=kind == "slow thread")
accelerator.reduce(torch.ones(1))
if kind == "slow thread":  # one of gloo's that lets go of a tensor when the script is over
    tensor = torch.ones(3)
    torch.distributed.all_reduce(tensor, async_op=True)
    kept = weakref.ref(tensor, lambda _: time.sleep(0.3))
    del tensor
if accelerator.process_index == 1:
    if kind == "exit":
        os._exit(0)
    raise KeyError("mine")
if kind == "compute":
    time.sleep(60)
torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    "kind", with_few(["raise"], ["raise", "adopted", "exit", "compute", "slow thread"])
)
def test_loops_of_the_users_own_are_watched(kind: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "TRAINKIT_INIT_METHOD": f"file://{tmp_path}/init",
        "TRAINKIT_REPORT_DIR": str(tmp_path / "reports"),
    }
    start = [sys.executable, "-c", _OWN_LOOP, kind]
    # That thread comes while modules are taken down.
    with nullcontext() if kind == "slow thread" else warm():
        ranks = [
            subprocess.Popen(
                start, env={**environment, "RANK": str(r)}, stderr=subprocess.PIPE, text=True
            )
            for r in range(2)
        ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert ranks[0].returncode == EXIT_OTHER_FAILED, errors
    text = failure.show(tmp_path / "reports")
    assert text is not None
    if kind == "exit":
        assert ranks[1].returncode == 0
        assert "process 1 (pid" in text
        assert "ended without a word" in text
        return
    assert ranks[1].returncode == 1
    assert errors[1].count("Traceback (most recent call last)") == 1
    assert "process 1 of 2" in text
    assert "KeyError: 'mine'" in text
    assert "leaves because process 1 failed: KeyError: 'mine'" in errors[0]
    assert "Traceback" not in errors[0]


def _mismatch(rank: int) -> str:
    os.environ["TRAINKIT_DEBUG"] = "1"
    processes = Processes.start()
    processes.barrier()
    with pytest.raises(RuntimeError) as caught:
        torch.distributed.all_reduce(torch.ones(3 + 2 * rank))
    processes.barrier()
    processes.close()
    return str(caught.value)


def test_debugging_names_who_had_which_tensor() -> None:
    for text in run_ranks(2, _mismatch):
        assert "TensorShape=[3]" in text
        assert "TensorShape=[5]" in text
        assert "different collectives" in hint_for("RuntimeError", text)


def _die_while_others_compute(rank: int) -> None:
    Processes.start().barrier()
    if rank == 1:
        os._exit(3)
    sum(0 for _ in iter(int, 1))  # for ever, in Python


def test_a_lost_process_ends_one_that_computes() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError, match=f"rank 0 .*exit code {EXIT_OTHER_FAILED}"):
        run_ranks(2, _die_while_others_compute)
    assert time.monotonic() - start < 200  # the ranks' own limit is 240


# Parts.

_ME = Member("a", "machine", 1, "0")


def _state(inside: str, step: int = 3) -> dict[str, Any]:
    line = "x.py:1 in `f`"
    text = f"in `{inside}`, called at {line} (phase train, after step {step})"
    return {"inside": inside, "line": line, "step": step, "text": text}


@pytest.mark.parametrize(
    ("states", "process", "text"),
    [
        ({0: _state("backward"), 2: _state("backward")}, 1, "^process 1 is silent$"),
        ({}, 0, "^process 0 is silent; process 1 is silent; process 2 is silent$"),
        ({0: _state("a"), 1: _state(""), 2: _state("a")}, 1, "process 1 is at x.py:1"),
        ({0: _state("a"), 1: _state(""), 2: _state("")}, 1, "process 1 is at.*process 2 is"),
        ({0: _state("a"), 1: _state("b"), 2: _state("a")}, None, "different places.*1 in `b`"),
        ({0: _state("a"), 1: _state("a", 2), 2: _state("a")}, None, "different places.*step 2"),
        ({r: _state("backward" if r else "a") for r in range(3)}, None, "find_unused_parameters"),
        ({r: _state("backward", 2 + r) for r in range(3)}, None, r"after step 4\)$"),
        ({0: _state("a"), 1: _state("a"), 2: _state("a")}, None, "the same place"),
        ({0: _state(""), 1: _state(""), 2: _state("")}, None, "no process is in a collective"),
    ],
)
def test_the_verdict(states: dict[int, Any], process: int | None, text: str) -> None:
    verdict = judge(states, dict.fromkeys({0, 1, 2} - states.keys(), "is silent"))
    assert verdict.process == process
    assert re.search(text, verdict.text), verdict.text


def test_the_modules_whose_frames_wait_are_there() -> None:
    assert all(map(importlib.import_module, where._WAITING))


def test_only_the_process_that_was_meant_is_killed() -> None:
    me = Member.this()
    assert not Member(me.host, me.machine, me.pid, "another start").kill(signal.SIGKILL)
    assert me.kill(0)
    assert not me.is_stopped()


@pytest.mark.parametrize("value", [0, -1, math.nan, True, "3"])
def test_limits_must_be_positive_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"`Watchdog\(save=\.\.\.\)` must be a positive number"):
        Watchdog(save=value)


def test_limits_follow_the_phase() -> None:
    watchdog = Watchdog(setup=1, first_step=2, step=3, evaluation=4, save=5, end=math.inf)
    limits = [watchdog.limit(p, first=False) for p in ("setup", "train", "evaluate", "save", "end")]
    assert limits == [1, 3, 4, 5, math.inf]
    assert Watchdog(step=3, first_step=9).limit("train", first=True) == 9
    assert watchdog.limit("train", first=True) == 3
    assert watchdog.limit("done", first=False) == math.inf


def _report(reporter: int, **more: Any) -> Report:
    settings: dict[str, Any] = {"kind": "error", "cause": "ValueError: x", "process": reporter}
    return Report(processes=2, reporter=reporter, **settings | more)


def test_the_first_report_is_the_earliest_that_tells_the_cause(tmp_path: Path) -> None:
    _report(0, secondary=True, kind="left", time=1.0, pid=5).write(tmp_path)
    _report(1, time=3.0, pid=6, cause="the first").write(tmp_path)
    _report(2, time=4.0, pid=7).write(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"step": 3}))
    found = read_all(tmp_path)
    assert [report.reporter for _, report in found] == [0, 1, 2]
    first = first_of(found)
    assert first is not None
    assert first[1] == _report(1, time=3.0, pid=6, cause="the first")
    text = failure.show(tmp_path)
    assert text is not None
    assert "the first" in text
    assert "Failed by itself too: process 2." in text
    assert str(first[0]) in text


def test_what_the_launcher_saw_is_told_of_a_lost_process(tmp_path: Path) -> None:
    _report(0, kind="lost", process=1).write(tmp_path)
    text = failure.show(tmp_path, {0: "ended with code 69", 1: "was killed by SIGKILL"})
    assert text is not None
    assert "Process 1 was killed by SIGKILL." in text
    assert "code 69" not in text


def test_what_another_process_failed_by_itself_is_not_put_down_to_the_first(
    tmp_path: Path,
) -> None:
    _report(0, time=1.0).write(tmp_path)
    _report(1, time=2.0, cause="ValueError: another").write(tmp_path)
    text = failure.show(tmp_path)
    assert text is not None
    assert "Failed by itself too: process 1." in text


def test_one_process_alone_hears_nothing_of_others() -> None:
    for text in ("[../gloo/pair.cc:547] Connection closed by peer", "gloo: Timed out waiting"):
        assert hint_for("RuntimeError", text, alone=True) == ""


def _fit_without(rank: int, left: int, how: str) -> None:
    data = DataLoader(TensorDataset(torch.ones(16, 3), torch.ones(16, 1)), 2)
    trainer = Trainer(max_epochs=1, callbacks=[])
    if rank == left and how == "close":
        trainer.close()
        time.sleep(3)  # it has left the job, not the machine
    elif rank == left:
        atexit._run_exitfuncs()  # as the interpreter does at its end
    else:
        try:
            trainer.fit(
                nn.Linear(3, 1), data, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=_loss
            )
        except RuntimeError as error:  # as the interpreter does where nobody catches it
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize(
    ("size", "left", "how"),
    with_few([(3, 1, "end")], [(2, 1, "end"), (2, 0, "end"), (3, 1, "end"), (2, 1, "close")]),
)
def test_who_ended_in_order_is_named_where_the_others_wait(
    size: int, left: int, how: str, tmp_path: Path
) -> None:
    job = _run(size, tmp_path, partial(_fit_without, left=left, how=how))
    others = [rank for rank in range(size) if rank != left]
    assert job.codes[left] == 0, job.log()
    assert all(job.codes[rank] in (1, EXIT_OTHER_FAILED) for rank in others), job.log()
    first = first_of(read_all(tmp_path / "reports"))
    assert first is not None
    ended = "left the job by `close`" if how == "close" else "ended (with code 0|without an error)"
    told = rf"process {left} \(pid \d+ on .*\) {ended} while the others wait in `fit`"
    assert re.fullmatch(told, first[1].cause)
    assert (first[1].process, first[1].secondary) == (left, False)
    assert "behind `if rank == 0`" in first[1].hint
    assert len(re.findall(f"hint: {first[1].hint[:20]}", job.log())) == 1, job.log()
    assert "see the output of the others" not in job.log()


def test_no_report_has_nothing_to_show(tmp_path: Path) -> None:
    assert failure.show(tmp_path) is None
    assert failure.show(tmp_path / "missing") is None


BATCH_NORM = "Expected more than 1 value per channel when training, got input size [1, 3]"


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [
        ("MemoryError", "", "Out of memory"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: 9 bytes", "Out of memory"),
        ("OutOfMemoryError", "CUDA out of memory. Tried", "Out of memory"),
        ("RuntimeError", "[../gloo/pair.cc:547] Connection closed by peer", "none has said why"),
        ("RuntimeError", "[../gloo/pair.cc:547] Timed out waiting", "did not come"),
        ("DistNetworkError", "Connection reset by peer", "none has said why"),
        # What is none of a collective is not blamed on other processes.
        ("RuntimeError", "Connection refused by the database", ""),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", ""),
        ("BrokenPipeError", "[Errno 32] Broken pipe", ""),
        ("RuntimeError", "DataLoader timed out after 5 seconds", ""),
        ("TimeoutError", "timed out", ""),
        ("RuntimeError", "DataLoader worker (pid 3) is killed by signal: Bus error", "shm-size"),
        ("ValueError", BATCH_NORM, "`DataLoader(drop_last=True)`"),
        ("OSError", "[Errno 28] No space left on device", "disk is full"),
        ("RuntimeError", "Expected all tensors to be on the same device, but", "as buffers"),
        ("RuntimeError", "Expected all tensors to be on the same device, but", "is on the CPU"),
        ("RuntimeError", "aten.add got mixed torch.Tensor and DTensor, need", "model's forward"),
        ("RuntimeError", "DDP expects same model across all ranks, but Rank 0", "frozen on some"),
        ("AttributeError", "'Reducing' object has no attribute 'head'", "as a whole"),
        ("ValueError", "plain", ""),
    ],
)
def test_hints(kind: str, text: str, hint: str) -> None:
    assert hint in hint_for(kind, text)
    assert bool(hint) == bool(hint_for(kind, text))


def _crossed(rank: int) -> None:
    timing.TICK, timing.WAITS = 0.2, 1.0
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))  # process 1 never comes
    accelerator.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.e2e
def test_a_loop_of_the_users_own_that_hangs_for_ever_is_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, _crossed)
    assert "exit code 70" in caught.value.failures[0]
    assert "exit code 70" in caught.value.failures[1]
    text = capfd.readouterr().err
    assert "no progress: the processes wait in different places: process 0 in " in text
    assert "accelerator.gather(torch.ones(1))" in text
    assert re.search("process 1: in `[a-zA-Z_]+` .*called at ", text)


Call = Callable[[Accelerator], object]


def _gather(accelerator: Accelerator) -> object:
    return accelerator.gather(torch.ones(2))


def _reduce(accelerator: Accelerator) -> object:
    return accelerator.reduce(torch.ones(3))


def _wait(accelerator: Accelerator) -> None:
    accelerator.wait_for_everyone()


def _own_barrier(accelerator: Accelerator) -> object:
    return torch.distributed.barrier()


def _own_reduction(accelerator: Accelerator) -> object:
    return torch.distributed.all_reduce(torch.ones(1))


def _different(rank: int, ways: tuple[tuple[Call, ...], tuple[Call, ...]]) -> None:
    timing.TICK, timing.WAITS = 0.2, 1.0
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    for call in ways[rank]:
        call(accelerator)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ways", "shown"),
    [
        (((_gather,), (_wait,)), ("accelerator.gather(", "accelerator.wait_for_everyone()")),
        (((_gather, _reduce), (_reduce, _gather)), ("all_gather of uint8", "all_reduce of int64")),
        (((_own_barrier,), (_own_reduction,)), ("`barrier`", "`all_reduce`")),
    ],
    ids=["gather and barrier", "swapped", "of torch"],
)
def test_processes_in_different_collectives_of_one_group_are_ended(
    ways: tuple[tuple[Call, ...], tuple[Call, ...]],
    shown: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, _different, ways)
    assert all("exit code 70" in failure for failure in caught.value.failures.values())
    text = capfd.readouterr().err
    assert "no progress: the processes wait in different places: process 0 in " in text
    assert all(part in text for part in shown)


def _slow(rank: int) -> None:
    timing.TICK, timing.WAITS = 0.1, 0.3
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    for late in (0, 1, 0):
        if rank == late:
            time.sleep(0.8)
        accelerator.wait_for_everyone()
        if rank != late:
            time.sleep(0.8)
        accelerator.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.e2e
def test_slow_is_not_crossed() -> None:
    run_ranks(2, _slow)
