"""Hosts for tests: each has a network, a name, processes and mounts of its own, on one machine.

    with hosts(2, tmp_path) as (a, b):
        jobs = launch((a, b), "train.py", "--steps", 100, options=("--num_processes", 4))
        jobs[0].wait_for("step 3")
        a.network.cut(b)
        assert [job.wait(60) for job in jobs] == [1, 1], jobs[0].output
        everything_gone((a, b), within=20)

They are Linux namespaces, joined by a bridge in one more: nothing touches the network of the
machine itself. A host's files are those of the machine, but for `/etc/hosts`, `/etc/hostname` and
`/etc/resolv.conf`. `host.ip`, `host.ip6` are its addresses, `host.name` its name, `host.names` what
it knows of names: its own is 127.0.1.1, as on Debian. Only root can make them; a test that has the
mark `needs_hosts` is skipped elsewhere.

    a.network.cut(b)            b hears nobody, nobody hears b; no end sees a sign of it
    a.network.unplug(b)         the same, and b sees that its cable is out
    a.network.plug(b)           all is well again
    a.network.separate(b, c)    b and c hear everybody but each other
    b.drop("")                  b hears nobody, but is heard: its firewall drops what comes
    b.drop("ipproto tcp dport 1024-65534")      it drops that; selectors as in `ip rule`
    b.admit("")                 what was dropped comes through again
    b.die(), b.die(silently=True)               all its processes are killed; no FIN leaves it
    b.freeze("train.py"), b.thaw("train.py"), b.kill("train.py")    who has that in its command
    b.sh("ip addr add 172.17.0.1/16 dev lo")    whatever root can do on it
    b.run("python", "-m", "http.server")        a program that runs meanwhile

All of it ends with the test, also where that is killed: the first process of each host reads from
a pipe that the test holds.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

__all__ = ["WHY_NOT", "Host", "Network", "Program", "everything_gone", "hosts", "launch"]

ROOT = Path(__file__).resolve().parents[2]
NAMES = "abcdefgh"

_SECONDS = 60.0  # for what takes less than one
_GONE = ("", "Z", "X")  # states of a process that has ended
_KINDS = ("net", "uts", "ipc", "pid", "mnt")
_CLONE_FS = 0x200
_LIBC = ctypes.CDLL(None, use_errno=True)

# Ends when the pipe to the test does; who loses its parent is reaped.
_LAST = "echo ready\nexec env --ignore-signal=CHLD cat > /dev/null"
_SWITCH = f"ip link add switch type bridge\nip link set switch up\n{_LAST}"
# `local` comes later than usual: so rules can drop what is for this host.
_HOST = f"""
cd "$1"
hostname "$2"
mount -t proc proc /proc
for file in hosts hostname resolv.conf; do mount --bind $file /etc/$file; done
mount --bind boot_id /proc/sys/kernel/random/boot_id
ip link set lo up
for family in -4 -6; do ip $family rule add pref 10 lookup local; ip $family rule del pref 0; done
{_LAST}"""


def _why_not() -> str:
    """Return why there can be no hosts here; empty where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts are made of Linux namespaces, which here only root can make"
    if missing := [tool for tool in ("ip", "ss", "unshare", "nsenter") if not shutil.which(tool)]:
        return f"hosts need {', '.join(missing)}"
    trial = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "sh", "-ec"]
    bridge = "mount -t proc proc /proc; ip link add one type bridge; ip link add two type veth"
    tried = subprocess.run([*trial, bridge], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = _why_not()
"""Why there can be no hosts here; empty where there can."""
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


class _Namespaces:
    """Namespaces that last until `close`, or until this process ends.

    Attributes:
        pid: Of their first process, as this process sees it.
    """

    def __init__(self, kinds: Sequence[str], script: str, *arguments: str) -> None:
        command = ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child"]
        self._keeper = subprocess.Popen(
            [*command, "sh", "-ec", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline()
        if said != "ready\n":
            raise OSError(f"no namespaces: {said}{self._keeper.stdout.read()}")
        [self.pid] = _children(self._keeper.pid)
        self._spaces = [f"--{kind}" for kind in kinds]

    def sh(self, script: str) -> str:
        """Run a shell script to its end in the namespaces, and return what it printed."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), *self._spaces, "sh", "-ec", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, f"{script}: {done.stdout}"
        return done.stdout

    def close(self) -> None:
        """Kill every process in them; they are gone with the last one."""
        if self._keeper.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._keeper.communicate()


class Network(_Namespaces):
    """The switch that joins hosts; each has a port of it."""

    def __init__(self) -> None:
        super().__init__(["net"], _SWITCH)

    def plug(self, host: "Host") -> None:
        """Join a host again."""
        self.sh(f"ip link set {host.port} master switch up")

    def cut(self, host: "Host") -> None:
        """Lose whatever a host sends or should get, without a sign."""
        self.sh(f"ip link set {host.port} nomaster")

    def unplug(self, host: "Host") -> None:
        """Take the carrier from a host, which sees it."""
        self.sh(f"ip link set {host.port} down")

    def separate(self, *apart: "Host") -> None:
        """Lose whatever these hosts send each other."""
        for host in apart:
            self.sh(f"ip link set {host.port} type bridge_slave isolated on")


class Host(_Namespaces):
    """One machine.

    Args:
        network: What joins it to the others.
        index: Its number, from 0.
        folder: For the files that it has for itself, among them temporary ones and output.
    """

    def __init__(self, network: Network, index: int, folder: Path) -> None:
        self.network = network
        self.name = f"host-{NAMES[index]}"
        self.port = f"port{index}"
        self.ip, self.ip6 = f"10.77.0.{index + 1}", f"fd77::{index + 1}"
        self.folder = folder
        self._programs: list[Program] = []
        (folder / "tmp").mkdir(parents=True)
        (folder / "hostname").write_text(f"{self.name}\n")
        (folder / "resolv.conf").touch()  # no server: other names are unknown at once
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.names = f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {self.name}\n"
        super().__init__(["net", "uts", "ipc", "pid", "mount"], _HOST, str(folder), self.name)
        network.sh(f"ip link add {self.port} type veth peer name eth0 netns {self.pid}")
        network.plug(self)
        self.sh(
            f"ip addr add {self.ip}/24 dev eth0\nip addr add {self.ip6}/64 dev eth0 nodad\n"
            "ip link set eth0 up"
        )

    @property
    def names(self) -> str:
        """What stands in its `/etc/hosts`."""
        return (self.folder / "hosts").read_text()

    @names.setter
    def names(self, text: str) -> None:
        (self.folder / "hosts").write_text(text)  # in place: it is mounted

    def run(self, *command: object, **more: Any) -> "Program":
        """Start a program; see `Program` for the keywords."""
        self._programs.append(Program(self, [str(word) for word in command], **more))
        return self._programs[-1]

    def is_alive(self) -> bool:
        """Return whether it has power."""
        return state(self.pid) not in _GONE

    def pids(self, text: str = "") -> list[int]:
        """Return the processes whose command has this text, as this process sees them."""
        found = []
        mine = _space(self.pid)
        for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]:
            if mine and pid != self.pid and _space(pid) == mine and state(pid) not in _GONE:
                found += [pid] if text in _command(pid) else []
        return sorted(found)

    def kill(self, text: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the processes whose command has this text."""
        pids = self.pids(text)
        assert pids, f"{self.name} has no process with `{text}` in its command"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def freeze(self, text: str = "") -> None:
        """Stop processes, by default all: they hold what they have, and do nothing."""
        self.kill(text, signal.SIGSTOP)

    def thaw(self, text: str = "") -> None:
        """Let processes go on."""
        self.kill(text, signal.SIGCONT)

    def drop(self, selector: str) -> None:
        """Lose what comes to this host and fits: selectors as in `ip rule`, empty for all."""
        for family in ("-4", "-6"):
            self.sh(f"ip {family} rule add pref 5 iif eth0 {selector} blackhole")

    def admit(self, selector: str) -> None:
        """Take back `drop`."""
        for family in ("-4", "-6"):
            self.sh(f"ip {family} rule del pref 5 iif eth0 {selector} blackhole")

    def die(self, *, silently: bool = False) -> None:
        """Kill all processes; `silently`: no other host gets a word of it, as without power."""
        if silently:
            self.network.cut(self)
        self.close()

    @override
    def close(self) -> None:
        super().close()
        for program in self._programs:
            program.wait()


class Program:
    """A program that runs on a host.

    Args:
        host: Where.
        command: Its words.
        environment: Variables beside the few that every program gets.
        folder: Where it starts; by default the host's.
    """

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._file = host.folder / f"output-{len([*host.folder.glob('output-*')])}"
        self._place = (host.pid, folder or host.folder)
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
        own = {"TMPDIR": str(host.folder / "tmp"), "XDG_CONFIG_HOME": str(host.folder)}
        usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self._file.open("wb") as file:
            try:
                self._waiter = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**kept, **own, **usual, **(environment or {})},
                    preexec_fn=self._enter,
                )
            except subprocess.SubprocessError as error:
                raise OSError(f"not on its host: {self.output}") from error

    def _enter(self) -> None:
        """Move, or say why not: an error before the program starts has no words of its own."""
        try:
            self._move()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            raise

    def _move(self) -> None:
        """Enter the host in a child, which goes on; wait here for how it ends.

        Not by `nsenter`, which stops with its child and so would not see the end of it.
        """
        pid, folder = self._place
        _LIBC.unshare(_CLONE_FS)  # from threads that libraries start in every child
        spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
        for space in spaces:
            if _LIBC.setns(space, 0):
                raise OSError(ctypes.get_errno(), "setns")
        if child := os.fork():
            os.closerange(0, 1 << 12)  # among them the pipes that hold the hosts
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(code if code >= 0 else 128 - code)
        os.setsid()
        os.chdir(folder)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._file.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + N where signal N killed it; None while it runs."""
        return self._waiter.poll()

    def send(self, signum: int) -> None:
        """Send a signal to the program itself, not to what it has started."""
        for pid in _children(self._waiter.pid):
            os.kill(pid, signum)

    def wait(self, seconds: float = _SECONDS) -> int:
        """Return its exit code; fail if it does not end in time."""
        try:
            return self._waiter.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {seconds:g} s:\n{self.output}") from None

    def wait_for(self, text: str, times: int = 1, seconds: float = _SECONDS) -> None:
        """Return when it has printed a text so often; fail if it does not in time."""
        end = time.monotonic() + seconds
        while self.output.count(text) < times:
            assert time.monotonic() < end, f"no `{text}` in {seconds:g} s:\n{self.output}"
            assert self.code is None, f"ended with {self.code}:\n{self.output}"
            time.sleep(0.02)


@contextmanager
def hosts(number: int, folder: Path) -> Iterator[tuple[Host, ...]]:
    """Make hosts, in a network; kill all that runs on them at the end."""
    network = Network()
    made: list[Host] = []
    try:
        for index in range(number):  # one by one: each is closed, also if the next fails
            made.append(Host(network, index, folder / f"host-{NAMES[index]}"))  # noqa: PERF401
        for host in made:
            others = [f"{other.ip} {other.name}\n" for other in made if other is not host]
            host.names += "".join(others)
        yield tuple(made)
    finally:
        for host in made:
            host.close()
        network.close()


def launch(
    machines: Sequence[Host],
    *script: object,
    options: Sequence[object] = (),
    each: Mapping[Host, Sequence[object]] | None = None,
    only: Host | None = None,
    **more: Any,
) -> list[Program]:
    """Start `trainkit launch` on hosts, the first of which is machine 0; one process on each.

    Args:
        machines: The hosts, by their `machine_rank`.
        script: The script and its arguments.
        options: Of every launcher; they beat what is set here.
        each: More options of single ones.
        only: Start this one alone; the others come in calls of their own.
        more: Keywords of `Program`.
    """
    size = len(machines)
    command = [sys.executable, "-m", "trainkit.cli", "launch", "--cpu", "--num_machines", size]
    command += ["--num_processes", size, "--main_process_ip", machines[0].ip, *options]
    return [
        host.run(*command, "--machine_rank", rank, *(each or {}).get(host, ()), *script, **more)
        for rank, host in enumerate(machines)
        if only in (None, host)
    ]


def everything_gone(machines: Sequence[Host], within: float) -> float:
    """Return after how many seconds no process is left on hosts; fail if some are, with which."""
    start = time.monotonic()
    while left := [(host.name, _command(pid)) for host in machines for pid in host.pids()]:
        assert time.monotonic() - start < within, f"left after {within:g} s: {left}"
        time.sleep(0.05)
    return time.monotonic() - start


def _children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def _space(pid: int) -> str:
    """Return which processes a process sees; empty for one that is not there."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def state(pid: int) -> str:
    """Return R, S, T, Z and so on; empty for a process that is not there."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
