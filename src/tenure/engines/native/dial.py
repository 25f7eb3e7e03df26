"""Opening a transport to a server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tenure.engines.native.url import Address, Target

__all__ = ["Dial", "dialler"]

Dial: TypeAlias = Callable[[Target, asyncio.Protocol], Awaitable[None]]
"""Connects a protocol to a server; it raises `OSError`, and is cancelled when that takes long."""


def dialler(address: Address, tls: ssl.SSLContext | None) -> Dial:
    """What dials over TCP, TLS or a Unix socket, as the address says."""

    async def dial(target: Target, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if target.path:
            await loop.create_unix_connection(lambda: protocol, target.path)
        elif tls is not None:
            name = address.server_name or target.host
            await loop.create_connection(
                lambda: protocol, target.host, target.port, ssl=tls, server_hostname=name
            )
        else:
            await loop.create_connection(lambda: protocol, target.host, target.port)

    return dial
