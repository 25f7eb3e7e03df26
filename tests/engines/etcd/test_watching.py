"""The stream of watches, on a member that has forgotten what they ask for."""

from __future__ import annotations

import asyncio
import base64

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.watch_cache import WatchCache
from tenure.testing.recorder import Recorder
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


async def test_what_is_read_after_a_watch_has_begun_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_load, load = asyncio.Event(), WatchCache._load

    async def late(self: WatchCache) -> None:
        await may_load.wait()
        await load(self)

    with a_prefix() as url:
        watching, writing = connect_engine(url, SystemClock()), connect_engine(url, SystemClock())
        await watching.open()
        await writing.open()
        try:
            watcher = await watching.attach(Attach("/default", 30), Recorder())
            writer = await writing.attach(Attach("/default", 30), Recorder())
            await writer.create_semaphore("s", 1, b"old", exist_ok=False)
            monkeypatch.setattr(WatchCache, "_load", late)
            changed = asyncio.Event()
            watcher.watch("s", data=True, owners=True, changed=changed.set)
            reading = asyncio.ensure_future(
                watcher.describe_semaphore("s", owners=True, waiters=False)
            )
            for _ in range(20):  # a read that does not wait is answered meanwhile
                await writer.update_semaphore("s", b"new")
            may_load.set()
            async with asyncio.timeout(PATIENCE):
                if (await reading).data != b"new":
                    await changed.wait()
        finally:
            await watching.aclose()
            await writing.aclose()


async def test_a_read_that_is_cancelled_while_a_watch_begins_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_prefix() as url:
        engine = connect_engine(url, SystemClock())
        assert isinstance(engine, EtcdEngine)
        await engine.open()
        try:
            session = await engine.attach(Attach("/default", 30), Recorder())
            load = WatchCache._load
            for turns in range(8):
                await session.create_semaphore(f"s{turns}", 1, b"new", exist_ok=False)
                may_load = asyncio.Event()

                async def late(self: WatchCache, may_load: asyncio.Event = may_load) -> None:
                    await may_load.wait()
                    await load(self)

                monkeypatch.setattr(WatchCache, "_load", late)
                stop = session.watch(f"s{turns}", data=True, owners=True, changed=lambda: None)
                one, other = (
                    asyncio.ensure_future(
                        session.describe_semaphore(f"s{turns}", owners=True, waiters=False)
                    )
                    for _ in range(2)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                one.cancel()
                may_load.set()
                async with asyncio.timeout(PATIENCE):
                    assert (await other).data == b"new"
                assert one.cancelled()
                stop()
        finally:
            await engine.aclose()
