"""Sessions kept for remote holders: in virtual time, over connections without a network."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.engines import connect_engine
from tenure.engines.memory import MemoryEngine
from tenure.server.limits import Limits
from tenure.server.native import NativeListener
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tenure.wire.messages import (
    Acknowledge,
    Alter,
    Attach,
    Attached,
    Changed,
    Close,
    Contact,
    CreateSemaphore,
    DeleteSemaphore,
    DescribeSemaphore,
    Detach,
    Done,
    Ended,
    Enqueue,
    Evict,
    Failed,
    Granted,
    Heard,
    ListSessions,
    Ping,
    Placed,
    Pong,
    Proven,
    Removed,
    Renew,
    RenewAside,
    SemaphoreDescribed,
    SessionsListed,
    Unproven,
    Unwatch,
    UpdateSemaphore,
    Watch,
    WatchRefused,
    Withdraw,
)
from tests.server.talking import Direct, linked, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

_numbers = itertools.count(1)

ALL = 2**64 - 1


@asynccontextmanager
async def two_servers(clock: VirtualClock) -> AsyncIterator[tuple[NativeListener, NativeListener]]:
    """Two servers on one store."""
    store = f"memory://hosting-{next(_numbers)}"
    async with serving(store, clock=clock) as one, serving(store, clock=clock) as other:
        yield one, other


@asynccontextmanager
async def slow_store(clock: VirtualClock, way: Way, **more: Any) -> AsyncIterator[NativeListener]:
    """A server whose store answers as the way has it."""
    engine = FaultyEngine(MemoryEngine("", clock), way)
    await engine.open()
    async with serving(engine=engine, **more) as listener:
        try:
            yield listener
        finally:
            way.mend()
    await engine.aclose()


async def mutex(client: Direct, channel: int, hold: int, name: str = "m") -> Placed:
    client.say(Enqueue(client.next_rid(), channel, hold, name, ALL, b"data", None, True))
    return await client.hear(Placed, skip=True)


async def sessions(client: Direct) -> list[int]:
    client.say(ListSessions(client.next_rid(), "/default"))
    return [each.id for each in (await client.hear(SessionsListed, skip=True)).sessions]


async def keep(client: Direct, seconds: float) -> None:
    """Let time pass, and have the session renewed meanwhile."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        client.say(Renew(1, 1))


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
        assert listener.hosting.sessions == {}
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
            assert [(each.hold, each.name, each.granted) for each in again.requests] == [
                (1, "m", True)
            ]
            client.say(Withdraw(client.next_rid(), 4, 1))
            assert (await other.hear(Granted)).hold == 7


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
            assert [each.hold for each in again.requests] == [1]
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
                assert [(each.hold, each.granted) for each in found.requests] == [(1, True)]
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
        assert await client.hear(Done) == Done(7)
        client.say(Renew(1, 1, 7), *(Withdraw(rid, 1, 99) for rid in range(8, 12)))
        await client.hear(Proven)
        for rid in range(8, 12):
            assert await client.hear(Done) == Done(rid)


# --- another server ------------------------------------------------------------------------


async def test_a_session_moves_to_another_server_on_the_same_store(clock: VirtualClock) -> None:
    async with two_servers(clock) as (one, other), linked(one) as client, linked(other) as waiter:
        first = await client.attach()
        await mutex(client, 1, 1)
        await waiter.attach()
        assert (await mutex(waiter, 1, 1)).place == 1
        async with linked(other, client.program) as moved:
            moved.rid = client.rid
            again = await moved.attach(kind="again", session_id=first.session_id)
            assert not again.kept
            assert again.attach_number == 2
            assert [(each.hold, each.data, each.granted) for each in again.requests] == [
                (1, b"data", True)
            ]
            await client.hear(Ended)
            assert one.hosting.sessions == {}
            moved.say(Withdraw(moved.next_rid(), 1, 1))
            await waiter.hear(Granted)


async def test_no_limit_keeps_a_session_from_moving(clock: VirtualClock) -> None:
    store = f"memory://hosting-{next(_numbers)}"
    tight = Limits(sessions=1, sessions_per_connection=1)
    async with (
        serving(store, clock=clock) as one,
        serving(store, clock=clock, limits=tight) as other,
        linked(one) as client,
    ):
        found = [await client.attach(channel) for channel in (1, 2)]
        async with linked(other, client.program) as moved:
            moved.rid = client.rid
            for channel, each in enumerate(found, start=1):
                again = await moved.attach(channel, "again", session_id=each.session_id)
                assert again.session_id == each.session_id
            moved.say(Attach(99, 3, "new", "/default", 10.0))
            refused = await moved.hear(Failed)
            assert "sessions_per_connection = 1" in refused.error.message
        async with linked(other) as stranger:
            stranger.say(Attach(1, 1, "new", "/default", 10.0))
            assert "sessions = 1" in (await stranger.hear(Failed)).error.message


async def test_a_session_that_is_over_is_over_everywhere(clock: VirtualClock) -> None:
    async with two_servers(clock) as (one, other):
        async with linked(one) as client:
            first = await client.attach(window=5.0)
        await asyncio.sleep(7)
        for listener in (one, other):
            async with linked(listener, client.program) as client:
                client.say(
                    Attach(7, 1, "again", "/default", 5.0, "", b"key", False, first.session_id)
                )
                assert (await client.hear(Failed)).error.kind == "SessionExpired"


async def test_a_node_that_is_gone_has_ended_its_sessions(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        client.say(Attach(7, 1, "again", "/gone", 5.0, "", b"key", False, 5))
        assert (await client.hear(Failed)).error.kind == "SessionExpired"


# --- resuming ------------------------------------------------------------------------------


@asynccontextmanager
async def resuming(listener: NativeListener, number: int, **more: Any) -> AsyncIterator[Direct]:
    """Another program, which asks for a session."""
    async with linked(listener) as client:
        more = {"node": "/default", "window": 10.0, "key": b"key", **more}
        client.say(Attach(client.next_rid(), 1, "resume", session_id=number, **more))
        yield client


async def test_a_resume_waits_until_the_former_program_has_heard(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        await mutex(former, 1, 1)
        async with resuming(listener, first.session_id) as client:
            await former.hear(Ended)
            await asyncio.sleep(3)
            assert client.unread == []
            former.say(Heard(1))
            asked = clock.now()
            attached = await client.hear(Attached)
            assert clock.now() == asked
            assert attached.attach_number == 2
            assert [(each.hold, each.data) for each in attached.requests] == [(1, b"data")]
            assert attached.age is not None


async def test_a_resume_waits_for_the_window_of_a_program_that_says_nothing(
    clock: VirtualClock,
) -> None:
    async with serving(clock=clock) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        await asyncio.sleep(2)
        former.say(Renew(1, 1))
        proof = clock.now()
        former.half_open = True
        await asyncio.sleep(3)
        async with resuming(listener, first.session_id) as client:
            await client.hear(Attached)
            assert 10 <= clock.now() - proof < 11


async def test_a_former_program_that_comes_back_meanwhile_is_told_and_sets_it_free(
    clock: VirtualClock,
) -> None:
    async with serving(clock=clock) as listener:
        async with linked(listener) as former:
            first = await former.attach(resumable=True)
        async with (
            resuming(listener, first.session_id) as client,
            linked(listener, former.program) as former,
        ):
            await asyncio.sleep(1)
            former.say(Attach(9, 5, "again", "/default", 10.0, "", b"key", True, first.session_id))
            assert (await former.hear(Ended)).channel == 5
            assert (await former.hear(Failed)).error.kind == "SessionExpired"
            asked = clock.now()
            former.say(Heard(5))
            await client.hear(Attached)
            assert clock.now() == asked


@pytest.mark.parametrize("way", ["detach", "assume dead"])
async def test_a_resume_is_answered_at_once(clock: VirtualClock, way: str) -> None:
    async with serving(clock=clock) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        if way == "detach":
            former.say(Detach(former.next_rid(), 1))
            await former.hear(Done)
        before = clock.now()
        async with resuming(listener, first.session_id, assume_dead=way == "assume dead") as client:
            await client.hear(Attached)
            assert clock.now() == before


async def test_a_detaching_that_others_have_followed_says_nothing_of_them(
    clock: VirtualClock,
) -> None:
    """Detached here, resumed at another server, whose program believes."""
    async with two_servers(clock) as (one, other), linked(one) as first:
        attached = await first.attach(resumable=True)
        first.say(Detach(first.next_rid(), 1))
        await first.hear(Done)
        async with resuming(other, attached.session_id) as second:
            await second.hear(Attached)  # after the window: nobody there knew of the detaching
            before = clock.now()
            async with resuming(one, attached.session_id) as third:
                await third.hear(Attached)
                assert clock.now() - before >= 10


async def test_after_a_restart_a_resume_waits_for_the_whole_window(clock: VirtualClock) -> None:
    engine = connect_engine("memory://", clock)
    await engine.open()
    async with serving(engine=engine) as listener, linked(listener) as former:
        first = await former.attach(resumable=True, window=20.0)
        await mutex(former, 1, 1)
    before = clock.now()
    async with (
        serving(engine=engine) as listener,
        # What the token says of the window is not what counts.
        resuming(listener, first.session_id, window=1.0) as client,
    ):
        for _ in range(3):
            await asyncio.sleep(6)
            client.say(Ping())
            await client.hear(Pong)
        attached = await client.hear(Attached)
        assert 20 <= clock.now() - before < 21
        assert [each.hold for each in attached.requests] == [1]
        await keep(client, 60)
        assert await sessions(client) == [first.session_id]
    await engine.aclose()


async def test_of_three_programs_the_last_waits_for_all_before_it(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as first:
        attached = await first.attach(resumable=True)
        async with resuming(listener, attached.session_id) as second:
            await first.hear(Ended)
            async with resuming(listener, attached.session_id) as third:
                assert (await second.hear(Failed)).error.kind == "SessionExpired"
                await asyncio.sleep(1)
                assert third.unread == []
                first.say(Heard(1))
                await third.hear(Attached)


async def test_a_resume_that_is_given_up_leaves_the_session_detached(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        former.half_open = True
        async with resuming(listener, first.session_id) as client:
            await asyncio.sleep(1)
            client.say(Detach(client.next_rid(), 1))
            assert (await client.hear(Failed)).error.kind == "SessionClosed"
            await client.hear(Done)
            assert await sessions(client) == [first.session_id]
        assert listener.hosting.sessions == {}
        assert listener.context.counts.sessions.taken == 0


@pytest.mark.parametrize("after", [0.0, 0.15, 0.25, 0.5, 2.0])
async def test_what_is_known_of_belief_outlasts_a_resume_that_is_given_up(
    clock: VirtualClock, after: float
) -> None:
    way = Way(delay=lambda: 0.1)
    async with slow_store(clock, way) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        asked = clock.now()
        async with resuming(listener, first.session_id):
            await asyncio.sleep(after)
        async with resuming(listener, first.session_id) as client:
            await former.hear(Ended)
            former.say(Heard(1))
            await client.hear(Attached)
            assert clock.now() - asked < after + 1.0


async def test_of_many_that_resume_at_once_the_last_has_the_session(clock: VirtualClock) -> None:
    way = Way(delay=lambda: 0.1)
    async with slow_store(clock, way) as listener, linked(listener) as former:
        first = await former.attach(resumable=True)
        former.say(Detach(former.next_rid(), 1))
        await former.hear(Done)
        asked = clock.now()
        async with (
            resuming(listener, first.session_id) as one,
            resuming(listener, first.session_id) as two,
            resuming(listener, first.session_id) as three,
        ):
            for client in (one, two):
                if isinstance(await client.listen(), Attached):
                    await client.hear(Ended)
                    client.say(Heard(1))
            await three.hear(Attached)
            assert clock.now() - asked < 2.0
            assert (await mutex(three, 1, 1)).place == 0
            assert all(isinstance(each.heard[-1], Ended | Failed) for each in (one, two))


async def test_a_resume_that_is_given_up_does_not_hide_those_whom_nobody_here_knows(
    clock: VirtualClock,
) -> None:
    async with two_servers(clock) as (one, other), linked(one) as former:
        first = await former.attach(resumable=True, window=10.0)
        before = clock.now()
        for passed in (1.0, 2.0):
            async with resuming(other, first.session_id):
                await asyncio.sleep(passed)
        async with resuming(other, first.session_id) as client:
            await client.hear(Attached)
            assert clock.now() - before >= 10


@pytest.mark.parametrize(
    ("made", "asked", "error"),
    [
        ({"resumable": True}, {"key": b"wrong"}, "AuthenticationFailed"),
        ({"resumable": False}, {}, "InvalidArgument"),
        ({"resumable": False}, {"key": b"wrong"}, "AuthenticationFailed"),
        ({"resumable": False, "drawn": True}, {"key": b""}, "InvalidArgument"),
        ({"resumable": False, "drawn": True}, {}, "AuthenticationFailed"),
    ],
)
async def test_who_may_not_resume_disturbs_nobody(
    clock: VirtualClock, made: dict[str, Any], asked: dict[str, Any], error: str
) -> None:
    async with serving(clock=clock) as listener, linked(listener) as former:
        first = await former.attach(**made)
        async with resuming(listener, first.session_id, **asked) as client:
            assert (await client.hear(Failed)).error.kind == error
        assert (await mutex(former, 1, 1)).place == 0
        assert former.unread == []


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
        assert (answers[7], answers[8]) == (Done(7), Done(8))
        assert answers["push"].hold == 2
        assert listener.hosting.semaphores.taken == 1


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
        assert [(each.hold, each.granted) for each in again.requests] == [(1, True)]
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
