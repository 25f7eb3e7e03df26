# ruff: noqa: PT012, SIM117  what raises here is a block, with its body
"""Elections: one leader, everyone sees who, and it needs no set-up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tenure._client.election import Leadership
from tenure._client.session_core import SessionCore
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    SessionExpired,
)
from tenure.model import Leader
from tests.primitives.helpers import World, turns

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 2])


@ENGINES
async def test_the_first_candidate_leads_and_then_the_next(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        election = session.election("e")
        assert repr(election) == "<Election 'e'>"
        async with election.campaign(b"one") as first:
            assert isinstance(first, Leadership)
            second = asyncio.create_task(election.campaign(b"two"))
            await turns()
            assert not second.done()
            await first.resign()
            await first.resign()
            assert (await second).fencing_token > first.fencing_token
        await (await second).resign()


async def test_a_leader_s_proclamation_is_seen_at_once(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with client.election("e").campaign(b"old") as leadership:
            term = leadership.fencing_token
            assert await other.election("e").leader() == Leader(b"old", False, term)
            await leadership.proclaim(b"new")
            assert await other.election("e").leader() == Leader(b"new", False, term)
            assert await client.election("e").leader() == Leader(b"new", True, term)
        assert await client.election("e").leader() is None
        with pytest.raises(LeaseReleased):
            await leadership.proclaim(b"newer")


async def test_one_that_nobody_has_campaigned_in_has_no_leader(world: World) -> None:
    async with world.client() as client:
        assert await client.election("e").leader() is None
        assert await client.list_semaphores() == []  # looking has not set it up


async def test_its_state_shows_the_leader_and_the_candidates(world: World) -> None:
    async with world.client() as client:
        election = client.election("e")
        before = await election.describe(owners=True, waiters=True)
        assert (before.limit, before.held, before.owners, before.waiting) == (1, 0, (), 0)
        async with election.campaign(b"first"):
            waiting = asyncio.create_task(election.campaign(b"second"))
            await turns()
            state = await election.describe(owners=True, waiters=True)
            assert [owner.data for owner in state.owners] == [b"first"]
            assert [waiter.data for waiter in state.waiters] == [b"second"]
            assert (await election.describe()).waiters == ()
        await (await waiting).resign()


async def test_a_campaign_may_end_in_time(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with other.election("e").campaign():
            with pytest.raises(AcquireTimeout, match="election 'e' on /default"):
                await client.election("e").campaign(timeout=1)
            assert len(await world.queue("e")) == 1


@ENGINES
async def test_observers_see_every_leader_and_every_proclamation(
    world: World, engine_turns: int | None
) -> None:
    seen: list[bytes | None] = []

    async def observe() -> None:
        async with other.election("e").observe() as leaders:
            async for leader in leaders:
                seen.append(leader.data if leader else None)
                if leader and leader.data == b"done":
                    break

    async with world.connect(engine_turns) as client, world.connect(engine_turns) as other:
        watching = asyncio.create_task(observe())
        await turns()
        async with client.election("e").campaign(b"one") as leadership:
            await turns()
            await leadership.proclaim(b"two")
            await turns()
        await turns()
        async with client.election("e").campaign(b"done"):
            await watching
    assert seen == [None, b"one", b"two", None, b"done"]


async def test_what_is_no_election_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(2)
        election = client.election("s")
        for call in (
            election.campaign(),
            election.leader(),
            election.describe(),
            anext(election.observe()),
        ):
            with pytest.raises(
                InvalidArgument, match="is a semaphore of limit 2, and is used here"
            ) as told:
                await call
            assert (told.value.node, told.value.name) == ("/default", "s")
            assert "'s' on /default is" in str(told.value)
        async with client.mutex("m").lock():
            election = client.election("m")
            for call in (
                election.campaign(),
                election.leader(),
                election.describe(),
                anext(election.observe()),
            ):
                with pytest.raises(InvalidArgument, match="ephemeral semaphore in use"):
                    await call


async def test_a_leader_whose_session_ends_leads_no_more(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost):
            async with session.election("e").campaign():
                await world.end_sessions()
                await asyncio.Event().wait()
        assert await client.election("e").leader() is None


async def test_a_session_that_ends_while_the_campaign_is_prepared_is_told_of(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the preparation and the end of the session came in one turn of the loop."""
    async with world.client() as client, contextlib.AsyncExitStack() as stack:
        session = await client.session()
        election = session.election("e")
        prepare = election._prepare

        async def prepare_too_late(core: SessionCore) -> None:
            await prepare(core)
            session._core.lapse()

        monkeypatch.setattr(election, "_prepare", prepare_too_late)
        async with asyncio.timeout(100):
            with pytest.raises(SessionExpired):
                await stack.enter_async_context(election.campaign())
        assert await world.queue("e") == []
