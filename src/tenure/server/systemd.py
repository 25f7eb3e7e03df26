"""Protocols of systemd, without a library: notifications, and passed sockets.

A notification is one datagram to the socket that ``NOTIFY_SOCKET`` names; without it, none is sent.
Sockets that systemd has opened (``LISTEN_FDS``) can be taken once, and belong to the taker.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, MutableMapping

FIRST_DESCRIPTOR = 3
"""The first passed descriptor; the others follow it."""


class Notifier:
    """Sender of notifications to the service manager.

    Args:
        environment: the environment with its variables.

    Attributes:
        watchdog: seconds between two watchdog notifications, ``None`` if none are requested. It is
            half of the manager's timeout.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog = _watchdog(environment) if self._address else None

    def ready(self, status: str) -> None:
        """Report that the server accepts connections."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def reloading(self, now: float) -> None:
        """Report that the server reads its files again, until `ready` is called.

        Args:
            now: the monotonic clock, which systemd compares with its own.
        """
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(now * 1e6)}")

    def stopping(self, status: str) -> None:
        """Report that the server is stopping."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def alive(self) -> None:
        """Send a watchdog notification."""
        self._send("WATCHDOG=1")

    def _send(self, *facts: str) -> None:
        if not self._address:
            return
        # "@" stands for the NUL byte of Linux's abstract namespace.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # A manager that does not exist, or does not read, is no reason to stop serving.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way,
        ):
            way.setblocking(False)
            way.sendto("\n".join(facts).encode(), address)


def _watchdog(environment: Mapping[str, str]) -> float | None:
    pid, microseconds = environment.get("WATCHDOG_PID"), environment.get("WATCHDOG_USEC", "")
    if pid not in {None, "", str(os.getpid())} or not microseconds.isascii():
        return None
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    return int(microseconds) / 2e6


def _line(text: str) -> str:
    return " ".join(text.split())


def passed_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the listening sockets passed to this process, and remove the variables."""
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return []
    sockets: list[socket.socket] = []
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
        sockets.append(socket.socket(fileno=descriptor))
    return sockets
