"""Run `trainkit` in processes that begin with torch imported."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.helpers.warm import warm
from trainkit.cli.main import main

TIME_LIMIT = 300.0


def free_port() -> int:
    """Return a TCP port that no server of this machine listens on now."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


class Launcher:
    """A `trainkit` command that runs in a process and a session of its own.

    Args:
        arguments: What follows `trainkit` on the command line.
        folder: Where it runs; its output goes to the file `output` in it.
        environment: Variables beside those of this process.
        forked: It is a fork of this process, with what a test has changed in it, and what it starts
            are interpreters of their own, which `ps` shows with their commands.
        inside: How many levels of programs that it starts begin with torch imported, too.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        *,
        output: str = "output",
        environment: dict[str, str] | None = None,
        forked: bool = False,
        inside: int = 1,
    ) -> None:
        self._file = folder / output
        self._file.touch()
        defaults = {
            "OMP_NUM_THREADS": "1",
            "TRAINKIT_REPORT_DIR": str(folder / "jobs"),
            "XDG_CONFIG_HOME": str(folder),
        }
        words, variables = [str(each) for each in arguments], {**defaults, **(environment or {})}
        if forked:
            self.pid = self._fork(words, folder, variables)
            return
        with warm(inside=inside), self._file.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainkit.cli", *words],
                cwd=folder,
                env={**os.environ, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._process.returncode = 0  # `wait` reaps it

    def _fork(self, words: list[str], folder: Path, variables: dict[str, str]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.setsid()
                for signum in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(signum, signal.SIG_DFL)
                descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
                os.chdir(folder)
                os.environ.update(variables)
                code = main(words)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return pid

    @property
    def output(self) -> str:
        """What it and its processes have printed."""
        return self._file.read_text()

    def wait(self, seconds: float = TIME_LIMIT) -> int:
        """Return its exit code; kill it when the time is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"The launcher did not end:\n{self.output}")

    def wait_for(self, word: str, times: int = 1) -> None:
        """Return when a word has been printed so often."""
        end = time.monotonic() + TIME_LIMIT
        while self.output.count(word) < times:
            assert time.monotonic() < end, self.output
            time.sleep(0.01)

    def send(self, signum: int) -> None:
        """Send a signal to the launcher alone."""
        os.kill(self.pid, signum)


def run(*arguments: object, folder: Path, code: int = 0, inside: int = 1) -> str:
    """Run a command to its end and return what it printed."""
    launcher = Launcher(arguments, folder, inside=inside)
    found = launcher.wait()
    assert found == code, f"exit code {found}\n{launcher.output}"
    return launcher.output


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")
