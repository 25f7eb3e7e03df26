"""Lost connections are freed at once: the collector would stall the loop for thousands of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import ssl
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.dflockd.listener import DflockdListener
from tenure.server.limits import Limits
from tenure.server.native import NativeListener
from tenure.server.tls import TlsFiles, server_context
from tenure.server.ydb import YdbListener
from tests.server.certificates import Authority

LISTENERS: dict[str, Any] = {
    "tenure": NativeListener,
    "ydb": YdbListener,
    "dflockd": DflockdListener,
}


def _of_its_own(connection: Any) -> Any:
    """Return an object that a connection alone refers to."""
    return connection.lost if hasattr(connection, "lost") else connection.gone


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("scheme", LISTENERS)
async def test_a_lost_connection_leaves_nothing_to_the_collector(
    scheme: str, tmp_path: Path, *, tls: bool
) -> None:
    engine = connect_engine("memory://", SystemClock())
    await engine.open()
    context = Context(engine, Limits(), Authenticator(), logging.getLogger("tenure.server"))
    secured, trusting = None, None
    if tls:
        authority = Authority(tmp_path)
        pair = authority.signs("server")
        secured = server_context(TlsFiles(pair.cert, pair.key))
        trusting = ssl.create_default_context(cafile=authority.cert)
        trusting.set_alpn_protocols(["h2"])
    listener = LISTENERS[scheme](context, f"{scheme}{'s' * tls}://127.0.0.1:0", tls=secured)
    await listener.open()
    gc.disable()
    try:
        port = urlsplit(listener.address).port
        pairs = [await asyncio.open_connection("127.0.0.1", port, ssl=trusting) for _ in range(3)]
        async with asyncio.timeout(15):
            while len(listener.connections) < len(pairs):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.005)
        alive = [weakref.ref(_of_its_own(each)) for each in listener.connections]
        if tls:
            alive += [
                weakref.ref(each._transport.get_extra_info("ssl_object"))
                for each in listener.connections
            ]
        for _, writer in pairs:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        async with asyncio.timeout(15):
            while any(each() is not None for each in alive):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.005)
    finally:
        gc.enable()
        await listener.aclose()
        await engine.aclose()
