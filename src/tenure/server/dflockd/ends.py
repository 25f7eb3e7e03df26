"""Distinction between half-closed connections and disconnected clients.

Both look the same at first. The kernel of a disconnected client rejects data that is written to it
or, about a minute after the end, a probe.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import select
import socket
import termios

_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def probe(transport: asyncio.Transport) -> None:
    """Let the kernel detect a disconnected client; `is_gone` has the result."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        if hasattr(socket, option):  # not all systems support all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_gone(transport: asyncio.Transport) -> bool:
    """Return true if the client is known to have disconnected."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_read(transport: asyncio.Transport) -> bool:
    """Return true if all written data has reached the client's kernel."""
    sock = transport.get_extra_info("socket")
    if transport.get_write_buffer_size():
        return False
    if sock is None:
        return True
    unread = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unread)
    return not unread[0]
