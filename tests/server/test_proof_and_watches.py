"""What a hosted session is told of its life and of changes, and how much it may have."""

from __future__ import annotations

import asyncio

import pytest

from tenure.engines import connect_engine
from tenure.server.limits import Limits
from tenure.testing import VirtualClock
from tenure.testing.faults import Way
from tenure.wire.messages import (
    Alter,
    Changed,
    Contact,
    CreateSemaphore,
    DeleteSemaphore,
    DescribeSemaphore,
    Done,
    Enqueue,
    Failed,
    Placed,
    Proven,
    Renew,
    RenewAside,
    SemaphoreDescribed,
    Unproven,
    Unwatch,
    UpdateSemaphore,
    Watch,
    WatchRefused,
    Withdraw,
)
from tests.server.hosting import mutex, slow_store
from tests.server.talking import linked, serving

pytestmark = pytest.mark.usefixtures("loop_factory")


# --- proof ---------------------------------------------------------------------------------


async def test_a_proof_that_answers_an_earlier_renewal_says_how_old_it_is(
    clock: VirtualClock,
) -> None:
    way = Way(delay=lambda: 0.75)
    async with slow_store(clock, way) as listener, linked(listener) as client:
        attached = await client.attach(window=9.0)
        assert attached.age == 0  # the store was asked because of it
        sent = clock.now()
        client.say(Renew(1, 5))
        await asyncio.sleep(0.5)
        client.say(Renew(1, 6))
        proven = [await client.hear(Proven) for _ in range(2)]
        assert clock.now() - sent == pytest.approx(1.5)
        assert [(each.number, each.age) for each in proven] == [(5, 0), (6, pytest.approx(0.5))]


async def test_who_comes_back_is_told_how_old_the_proof_is(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        first = await client.attach(window=9.0)
        for passed in (2.5, 1.0):
            await asyncio.sleep(passed)
            async with linked(listener, client.program) as again:
                again.rid = client.rid
                found = await again.attach(kind="again", session_id=first.session_id)
                assert found.age == (pytest.approx(2.5) if passed == 2.5 else None)


async def test_a_server_that_cannot_prove_says_so_after_a_third_of_the_window(
    clock: VirtualClock,
) -> None:
    way = Way()
    async with slow_store(clock, way) as listener, linked(listener) as client:
        await client.attach(window=9.0)
        await asyncio.sleep(0.5)
        way.cut()
        sent = clock.now()
        client.say(Renew(1, 1), Renew(1, 2))
        assert [(await client.hear(Unproven)).number for _ in range(2)] == [1, 2]
        assert 3 < clock.now() - sent <= 4.1
        client.say(*(Renew(1, number) for number in range(3, 40)))
        await client.until(lambda: len(client.unread) >= 37 - 16, "what is too much")
        way.mend()
        assert (await client.hear(Proven, skip=True)).number == 39 - 15


async def test_a_proof_may_be_asked_for_over_another_connection(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        first = await client.attach()
        async with linked(listener, client.program) as aside:
            aside.say(RenewAside(1, "/default", first.session_id, b"key"))
            assert (await aside.hear(Proven)).channel == 0
            aside.say(
                RenewAside(2, "/default", first.session_id, b"wrong"),
                RenewAside(3, "/default", 99, b"key"),
                RenewAside(4, "/other", first.session_id, b"key"),
            )
            assert [(await aside.hear(Unproven)).number for _ in range(3)] == [2, 3, 4]
        async with linked(listener) as stranger:
            stranger.say(RenewAside(1, "/default", first.session_id, b"key"))
            await stranger.hear(Unproven)


async def test_the_servers_own_contact_to_its_store_is_told(clock: VirtualClock) -> None:
    way = Way()
    async with slow_store(clock, way) as listener, linked(listener) as client:
        first = await client.attach()
        way.lose()
        assert not (await client.hear(Contact)).there
        async with linked(listener, client.program) as again:
            again.rid = client.rid
            attached = await again.attach(kind="again", session_id=first.session_id)
            assert attached.kept
            assert not (await again.hear(Contact)).there
            way.mend()
            assert (await again.hear(Contact)).there


# --- watches -------------------------------------------------------------------------------


async def test_a_watch_tells_of_changes_until_it_ends(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach()
        client.say(
            CreateSemaphore(2, 1, "s", 3, b"", False), Watch(1, 7, "s", data=True, owners=True)
        )
        await client.hear(Done)
        client.say(UpdateSemaphore(3, 1, "s", b"1"), UpdateSemaphore(4, 1, "s", b"2"))
        assert await client.hear(Changed, skip=True) == Changed(1, 7)
        client.say(Unwatch(1, 7), UpdateSemaphore(5, 1, "s", b"3"))
        await client.until(lambda: Done(5) in client.heard, "the last answer")
        await asyncio.sleep(1)
        assert client.heard[-1] == Done(5)


async def test_changes_that_are_not_read_are_one(clock: VirtualClock) -> None:
    async with (
        serving(clock=clock) as listener,
        linked(listener) as client,
        linked(listener) as other,
    ):
        await client.attach()
        await other.attach()
        client.say(Watch(1, 7, "s", data=True, owners=True))
        client.reads = False
        client.say(Renew(1, 1))
        for number in range(100):
            other.say(
                CreateSemaphore(other.next_rid(), 1, "s", 3, b"%d" % number, False),
                DeleteSemaphore(other.next_rid(), 1, "s", False),
            )
            await other.hear(Done)
            await other.hear(Done)
        client.read_again()
        await asyncio.sleep(1)
        assert [each for each in client.heard if isinstance(each, Changed)] == [Changed(1, 7)]


async def test_every_attaching_begins_without_watches(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        first = await client.attach()
        client.say(Watch(1, 7, "s", data=True, owners=True))
        async with linked(listener, client.program) as again:
            again.rid = client.rid
            await again.attach(kind="again", session_id=first.session_id)
            again.say(CreateSemaphore(9, 1, "s", 1, b"", False))
            await again.hear(Done)
            await asyncio.sleep(1)
            assert again.unread == []


# --- limits --------------------------------------------------------------------------------


async def test_a_session_has_so_many_requests_and_watches_and_so_much_data(
    clock: VirtualClock,
) -> None:
    limits = Limits(requests_per_session=2, queue_length=3, watches_per_session=1, data_bytes=10)
    async with serving(clock=clock, limits=limits) as listener, linked(listener) as client:
        await client.attach(1)
        await client.attach(2)
        for hold in (1, 2):
            await mutex(client, 1, hold)
        client.say(Enqueue(11, 1, 3, "m", 1, b"", None, True))
        assert "requests_per_session = 2" in (await client.hear(Failed)).error.message
        assert (await mutex(client, 2, 1)).place == 1
        client.say(Enqueue(21, 2, 2, "m", 1, b"", None, True))
        assert "queue_length = 3" in (await client.hear(Failed)).error.message
        for message in (
            Enqueue(22, 2, 3, "n", 1, bytes(11), None, True),
            CreateSemaphore(23, 2, "s", 1, bytes(11), False),
            UpdateSemaphore(24, 2, "s", bytes(11)),
            Alter(25, 2, 1, None, bytes(11)),
        ):
            client.say(message)
            assert "data_bytes" in (await client.hear(Failed)).error.message
        client.say(Watch(1, 1, "a", True, True), Watch(1, 2, "a", True, True))
        refused = await client.hear(WatchRefused)
        assert refused.number == 2
        assert "watches_per_session = 1" in refused.error.message
        client.say(Withdraw(31, 1, 2))
        await client.hear(Done)
        assert (await mutex(client, 1, 4, "free again")).place == 0


async def test_semaphores_that_were_there_before_the_server_count(clock: VirtualClock) -> None:
    engine = connect_engine("memory://", clock)
    await engine.open()
    limits = Limits(semaphores=1)
    async with serving(engine=engine) as listener, linked(listener) as client:
        await client.attach()
        client.say(CreateSemaphore(2, 1, "a", 1, b"", False))
        await client.hear(Done)
    async with serving(engine=engine, limits=limits) as listener, linked(listener) as client:
        await client.attach()
        client.say(CreateSemaphore(2, 1, "b", 1, b"", False))
        assert "semaphores = 1" in (await client.hear(Failed)).error.message
        client.say(Enqueue(3, 1, 1, "m", 1, b"", None, True))
        assert "semaphores = 1" in (await client.hear(Failed)).error.message
        client.say(DeleteSemaphore(4, 1, "a", False), CreateSemaphore(5, 1, "b", 1, b"", False))
        assert [await client.hear(Done) for _ in range(2)] == [Done(4), Done(5)]
    await engine.aclose()


async def test_refusals_are_in_the_log(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(requests_per_session=1)
    async with serving(clock=clock, limits=limits) as listener, linked(listener) as client:
        await client.attach()
        await mutex(client, 1, 1)
        client.say(Enqueue(9, 1, 2, "m", 1, b"", None, True))
        await client.hear(Failed)
    facts = [getattr(record, "facts", {}) for record in caplog.records]
    assert any(each.get("limit") == "requests_per_session" for each in facts)


async def test_a_description_that_is_too_long_is_refused(clock: VirtualClock) -> None:
    limits = Limits(data_bytes=1000, message_bytes=70_000, output_bytes=140_000)
    async with serving(clock=clock, limits=limits) as listener, linked(listener) as client:
        await client.attach()
        for hold in range(100):
            client.say(Enqueue(client.next_rid(), 1, hold, "m", 1, bytes(1000), None, True))
            await client.hear(Placed)
        client.say(DescribeSemaphore(client.next_rid(), 1, "m", True, True))
        assert "output_bytes" in (await client.hear(Failed)).error.message
        client.say(DescribeSemaphore(client.next_rid(), 1, "m", False, False))
        assert (await client.hear(SemaphoreDescribed)).semaphore.held == 100
