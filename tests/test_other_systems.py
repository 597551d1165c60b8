"""What only Linux has is guarded: trainkit trains where it is missing, as on Windows and macOS.

Neither is here. The names that a system lacks are known from the types of Python's library, which
mypy reads; programs run on this system with what can be taken away of them.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "other_systems" / "program.py"
HIDDEN = 'mount -t tmpfs none /proc && exec "$@"'  # for a shell of its own mounts

MODULES = ("fcntl", "os", "resource", "select", "signal", "socket", "time")
"""Whose names differ between systems, and that trainkit uses."""

LAUNCH = (  # imported once `start` in launch/command.py has refused systems that cannot fork
    "launch/orphan_killer.py", "launch/supervisor.py", "launch/workers.py",
)  # fmt: skip

GUARDED: dict[str, dict[str, str]] = {
    "win32": {
        "os.killpg signal.SIGKILL": "accelerate_compat/testing.py",
        "fcntl.LOCK_EX fcntl.LOCK_NB fcntl.flock": "basics/lock.py",
        "os.O_DIRECTORY": "checkpoint/io/files.py checkpoint/io/reading.py",
        "os.fwalk": "checkpoint/io/files.py",
        "os.POSIX_FADV_WILLNEED os.posix_fadvise os.preadv": "checkpoint/io/reading.py",
        "os.pidfd_open": "data/workers.py",
        "os.register_at_fork": "basics/systems.py",
        "os.sched_getaffinity": "launch/machine.py",
        "os.sysconf": "basics/host.py inspect/report/listing.py watch/member.py",
        "resource.RLIMIT_AS resource.RUSAGE_SELF resource.getrusage": "basics/host.py",
        "resource.RLIMIT_NOFILE resource.setrlimit": "distributed/group.py",
        "resource.RLIM_INFINITY resource.getrlimit": "basics/host.py distributed/group.py",
        "signal.SIG_BLOCK signal.SIG_SETMASK signal.SIG_UNBLOCK signal.pthread_sigmask":
            "basics/signals.py",
        "socket.AF_NETLINK": "launch/network.py",
        "socket.TCP_USER_TIMEOUT": "watch/connections.py",
        "time.CLOCK_BOOTTIME time.clock_gettime": "inspect/report/listing.py storage/lease.py",
    },
    "darwin": {
        "os.POSIX_FADV_WILLNEED os.posix_fadvise": "checkpoint/io/reading.py",
        "os.pidfd_open": "data/workers.py",
        "os.sched_getaffinity": "launch/machine.py",
        "socket.AF_NETLINK": "launch/network.py",
        "socket.TCP_USER_TIMEOUT": "watch/connections.py",
        "time.CLOCK_BOOTTIME": "inspect/report/listing.py storage/lease.py",
    },
}  # fmt: skip
"""The names that a system lacks, and the files that ask first whether they are there."""


def uses() -> Iterator[tuple[str, str]]:
    """Yield each name of the modules that the product uses, and the file."""
    for top in ("trainkit", "callbacks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    name = f"{node.value.id}.{node.attr}"
                    if node.value.id in MODULES:
                        yield name, path.relative_to(ROOT / top).as_posix()


@pytest.mark.e2e
@pytest.mark.parametrize("system", GUARDED)
def test_a_name_that_a_system_lacks_is_asked_for_first(system: str, tmp_path: Path) -> None:
    used: dict[str, set[str]] = {}
    for name, file in uses():
        used.setdefault(name, set()).add(file)
    names = sorted(used)
    program = tmp_path / "names.py"
    program.write_text("\n".join([f"import {', '.join(MODULES)}", *names]) + "\n", "utf-8")
    command = [sys.executable, "-m", "mypy", "--platform", system, "--no-error-summary"]
    command += ["--config-file", os.devnull, "--cache-dir", os.devnull, str(program)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    lines = [
        int(n) for n in re.findall(r"^names\.py:(\d+): error: .*attr-defined", found.stdout, re.M)
    ]
    assert lines, found.stdout + found.stderr
    missing = {names[line - 2]: used[names[line - 2]] - {*LAUNCH} for line in lines}
    guarded = {
        name: set(files.split())
        for names, files in GUARDED[system].items()
        for name in names.split()
    }
    assert {name: files for name, files in missing.items() if files} == guarded


def run(size: int, folder: Path) -> list[str]:
    """Run the program on some processes that see no `/proc`; return what each printed."""
    path = os.pathsep.join(map(str, (PROGRAM.parent, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["USERNAME"] = "somebody"  # else torch 2.10 asks `pwd`; Windows sets it
    hide = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh"]
    processes = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        own |= {"LOCAL_WORLD_SIZE": str(size), "TRAINKIT_INIT_METHOD": f"file://{folder}/meet"}
        processes.append(
            subprocess.Popen(
                [*hide, sys.executable, str(PROGRAM), str(folder / "run")],
                env={**environment, **(own if size > 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    end = time.monotonic() + 900
    try:
        return [process.communicate(timeout=end - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_fit_is_saved_and_resumed_with_no_proc_no_fork_and_no_locks(
    size: int, tmp_path: Path
) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], check=False).returncode:
        pytest.skip("this user cannot hide /proc: `unshare --mount` needs root")
    for output in run(size, tmp_path):
        assert output.endswith("equal\n"), output
        assert "has no locks (this system has no `flock`)" in output or size == 2
