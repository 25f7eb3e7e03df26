"""What the engine does when the way to the server breaks, or the server fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines._kit.reconnect import LONGEST_PAUSE
from tenure.engines.contract import Attach, EngineSession, Enqueued, Place, Withdrawn
from tenure.engines.ydb import connect, database, messages
from tenure.engines.ydb.engine import YdbEngine
from tenure.errors import EngineUnavailable, LeaseLost, SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.recorder import Attached, Detached, Recorder
from tests.engines.ydb.behind import Proxy, Server, in_a_file, in_memory
from tests.guarantees.vocabulary import YDB, broken, guarantee

WINDOW = 30.0


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    proxy.start()
    yield proxy
    proxy.stop()


@contextlib.asynccontextmanager
async def engine_at(url: str) -> AsyncIterator[YdbEngine]:
    engine = connect(url, SystemClock())
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


@contextlib.asynccontextmanager
async def session_at(
    url: str, window: float = WINDOW
) -> AsyncIterator[tuple[EngineSession, Recorder]]:
    async with engine_at(url) as engine:
        heard = Recorder()
        yield await engine.attach(Attach(DEFAULT_NODE, window), heard), heard


def lock(
    session: EngineSession,
    heard: Recorder,
    hold: int,
    name: str = "m",
    timeout: float | None = None,
) -> asyncio.Future[Enqueued]:
    heard.sending(hold)
    answer: Any = session.enqueue(hold, name, EPHEMERAL_LIMIT, b"", timeout=timeout, ephemeral=True)
    return answer  # type: ignore[no-any-return]


async def back(heard: Recorder, times: int = 1) -> None:
    def attached(heard: Recorder) -> bool:
        return sum(isinstance(each, Attached) for each in heard.said) >= times

    await heard.wait_for(attached, "the contact is back")


async def granted(heard: Recorder, hold: int) -> None:
    await heard.wait_for(lambda heard: heard.grants.get(hold) is not None, "the grant")


async def owners(session: EngineSession, name: str = "m") -> tuple[list[int], int]:
    """Whose it is, and how many wait."""
    found = await session.describe_semaphore(name, owners=True, waiters=True)
    return [each.session_id for each in found.owners], len(found.waiters)


async def nobody_in(store: str) -> None:
    """Wait until the store has ended every session."""
    engine = connect_engine(store, SystemClock())
    await engine.open()
    async with asyncio.timeout(20):
        while await engine.list_sessions(DEFAULT_NODE):  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.02)
    await engine.aclose()


@guarantee("cut off", "kept", on=YDB)
@pytest.mark.parametrize("options", ["", "?discovery=off"])
async def test_a_cut_connection_is_made_again_and_every_place_is_kept(
    server: Server, proxy: Proxy, options: str
) -> None:
    async with (
        session_at(proxy.url + options) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        assert (await lock(session, heard, 1, "held")).place is Place.GRANTED
        assert (await lock(other, told, 1)).place is Place.GRANTED
        assert (await lock(session, heard, 2)).place is Place.WAITING
        first = heard.proofs[-1]
        for times in (1, 2):
            proxy.cut()
            await back(heard, times)
        assert heard.proofs[-1] > first
        assert await owners(other, "held") == ([session.id], 0)
        assert await owners(other) == ([other.id], 1)
        withdrawn: Any = other.withdraw(1)
        await withdrawn
        await granted(heard, 2)
        assert not heard.removals


async def test_what_is_asked_while_the_contact_is_broken_is_done_when_it_is_back(
    server: Server, proxy: Proxy
) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, _),
    ):
        await lock(session, heard, 1)
        proxy.refuse()
        await heard.wait_for(lambda heard: Detached() in heard.said, "the loss of the contact")
        released: Any = session.withdraw(1)
        taken = lock(session, heard, 2, "another")
        again = lock(session, heard, 3)
        created = asyncio.create_task(session.create_semaphore("pool", 2, b"data", exist_ok=False))
        described = asyncio.create_task(
            session.describe_semaphore("pool", owners=False, waiters=False)
        )
        proxy.start()
        await released
        assert (await taken).place is Place.GRANTED
        assert (await again).place is Place.GRANTED
        await created
        assert (await described).data == b"data"
        assert await owners(other) == ([session.id], 0)
        assert heard.broken == []


async def test_a_release_whose_answer_was_lost_was_in_time(server: Server, proxy: Proxy) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        await lock(session, heard, 1)
        assert (await lock(other, told, 1)).place is Place.WAITING
        proxy.stall(there=False)
        released: Any = session.withdraw(1)
        await granted(told, 1)  # the server has done it
        proxy.cut()
        proxy.flow()
        assert await released is Withdrawn.LEFT
        assert await owners(other) == ([other.id], 0)
        assert session.withdraw(1) is Withdrawn.MISSING


@guarantee("cut off", "nothing leaks", on=YDB)
async def test_a_waiter_that_gives_up_while_the_contact_is_broken_is_not_granted_later(
    server: Server, proxy: Proxy
) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        await lock(other, told, 1)
        await lock(session, heard, 1)
        proxy.refuse()
        await heard.wait_for(lambda heard: Detached() in heard.said, "the loss of the contact")
        withdrawn: Any = session.withdraw(1)
        proxy.start()
        await withdrawn
        released: Any = other.withdraw(1)
        await released
        assert (await lock(other, told, 2, timeout=0)).place is Place.GRANTED
        assert not heard.grants


@guarantee("cut off", "others proceed", on=YDB)
async def test_a_grant_that_was_not_heard_is_told_when_the_contact_is_back(
    server: Server, proxy: Proxy
) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        await lock(other, told, 1)
        await lock(session, heard, 1)
        proxy.refuse()
        released: Any = other.withdraw(1)
        await released
        assert await owners(other) == ([session.id], 0)
        proxy.start()
        await granted(heard, 1)


@guarantee("administrator", "loss reported", on=YDB)
async def test_what_was_evicted_while_the_contact_was_broken_is_told_when_it_is_back(
    server: Server, proxy: Proxy
) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        await other.create_semaphore("pool", 1, b"", exist_ok=False)
        heard.sending(1)
        answer: Any = session.enqueue(1, "pool", 1, b"", timeout=None, ephemeral=False)
        assert (await answer).place is Place.GRANTED
        proxy.refuse()
        await other.delete_semaphore("pool", force=True)
        proxy.start()
        await heard.wait_for(lambda heard: 1 in heard.removals, "that it was taken away")
        assert told.end is None


async def test_a_watch_tells_of_what_has_changed_while_the_contact_was_broken(
    server: Server, proxy: Proxy
) -> None:
    changed = asyncio.Event()
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, _),
    ):
        await other.create_semaphore("config", 1, b"old", exist_ok=False)
        stop = session.watch("config", data=True, owners=False, changed=changed.set)
        await session.describe_semaphore("config", owners=False, waiters=False)
        proxy.refuse()
        await other.update_semaphore("config", b"new")
        proxy.start()
        async with asyncio.timeout(20):
            await changed.wait()
        found = await session.describe_semaphore("config", owners=False, waiters=False)
        assert found.data == b"new"
        changed.clear()
        await other.update_semaphore("config", b"newest")
        async with asyncio.timeout(20):
            await changed.wait()
        stop()
        assert heard.end is None


async def test_siblings_come_back_too(server: Server, proxy: Proxy) -> None:
    async with (
        session_at(proxy.url) as (session, heard),
        session_at(server.url) as (other, told),
    ):
        first = await lock(session, heard, 1)
        assert (await lock(session, heard, 2)).place is Place.WAITING
        assert (await lock(session, heard, 3)).place is Place.WAITING
        await lock(other, told, 1)
        proxy.cut()
        await back(heard)
        assert first.place is Place.GRANTED
        for hold in (1, 2):
            released: Any = session.withdraw(hold)
            await released
            await granted(heard, hold + 1)
        assert not told.grants


@pytest.mark.parametrize("options", ["", "?discovery=off"])
async def test_a_server_that_says_nothing_any_more_is_left(
    server: Server, proxy: Proxy, options: str
) -> None:
    async with session_at(proxy.url + options, window=6.0) as (session, heard):
        await lock(session, heard, 1)
        proxy.stall()
        session.renew()
        await heard.wait_for(lambda heard: Detached() in heard.said, "the loss of the contact")
        proxy.cut()
        proxy.flow()
        await back(heard)
        assert await owners(session) == ([session.id], 0)


async def test_a_slow_connection_proves_from_when_it_was_asked(
    server: Server, proxy: Proxy
) -> None:
    clock = SystemClock()
    async with session_at(proxy.url) as (session, heard):
        proxy.delay(0.1)
        before = clock.now()
        session.renew()
        known = len(heard.proofs)
        await heard.wait_for(lambda heard: len(heard.proofs) > known, "a proof")
        assert before <= heard.proofs[-1] < clock.now() - 0.2
        proxy.delay(0)


async def test_a_session_that_expired_meanwhile_is_told_so(server: Server, proxy: Proxy) -> None:
    async with session_at(proxy.url, window=1.0) as (session, heard):
        pending = lock(session, heard, 1)
        await pending
        proxy.refuse()
        await heard.wait_for(lambda heard: Detached() in heard.said, "the loss of the contact")
        waiting: Any = session.withdraw(1)
        await nobody_in(server.store)
        proxy.start()
        await heard.wait_for(lambda heard: heard.end is not None, "the end")
        with pytest.raises(SessionExpired):
            await waiting
        with pytest.raises(SessionExpired):
            session.enqueue(2, "m", 1, b"", timeout=None, ephemeral=True)


async def test_a_stolen_session_is_over(server: Server) -> None:
    async with engine_at(server.url) as engine:
        heard, key = Recorder(), b"a key"
        session = await engine.attach(Attach(DEFAULT_NODE, WINDOW, key=key), heard)
        thief = await engine.database.stream(1.0)
        await thief.write(messages.start("/local/default", session.id, WINDOW, "", 99, key))
        await heard.wait_for(lambda heard: heard.end is not None, "the end")
        thief.cut()
        assert "another program has resumed it" in str(heard.end)


@guarantee("restarted", "kept", "answers stand", on=YDB)
@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_server_that_is_started_anew_finds_everybody_again(kind: str) -> None:
    """On a file; in memory everything is lost, and that is told."""
    with (in_a_file if kind == "file" else in_memory)() as store:
        server = Server(store)
        server.start()
        try:
            async with session_at(server.url, 10.0) as (session, heard):
                held = await lock(session, heard, 1)
                await lock(session, heard, 2)
                server.stop()
                await heard.wait_for(lambda heard: Detached() in heard.said, "the loss")
                server.start()
                if kind == "memory":
                    await heard.wait_for(lambda heard: heard.end is not None, "the end")
                    return
                await back(heard)
                assert await owners(session) == ([session.id], 1)
                released: Any = session.withdraw(1)
                await released
                await granted(heard, 2)
                later = heard.grants[2]
                assert later is not None
                assert held.order_id is not None
                assert later > held.order_id
        finally:
            server.stop()


async def test_who_cannot_connect_is_told_where_to() -> None:
    with in_memory() as store:
        server = Server(store)
        server.start()
        server.stop()
        engine = connect(f"{server.url}?connect_timeout=1", SystemClock())
        with pytest.raises(EngineUnavailable, match=r"cannot be reached: .*without TLS") as caught:
            await engine.open()
        assert server.address in str(caught.value)
        await engine.aclose()


async def test_who_cannot_attach_is_told_why(server: Server, proxy: Proxy) -> None:
    async with engine_at(f"{proxy.url}?connect_timeout=1") as engine:
        proxy.refuse()
        with pytest.raises(EngineUnavailable, match="no session on /default"):
            await engine.attach(Attach(DEFAULT_NODE, WINDOW), Recorder())
        with pytest.raises(EngineUnavailable, match="/default"):
            await engine.describe_node(DEFAULT_NODE)


async def test_pauses_between_attempts_are_short_for_a_session_with_a_short_window(
    server: Server,
) -> None:
    async with engine_at(server.url) as engine:
        without = engine.database.longest_pause()
        session = await engine.attach(Attach(DEFAULT_NODE, 1.0), Recorder())
        assert engine.database.longest_pause() == pytest.approx(0.1)
        await session.close()
        assert engine.database.longest_pause() == without == LONGEST_PAUSE


async def test_a_call_waits_for_a_lost_connection(
    server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LONGEST_CALL_WAIT", 60.0)
    async with engine_at(f"{proxy.url}?connect_timeout=60") as engine:
        proxy.refuse()
        with pytest.raises(EngineUnavailable):
            await engine.describe_node(DEFAULT_NODE)
        waiting = asyncio.create_task(engine.describe_node(DEFAULT_NODE))
        await asyncio.sleep(0)  # it has begun
        assert not waiting.done()
        proxy.start()
        assert (await waiting).path == DEFAULT_NODE


@broken("stalled", "kept", on=YDB)
async def test_a_loop_that_is_stuck_for_longer_than_the_window_has_lost_its_leases(
    server: Server,
) -> None:
    async with tenure.connect(server.url) as client:
        session = await client.session(recovery_window=1, max_stall=60)
        lease = await session.mutex("m").lock()
        time.sleep(1.5)  # noqa: ASYNC251  the loop is to be stuck
        assert not lease.held
        assert isinstance(await lease.wait_lost(), LeaseLost)


@guarantee("cut off", "loss reported", on=YDB)
async def test_a_lease_is_lost_before_it_can_have_expired(server: Server, proxy: Proxy) -> None:
    """With the primitives above: the body is cancelled by the holder's own clock."""
    clock = SystemClock()
    cut = 0.0

    async def work(client: tenure.Client) -> None:
        nonlocal cut
        async with (
            client.session(DEFAULT_NODE, recovery_window=2.0) as session,
            session.mutex("m").lock(),
        ):
            proxy.refuse()
            cut = clock.now()
            await asyncio.sleep(60)

    async with tenure.connect(proxy.url) as client:
        with pytest.raises(LeaseLost):
            await work(client)
        assert clock.now() - cut < 2.0 + 1.0
        proxy.start()
