"""Ports of this host for the servers that tests start.

The kernel gives any port of its own range to an outgoing connection, or to a listener that asks for
no certain one. So a port of that range, found free, may be taken before a server listens there.
"""

from __future__ import annotations

import random
import socket

_BELOW_THE_KERNELS = range(10_000, 32_000)

_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """Return a port on which nothing listens, and which no other process gets from here."""
    choice = random.SystemRandom()  # tests choose the seed of the other one
    while True:
        port = choice.choice(_BELOW_THE_KERNELS)
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            reservation.bind(f"\0tenure-tests-port-{port}")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            reservation.close()
            continue
        _reserved.append(reservation)
        return port
