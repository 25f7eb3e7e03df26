"""Two servers on one store: each accepts the other's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from tenure.engines.contract import Attach, Engine
from tenure.engines.memory import MemoryEngine
from tenure.server.dflockd.claims import key_of
from tenure.server.dflockd.listener import Deaf, DflockdListener
from tenure.server.dflockd.remote import LETTERS
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tests.server.dflockd.talking import Client, serving
from tests.server.dflockd.test_connection import token_of

pytestmark = pytest.mark.usefixtures("loop_factory")

_stores = itertools.count()


@pytest.fixture
def name() -> str:
    return f"remote-{next(_stores)}"


@pytest.fixture(params=["at once", "later"])
def ways(request: pytest.FixtureRequest) -> tuple[Way | None, Way | None]:
    """The ways of two servers to their store."""
    if request.param == "at once":
        return None, None
    return Way(delay=lambda: 0.003), Way(delay=lambda: 0.003)


@contextlib.asynccontextmanager
async def two_servers(
    clock: VirtualClock, name: str, ways: tuple[Way | None, Way | None]
) -> AsyncIterator[tuple[DflockdListener, DflockdListener]]:
    """Two servers on one store, whose clients may be silent for long."""

    def engine(way: Way | None) -> Engine:
        inner = MemoryEngine(name, clock)
        return inner if way is None else FaultyEngine(inner, way)

    async with (
        serving(clock, engine=engine(ways[0]), read_timeout=1000.0) as one,
        serving(clock, engine=engine(ways[1]), read_timeout=1000.0) as two,
    ):
        yield one, two


async def patient(client: Client, command: str, key: str, argument: str) -> str:
    """The reply to a request that another server has a part in."""
    client.ask(command, key, argument)
    await asyncio.sleep(6)
    heard = await client.hears()
    assert heard.endswith("\n"), f"no reply to {command}: {heard!r}"
    return heard[:-1]


async def test_a_token_is_released_at_another_server(
    clock: VirtualClock, name: str, ways: tuple[Way | None, Way | None]
) -> None:
    async with two_servers(clock, name, ways) as (one, two):
        holder, waiter, other = Client(one), Client(one), Client(two)
        token = token_of(await holder.asks("e", "job", "600"))
        slot = token_of(await holder.asks("sl", "pool", "0 2 600"))
        waiter.ask("l", "job", "600")
        assert await patient(other, "r", "job", token) == "ok"
        token_of((await waiter.hears())[:-1])
        assert await patient(other, "r", "job", token) == "error"
        assert await holder.asks("n", "job", token) == "error"
        assert await holder.asks("w", "job", "0") == "error_not_enqueued"
        assert await patient(other, "sr", "pool", slot) == "ok"
        assert not holder.is_closed()


async def test_a_token_is_renewed_at_another_server(
    clock: VirtualClock, name: str, ways: tuple[Way | None, Way | None]
) -> None:
    async with two_servers(clock, name, ways) as (one, two):
        holder, other, third = Client(one), Client(two), Client(two)
        token = token_of(await holder.asks("l", "job", "0 20"))
        slot = token_of(await holder.asks("sl", "pool", "0 2 20"))
        assert await patient(other, "n", "job", f"{token} 60") == "ok 60"
        assert await patient(other, "sn", "pool", slot) == "ok 33"
        await asyncio.sleep(25)
        assert await third.asks("l", "job", "0") == "timeout"
        assert await holder.asks("n", "job", f"{token} 50") == "ok 50"
        assert await patient(other, "n", "job", f"{token} 5") == "ok 5"  # it may last longer
        assert await third.asks("l", "job", "0") == "timeout"
        await asyncio.sleep(60)
        assert (await third.asks("l", "job", "0")).startswith("ok ")
        for listener in one, two:
            assert not any(each.letters for each in listener.locks.holders)
        assert key_of(LETTERS) is None
        engine = two.context.engine
        found = await engine.list_semaphores("/dflockd", owners=False, waiters=False)
        assert LETTERS not in [each.name for each in found]


async def test_what_is_no_token_is_refused_at_another_server(
    clock: VirtualClock, name: str, ways: tuple[Way | None, Way | None]
) -> None:
    async with two_servers(clock, name, ways) as (one, two):
        holder, other = Client(one), Client(two)
        token = token_of(await holder.asks("l", "job", "0 600"))
        token_of(await holder.asks("l", "other", "0 600"))
        guessed = token[:16] + "0123456789abcdef"
        for key, wrong in [("job", guessed), ("other", token), ("none", token), ("a b", token)]:
            assert await patient(other, "r", key, wrong) == "error"
            assert await patient(other, "n", key, wrong) == "error"
        assert await holder.asks("n", "job", token) == "ok 33"


async def test_a_letter_of_anybody_shortens_no_lease(
    clock: VirtualClock, name: str, ways: tuple[Way | None, Way | None]
) -> None:
    async with two_servers(clock, name, ways) as (one, two):
        holder, other = Client(one), Client(two)
        token = token_of(await holder.asks("l", "job", "0 60"))
        session = await two.context.engine.attach(Attach("/dflockd", 600.0), Deaf())
        for hold, letter in enumerate(
            [b"dflockd renew %d 1" % int(token[:16], 16), b"dflockd renew 7 1", b"\xff", b""]
        ):
            placed = session.enqueue(hold + 1, LETTERS, 1, letter, timeout=0, ephemeral=True)
            if isinstance(placed, asyncio.Future):
                await placed
        await asyncio.sleep(40)
        assert await other.asks("l", "job", "0") == "timeout"
        assert await holder.asks("n", "job", token) == "ok 33"
        await session.close()


async def test_a_server_that_cannot_answer_renews_nothing_and_loses_nothing(
    clock: VirtualClock, name: str
) -> None:
    way = Way(delay=lambda: 0.003)
    async with two_servers(clock, name, (way, None)) as (one, two):
        holder, other = Client(one), Client(two)
        token = token_of(await holder.asks("l", "job", "0 60"))
        way.cut()
        assert await patient(other, "n", "job", f"{token} 60") == "error"
        way.mend()
        await asyncio.sleep(2)
        assert await holder.asks("n", "job", f"{token} 60") == "ok 60"


async def test_what_a_server_left_is_renewed_and_released_at_once_by_another(
    clock: VirtualClock, name: str
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock), read_timeout=1000.0) as two:
        async with serving(clock, engine=MemoryEngine(name, clock)) as one:
            holder, other = Client(one), Client(two)
            job = token_of(await holder.asks("l", "job", "0 60"))
            free = token_of(await holder.asks("l", "free", "0 60"))
        assert await patient(other, "r", "free", free) == "ok"
        assert await patient(other, "n", "job", f"{job} 90") == "ok 90"
        assert await other.asks("l", "job", "0") == "timeout"
        assert await other.asks("r", "job", job) == "ok"
    await store.aclose()


@pytest.mark.parametrize("moment", [0.0, 0.004, 0.01, 0.5, 3.0])
async def test_a_client_that_goes_while_it_renews_elsewhere_leaves_nothing(
    clock: VirtualClock, name: str, moment: float
) -> None:
    way = Way(delay=lambda: 0.003)
    async with two_servers(clock, name, (None, way)) as (one, two):
        holder, other = Client(one), Client(two)
        token = token_of(await holder.asks("l", "job", "0 600"))
        one.locks.held.clear()  # it looks for no letters
        other.ask("n", "job", token)
        await asyncio.sleep(moment)
        other.abort()
        await asyncio.sleep(1)
        assert not two.locks.holders
        sessions = await two.context.engine.list_sessions("/dflockd")
        assert len(sessions) == 1


@pytest.mark.parametrize(("outage", "granted"), [(45.0, True), (95.0, False)])
async def test_a_grant_that_a_server_hears_of_late_is_told_if_the_session_is_its_own_still(
    clock: VirtualClock, name: str, outage: float, granted: bool
) -> None:
    way = Way(delay=lambda: 0.003)
    async with two_servers(clock, name, (way, None)) as (one, two):
        waiter, holder, other = Client(one), Client(two), Client(two)
        token = token_of(await holder.asks("l", "job", "0 900"))
        waiter.ask("l", "job", "900 60")
        assert await waiter.hears() == ""
        way.cut()
        assert await holder.asks("r", "job", token) == "ok"
        await asyncio.sleep(outage)
        assert bool(two.locks.held) is not granted  # it has taken the session over
        way.mend()
        await asyncio.sleep(20)
        heard = await waiter.hears()
        assert heard.startswith("ok ") if granted else heard == "error\n"
        assert waiter.is_closed() is not granted
        assert await other.asks("l", "job", "0") == "timeout"
