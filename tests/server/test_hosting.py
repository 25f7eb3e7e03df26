"""Sessions kept for remote holders: in virtual time, over connections without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenure.engines import connect_engine
from tenure.engines.memory import MemoryEngine
from tenure.server.limits import Limits
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tenure.wire.messages import (
    Acknowledge,
    Alter,
    Attach,
    Close,
    CreateSemaphore,
    DeleteSemaphore,
    DescribeSemaphore,
    Done,
    Ended,
    Enqueue,
    Evict,
    Failed,
    Granted,
    ListSessions,
    Placed,
    Proven,
    Removed,
    Renew,
    UpdateSemaphore,
    Withdraw,
)
from tests.server.hosting import ALL, keep, mutex, sessions, slow_store
from tests.server.talking import linked, serving

pytestmark = pytest.mark.usefixtures("loop_factory")


# --- living and dying ----------------------------------------------------------------------


async def test_a_session_lives_as_long_as_its_holder_renews_it(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        attached = await client.attach(window=10.0)
        await keep(client, 60)
        assert await sessions(client) == [attached.session_id]


async def test_nobody_renews_a_session_in_place_of_its_holder(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach(window=10.0)
        await asyncio.sleep(9)
        client.say(Enqueue(client.next_rid(), 1, 1, "m", 1, b"", None, True))
        client.say(Renew(1, 1))
        renewed = clock.now()
        ended = await client.hear(Ended, skip=True)
        assert 9.9 < clock.now() - renewed <= 11
        assert ended.error.kind == "SessionExpired"
        assert listener.registry.sessions == {}
        assert listener.context.counts.sessions.taken == 0
        assert listener.context.counts.semaphores.taken == 0


async def test_a_session_outlives_its_connection_by_its_window(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as other:
        async with linked(listener) as client:
            attached = await client.attach(window=10.0)
            await mutex(client, 1, 1)
            last = clock.now()
        await other.attach(window=30.0)
        assert (await mutex(other, 1, 1)).place == 1
        assert attached.session_id in await sessions(other)
        await other.hear(Granted, skip=True)
        assert 9.9 < clock.now() - last < 11.1


async def test_an_operation_is_no_renewal(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach(window=5.0)
        for rid in range(2, 12):
            client.say(Enqueue(rid, 1, rid, f"m{rid}", ALL, b"", None, True))
            await asyncio.sleep(1)
        assert any(isinstance(each, Ended) for each in client.heard)


# --- attaching again, at the same server ---------------------------------------------------


async def test_a_holder_that_comes_back_finds_everything_in_its_place(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as other:
        async with linked(listener) as client:
            first = await client.attach(key=b"secret")
            await mutex(client, 1, 1)
            rid = client.rid
        await other.attach()
        assert (await mutex(other, 1, 7)).place == 1
        async with linked(listener, client.program) as client:
            client.rid = rid
            again = await client.attach(4, "again", key=b"secret", session_id=first.session_id)
            assert again.kept
            assert (again.session_id, again.attach_number) == (first.session_id, 1)
            assert [(each.request_id, each.name, each.granted) for each in again.requests] == [
                (1, "m", True)
            ]
            client.say(Withdraw(client.next_rid(), 4, 1))
            assert (await other.hear(Granted)).request_id == 7


async def test_a_half_open_connection_does_not_keep_its_holder_out(clock: VirtualClock) -> None:
    """Neither by itself nor by what it still counts for."""
    tight = Limits(connections=1, sessions=1, sessions_per_connection=1)
    async with serving(clock=clock, limits=tight) as listener, linked(listener) as old:
        first = await old.attach()
        await mutex(old, 1, 1)
        old.half_open = True
        async with linked(listener, old.program) as new:
            new.rid = old.rid
            again = await new.attach(kind="again", session_id=first.session_id)
            assert [each.request_id for each in again.requests] == [1]
            client_of_old = [each for each in old.heard if isinstance(each, Ended)]
            assert client_of_old == []
        assert listener.context.counts.connections.taken == 1
        assert listener.context.counts.sessions.taken == 1


async def test_what_the_old_connection_still_says_is_nobodys(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as old:
        first = await old.attach()
        async with linked(listener, old.program) as new:
            await new.attach(kind="again", session_id=first.session_id)
            old.say(Enqueue(9, 1, 1, "m", 1, b"", None, True))
            assert (await old.hear(Failed)).rid == 9
            new.say(DescribeSemaphore(10, 1, "m", True, True))
            assert (await new.hear(Failed)).error.kind == "SemaphoreNotFound"


async def test_a_push_that_was_lost_is_said_by_attaching_again(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as other:
        await other.attach()
        await mutex(other, 1, 1)
        async with linked(listener) as client:
            first = await client.attach()
            assert (await mutex(client, 1, 1)).place == 1
            placed = await mutex(client, 1, 2, "evicted")
            client.half_open = True
            other.say(Withdraw(other.next_rid(), 1, 1))
            other.say(Evict(other.next_rid(), "/default", "evicted", placed.order_id or 0))
            await other.hear(Done)
            await other.hear(Done)
            async with linked(listener, client.program) as again:
                found = await again.attach(kind="again", session_id=first.session_id)
                assert [(each.request_id, each.granted) for each in found.requests] == [(1, True)]
                assert found.removed == [(2, "evicted")]


async def test_another_key_or_another_program_is_not_let_near(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        first = await client.attach(key=b"right")
        client.say(
            Attach(2, 2, "again", "/default", 10.0, key=b"wrong", session_id=first.session_id)
        )
        assert (await client.hear(Failed)).error.kind == "AuthenticationFailed"
        async with linked(listener) as stranger:
            stranger.say(
                Attach(1, 1, "again", "/default", 10.0, key=b"right", session_id=first.session_id)
            )
            assert (await stranger.hear(Failed)).error.kind == "SessionExpired"
        assert (await mutex(client, 1, 1)).place == 0


async def test_a_session_whose_first_answer_was_lost_is_not_begun_twice(
    clock: VirtualClock,
) -> None:
    async with serving(clock=clock) as listener:
        async with linked(listener) as client:
            first = await client.attach()
        async with linked(listener, client.program) as client:
            second = await client.attach()  # under the same rid
            assert second.session_id == first.session_id
            assert await sessions(client) == [first.session_id]


# --- once only -----------------------------------------------------------------------------


async def test_what_is_sent_again_is_done_once_and_answered_alike(clock: VirtualClock) -> None:
    operations = [
        CreateSemaphore(11, 1, "s", 5, b"", False),
        Enqueue(12, 1, 1, "s", 2, b"", None, False),
        Alter(13, 1, 1, 1, None),
        Enqueue(14, 1, 2, "none", 2, b"", None, False),
        UpdateSemaphore(15, 1, "s", b"new"),
        Withdraw(16, 1, 1),
        DeleteSemaphore(17, 1, "s", False),
    ]
    async with serving(clock=clock) as listener:
        async with linked(listener) as client:
            first = await client.attach()
            client.say(*operations)
            await client.until(lambda: len(client.unread) == 7, "seven answers")
            answers = sorted(client.unread, key=lambda each: each.rid)  # type: ignore[attr-defined]
        async with linked(listener, client.program) as client:
            client.rid = 20
            await client.attach(kind="again", session_id=first.session_id)
            client.say(*operations)
            await client.until(lambda: len(client.unread) == 7, "seven answers")
            assert client.unread == answers
            assert [type(each) for each in answers] == [
                *(Done, Placed, Done, Failed),
                *(Done, Done, Done),
            ]


async def test_answers_are_kept_until_they_are_acknowledged_and_no_more_than_the_limit(
    clock: VirtualClock,
) -> None:
    limits = Limits(kept_answers=4)
    async with serving(clock=clock, limits=limits) as listener, linked(listener) as client:
        await client.attach()
        client.say(*(Withdraw(rid, 1, 99) for rid in range(2, 8)))
        await client.until(lambda: len(client.unread) == 6, "six answers")
        kinds = [type(await client.listen()) for _ in range(6)]
        assert kinds == [Done] * 4 + [Failed] * 2
        refused = client.heard[-1]
        assert isinstance(refused, Failed)
        assert "kept_answers = 4" in refused.error.message
        client.say(Acknowledge(1, 5), Withdraw(7, 1, 99))
        assert await client.hear(Done) == Done(7, found=False)
        client.say(Renew(1, 1, 7), *(Withdraw(rid, 1, 99) for rid in range(8, 12)))
        await client.hear(Proven)
        for rid in range(8, 12):
            assert await client.hear(Done) == Done(rid, found=False)


# --- leaving before arriving ---------------------------------------------------------------


async def test_a_session_that_is_not_wanted_any_more_is_not_left_behind(
    clock: VirtualClock,
) -> None:
    way = Way(delay=lambda: 1.0)
    async with slow_store(clock, way) as listener, linked(listener) as client:
        client.say(Attach(1, 1, "new", "/default", 10.0), Close(2, 1))
        assert (await client.hear(Failed)).rid == 1
        assert await client.hear(Done) == Done(2)
        await asyncio.sleep(5)
        client.rid = 2
        assert await sessions(client) == []
        assert listener.context.counts.sessions.taken == 0
        client.say(Attach(9, 1, "new", "/default", 10.0))
        client.lose()
        async with linked(listener) as other:
            await asyncio.sleep(5)
            assert await sessions(other) == []


# --- a store that takes its time -----------------------------------------------------------


async def test_everything_is_answered_by_a_store_that_takes_its_time(clock: VirtualClock) -> None:
    way = Way(delay=lambda: 0.1)
    async with slow_store(clock, way) as listener, linked(listener) as client:
        await client.attach()
        client.say(
            CreateSemaphore(2, 1, "s", 3, b"", False),
            Enqueue(3, 1, 1, "s", 2, b"", None, False),
            Enqueue(4, 1, 2, "s", 3, b"", None, False),
            Enqueue(5, 1, 3, "s", 1, b"", 0, False),
            Enqueue(6, 1, 4, "none", 1, b"", 0, False),
            Alter(7, 1, 1, 1, None),
            Withdraw(8, 1, 1),
        )
        answers = {}
        for _ in range(8):
            answer: Any = await client.listen()
            answers[getattr(answer, "rid", "push")] = answer
        assert answers[2] == Done(2)
        assert (answers[3].place, answers[4].place, answers[5].place) == (0, 1, 2)
        assert answers[6].error.kind == "SemaphoreNotFound"
        assert (answers[7], answers[8]) == (Done(7), Done(8, found=True))
        assert answers["push"].request_id == 2
        assert listener.context.counts.semaphores.taken == 1


async def test_what_is_under_way_when_a_connection_is_lost_is_answered_over_the_next(
    clock: VirtualClock,
) -> None:
    way = Way(delay=lambda: 0.5)
    async with slow_store(clock, way) as listener, linked(listener) as client:
        first = await client.attach()
        request = Enqueue(5, 1, 1, "m", 1, b"", None, True)
        client.say(request, CreateSemaphore(6, 1, "s", 1, b"", False))
        client.lose()
        async with linked(listener, client.program) as again:
            again.rid = 9
            await again.attach(kind="again", session_id=first.session_id)
            again.say(request, CreateSemaphore(6, 1, "s", 1, b"", False))
            assert (await again.hear(Placed)).rid == 5
            assert await again.hear(Done) == Done(6)
            await asyncio.sleep(2)
            assert again.unread == []


# --- the server's end ----------------------------------------------------------------------


async def test_a_server_that_closes_leaves_its_sessions_to_the_store(clock: VirtualClock) -> None:
    engine = connect_engine("memory://", clock)
    await engine.open()
    async with serving(engine=engine) as listener, linked(listener) as client:
        first = await client.attach()
        await mutex(client, 1, 1)
        await listener.drain()
    (found,) = await engine.list_sessions("/default")
    assert (found.id, found.attached) == (first.session_id, False)
    async with serving(engine=engine) as listener, linked(listener, client.program) as client:
        client.rid = 50
        again = await client.attach(kind="again", session_id=first.session_id)
        assert [(each.request_id, each.granted) for each in again.requests] == [(1, True)]
    await engine.aclose()


async def test_a_server_whose_store_hangs_ends_when_it_must(clock: VirtualClock) -> None:
    way = Way()
    engine = FaultyEngine(MemoryEngine("", clock), way)
    await engine.open()
    async with serving(engine=engine) as listener, linked(listener) as client:
        await client.attach(1)
        await client.attach(2)
        way.cut()
        client.say(Enqueue(2, 1, 1, "m", 1, b"", None, True))
        client.say(
            CreateSemaphore(3, 1, "s", 1, b"", False),
            ListSessions(4, "/default"),
            Attach(5, 3, "new", "/default", 10.0),
            Close(6, 2),
        )
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await listener.aclose()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks
        assert client.lost
    way.mend()
    await engine.aclose()


async def test_removals_are_pushed_with_their_reason(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach()
        await mutex(client, 1, 1)
        client.say(Enqueue(9, 1, 2, "m", 1, b"", 3.0, True))
        await client.hear(Placed)
        assert await client.hear(Removed) == Removed(1, 2, "timed out")
