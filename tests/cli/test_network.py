"""The way to machine 0: by which interface it goes, and what is said where there is none."""

import socket
import threading
import time

import pytest

from tests.cli.launcher import free_port
from trainkit.errors import DistributedError
from trainkit.launch import meeting
from trainkit.launch.network import interface_to, is_own, job_interface, kernel_ports, reach
from trainkit.watch.listening import listen, ports


def test_the_interface_is_that_of_the_route() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("127.0.1.1") == "lo"  # Debian's address of its own name
    assert job_interface(["127.0.0.1", "127.0.1.1"]) == "lo"
    elsewhere = interface_to("192.0.2.1")  # nobody's; there may be no route in a container
    assert elsewhere != "lo"
    assert job_interface(["127.0.0.1", "192.0.2.1"]) == (elsewhere or "lo")


def test_a_server_that_starts_later_is_reached() -> None:
    port = free_port()
    servers: list[socket.socket] = []

    def start() -> None:
        time.sleep(0.5)
        servers.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=start)
    thread.start()
    assert reach("localhost", port, 60) == ("127.0.0.1", "127.0.0.1")
    thread.join()
    servers[0].close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-host.invalid", ["`main_process_ip` no-such-host.invalid", "Check that name"]),
        ("127.0.0.1", ["127.0.0.1 cannot be reached: Connection refused (tried for 1 s)"]),
    ],
)
def test_what_is_wrong_is_said(host: str, words: list[str]) -> None:
    with pytest.raises(DistributedError) as caught:
        reach(host, free_port(), 0.1)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def test_servers_listen_in_a_range_of_ports() -> None:
    port = free_port()
    allowed = ports(f"{port}-{port + 5}")
    with listen("127.0.0.1", allowed, 1) as one, listen("127.0.0.1", allowed, 1) as two:
        found = [each.getsockname()[1] for each in (one, two)]
        assert found[0] < found[1]
        assert set(found) <= set(allowed)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", [found[0]], 1)
    assert list(ports(None)) == [0]
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")


def test_ports_of_gloo_that_are_closed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_PROBE_SECONDS", 0.1)
    free = kernel_ports()
    doors = [listen("127.0.0.1", ports, 1) for ports in (free, reversed(free))]
    first, last = [door.getsockname()[1] for door in doors]
    assert {first, last} <= set(free)
    there = {"host": "b", "address": "127.0.0.1", "range": "40000-50000"}
    cards: list[meeting.Card] = [{"host": "a"}, {**there, "trial": [first, last]}]
    assert meeting.probe(0, cards) == ""
    doors.pop().close()
    told = meeting.probe(0, cards)
    assert f"machine 0 (a) is cut off from machine 1 (b): port {last} of machine 1 (b)" in told
    assert "listens at any port of 40000-50000 there" in told
    assert "sysctl -w net.ipv4.ip_local_port_range=" in told
    for door in doors:
        door.close()
