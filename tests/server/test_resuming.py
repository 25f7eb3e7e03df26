"""Sessions that move to another server, or that another program takes over: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.engines import connect_engine
from tenure.server.limits import Limits
from tenure.server.native import NativeListener
from tenure.testing import VirtualClock
from tenure.testing.faults import Way
from tenure.wire.messages import (
    Attach,
    Attached,
    Detach,
    Done,
    Ended,
    EndReceived,
    Failed,
    Granted,
    Ping,
    Pong,
    Renew,
    Withdraw,
)
from tests.server.hosting import keep, mutex, new_store, sessions, slow_store, two_servers
from tests.server.talking import Direct, linked, serving

pytestmark = pytest.mark.usefixtures("loop_factory")


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
            assert [(each.request_id, each.data, each.granted) for each in again.requests] == [
                (1, b"data", True)
            ]
            await client.hear(Ended)
            assert one.registry.sessions == {}
            moved.say(Withdraw(moved.next_rid(), 1, 1))
            await waiter.hear(Granted)


async def test_no_limit_keeps_a_session_from_moving(clock: VirtualClock) -> None:
    store = new_store()
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
            former.say(EndReceived(1))
            asked = clock.now()
            attached = await client.hear(Attached)
            assert clock.now() == asked
            assert attached.attach_number == 2
            assert [(each.request_id, each.data) for each in attached.requests] == [(1, b"data")]
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
            former.say(EndReceived(5))
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
        assert [each.request_id for each in attached.requests] == [1]
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
                first.say(EndReceived(1))
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
        assert listener.registry.sessions == {}
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
            former.say(EndReceived(1))
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
                    client.say(EndReceived(1))
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
