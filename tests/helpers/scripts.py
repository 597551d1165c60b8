"""Run scripts: in forks of this process, which has imported torch, or as programs of their own."""

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from tests.helpers.ranks import run_ranks
from tests.helpers.warm import warm

__all__ = ["ROOT", "TRANSFORMERS", "Ended", "run_forked", "run_program", "shell", "torchrun"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
TRANSFORMERS = tuple(
    f"transformers.{name}"
    for name in ("trainer", "models.auto.modeling_auto", "models.gpt2.modeling_gpt2")
)


class Ended(NamedTuple):
    """How a script ended, and what it printed; of several processes, the first one."""

    code: int
    output: str
    errors: str


def run_forked(script: Path, *arguments: str, size: int = 1, code: int = 0) -> Ended:
    """Run a script to its end on `size` forked processes, of which only the first may print."""
    first, *others = run_ranks(size, _be_script, script, arguments, timeout=SECONDS)
    assert not any(other.output for other in others)
    assert [ended.code for ended in (first, *others)] == [code] * size, first
    return Ended(*first)


def _be_script(rank: int, script: Path, arguments: tuple[str, ...]) -> Ended:
    warnings.resetwarnings()  # as in an interpreter of its own
    sys.path.insert(0, str(script.parent))
    sys.argv = [script.name, *arguments]
    code = 0
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, output.getvalue(), errors.getvalue())


def run_program(*arguments: str, imports: tuple[str, ...] = ()) -> str:
    """Run Python with `arguments`, as users do, and return what it printed; fail where it fails.

    What it `imports` is there, beside torch, when it begins.
    """
    with warm(inside=2, imports=imports):
        result = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def torchrun(size: int, script: Path) -> list[str]:
    """Return the arguments of Python that start a script on `size` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [*(launcher if size > 1 else []), str(script)]


# Stands for a program that another process starts: with its streams, and ends as it does.
_COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({place!r})
    socket.send_fds(line, [b"!"], [0, 1, 2])
    told = {{"words": [*{words!r}, *sys.argv[1:]], "folder": os.getcwd(), "env": {{**os.environ}}}}
    line.sendall(json.dumps(told).encode())
    line.shutdown(socket.SHUT_WR)
    code = int(line.recv(16))
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def shell(folder: Path) -> Iterator[dict[str, str]]:
    """Give an environment in which `python` and `trainkit` begin with torch imported.

    They are commands in `folder / "bin"`; what they start are children of this process.
    """
    (folder / "bin").mkdir(exist_ok=True)
    place = tempfile.mktemp(prefix="line-")  # short enough for a socket
    for name, words in (("python", []), ("trainkit", ["-m", "trainkit.cli"])):
        command = folder / "bin" / name
        command.write_text(_COMMAND.format(python=sys.executable, place=place, words=words))
        command.chmod(0o755)
    paths = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with warm(inside=1), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        try:
            yield {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            os.unlink(place)


def _serve(listener: socket.socket) -> None:
    with suppress(OSError):  # at the end
        while True:
            threading.Thread(target=_start, args=listener.accept()[:1], daemon=True).start()


def _start(line: socket.socket) -> None:
    with line, line.makefile("rb") as file:
        _, streams, _, _ = socket.recv_fds(line, 1, 3)
        told = json.load(file)
        program = subprocess.Popen(
            [sys.executable, *told["words"]],
            cwd=told["folder"],
            env=told["env"],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
        )
        for each in streams:
            os.close(each)
        line.sendall(str(program.wait(SECONDS)).encode())
