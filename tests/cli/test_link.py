"""What launchers tell each other at the end of a job."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from trainkit.launch.link import ASKED, LOST, Link
from trainkit.watch.connections import Links, open_server, reach_server


@pytest.fixture
def launchers() -> Iterator[tuple[Link, Links, int, int]]:
    """The link of machine 0, its connections, the pid of the other launcher, what it reads from."""
    server, address = open_server(2, one_machine=True)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        links = reach_server(address, 1, 2, one_machine=True)
        os.read(reading, 1)
        if links is not None and links.parent is not None:
            links.parent.connection.close()  # a broken connection, of a launcher that lives
        signal.pause()
        os._exit(0)
    link = Link(0, 2, server)
    try:
        assert link.wait(lambda: link.present == {1}, 30)
        yield link, server, pid, writing
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        link.close()
        os.close(reading)
        os.close(writing)


def test_the_report_waits_for_a_launcher_that_may_connect_again(
    launchers: tuple[Link, Links, int, int],
) -> None:
    # Its processes were told to end when it died, and have ended those of this machine with them.
    link, server, pid, writing = launchers
    os.write(writing, b".")
    assert link.wait(lambda: not server.children, 30)
    assert link.present == {1}
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    link.tell_end(ASKED, "process 0 on machine 0 ended with code 143", 143)
    stories = link.gather({"badly": {"0": "ended with code 143"}}, 30)
    assert stories == {0: {"badly": {"0": "ended with code 143"}}}
    assert link.end is not None
    assert link.end.kind == LOST
    assert link.end.cause.startswith("machine 1 unreachable: its launcher was killed")
