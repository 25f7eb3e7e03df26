"""Groups: who is in, and who comes and goes."""

from __future__ import annotations

import asyncio
import gc

import pytest

import tenure
from tenure.errors import InvalidArgument, SessionClosed
from tenure.recipes import Change, Group, Joined, Left, Member, Updated
from tests.primitives.helpers import World, turns
from tests.recipes.conftest import program


async def test_members_are_listed_the_oldest_first(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        here, there = Group(client, "workers"), Group(other, "workers")
        assert repr(here) == "<Group 'workers'>"
        assert await here.members() == ()
        async with here.join(b"a") as first, there.join(b"b") as second, here.join():
            members = await there.members()
            assert [member.data for member in members] == [b"a", b"b", b""]
            assert members[:2] == (
                Member(b"a", first.session.id, first.fencing_token),
                Member(b"b", second.session.id, second.fencing_token),
            )
            assert all(member.since is not None for member in members)
        assert await here.members() == ()


async def test_a_watch_tells_the_members(url: str) -> None:
    async with tenure.connect(url) as client:
        group = Group(client, "workers")
        async with group.watch() as states:
            assert await anext(states) == ()
            async with group.join(b"a") as membership:
                assert [member.data for member in await anext(states)] == [b"a"]
                await membership.update(b"busy")
                assert [member.data for member in await anext(states)] == [b"busy"]
            assert await anext(states) == ()


async def test_changes_tell_who_is_there_and_who_comes_goes_and_changes(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        group, theirs = Group(client, "workers"), Group(other, "workers")
        async with group.join(b"a") as a, group.changes() as changes:
            me = Member(b"a", a.session.id, a.fencing_token)
            assert await anext(changes) == Joined(me)
            async with theirs.join(b"b") as b:
                them = Member(b"b", b.session.id, b.fencing_token)
                assert await anext(changes) == Joined(them)
                await b.update(b"busy")
                busy = Member(b"busy", them.session_id, them.token)
                assert await anext(changes) == Updated(busy, b"b")
            assert await anext(changes) == Left(busy)


async def test_who_applies_the_changes_knows_the_members(world: World) -> None:
    async with world.client() as client, client.session() as session, world.client() as other:
        group = Group(session, "workers")
        known: dict[int, Member] = {}
        told: list[Change] = []

        async def follow() -> None:
            async with Group(other, "workers").changes() as changes:
                async for change in changes:
                    told.append(change)
                    match change:
                        case Joined(member):
                            assert member.token not in known
                            known[member.token] = member
                        case Updated(member, before):
                            assert known[member.token].data == before
                            known[member.token] = member
                        case Left(member):
                            assert known.pop(member.token) == member

        following = asyncio.create_task(follow())
        await turns()
        memberships = [await group.join(b"%d" % number) for number in range(5)]
        await turns(2)
        for number, membership in enumerate(memberships[:4]):
            await turns(number)
            await membership.update(b"busy")
            if number % 2:
                await membership.release()
        await turns()
        assert tuple(known.values()) == await group.members()
        assert [member.data for member in known.values()] == [b"busy", b"busy", b"4"]
        assert {type(change) for change in told} == {Joined, Updated, Left}
        following.cancel()
        await asyncio.wait([following])


async def test_one_that_came_and_went_between_two_looks_is_not_told(world: World) -> None:
    async with world.client() as client:
        group = Group(client, "workers")
        async with group.join(b"a"), group.changes() as changes:
            await anext(changes)
            async with group.join(b"unseen"):
                pass
            async with group.join(b"b"):
                change = await anext(changes)
                assert isinstance(change, Joined)
                assert change.member.data == b"b"


async def test_who_leaves_and_comes_back_is_another_member(world: World) -> None:
    async with world.client() as client:
        group = Group(client, "workers")
        first = await group.join(b"a")
        async with group.changes() as changes:
            await anext(changes)
            await first.release()
            async with group.join(b"a"):
                gone, come = await anext(changes), await anext(changes)
                assert isinstance(gone, Left)
                assert isinstance(come, Joined)
                assert gone.member.data == come.member.data == b"a"
                assert gone.member.token < come.member.token


async def test_the_end_of_the_session_ends_the_changes(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        changes = Group(session, "workers").changes()
        next_one = asyncio.ensure_future(anext(changes))
        await turns()
        await session.aclose()
        with pytest.raises(SessionClosed):
            await next_one


async def test_a_break_leaks_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        group = Group(session, "workers")
        async with group.join(b"a"), group.join(b"b"):
            async with group.changes() as changes:
                async for _ in changes:
                    break
            assert [change async for change in changes] == []
            async for _ in group.changes():
                break
            async for _ in group.watch():
                break
        gc.collect()
        assert session._core.watchers == {}


async def test_a_lasting_semaphore_of_that_name_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(4)
        group = Group(client, "s")
        for act in (group.members, group.join, lambda: anext(group.changes())):
            with pytest.raises(InvalidArgument, match="'s' on /default is a lasting semaphore"):
                await act()


MEMBER = """
import asyncio, sys, tenure
from tenure.recipes import Group

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        async with Group(client, "workers").join(b"doomed"):
            print("ready", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_process_has_left(sqlite_url: str) -> None:
    async with tenure.connect(sqlite_url) as client:
        changes = Group(client, "workers").changes()
        async with changes, program(MEMBER, sqlite_url) as doomed, asyncio.timeout(20):
            joined = await anext(changes)
            doomed.kill()
            assert await anext(changes) == Left(joined.member)
