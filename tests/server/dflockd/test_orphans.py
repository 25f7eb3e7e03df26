"""Sessions that a listener left in the store: another listener on the node takes them over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tenure.engines.contract import Attach, Enqueued
from tenure.engines.memory import MemoryEngine
from tenure.model import EPHEMERAL_LIMIT, SessionDescription
from tenure.server.dflockd.claims import ClaimRecord, sealed
from tenure.server.dflockd.listener import Deaf, DflockdListener
from tenure.server.reads import SLICE, ReadingClient, ReadSchedule
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tenure.wire.lines import make_token
from tests.server.dflockd.talking import Client, serving
from tests.server.dflockd.test_connection import token_of

pytestmark = pytest.mark.usefixtures("loop_factory")

_stores = itertools.count()
SALT = "0123456789abcdef"


@pytest.fixture
def name() -> str:
    return f"orphans-{next(_stores)}"


class Unseeing(MemoryEngine):
    """A store that cannot tell who is attached, as one that many machines share.

    Attributes:
        silent: seconds for which it has heard of no session.
    """

    silent = 0.0

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        found = await super().list_sessions(path)
        return [replace(each, attached=None, silent_for=self.silent) for each in found]

    def pages(self) -> None:  # type: ignore[override]  # `Engine.pages` may return None
        return None


async def leave_a_lock(engine: MemoryEngine, listener: DflockdListener) -> str:
    """Have another listener hold the key ``job`` for 900 s; returns the token."""
    how = Attach("/dflockd", 1000.0, listener.describe("somebody"), "window")
    session = await engine.attach(how, Deaf())
    until = int((listener.context.clock.wall() + 900) * 1000)
    record = ClaimRecord(sealed(SALT, "job"), 900, until).to_bytes()
    placed = session.enqueue(1, "job", EPHEMERAL_LIMIT, record, timeout=None, ephemeral=True)
    assert isinstance(placed, Enqueued)
    assert placed.order_id is not None
    return make_token(placed.order_id, SALT)


async def test_a_server_at_another_address_takes_over_what_the_former_one_left(
    clock: VirtualClock, name: str
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        client = Client(listener)
        token = token_of(await client.asks("l", "job", "0 20"))
        pool = token_of(await client.asks("sl", "pool", "0 2 20"))
        former = listener.address
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        assert listener.address != former
        client = Client(listener)
        assert await client.asks("l", "job", "0") == "timeout"
        assert await client.asks("n", "job", f"{token} 20") == "ok 20"
        assert await client.asks("sr", "pool", pool) == "ok"
        assert await client.asks("r", "job", token) == "ok"
        assert (await client.asks("l", "job", "0")).startswith("ok ")
    await store.aclose()


async def test_a_server_that_is_started_beside_another_takes_nothing_of_it(
    clock: VirtualClock, name: str
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock), read_timeout=1000.0) as first:
        holder = Client(first)
        token = token_of(await holder.asks("l", "job", "0 900"))
        async with serving(clock, engine=MemoryEngine(name, clock), read_timeout=1000.0) as second:
            await asyncio.sleep(200)
            assert not second.locks.held
            assert await holder.asks("n", "job", f"{token} 900") == "ok 900"
            assert await Client(second).asks("l", "job", "0") == "timeout"
        assert not holder.is_closed()
        assert await holder.asks("r", "job", token) == "ok"
    await store.aclose()


async def test_a_session_that_is_silent_for_long_is_taken_over(
    clock: VirtualClock, name: str
) -> None:
    engine = Unseeing(name, clock)
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        client = Client(listener)
        token = await leave_a_lock(engine, listener)
        engine.silent = 500.0
        await asyncio.sleep(60)
        client.ask("n", "job", token)
        await asyncio.sleep(6)
        assert await client.hears() == "error\n"
        engine.silent = 501.0
        await asyncio.sleep(20)
        engine.silent = 521.0
        await asyncio.sleep(20)
        assert await client.asks("l", "job", "0") == "timeout"
        assert (await client.asks("n", "job", token)).startswith("ok ")
        assert await client.asks("r", "job", token) == "ok"
        token_of(await client.asks("l", "job", "0"))


async def test_looks_in_quick_succession_take_nothing_of_a_silent_server(
    clock: VirtualClock, name: str
) -> None:
    engine = Unseeing(name, clock)
    async with serving(clock, engine=engine, read_timeout=1000.0, gc_interval=1000.0) as listener:
        token = await leave_a_lock(engine, listener)
        clients = [Client(listener) for _ in range(3)]
        for silent, client in enumerate(clients):
            engine.silent = 600.0 + silent
            client.ask("n", "job", token)
            await asyncio.sleep(2)
        await asyncio.sleep(6)
        assert [await client.hears() for client in clients] == ["error\n"] * 3
        assert not listener.locks.held


async def test_the_search_takes_turns_with_the_costly_reads_of_clients(
    clock: VirtualClock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[tuple[str, bool]] = []
    reading = 0
    store = MemoryEngine(name, clock)
    await store.open()
    pages_of = MemoryEngine.pages

    class NotedPages:
        """The pages of the store, with a note of each one."""

        def __init__(self, engine: MemoryEngine) -> None:
            self._pages = pages_of(engine)

        async def sessions(self, path: str, *, after: int, most: int) -> Any:
            lists.append(("sessions", reading > 0))
            return await self._pages.sessions(path, after=after, most=most)

        async def semaphores(self, path: str, **options: Any) -> Any:
            lists.append(("semaphores", reading > 0))
            return await self._pages.semaphores(path, **options)

    begin, end = ReadSchedule.begin_slice, ReadSchedule.end_slice

    async def count_begin(reads: ReadSchedule, client: ReadingClient, connection: object) -> None:
        nonlocal reading
        await begin(reads, client, connection)
        reading += 1

    def count_end(reads: ReadSchedule, client: ReadingClient, described: int = SLICE + 1) -> None:
        nonlocal reading
        reading -= 1
        end(reads, client, described)

    monkeypatch.setattr(MemoryEngine, "pages", lambda engine: NotedPages(engine))  # noqa: PLW0108  (binds)
    monkeypatch.setattr(ReadSchedule, "begin_slice", count_begin)
    monkeypatch.setattr(ReadSchedule, "end_slice", count_end)
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        token = token_of(await Client(listener).asks("l", "job", "0 20"))
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        assert (await Client(listener).asks("n", "job", f"{token} 20")).startswith("ok ")
    await store.aclose()
    assert {kind for kind, _ in lists} == {"sessions", "semaphores"}
    assert all(in_turn for _, in_turn in lists)
    assert reading == 0


@pytest.mark.parametrize("moment", [4.001, 4.02, 4.026, 4.032, 4.038, 4.044, 4.05, 4.1])
async def test_a_client_that_goes_in_the_middle_of_a_takeover_does_not_stop_it(
    clock: VirtualClock, name: str, moment: float
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    engine = FaultyEngine(MemoryEngine(name, clock), Way(delay=lambda: 0.003))
    async with serving(clock, engine=engine, read_timeout=1000.0, gc_interval=1000.0) as listener:
        holder, client, other = Client(listener), Client(listener), Client(listener)
        token_of(await holder.asks("l", "busy", "0 900"))
        key = listener.context.session_keys.of_dflockd()
        how = Attach("/dflockd", 1000.0, listener.describe("somebody"), "window", key)
        session = await store.attach(how, Deaf())
        for hold, wanted in (1, "busy"), (2, "job"):
            record = ClaimRecord(
                sealed(SALT, wanted), 900, int((clock.wall() + 900) * 1000)
            ).to_bytes()
            placed = session.enqueue(
                hold, wanted, EPHEMERAL_LIMIT, record, timeout=None, ephemeral=True
            )
            assert isinstance(placed, Enqueued)
            assert placed.order_id is not None
        await session.detach()
        token = make_token(placed.order_id or 0, SALT)
        client.ask("n", "job", token)
        await asyncio.sleep(moment)
        client.abort()
        await asyncio.sleep(1)
        other.ask("r", "job", token)
        await asyncio.sleep(6)
        assert await other.hears() == "ok\n"
        assert [each.connection for each in listener.locks.holders] == [holder.connection]
    await store.aclose()


async def test_a_session_that_is_heard_of_after_an_outage_is_left_alone(
    clock: VirtualClock, name: str
) -> None:
    engine = Unseeing(name, clock)
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        await leave_a_lock(engine, listener)
        for silent in (700.0, 3.0, 700.0, 600.0, 500.0, 700.0):
            engine.silent = silent
            await asyncio.sleep(15)
        assert not listener.locks.held
