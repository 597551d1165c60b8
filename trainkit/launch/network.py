"""The way to another machine: by which interface, and what is wrong if nobody answers."""

import math
import platform
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainkit.errors import DistributedError

_MACHINE_0 = "`main_process_ip`"  # what it is called in sentences: as the user has named it
_PAUSE = 0.25  # seconds between two attempts
_ATTEMPT_SECONDS = 5.0
_RTM_GETROUTE, _NLM_F_REQUEST, _RTA_DST, _RTA_OIF = 26, 1, 1, 4


def interface_to(address: str) -> str | None:
    """Return the interface that this machine sends by to an address; None where nobody says it.

    The kernel is asked for its route, as `ip route get` does; only Linux can be.
    """
    if platform.system() != "Linux":
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    to = socket.inet_pton(family, address.partition("%")[0])
    body = struct.pack("=BBBBBBBBI", family, 8 * len(to), 0, 0, 0, 0, 0, 0, 0)
    body += struct.pack("=HH", 4 + len(to), _RTA_DST) + to
    header = struct.pack("=IHHII", 16 + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0)
    with suppress(OSError, struct.error):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
            kernel.settimeout(_ATTEMPT_SECONDS)
            kernel.send(header + body)
            reply = kernel.recv(1 << 14)
        offset = 28  # behind the header and the route
        while offset + 8 <= len(reply):
            length, kind = struct.unpack_from("=HH", reply, offset)
            if kind == _RTA_OIF:
                return socket.if_indextoname(struct.unpack_from("=I", reply, offset + 4)[0])
            offset += max(4, (length + 3) & ~3)
    return None


def job_interface(addresses: Iterable[str]) -> str | None:
    """Return the interface to the machines of these addresses; the loopback to itself alone.

    It is that of the first one that is on another machine.
    """
    loopback = interface_to("127.0.0.1")
    others = (other for each in addresses if (other := interface_to(each)) not in (None, loopback))
    return next(others, loopback)


def kernel_ports() -> range:
    """Return the ports that the system gives whoever names none, as gloo and NCCL do not."""
    with suppress(OSError):  # Linux says it; these are the usual ones elsewhere
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return range(int(first), int(last) + 1)
    return range(49152, 65536)


def addresses_of(host: str, port: int) -> list[str]:
    """Return the numeric addresses that a name stands for.

    Raises:
        OSError: It is unknown.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in infos))


def is_own(address: str) -> bool:
    """Return whether an address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def reach(host: str, port: int, seconds: float, name: str = _MACHINE_0) -> tuple[str, str]:
    """Connect to a server, which may start later than this; return its address, and the own one."""
    end = time.monotonic() + seconds
    while True:
        left = max(_PAUSE, min(_ATTEMPT_SECONDS, end - time.monotonic()))
        try:
            with socket.create_connection((host, port), left) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _PAUSE > end:
                raise DistributedError(
                    f"port {port} of {name} {host} cannot be reached: {error.strerror or error} "
                    f"(tried for {math.ceil(seconds)} s). Check that name or address, that the "
                    "launcher of that machine runs, and that no firewall drops connections"
                ) from None
        time.sleep(_PAUSE)
