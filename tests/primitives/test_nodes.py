"""Nodes, and looking at what is on them without a session."""

from __future__ import annotations

import pytest

from tenure.errors import (
    InvalidArgument,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.model import NodeConfig
from tests.primitives.helpers import World, turns


async def test_a_node_is_created_described_altered_and_dropped(world: World) -> None:
    async with world.client() as client:
        await client.create_node("/a/b", NodeConfig(self_check_period=2.0))
        assert await client.list_nodes() == ["/a/b", "/default"]
        with pytest.raises(NodeExists):
            await client.create_node("/a/b")
        await client.create_node("/a/b", exist_ok=True)
        await client.alter_node("/a/b", NodeConfig(session_grace_period=3.0))
        described = await client.describe_node("/a/b")
        assert described.config == NodeConfig(self_check_period=2.0, session_grace_period=3.0)
        await client.drop_node("/a/b")
        for call in (
            client.describe_node("/a/b"),
            client.alter_node("/a/b", NodeConfig()),
            client.drop_node("/a/b"),
            client.list_semaphores("/a/b"),
            client.list_sessions("/a/b"),
        ):
            with pytest.raises(NodeNotFound):
                await call


async def test_one_with_sessions_is_dropped_by_force_only_and_they_expire(world: World) -> None:
    async with world.client() as client:
        await client.create_node("/n")
        session = await client.session("/n")
        with pytest.raises(NodeBusy):
            await client.drop_node("/n")
        await client.drop_node("/n", force=True)
        await turns()
        assert session.state == "expired"
        with pytest.raises(SessionExpired):
            await session.mutex("m").lock()


async def test_the_default_node_stays(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="cannot be dropped"):
            await client.drop_node("/default", force=True)


async def test_equal_names_on_two_nodes_are_two_things(world: World) -> None:
    async with world.client() as client:
        await client.create_node("/n")
        async with client.session("/n") as there, client.mutex("m").lock():
            lease = await there.mutex("m").try_lock()
            assert lease is not None
            assert lease.node == "/n"


async def test_what_is_on_a_node_can_be_looked_at(world: World) -> None:
    async with world.client() as client:
        async with client.mutex("m").lock(data=b"me") as lease:
            (listed,) = await client.list_semaphores(owners=True)
            assert [owner.order_id for owner in listed.owners] == [lease.fencing_token]
            described = await client.describe_semaphore("m")
            assert described.owners[0].data == b"me"
            (session,) = await client.list_sessions()
            assert session.id == lease.session.id
        with pytest.raises(SemaphoreNotFound, match="'m' on /default"):
            await client.describe_semaphore("m")


async def test_an_administrator_can_end_and_evict(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await other.semaphore("s").create(1)
        lease = await other.semaphore("s").acquire()
        assert not await client.end_session("/default", 999)
        assert await client.evict("/default", "s", lease.fencing_token)
        assert not await client.evict("/default", "s", lease.fencing_token)
        await turns()
        assert not lease.held
        assert await client.end_session("/default", lease.session.id)


@pytest.mark.parametrize("path", ["", "x", "/", "/a/", "/a b"])
async def test_paths_and_names_are_checked(world: World, path: str) -> None:
    async with world.client() as client:
        for call in (
            client.create_node(path),
            client.alter_node(path, NodeConfig()),
            client.drop_node(path),
            client.describe_node(path),
            client.list_semaphores(path),
            client.describe_semaphore("m", path),
            client.list_sessions(path),
            client.end_session(path, 1),
            client.evict(path, "m", 1),
        ):
            with pytest.raises(InvalidArgument):
                await call
        for call in (client.describe_semaphore(""), client.evict("/default", "", 1)):
            with pytest.raises(InvalidArgument, match="1 to 1024 bytes"):
                await call
