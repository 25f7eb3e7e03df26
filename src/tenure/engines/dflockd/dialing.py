"""Opening a connection: TCP, TLS, the token, and the kind of the server.

dflockd reports no version, so the kind of a server is determined by its answers: `PING` exists
since 2.0, whose tokens begin with a fencing token; `STATS` since 1.0, which has semaphores. An
early server closes the connection after an unknown request, so `kind_of` may have to open another
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from enum import Enum

from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import AuthenticationFailed, EngineUnavailable, TenureError
from tenure.wire.lines import requesting

# While nothing can be sent, TCP keepalive detects a dead peer.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Kind(Enum):
    """Features of a server."""

    FENCING = "with fencing tokens"  # dflockd 2.x, and tenure's own server
    COUNTING = "with semaphores, and without fencing tokens"  # dflockd 1.x
    PLAIN = "with locks alone"  # before


@contextlib.asynccontextmanager
async def _unavailable(address: DflockdUrl, endpoint: Endpoint) -> AsyncIterator[None]:
    """Limit the time, and raise network errors as `EngineUnavailable`."""
    limit = address.connect_timeout
    try:
        async with asyncio.timeout(limit):
            yield
    except TenureError:  # before its builtin relatives: AuthenticationFailed is an OSError
        raise
    except TimeoutError as error:
        raise EngineUnavailable(f"{endpoint} did not answer within {limit:g} s") from error
    except OSError as error:
        cause = str(error) or type(error).__name__
        raise EngineUnavailable(f"{endpoint} cannot be reached: {cause}") from error


async def dial(address: DflockdUrl, endpoint: Endpoint, clock: Clock) -> DflockdConnection:
    """Open a usable connection.

    Raises:
        EngineUnavailable: the server cannot be reached, or not in time.
        AuthenticationFailed: the server rejects the token.
    """
    async with _unavailable(address, endpoint):
        transport = await _connected(address, endpoint)
        connection = DflockdConnection(transport, clock, asyncio.get_running_loop())
        try:
            if address.token:
                reply = await connection.request(requesting.auth(address.token))
                if reply.status != "ok":
                    raise AuthenticationFailed(
                        f"{endpoint} rejected the token ({reply.status}), or has no token "
                        "configured; check the token in the URL and in the server's settings"
                    )
        except BaseException:
            connection.hang_up()
            raise
        return connection


async def kind_of(
    address: DflockdUrl, endpoint: Endpoint, clock: Clock, dialled: DflockdConnection
) -> tuple[Kind, DflockdConnection]:
    """Return the kind of a server, and a usable connection, perhaps the given one.

    Raises:
        EngineUnavailable: the server does not answer in time.
        AuthenticationFailed: the server requires a token.
    """
    connection = dialled
    try:
        for request, kind in ((requesting.PING, Kind.FENCING), (requesting.STATS, Kind.COUNTING)):
            async with _unavailable(address, endpoint):
                reply = await connection.request(request)
            if reply.status == "ok":
                return kind, connection
            if reply.status == "error_auth":
                raise AuthenticationFailed(
                    f"{endpoint} requires a token: write dflockd://TOKEN@HOST"
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
        raise EngineUnavailable(f"{host!r} is not a host name: {error}") from error
    failure: OSError = OSError(f"{host!r} has no address")
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
            failure = error
            continue
        except BaseException:
            made.close()
            raise
        return made
    raise failure


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
