"""A port where the ranks of one machine meet."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10000
# The default on Linux; macOS and Windows begin at 49152.
_FIRST_EPHEMERAL = 32768
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on and that the system does not hand out by itself.

    Ranks take seconds until they listen on it. By then, a port of the ephemeral range, which binding to port 0 returns,
    may be one end of another connection, so that the ranks cannot bind to it or talk to a stranger. So the port is
    drawn from those below that range, if the system leaves any there.

    Raises:
        OSError: no port can be bound.
    """
    below = range(_LOWEST, max(_LOWEST, _first_ephemeral()))
    for port in random.SystemRandom().sample(below, min(_TRIES, len(below))):
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        return listener.getsockname()[1]


def _first_ephemeral() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_EPHEMERAL
