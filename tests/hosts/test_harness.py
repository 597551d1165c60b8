"""The hosts that other tests use are like machines: apart, joined by a network that can break."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness import ROOT, Host, everything_gone, hosts, needs_hosts, state

pytestmark = [needs_hosts, pytest.mark.e2e]

# Answers each line that comes in.
SERVER = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            print("got", line.decode().strip(), flush=True)
            self.wfile.write(line)
        print("closed", flush=True)
server = socketserver.ThreadingTCPServer(("", 29500), Echo)
print("listens", flush=True)
server.serve_forever()
"""
# Sends a line and says what it hears.
CLIENT = """
import socket, sys, time
try:
    with socket.create_connection((sys.argv[1], 29500), timeout=0.5) as line:
        for _ in range(int(sys.argv[2])):
            line.sendall(b"hello\\n")
            print(line.recv(9).decode().strip(), flush=True)
            time.sleep(0.05)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    with hosts(2, tmp_path) as made:
        yield made


def says(client: Host, address: str, lines: int = 1) -> str:
    program = client.run(sys.executable, "-Sc", CLIENT, address, lines)
    program.wait()
    return program.output.strip()


def test_each_host_has_a_name_an_address_and_processes_of_its_own(pair: tuple[Host, ...]) -> None:
    for host in pair:
        assert host.sh("hostname; cat /etc/hostname") == f"{host.name}\n{host.name}\n"
        assert f"127.0.1.1 {host.name}" in host.sh("cat /etc/hosts")
        assert f"inet {host.ip}/24" in host.sh("ip addr show eth0")
        sleeper = host.run("sleep", 60)
        assert [*map(host.sh, ["cat /proc/[0-9]*/comm | grep -c sleep"])] == ["1\n"]
        host.kill("sleep")
        assert sleeper.wait() == 128 + 9
    boots = {host.sh("cat /proc/sys/kernel/random/boot_id") for host in pair}
    assert len(boots) == 2


def test_a_network_that_breaks(pair: tuple[Host, ...]) -> None:
    a, b = pair
    b.run(sys.executable, "-Sc", SERVER).wait_for("listens")
    assert says(a, b.ip) == "hello"
    assert says(a, b.name) == "hello"
    a.network.cut(b)
    assert says(a, b.ip) == "TimeoutError"
    a.network.plug(b)
    assert says(a, b.ip) == "hello"
    b.drop("ipproto tcp dport 29000-30000")
    assert says(a, b.ip) == "TimeoutError"
    b.admit("ipproto tcp dport 29000-30000")
    assert says(a, b.ip) == "hello"
    a.network.separate(a, b)
    assert says(a, b.ip) == "TimeoutError"


def test_only_one_direction_breaks_also_for_what_is_connected(pair: tuple[Host, ...]) -> None:
    a, b = pair
    server = b.run(sys.executable, "-Sc", SERVER)
    server.wait_for("listens")
    client = a.run(sys.executable, "-Sc", CLIENT, b.ip, 1000)
    client.wait_for("hello", times=3)
    a.drop("")
    client.wait()
    heard = client.output.count("hello")
    assert client.output.endswith("TimeoutError\n")
    assert server.output.count("got") == heard + 1


def test_a_host_that_dies_says_so_unless_it_has_no_power(tmp_path: Path) -> None:
    for silently in (False, True):
        with hosts(2, tmp_path / str(silently)) as (a, b):
            server = b.run(sys.executable, "-Sc", SERVER)
            server.wait_for("listens")
            a.run(sys.executable, "-Sc", CLIENT, b.ip, 1000).wait_for("hello")
            a.die(silently=silently)
            assert not a.is_alive()
            if silently:
                time.sleep(0.3)
                assert "closed" not in server.output
            else:
                server.wait_for("closed")


@pytest.mark.e2e
def test_nothing_is_left_of_hosts_whose_test_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time, pathlib\n"
        "from tests.hosts.harness import hosts\n"
        "with hosts(1, pathlib.Path(sys.argv[1])) as (a,):\n"
        "    a.run('sleep', 60)\n"
        "    print(a.pid, a.pids('sleep')[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    pids = [*map(int, killed.stdout.split())]
    assert len(pids) == 2
    end = time.monotonic() + 20
    while alive := [pid for pid in pids if state(pid) not in ("", "Z")]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


def test_a_process_whose_children_have_threads_has_hosts_too(tmp_path: Path) -> None:
    """Some libraries start a thread in every child, and threads share what `setns` replaces."""
    script = (
        "import os, pathlib, sys, threading, time\n"
        "from tests.hosts.harness import hosts\n"
        "def start():\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "os.register_at_fork(after_in_child=start)\n"
        "with hosts(1, pathlib.Path(sys.argv[1])) as (a,):\n"
        "    program = a.run('hostname')\n"
        "    program.wait()\n"
        "    print(program.output, end='', flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "host-a\n"), done.stderr


def test_what_is_left_is_named(pair: tuple[Host, ...]) -> None:
    pair[1].run("sleep", "61")
    with pytest.raises(AssertionError, match="host-b', 'sleep 61"):
        everything_gone(pair, within=0.2)
    pair[1].kill("sleep")
    assert everything_gone(pair, within=10) < 10
