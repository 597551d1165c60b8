"""Where the processes of a job listen: at one address, and in a range of ports if one is given."""

import socket
from collections.abc import Iterable, Sequence

ADDRESS_VARIABLE = "TRAINKIT_ADDRESS"
"""Environment variable with the address by which other machines reach this one; empty: any."""

PORTS_VARIABLE = "TRAINKIT_PORTS"
"""Environment variable with the ports that a job may listen at, such as 29500-29520."""


def ports(allowed: str | None) -> Sequence[int]:
    """Return the ports of a range, such as 29500-29520; without one 0, which is any free one."""
    first, _, last = (allowed or "").partition("-")
    return range(int(first), int(last) + 1) if last else (0,)


def listen(host: str, ports: Iterable[int], backlog: int) -> socket.socket:
    """Listen at the first free one of some ports.

    Args:
        host: An address of this machine; empty: all of them.
        ports: To try in turn; 0 is any free one.
        backlog: How many may connect at once.

    Raises:
        OSError: None is free.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    failure = OSError("there is no port to listen at")
    for port in ports:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=backlog, dualstack_ipv6=dual
            )
        except OSError as error:
            failure = error
    raise failure
