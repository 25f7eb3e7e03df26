"""Outages of networked stores: never reported as contention, bounded, and logged once."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

import tenure
from tenure import blocking, events
from tenure._client.request import SENT
from tenure._client.session_core import SessionCore
from tenure.errors import AcquireTimeout, EngineUnavailable, Unsupported
from tests.engines.outages import NETWORKED, Afar

ANSWER_TIMEOUT = 1.0
"""Seconds that the tests' URLs allow for an answer."""

BOUND = 10.0
"""Seconds within which everything has to end that is to be bounded; generous for a busy machine."""


STALLED = pytest.param("stalled", marks=pytest.mark.exhaustive)
"""Of a test whose other case of an outage shows the same rule sooner."""


ENGINES = [
    *sorted({*NETWORKED} - {"postgresql"}),
    # Its requests wait in the same code as those of redis.
    pytest.param("postgresql", marks=pytest.mark.exhaustive),
]


@pytest.fixture(params=ENGINES)
def afar(request: pytest.FixtureRequest) -> Iterator[Afar]:
    with NETWORKED[request.param]() as found:
        yield found


@pytest.fixture
def url(afar: Afar) -> str:
    return f"{afar.url}{'&' if '?' in afar.url else '?'}answer_timeout={ANSWER_TIMEOUT}"


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < BOUND


def breaks(afar: Afar, how: str) -> None:
    if how == "refused":
        afar.network.refuse()
    else:
        afar.network.stall()


def mends(afar: Afar) -> None:
    afar.network.flow()
    afar.network.start()


async def recovers(afar: Afar, client: tenure.Client) -> None:
    """Mend the network, and wait until the client can acquire again."""
    mends(afar)
    async with client.mutex("another").lock(timeout=30) as lease:
        assert lease.held


@pytest.mark.parametrize("how", ["refused", STALLED])
async def test_what_is_free_is_not_acquired_during_an_outage_and_the_error_says_why(
    afar: Afar, url: str, how: str
) -> None:
    async with tenure.connect(url) as client:
        mutex = client.mutex("nightly")
        await (await mutex.lock(timeout=30)).release()
        breaks(afar, how)
        calls: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (1, lambda: mutex.lock(timeout=1)),
            (ANSWER_TIMEOUT, lambda: mutex.lock(timeout=0)),
            (ANSWER_TIMEOUT, mutex.try_lock),
        ]
        for seconds, call in calls:
            async with in_time():
                with pytest.raises(AcquireTimeout) as late:
                    await call()
            message = str(late.value)
            assert message.startswith(
                f"mutex 'nightly' on /default: not acquired within {seconds:g} s, because "
                f"{client.url} has "
            )
            assert " been unreachable for " in message or " not answered for " in message
            assert isinstance(late.value.__cause__, EngineUnavailable)
        await recovers(afar, client)


@pytest.mark.parametrize("how", ["refused", STALLED])
async def test_a_waiter_that_times_out_during_an_outage_is_not_told_of_contention(
    afar: Afar, url: str, how: str
) -> None:
    async with (
        tenure.connect(afar.direct) as holder,
        tenure.connect(url) as client,
        holder.mutex("nightly").lock(timeout=30),
    ):
        mutex = client.mutex("nightly")
        with pytest.raises(AcquireTimeout, match=r"not acquired within 1 s; ") as busy:
            await mutex.lock(timeout=1)
        assert busy.value.__cause__ is None
        assert await mutex.try_lock() is None
        waiting = asyncio.ensure_future(mutex.lock(timeout=3))
        await until_it_waits(client)
        breaks(afar, how)
        with pytest.raises(AcquireTimeout, match=r"not acquired .* because .* has ") as late:
            await waiting
        assert isinstance(late.value.__cause__, EngineUnavailable)
        await recovers(afar, client)


async def until_it_waits(client: tenure.Client) -> None:
    """Wait until the store has put the latest request into its queue."""
    await asyncio.sleep(0)
    (session,) = client._core.sessions
    assert isinstance(session, SessionCore)
    *_, request = session.requests.values()
    async with asyncio.timeout(10):
        while request.state is SENT:  # noqa: ASYNC110  its waiting task is not woken either
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["refused", STALLED])
async def test_reads_end_in_time_during_an_outage(afar: Afar, url: str, how: str) -> None:
    async with tenure.connect(url) as client:
        async with client.mutex("nightly").lock(timeout=30):
            pass
        pool, reads = client.semaphore("gpu"), dict[str, Callable[[], Awaitable[object]]]()
        await pool.create(2, exist_ok=True)
        reads = {
            "inspect": client.mutex("nightly").inspect,
            "describe": pool.describe,
            "count": pool.count,
            "leader": client.election("primary").leader,
            "list_semaphores": client.list_semaphores,
            "list_sessions": client.list_sessions,
            "describe_node": client.describe_node,
            "list_nodes": client.list_nodes,
        }
        able = [name for name, read in reads.items() if await _is_supported(read)]
        assert able
        breaks(afar, how)
        for name in able:
            if client.url.startswith("dflockd:") and name in {"list_nodes", "describe_node"}:
                continue  # there is one node, and no server is asked about it
            async with in_time():
                with pytest.raises(EngineUnavailable):
                    await reads[name]()
        await recovers(afar, client)


async def _is_supported(read: Callable[[], Awaitable[object]]) -> bool:
    try:
        await read()
    except Unsupported:
        return False
    except tenure.TenureError:
        pass
    return True


async def test_an_outage_is_logged_once_however_many_sessions_there_are(
    afar: Afar, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tenure")
    async with tenure.connect(url) as client:
        sessions = [await client.session() for _ in range(5)]
        caplog.clear()
        async with asyncio.timeout(30), client.events() as stream:
            afar.network.refuse()
            await five(stream, events.SessionDetached)
            while not caplog.records:  # noqa: ASYNC110  a brief interruption is not logged
                await asyncio.sleep(0.01)
            afar.network.start()
            await five(stream, events.SessionAttached)
            assert len(sessions) == 5
        told = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO"], told
    (_, lost), (_, found) = told
    assert lost.startswith(f"lost contact, nothing is granted meanwhile: url={client.url} error=")
    assert found.startswith(f"re-established contact: url={client.url} seconds=")


async def test_a_cut_of_an_idle_connection_costs_no_lease_and_no_line_in_the_log(
    afar: Afar, caplog: pytest.LogCaptureFixture
) -> None:
    if afar.url.startswith("dflockd"):
        pytest.skip("a lease of dflockd's ends with its connection")
    caplog.set_level(logging.INFO, "tenure")
    async with tenure.connect(afar.url) as client, client.mutex("m").lock() as lease:
        caplog.clear()
        async with asyncio.timeout(30), client.events() as stream:
            afar.network.cut()
            async for event in stream:
                if isinstance(event, events.SessionAttached):
                    break
        assert lease.held
        async with client.mutex("another").lock(timeout=30):
            pass
    assert [each.getMessage() for each in caplog.records] == []


async def five(stream: events.EventStream, kind: type[events.Event]) -> None:
    """Wait for so many events of that kind."""
    left = 5
    async for event in stream:
        left -= isinstance(event, kind)
        if not left:
            return


@pytest.mark.parametrize("how", ["refused", "stalled"])
async def test_a_first_connection_that_fails_says_so_in_time(
    afar: Afar, url: str, how: str
) -> None:
    breaks(afar, how)
    client = tenure.connect(url)
    try:
        for call in (lambda: client.mutex("m").lock(timeout=1), client.mutex("m").try_lock):
            async with in_time():
                with pytest.raises((AcquireTimeout, EngineUnavailable)) as failed:
                    await call()
            if isinstance(failed.value, AcquireTimeout):
                assert isinstance(failed.value.__cause__, EngineUnavailable)
        async with in_time():
            with pytest.raises(EngineUnavailable):
                await client.mutex("m").inspect()
    finally:
        mends(afar)
        await client.aclose()


def test_synchronous_programs_see_the_same(afar: Afar, url: str) -> None:
    with blocking.connect(url) as client:
        mutex = client.mutex("nightly")
        mutex.lock(timeout=30).release()
        breaks(afar, "stalled")
        for call in (lambda: mutex.lock(timeout=1), mutex.try_lock):
            began = time.monotonic()
            with pytest.raises(AcquireTimeout, match="within 1 s, because ") as late:
                call()
            assert time.monotonic() - began < BOUND
            assert isinstance(late.value.__cause__, EngineUnavailable)
        mends(afar)
        mutex.lock(timeout=30).release()


async def cut_off(session: tenure.Session, client: tenure.Client, afar: Afar) -> None:
    """Begin an outage, after the session has used the store; return when the client knows."""
    await (await session.mutex("m").lock(timeout=30)).release()
    async with client.events() as happened:
        breaks(afar, "refused")
        async for event in happened:
            if isinstance(event, events.SessionDetached):
                break


TRIES = 60
"""Requests of each round that times out during an outage."""


async def kept_after(session: tenure.Session, names: Sequence[str]) -> int:
    """Let requests for these names time out; return how many are in memory afterwards."""
    for _ in range(TRIES // len(names)):
        for answer in await asyncio.gather(
            *(session.mutex(name).lock(timeout=0.001) for name in names), return_exceptions=True
        ):
            assert isinstance(answer, AcquireTimeout)
    await asyncio.sleep(0)
    gc.collect()
    return sum(type(each).__name__.endswith("Request") for each in gc.get_objects())


@pytest.mark.parametrize("waiters", [0, 2])
async def test_requests_that_time_out_during_an_outage_leave_nothing_in_memory(
    afar: Afar, url: str, waiters: int
) -> None:
    async with tenure.connect(url) as client, client.session() as session:
        await cut_off(session, client, afar)
        waiting = [asyncio.ensure_future(session.mutex("m").lock()) for _ in range(waiters)]
        counts = list[int]()
        for number in range(2):
            counts.append(await kept_after(session, ["m"] * 20))
            others = [f"{number}-{each}" for each in range(TRIES)]
            counts.append(await kept_after(session, others))
        assert max(counts) < min(counts) + TRIES / 2
        mends(afar)
        for each in waiting:
            await (await each).release()
        async with session.mutex("m").lock(timeout=30) as lease:
            assert lease.held


ROUNDS = 6


async def objects_after(election: tenure.Election) -> int:
    """Let candidacies time out; return how many objects are in memory afterwards."""
    for answer in await asyncio.gather(
        *(election.campaign(b"", timeout=0.001) for _ in range(TRIES)), return_exceptions=True
    ):
        assert isinstance(answer, AcquireTimeout)
    await asyncio.sleep(0)
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("afar", [each for each in ENGINES if each != "dflockd"], indirect=True)
async def test_candidates_that_time_out_during_an_outage_leave_nothing_in_memory(
    afar: Afar, url: str
) -> None:
    async with tenure.connect(url) as client, client.session() as session:
        await cut_off(session, client, afar)
        election = session.election("e")
        counts = [await objects_after(election) for _ in range(ROUNDS)]
        assert counts[-1] < counts[0] + ROUNDS * TRIES
        mends(afar)
        async with election.campaign(b"", timeout=30) as leadership:
            assert leadership.held
