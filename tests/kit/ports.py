"""Ports of loopback for programs that have to be told a number.

They are below those that the kernel gives to whoever asks for any, and below those of machines (`hawker.worker.ports`):
nothing takes one between the look and the program's start, and none is given out twice in a run.
"""

from __future__ import annotations

import itertools
import random
import socket

_PORTS = range(10000, 20000)

_numbers = itertools.cycle(_PORTS)
# Other runs of the tests on this host begin elsewhere.
for _ in range(random.SystemRandom().randrange(len(_PORTS))):
    next(_numbers)


def free_port() -> int:
    """For TCP and UDP, and on all of the host's addresses."""
    for port in itertools.islice(_numbers, len(_PORTS)):
        if all(_is_free(kind, port) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)):
            return port
    raise AssertionError(f"no port of {_PORTS} is free")


def _is_free(kind: socket.SocketKind, port: int) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
