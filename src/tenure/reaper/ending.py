"""Ending of a dead program's sessions, with the engines of their stores."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine, Orphan
from tenure.errors import EngineError, EngineUnavailable, NodeNotFound, TenureError

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


def end(registered: Iterable[Mapping[str, Any]], limit: Callable[[], float]) -> None:
    """End sessions, in the stores of their URLs.

    Args:
        registered: for each session its URL, and the fields of `Orphan`.
        limit: seconds for all attempts; may change meanwhile.
    """
    stores: dict[str, list[Orphan]] = {}
    for each in registered:
        fields = dict(each)
        stores.setdefault(fields.pop("url"), []).append(Orphan(**fields))
    asyncio.run(_end_in_stores(stores, limit))


async def _end_in_stores(
    stores: Mapping[str, Sequence[Orphan]], limit: Callable[[], float]
) -> None:
    began = time.monotonic()
    await asyncio.gather(
        *(end_all(url, found, began, limit) for url, found in stores.items()),
        return_exceptions=True,  # a store that fails does not stop the others
    )


async def end_all(
    url: str, orphans: Sequence[Orphan], began: float, limit: Callable[[], float]
) -> bool:
    """End sessions in one store; false if it was not confirmed within the limit.

    After an outage it tries again: the sessions live for their windows.
    """
    left, pause = list(orphans), FIRST_PAUSE
    while True:
        engine = connect_engine(url, SystemClock())
        try:
            seconds = max(0.0, limit() - (time.monotonic() - began))
            async with asyncio.timeout(seconds):
                await _end_now(engine, left)
        except (EngineUnavailable, EngineError, TimeoutError):
            if time.monotonic() - began + pause >= limit():
                return False
        else:
            return True
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)


async def _end_now(engine: Engine, left: list[Orphan]) -> None:
    """End sessions, and remove them from the list."""
    try:
        await engine.open()
        while left:
            with contextlib.suppress(NodeNotFound):  # its sessions have ended with it
                await engine.end_orphan(left[-1])
            left.pop()
    finally:
        with contextlib.suppress(TenureError):
            await engine.aclose()
