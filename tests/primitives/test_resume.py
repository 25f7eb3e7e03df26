"""Sessions that outlive their program: tokens, the take-over, and what is found again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import events
from tenure._client.session_handle import ResumeToken, new_key
from tenure.core import rules
from tenure.engines.contract import Removal
from tenure.errors import (
    AuthenticationFailed,
    InvalidArgument,
    LeaseLost,
    SessionClosed,
    SessionExpired,
    Unsupported,
)
from tenure.model import EPHEMERAL_LIMIT, Capabilities, NodeConfig, Recovered
from tenure.testing.clock import VirtualClock
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import World, is_held, released_after, turns

# Tokens

TOKENS = st.builds(
    ResumeToken,
    st.sampled_from(["/default", "/a/b.c_d-e", "/" + "x" * 255]),
    st.integers(1, 2**63 - 1),
    st.floats(rules.MIN_WINDOW, rules.MAX_WINDOW),
    st.binary(min_size=16, max_size=16),
)


@given(TOKENS)
def test_a_token_says_again_what_it_was_made_of(token: ResumeToken) -> None:
    text = str(token)
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set(" /+='\"\\$&|;<>")
    assert ResumeToken.parse(text) == token


@given(TOKENS, st.data())
def test_a_token_with_a_mistake_in_it_is_refused(token: ResumeToken, data: st.DataObject) -> None:
    text = str(token)
    place = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["cut", "change", "double"]))
    if how == "cut":
        wrong = text[:place]
    elif how == "double":
        wrong = text[:place] + text[place:] * 2
    else:
        other = data.draw(st.sampled_from("aZ0-_.é \n"))
        wrong = text[:place] + other + text[place + 1 :]
    try:
        found = ResumeToken.parse(wrong)
    except InvalidArgument:
        return
    assert found == token  # the last bits of the base64 text mean nothing


@pytest.mark.parametrize("nothing", ["", "tenure1.", "tenure2.AAAA", None, b"tenure1.AAAA", 7])
def test_what_is_no_token_is_refused(nothing: str) -> None:
    with pytest.raises(InvalidArgument, match="resume token"):
        ResumeToken.parse(nothing)


@pytest.mark.parametrize(
    "forged",
    [
        ResumeToken("/default", 2**63, 30.0, bytes(16)),
        ResumeToken("/default", 0, 30.0, bytes(16)),
        ResumeToken("/default", 1, float("nan"), bytes(16)),
        ResumeToken("/default", 1, 0.5, bytes(16)),
        ResumeToken("no path", 1, 30.0, bytes(16)),
    ],
)
def test_a_token_that_no_store_can_have_given_is_refused(forged: ResumeToken) -> None:
    with pytest.raises(InvalidArgument, match="no resume token"):
        ResumeToken.parse(str(forged))


def test_two_keys_are_never_equal() -> None:
    assert len({new_key() for _ in range(100)}) == 100


async def test_a_session_that_ends_with_its_program_has_no_token(world: World) -> None:
    async with world.client() as client, client.session() as session:
        with pytest.raises(Unsupported, match="resumable=True"):
            _ = session.resume_token
        assert session.recovered == ()


async def test_an_engine_without_such_sessions_says_so_at_once(world: World) -> None:
    client, engine = world.slow(0)
    engine.inner.capabilities = Capabilities(resume=False)  # type: ignore[misc]
    async with client:
        with pytest.raises(Unsupported, match="has no sessions that can be resumed"):
            client.session(resumable=True)


async def test_a_token_for_another_node_than_was_named_is_refused(world: World) -> None:
    async with world.client() as client:
        await client.create_node("/a", NodeConfig())
        await client.create_node("/b", NodeConfig())
        session = await client.session("/a", resumable=True)
        with pytest.raises(InvalidArgument, match="on /a, not on /b"):
            client.session("/b", resume=session.resume_token)
        async with client.session("/a", resume=session.resume_token) as resumed:
            assert (resumed.node, resumed.id) == ("/a", session.id)


async def test_a_token_of_another_store_is_refused(world: World, clock: VirtualClock) -> None:
    other = World(clock)
    async with world.client() as client, other.client() as elsewhere:
        session = await client.session(resumable=True)
        _held = await elsewhere.session(resumable=True)
        with pytest.raises(AuthenticationFailed, match="another key"):
            await elsewhere.session(resume=session.resume_token)
        await session.aclose()


# Resuming


@guarantee("taken over", "tokens rise", on=MEMORY)
@pytest.mark.parametrize("engine_turns", [None, 0, 2])
async def test_a_resumed_session_has_what_it_had(world: World, engine_turns: int | None) -> None:
    async with world.connect(engine_turns) as first, world.client() as other:
        session = await first.session(resumable=True, recovery_window=25, description="me")
        token = session.resume_token
        held = await session.mutex("held").lock(data=b"whole")
        blocking = await other.mutex("awaited").lock()
        asking = asyncio.create_task(session.mutex("awaited").lock())
        await turns()
        await session.detach()
        assert session.state == "detached"
        with pytest.raises(SessionClosed):
            await asking
        async with world.connect(engine_turns) as second:
            resumed = await second.session(resume=token)
            assert (resumed.id, resumed.recovery_window) == (session.id, 25)
            assert resumed.resume_token == token
            assert [(each.name, each.granted) for each in resumed.recovered] == [
                ("held", True),
                ("awaited", False),
            ]
            ticket = resumed.mutex("held").recover()
            assert ticket is not None
            lease = await ticket.wait()
            assert lease.fencing_token == held.fencing_token
            assert lease.count == EPHEMERAL_LIMIT
            assert [each.name for each in resumed.recovered] == ["awaited"]
            assert resumed.mutex("held").recover() is None
            await lease.release()
            await resumed.aclose()
        assert await world.queue("held") == []
        assert [each.order_id for each in await world.queue("awaited")] == [blocking.fencing_token]


async def test_a_place_in_line_is_found_again_and_leads_to_its_grant(world: World) -> None:
    async with world.client() as first, world.client() as second, world.client() as other:
        session = await first.session(resumable=True)
        blocking = await other.mutex("m").lock()
        ticket = asyncio.create_task(session.mutex("m").lock())
        await turns()
        behind = asyncio.create_task(other.mutex("m").lock())
        await turns()
        # The program is cut off in the middle: the token is used elsewhere.
        resumed = await second.session(resume=session.resume_token)
        with pytest.raises(SessionExpired, match="resumed it"):
            await ticket
        (found,) = resumed.recovered
        assert (found.name, found.granted) == ("m", False)
        async with released_after(5, blocking):
            again = resumed.mutex("m").recover()
            assert again is not None
            assert not again.granted
            lease = await again.wait()
        assert lease.fencing_token == found.order_id
        assert not behind.done()
        await resumed.aclose()
        await (await behind).release()


async def test_a_leadership_goes_on_with_the_same_term(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        leadership = await session.election("e").campaign(b"here")
        resumed = await second.session(resume=session.resume_token)
        assert not is_held(leadership)
        ticket = resumed.election("e").recover()
        assert ticket is not None
        async with ticket:
            again = await ticket.wait()
            await again.proclaim(b"there")
            leader = await second.election("e").leader()
            assert leader is not None
            assert (leader.data, leader.term) == (b"there", leadership.fencing_token)
        assert await second.election("e").leader() is None
        await resumed.aclose()


async def test_a_semaphores_requests_are_recovered_one_by_one_in_order(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        pool = session.semaphore("pool")
        await pool.create(3)
        leases = [await pool.acquire(count, data=b"%d" % count) for count in (1, 2)]
        resumed = await second.session(resume=session.resume_token)
        assert [(each.count, each.data) for each in resumed.recovered] == [(1, b"1"), (2, b"2")]
        assert resumed.mutex("pool").recover() is None  # it is no mutex
        assert resumed.semaphore("other").recover() is None
        for lease in leases:
            ticket = resumed.semaphore("pool").recover()
            assert ticket is not None
            again = await ticket.wait()
            assert (again.count, again.fencing_token) == (lease.count, lease.fencing_token)
            await ticket.withdraw()
        assert pool.name == "pool"
        assert await world.queue("pool") == []
        await resumed.aclose()


async def test_new_requests_do_not_disturb_recovered_ones(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        _held = await session.mutex("m").lock()
        resumed = await second.session(resume=session.resume_token)
        async with resumed.mutex("n").lock():
            assert [each.name for each in resumed.recovered] == ["m"]
            assert await resumed.mutex("m").try_lock() is None
        assert len(await world.queue("m")) == 1
        await resumed.aclose()
        assert await world.queue("m") == []


async def test_a_grant_before_its_request_is_claimed_is_not_missed(world: World) -> None:
    async with world.client() as first, world.client() as second, world.client() as other:
        session = await first.session(resumable=True)
        blocking = await other.mutex("m").lock()
        waiting = asyncio.create_task(session.mutex("m").lock())
        await turns()
        resumed = await second.session(resume=session.resume_token)
        with pytest.raises(SessionExpired):
            await waiting
        await blocking.release()
        await turns()
        (found,) = resumed.recovered
        assert found == Recovered(
            found.request_id,
            "m",
            found.order_id,
            EPHEMERAL_LIMIT,
            b"",
            ephemeral=True,
            granted=True,
        )
        ticket = resumed.mutex("m").recover()
        assert ticket is not None
        assert ticket.granted
        await resumed.aclose()


async def test_what_is_evicted_before_it_is_claimed_is_not_recovered(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        lease = await session.mutex("m").lock()
        resumed = await second.session(resume=session.resume_token)
        await second.evict("/default", "m", lease.fencing_token)
        await turns()
        assert resumed.recovered == ()
        resumed._core.removed(12345, Removal.EVICTED)  # of what it never had: nothing
        resumed._core.granted(12345, 1)
        await resumed.aclose()


async def test_a_recovered_lease_may_need_time_to_stop(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True, recovery_window=20)
        _held = await session.mutex("m").lock()
        resumed = await second.session(resume=session.resume_token)
        with pytest.raises(InvalidArgument, match="under half the recovery window"):
            resumed.mutex("m").recover(stop_time=10)
        ticket = resumed.mutex("m").recover(stop_time=9)
        assert ticket is not None
        lease = await ticket.wait()
        assert lease.deadline - second.clock.now() <= 11
        await resumed.aclose()
        assert resumed.recovered == ()


async def test_a_session_of_the_client_itself_recovers_nothing(world: World) -> None:
    async with world.client() as client:
        assert client.mutex("m").recover() is None
        async with client.mutex("m").lock():
            assert client.mutex("m").recover() is None


# The former program


@guarantee("taken over", "one owner", "loss reported", on=MEMORY)
async def test_whoever_is_inside_a_lease_is_stopped_before_the_successor_has_it(
    world: World,
) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        stopped: list[bool] = []
        inside = asyncio.Event()

        async def work() -> None:
            async with session.mutex("m").lock() as lease:
                try:
                    inside.set()
                    await asyncio.Event().wait()
                finally:
                    stopped.append(is_held(lease))

        working = asyncio.create_task(work())
        await inside.wait()
        resumed = await second.session(resume=session.resume_token)
        with pytest.raises(LeaseLost, match="resumed it with its token"):
            await working
        assert stopped == [False]
        assert session.state == "expired"
        assert len(await world.queue("m")) == 1  # its release was not the successor's
        await resumed.aclose()


@guarantee("taken over", "one owner", on=MEMORY)
async def test_a_program_that_is_out_of_reach_keeps_the_successor_waiting_for_its_window(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as second:
        session = await client.session(resumable=True, recovery_window=20)
        lease = await session.mutex("m").lock()
        inner: Any = engine.sessions[0].inner
        # Nothing reaches it, and it does not renew.
        monitored: list[bool] = []
        cut = clock.now()
        inner.over = lambda _error: None
        engine.cut()
        resuming = asyncio.create_task(second.session(resume=session.resume_token))
        await turns()
        while not resuming.done():
            monitored.append(is_held(lease))
            await asyncio.sleep(1)
        assert 19 <= clock.now() - cut <= 22
        assert monitored[0] is True
        assert not is_held(lease)
        resumed = resuming.result()
        assert [each.name for each in resumed.recovered] == ["m"]
        engine.mend()
        await resumed.aclose()


async def test_assume_dead_does_not_wait(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as second:
        session = await client.session(resumable=True, recovery_window=20)
        _held = await session.mutex("m").lock()
        inner: Any = engine.sessions[0].inner
        inner.over = lambda _error: None
        before = clock.now()
        resumed = await second.session(resume=session.resume_token, assume_dead=True)
        assert clock.now() == before
        assert [each.name for each in resumed.recovered] == ["m"]
        await resumed.aclose()


async def test_a_session_that_is_over_is_not_resumed(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        closed = await client.session(resumable=True)
        await closed.aclose()
        left = await client.session(resumable=True, recovery_window=5)
        await left.detach()
        await asyncio.sleep(6)
        for session in (closed, left):
            with pytest.raises(SessionExpired, match="cannot be resumed: open a new one"):
                await client.session(resume=session.resume_token)


async def test_a_cancelled_resumption_leaves_the_session_to_the_next(world: World) -> None:
    for moment in range(12):
        async with world.slow(2)[0] as first, world.slow(2)[0] as second:
            session = await first.session(resumable=True)
            _held = await session.mutex("m").lock()
            token = session.resume_token
            resuming = asyncio.create_task(second.session(resume=token))
            await turns(moment)
            resuming.cancel()
            await asyncio.wait([resuming])
            await turns()
            assert len(await world.queue("m")) == 1
            async with second.session(resume=token) as resumed:
                assert [each.name for each in resumed.recovered] == ["m"]
        assert await world.sessions() == []


async def test_streams_of_events_hear_of_both_sides(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        with_first, with_second = first.events(), second.events()
        resumed = await second.session(resume=session.resume_token)
        await turns()
        assert any(isinstance(each, events.Expired) for each in with_first._events)
        assert [type(each) for each in with_second._events] == [events.SessionAttached]
        await resumed.aclose()
        await with_first.aclose()
        await with_second.aclose()
