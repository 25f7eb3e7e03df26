# ruff: noqa: PT012  what raises here is a block, with its body
"""The service registry: what is registered is there as long as it lives."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tenure.errors import InvalidArgument, LeaseLost, SessionExpired
from tenure.recipes import Endpoint, ServiceRegistry
from tests.guarantees import SQLITE, guarantee
from tests.primitives.helpers import World, for_ever, turns
from tests.recipes.conftest import program


async def test_an_endpoint_is_listed_while_its_block_lasts(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        there = ServiceRegistry(other, "databases")
        assert repr(there) == "<ServiceRegistry 'databases'>"
        assert await there.list() == ()
        async with client.session() as session:
            registry = ServiceRegistry(session, "databases")
            async with registry.register("10.0.0.1:80") as first, registry.register(b"\xff"):
                one, two = await there.list()
                assert one == Endpoint(b"10.0.0.1:80", session.id, first.fencing_token)
                assert one.text == "10.0.0.1:80"
                assert one.since is not None
                assert two.data == b"\xff"
                with pytest.raises(UnicodeDecodeError):
                    _ = two.text
            assert await there.list() == ()


async def test_one_that_is_awaited_lasts_until_it_is_released(url: str) -> None:
    async with tenure.connect(url) as client:
        registry = ServiceRegistry(client, "databases")
        registration = await registry.register("a")
        assert len(await registry.list()) == 1
        await registration.release()
        assert await registry.list() == ()


async def test_an_endpoint_changes_in_its_place(url: str) -> None:
    async with tenure.connect(url) as client:
        registry = ServiceRegistry(client, "databases")
        async with registry.register("a") as first, registry.register("b"):
            await first.update(b"a2")
            assert [endpoint.text for endpoint in await registry.list()] == ["a2", "b"]
            assert (await registry.list())[0].token == first.fencing_token


async def test_a_watch_tells_the_live_set(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        there = ServiceRegistry(other, "databases")
        async with ServiceRegistry(client, "databases").watch() as sets:
            assert await anext(sets) == ()
            for _ in range(2):
                async with there.register("a") as registration:
                    assert [endpoint.text for endpoint in await anext(sets)] == ["a"]
                    await registration.update(b"b")
                    assert [endpoint.text for endpoint in await anext(sets)] == ["b"]
                assert await anext(sets) == ()


async def test_registrations_end_with_their_session_and_their_block_raises(world: World) -> None:
    async with world.client() as client, world.client() as other:
        with pytest.raises(SessionExpired):
            async with client.session(description="mine") as session:
                with pytest.raises(LeaseLost):
                    async with ServiceRegistry(session, "databases").register("a"):
                        await world.end_sessions("mine")
                        await for_ever()
                await for_ever()  # the session's block is cancelled as well
        assert await ServiceRegistry(other, "databases").list() == ()


async def test_one_that_was_evicted_knows(world: World) -> None:
    async with world.client() as client, world.client() as other:
        with pytest.raises(LeaseLost):
            async with ServiceRegistry(client, "databases").register("a") as registration:
                await other.semaphore("databases", ephemeral=True).delete(force=True)
                await registration.wait_lost()


async def test_a_lasting_semaphore_of_that_name_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(4)
        registry = ServiceRegistry(client, "s")
        for act in (registry.list, lambda: registry.register("a"), lambda: anext(registry.watch())):
            with pytest.raises(InvalidArgument, match="'s' on /default is a lasting semaphore"):
                await act()


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2, 3])
async def test_cancelled_at_any_step_a_registration_leaves_nothing(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client:
        registry = ServiceRegistry(client, "databases")

        async def serve() -> None:
            async with registry.register("a") as registration:
                await registration.update(b"b")
                await turns(1)

        for step in range(40):
            serving = asyncio.create_task(serve())
            await turns(step)
            serving.cancel()
            await asyncio.wait([serving])
            await turns()
            assert await world.queue("databases") == []
        assert serving.exception() is None if not serving.cancelled() else False


async def test_an_endpoint_without_an_encoding_is_refused(url: str) -> None:
    async with tenure.connect(url) as client:
        registry = ServiceRegistry(client, "databases")
        with pytest.raises(InvalidArgument, match="valid Unicode text"):
            await registry.register("\ud800")
        assert await registry.list() == ()


REGISTERED = """
import asyncio, sys, tenure
from tenure.recipes import ServiceRegistry

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        async with ServiceRegistry(client, "databases").register(sys.argv[2]):
            print("ready", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@guarantee("killed", "nothing leaks", on=SQLITE)
async def test_a_killed_process_is_out_of_the_list_at_once(sqlite_url: str) -> None:
    async with tenure.connect(sqlite_url) as client:
        registry = ServiceRegistry(client, "databases")
        async with (
            registry.watch() as sets,
            program(REGISTERED, sqlite_url, "a") as doomed,
            program(REGISTERED, sqlite_url, "b"),
        ):
            assert [endpoint.text for endpoint in await registry.list()] == ["a", "b"]
            doomed.kill()
            async with asyncio.timeout(20):  # long before its recovery window of 30 s
                async for endpoints in sets:
                    if [endpoint.text for endpoint in endpoints] == ["b"]:
                        break
