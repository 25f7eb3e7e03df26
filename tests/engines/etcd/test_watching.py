"""The stream of watches, on a member that has forgotten what they ask for."""

from __future__ import annotations

import asyncio
import base64

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.etcd.engine import EtcdEngine
from tests.engines.etcd.contest import PATIENCE
from tests.engines.etcd.servers import a_prefix, shared


def put(key: str, value: str) -> None:
    """As somebody else does."""
    text = {"key": base64.b64encode(key.encode()), "value": base64.b64encode(value.encode())}
    shared().ask("kv/put", {name: each.decode() for name, each in text.items()})


async def test_a_watch_of_what_was_compacted_away_says_so_and_goes_on() -> None:
    with a_prefix() as url:
        engine = connect_engine(url, SystemClock())
        assert isinstance(engine, EtcdEngine)
        await engine.open()
        try:
            key = f"{url.partition('=')[2]}/key"
            since = await asyncio.to_thread(shared().revision)
            for text in ("old", "older than what is known"):
                await asyncio.to_thread(put, key, text)
            await asyncio.to_thread(shared().compact)
            missed, happened = asyncio.Event(), asyncio.Event()
            for _ in range(3):  # each is ended, and goes on, by itself
                missed.clear()
                happened.clear()
                watch = engine.watching.add(
                    key.encode(), b"", since + 1, lambda _: happened.set(), missed.set
                )
                async with asyncio.timeout(PATIENCE):
                    await missed.wait()
                    await asyncio.to_thread(put, key, "new")
                    await happened.wait()
                engine.watching.remove(watch)
            assert engine.watching.is_up
        finally:
            await engine.aclose()
