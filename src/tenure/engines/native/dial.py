"""Opening a transport to a server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tenure.engines._kit.url import Endpoint
from tenure.engines.native.url import NativeUrl

__all__ = ["Dial", "dialler"]

Dial: TypeAlias = Callable[[Endpoint, asyncio.Protocol], Awaitable[None]]
"""Connects a protocol to a server; it raises `OSError`, and is cancelled when that takes long."""


def dialler(address: NativeUrl, tls: ssl.SSLContext | None) -> Dial:
    """Return a dialler for TCP, TLS or a Unix socket, as the address says."""

    async def dial(endpoint: Endpoint, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if endpoint.path:
            await loop.create_unix_connection(lambda: protocol, endpoint.path)
        elif tls is not None and address.tls is not None:
            name = address.tls.server_name or endpoint.host
            await loop.create_connection(
                lambda: protocol, endpoint.host, endpoint.port, ssl=tls, server_hostname=name
            )
        else:
            await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port)

    return dial
