"""Lost connections are freed at once: the collector would stall the loop for thousands of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
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
from tenure.server.ydb import YdbListener

LISTENERS: dict[str, Any] = {
    "tenure": NativeListener,
    "ydb": YdbListener,
    "dflockd": DflockdListener,
}


def _of_its_own(connection: Any) -> Any:
    """Return an object that a connection alone refers to."""
    return connection.lost if hasattr(connection, "lost") else connection.gone


@pytest.mark.parametrize("scheme", LISTENERS)
async def test_a_lost_connection_leaves_nothing_to_the_collector(scheme: str) -> None:
    engine = connect_engine("memory://", SystemClock())
    await engine.open()
    context = Context(engine, Limits(), Authenticator(), logging.getLogger("tenure.server"))
    listener = LISTENERS[scheme](context, f"{scheme}://127.0.0.1:0")
    await listener.open()
    gc.disable()
    try:
        port = urlsplit(listener.address).port
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with asyncio.timeout(60):
            while len(listener._connections) < len(pairs):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.005)
        alive = [weakref.ref(_of_its_own(each)) for each in listener._connections]
        for _, writer in pairs:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        async with asyncio.timeout(60):
            while any(each() is not None for each in alive):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.005)
    finally:
        gc.enable()
        await listener.aclose()
        await engine.aclose()
