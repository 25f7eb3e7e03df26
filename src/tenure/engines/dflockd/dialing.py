"""Opening a connection: TCP, TLS, the token, and the kind of the server.

dflockd tells no version. What a server is shows in what it answers: `PING` since 2.0, whose tokens
begin with a fencing token; `STATS` since 1.0, which has semaphores; and neither before. A request
that an early server does not know makes it close the connection, so that nothing but what is
dialled in order to find out is used for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from enum import Enum

from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import AuthenticationFailed, EngineUnavailable
from tenure.wire.lines import asking

__all__ = ["Kind", "dial", "kind_of"]

# When the network stays silent: that a peer is gone is noticed while nothing can be sent.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Kind(Enum):
    """Features of a server."""

    FENCING = "with fencing tokens"  # dflockd 2.x, and tenure's own server
    COUNTING = "with semaphores, and without fencing tokens"  # dflockd 1.x
    PLAIN = "with locks alone"  # before


async def dial(address: DflockdUrl, endpoint: Endpoint, clock: Clock) -> DflockdConnection:
    """A connection over which requests can be sent.

    Raises:
        OSError: it cannot be had (`TimeoutError`: not in time).
        AuthenticationFailed: the server does not take the token.
    """
    async with asyncio.timeout(address.connect_timeout):
        transport = await _connected(address, endpoint)
        connection = DflockdConnection(transport, clock, asyncio.get_running_loop())
        try:
            if address.token:
                reply = await connection.request(asking.auth(address.token))
                if reply.status != "ok":
                    raise AuthenticationFailed(
                        f"the server at {endpoint} does not take the token "
                        f"({reply.status}), or knows none"
                    )
        except BaseException:
            connection.hang_up()
            raise
        return connection


async def kind_of(
    address: DflockdUrl, endpoint: Endpoint, clock: Clock, dialled: DflockdConnection
) -> tuple[Kind, DflockdConnection]:
    """Return the kind of a server, and a usable connection, perhaps the given one."""
    connection = dialled
    try:
        for request, kind in ((asking.PING, Kind.FENCING), (asking.STATS, Kind.COUNTING)):
            async with asyncio.timeout(address.connect_timeout):
                reply = await connection.request(request)
            if reply.status == "ok":
                return kind, connection
            if reply.status == "error_auth":
                raise AuthenticationFailed(
                    f"the server at {endpoint} asks for a token: dflockd://TOKEN@HOST"
                )
            connection.hang_up()
            connection = await dial(address, endpoint, clock)
    except BaseException:
        connection.hang_up()
        raise
    return Kind.PLAIN, connection


async def _connected(address: DflockdUrl, endpoint: Endpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = endpoint.host, endpoint.port
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise EngineUnavailable(f"{host!r} is no name of a host: {error}") from None
    trouble: OSError = OSError(f"{host!r} has no address")
    for family, kind, protocol, _, target in found:
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            await loop.sock_connect(made, target)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):  # Linux has them, macOS some
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if address.tls is not None:
                made = await _encrypted(made, address.tls, address.server_name or host)
        except OSError as error:
            made.close()
            trouble = error
            continue
        except BaseException:
            made.close()
            raise
        return made
    raise trouble


async def _encrypted(plain: socket.socket, tls: ssl.SSLContext, name: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    made = tls.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
    try:
        while True:
            try:
                made.do_handshake()
            except ssl.SSLWantReadError:
                await _ready(made, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(made, loop.add_writer, loop.remove_writer)
            else:
                return made
    except BaseException:
        made.close()
        raise


async def _ready(
    made: socket.socket,
    add: Callable[[int, Callable[[], None]], None],
    remove: Callable[[int], bool],
) -> None:
    ready = asyncio.Event()
    descriptor = made.fileno()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        with contextlib.suppress(ValueError):
            remove(descriptor)
