"""Attacks by connections alone: none of them authenticates, or says more than a greeting."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
from collections import deque

from tests.hostile.target import LISTENERS, Listener, Target

_SILENT = 200  # connections that one thread keeps open
_AT_ONCE = 32  # handshakes that one thread begins at once


def silent(target: Target) -> None:
    """Keep many connections open that say nothing, to all listeners in turn."""
    opened: deque[socket.socket] = deque()
    for listener in itertools.cycle(LISTENERS):
        if target.stopped.is_set():
            break
        with contextlib.suppress(OSError):
            opened.append(_connect(target, listener))
        if len(opened) > _SILENT:
            opened.popleft().close()
            target.stopped.wait(0.001)
    for each in opened:
        each.close()


def hurried(target: Target) -> None:
    """Connect to all listeners in turn, and close at once, as fast as that goes."""
    for listener in itertools.cycle(LISTENERS):
        if target.stopped.is_set():
            break
        with contextlib.suppress(OSError):
            _connect(target, listener).close()


def client_hellos(target: Target) -> None:
    """Begin many TLS handshakes at the same time, and never end them."""
    hello = client_hello()
    for listener in itertools.cycle(LISTENERS):
        if target.stopped.is_set():
            break
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            opened = [stack.enter_context(_connect(target, listener)) for _ in range(_AT_ONCE)]
            for each in opened:
                each.sendall(hello)
            for each in opened:
                each.recv(16)  # the server has paid for its half


def client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _connect(target: Target, listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.port(listener)), 1.0)
