"""The side of the workers: one process for each peer that imports it once, and forks for each job.

    python -m benchmarks.compare.worker PEER SOCKET

On the socket pair with the number SOCKET it says how its import went, then forks a child for every
job that it gets. A job is a JSON object with the workload's name and the environment of the
process, and comes with the end of another socket pair, on which the child answers: see `_serve`.
"""

import gc
import importlib
import importlib.metadata
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.compare.channel import Channel, Closed, Message
from benchmarks.compare.meter import Meter
from benchmarks.compare.workload import Unsupported, Workload
from benchmarks.compare.workloads import WORKLOADS

MESSAGE_BYTES = 65536
TERMINAL_SIZE = (30, 100)  # rows, columns


def main() -> None:
    """Import the peer, then start a child for each job."""
    name, descriptor = sys.argv[1:]
    channel = Channel(socket.socket(fileno=int(descriptor)))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_num_interop_threads(1)
    before = frozenset(sys.modules)
    try:
        peer = importlib.import_module(f"benchmarks.compare.peers.{name}")
    except ImportError as error:
        channel.send(missing=str(error))
        return
    channel.send(version=importlib.metadata.version(peer.PACKAGE))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel.socket, MESSAGE_BYTES, 1)
        if not data:
            return
        end = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            channel.close()
            _run_child(peer, before, Channel(end), data)
        end.close()


def _run_child(peer: ModuleType, before: frozenset[str], channel: Channel, data: bytes) -> None:
    """Do one job; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = Channel.decode(data)
        os.environ.update(job["environment"])
        _open_terminal(Path(job["log"]))
        workload = next(known for known in WORKLOADS if known.name == job["workload"])
        _serve(peer, before, workload, channel)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _open_terminal(log: Path) -> None:
    """Give this process a terminal, as progress bars expect one; what it shows goes to `log`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, TERMINAL_SIZE)
    with log.open("wb") as file:
        subprocess.Popen(["cat"], stdin=ours, stdout=file, stderr=subprocess.DEVNULL)
    for descriptor in (1, 2):
        os.dup2(theirs, descriptor)
    os.close(ours)
    os.close(theirs)


def _serve(peer: ModuleType, before: frozenset[str], workload: Workload, channel: Channel) -> None:
    """Answer requests `{"mode": "time" | "calls" | "syncs", "product": path or None}`.

    The answer holds the figures of `Outcome` and `modules`, or `unsupported`, or `error`.
    """
    while True:
        try:
            request = channel.receive()
        except Closed:
            return
        gc.collect()  # what the last run left is not this one's
        try:
            answer = _measure(peer, workload, request)
            answer["modules"] = len(sys.modules.keys() - before)
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        channel.send(**answer)


def _measure(peer: ModuleType, workload: Workload, request: Message) -> dict[str, Any]:
    work = getattr(peer, workload.kind, None)
    if work is None:
        raise Unsupported(f"nothing of its own for {workload.kind}")
    with Meter(request["mode"]) as meter:
        outcome = workload.measure(work, meter)
    if request["product"] is not None and outcome.product is not None:
        np.save(request["product"], outcome.product.numpy(force=True))
    return {"seconds": outcome.seconds, "calls": outcome.calls, "syncs": outcome.syncs}


if __name__ == "__main__":
    main()
