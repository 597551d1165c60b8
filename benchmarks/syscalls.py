"""Kills and failing disks at every system call of a save and its rotation, by strace.

Run it in the root of the repository, where `strace` is installed:

    OMP_NUM_THREADS=1 python -m benchmarks.syscalls

A child with a committed checkpoint of step 1 saves step 2 and rotates; at its k-th call of one kind
it is killed, or the call fails with EIO or ENOSPC, for every kind and every k. Afterwards a
checkpoint that was acknowledged must be there and everything visible must verify, and the next
save must succeed. Nothing of trainkit takes part in it. Exits with 1 if anything is lost.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from tests.checkpoint.toys import RUN, save_alone
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.checkpoint.saver import Saver
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError

CALLS = ("mkdir", "openat", "write", "fsync", "close", "rename", "unlinkat", "rmdir")
FAULTS = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
ACKED, RAISED = 0, 3  # exit codes of a child


def in_foreground(directory: Path) -> None:
    """Save step 2, and keep only that."""
    store = CheckpointStore(directory / "checkpoints")
    save_alone(store, 2)
    rotate(store, KeepPolicy(keep_last=1))


def in_background(directory: Path) -> None:
    """Do the same in a thread of its own."""
    saver = Saver(directory, Processes.start(), KeepPolicy(keep_last=1), run_id=RUN,
                  goes_on=True, background=True)  # fmt: skip
    try:
        saver.save(2, {"model": {"weight": torch.full((64, 64), 2.0)}}, {})
        saver.wait()
    finally:
        saver.close()


def child_of(save: Callable[[Path], None], directory: Path) -> tuple[int, int]:
    """Fork a child that waits for a byte before it saves; return its number and the pipe."""
    receive, send = os.pipe()
    child = os.fork()
    if child:
        os.close(receive)
        return child, send
    code = 99
    try:
        os.read(receive, 1)
        try:
            save(directory)
            code = ACKED
        except (CheckpointError, OSError):
            code = RAISED
    finally:
        os._exit(code)


def traced(save: Callable[[Path], None], directory: Path, call: str, fault: str, k: int) -> int:
    """Save with a fault at the k-th `call`; return the exit code, negative for a signal."""
    child, start = child_of(save, directory)
    command = ["strace", "-f", "-qq", "-p", str(child), "-o", os.devnull, "-e", f"trace={call}"]
    tracer = subprocess.Popen([*command, "-e", f"inject={call}:{fault}:when={k}"])
    status = Path(f"/proc/{child}/status")
    while "TracerPid:\t0\n" in status.read_text():
        if tracer.poll() is not None:
            raise SystemExit("strace could not attach: it needs the right to trace processes.")
        time.sleep(0.002)
    os.write(start, b".")
    os.close(start)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tracer.wait()
    return code


def check(directory: Path, code: int) -> list[str]:
    """Return what is wrong with the folder after a child ended with `code`."""
    store = CheckpointStore(directory / "checkpoints")
    problems: list[str] = []
    newest = store.newest_valid(problems.append)
    step = 0 if newest is None else newest.step
    if step < (2 if code == ACKED else 1):
        problems.append(f"step {step} is the newest")
    store.clean()
    left = [path.name for path in store.directory.iterdir() if path.name.startswith(".")]
    problems += [f"left behind: {name}" for name in left]
    with suppress(CheckpointError):
        save_alone(store, 3)
    if store.checkpoints()[-1].step != 3:
        problems.append("the next save failed")
    return problems


def main() -> None:
    """Print a row for each way to save, call and fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=100, help="calls of one kind at most")
    most = parser.parse_args().most
    if shutil.which("strace") is None:
        raise SystemExit("`strace` is not installed.")
    torch.set_num_threads(1)
    failed = total = 0
    for save in (in_foreground, in_background):
        for call in CALLS:
            for fault in FAULTS:
                codes: list[int] = []
                for k in range(1, most + 1):
                    with tempfile.TemporaryDirectory() as folder:
                        save_alone(CheckpointStore(Path(folder, "checkpoints")), 1)
                        code = traced(save, Path(folder), call, fault, k)
                        problems = check(Path(folder), code)
                    if problems:
                        failed += 1
                        print(f"{save.__name__}, {call} {k}, {fault}: {problems}", flush=True)
                    codes.append(code)
                    # Some failures are harmless (a file that cannot be removed): three in a row
                    # that change nothing are the end of the calls.
                    if codes[-3:] == [ACKED] * 3:
                        break
                hurt = sum(code != ACKED for code in codes)
                total += len(codes)
                print(f"{save.__name__:14} {call:9} {fault:15} {len(codes):4} runs, {hurt:3} hurt")
    print(f"{total} runs, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
