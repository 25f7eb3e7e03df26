"""Two servers on one store, and one that dies and comes back: sessions do not notice which."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.server.ydb.messages import Request, Status
from tests.engines.postgresql.servers import a_schema
from tests.ports import free_port
from tests.server.ydb.raw import NODE, Over, Server, channel, serving, session, stream

MUTEX: dict[str, Any] = {"count": 2**64 - 1, "ephemeral": True}
PATIENCE = 20.0


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store, which outlives a crash of a server."""
    if request.param == "postgresql":
        with a_schema() as url:
            yield url
    else:
        yield f"sqlite:///{tmp_path}/store.db?durability=full"


@contextlib.asynccontextmanager
async def two_servers(url: str) -> AsyncIterator[tuple[Server, Over, Server, Over]]:
    """Two servers on one store, and a connection to each."""
    async with (
        serving(url) as first,
        serving(url) as second,
        channel(first.target) as one,
        channel(second.target) as other,
    ):
        yield first, one, second, other


async def test_a_session_goes_from_server_to_server_with_what_it_has(store: str) -> None:
    async with two_servers(store) as (_, one, _, other):
        waiter = await session(other)
        client = await session(one, protection_key=b"key")
        await client.acquired(await client.acquire("m", **MUTEX))
        waits = await waiter.acquire("m", **MUTEX)
        await waiter.pending(waits)
        for turn in range(4):
            await client.call.cancel()
            client = await session(
                (other, one)[turn % 2], session_id=client.session_id, protection_key=b"key"
            )
            assert await client.acquired(await client.acquire("m", **MUTEX))
        assert await client.released(await client.release("m"))
        assert await waiter.acquired(waits)


async def test_a_waiter_keeps_its_place_from_server_to_server(store: str) -> None:
    async with two_servers(store) as (_, one, _, other):
        owner, waiter, behind = await session(one), await session(one), await session(other)
        await owner.acquired(await owner.acquire("m", **MUTEX))
        await waiter.pending(await waiter.acquire("m", **MUTEX))
        others = await behind.acquire("m", **MUTEX)
        await behind.pending(others)
        await waiter.call.cancel()
        waiter = await session(other, session_id=waiter.session_id)
        waits = await waiter.acquire("m", **MUTEX)
        await waiter.pending(waits)
        await owner.released(await owner.release("m"))
        assert await waiter.acquired(waits)
        assert await waiter.released(await waiter.release("m"))
        assert await behind.acquired(others)


async def test_a_stream_is_told_that_another_server_has_its_session_now(store: str) -> None:
    async with two_servers(store) as (first, one, _, other):
        former = await session(one, timeout=60)
        latter = await session(other, timeout=5, session_id=former.session_id)
        assert latter.timeout_millis == 5_000
        await former.fails(Status.BAD_SESSION)
        assert await latter.acquired(await latter.acquire("m", **MUTEX))
        assert first.listener._streams == set()


async def test_a_wrong_key_is_refused_by_any_server(store: str) -> None:
    async with two_servers(store) as (_, one, _, other):
        former = await session(one, protection_key=b"key")
        thief = await stream(other)
        await thief.send(
            session_start=Request.SessionStart(
                path=NODE, session_id=former.session_id, protection_key=b"wrong"
            )
        )
        await thief.fails(Status.BAD_SESSION)
        assert await former.acquired(await former.acquire("m", **MUTEX))


@pytest.mark.parametrize("can_adopt", [True, False])
async def test_many_who_come_to_a_new_server_at_once_cost_few_looks_at_the_store(
    store: str, can_adopt: bool
) -> None:
    async with two_servers(store) as (_, one, second, other):
        former = [await session(one, timeout=10 + each) for each in range(20)]
        engine = second.context.engine
        can = replace(engine.capabilities, adopt=can_adopt)
        engine.capabilities = can  # type: ignore[misc]
        looks = 0
        look = engine.list_sessions

        async def counted(path: str) -> Any:
            nonlocal looks
            looks += 1
            return await look(path)

        engine.list_sessions = counted  # type: ignore[method-assign]

        async def restore(number: int, session_id: int) -> None:
            client = await session(other, session_id=session_id)
            assert client.timeout_millis == (30_000 if can_adopt else (10 + number) * 1000)

        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(former):
                group.create_task(restore(number, each.session_id))
        assert looks < len(former) if not can_adopt else looks == 0
        windows = [each.recovery_window for each in await look("/default")]
        assert windows == [30.0 if can_adopt else 10.0 + each for each in range(20)]


async def test_changes_made_through_one_server_are_told_by_the_other(store: str) -> None:
    async with two_servers(store) as (_, one, _, other):
        watcher, writer = await session(one), await session(other)
        await writer.create("s", 1, b"one")
        asked = await watcher.describe("s", watch_data=True, watch_owners=True)
        await watcher.expect("describe_semaphore_result")
        await writer.update("s", b"two")
        assert await watcher.changed(asked) == (True, False)
        asked = await watcher.describe("s", watch_data=True, watch_owners=True)
        await watcher.expect("describe_semaphore_result")
        await writer.expect("update_semaphore_result")
        await writer.acquired(await writer.acquire("s"))
        assert await watcher.changed(asked) == (False, True)


@contextlib.asynccontextmanager
async def one_server(store: str, port: int | None = None) -> AsyncIterator[tuple[Any, str]]:
    """A server in a process of its own; the process, and where it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.server.ydb.one_server", store, str(port or free_port())),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            target = (await process.stdout.readline()).decode().strip()
        assert target, "the server did not start"
        yield process, target
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.no_debug
async def test_a_server_that_is_killed_and_started_again_has_lost_nothing(store: str) -> None:
    async with one_server(store) as (process, target), channel(target) as over:
        owner, waiter = await session(over, protection_key=b"o"), await session(over)
        await owner.acquired(await owner.acquire("m", **MUTEX, data=b"mine"))
        (before,) = (await owner.described("m", include_owners=True)).owners
        await waiter.pending(await waiter.acquire("m", **MUTEX))
        process.kill()
        await process.wait()
    async with (
        one_server(store, int(target.rpartition(":")[2])) as (_, again),
        channel(again) as over,
    ):
        assert again == target
        kept = await session(over, session_id=owner.session_id, protection_key=b"o")
        assert kept.timeout_millis == 30_000
        waits = await session(over, session_id=waiter.session_id)
        found = await kept.described("m", include_owners=True, include_waiters=True)
        assert [each.session_id for each in found.owners] == [owner.session_id]
        assert found.owners[0].order_id == before.order_id
        assert found.owners[0].data == b"mine"
        assert [each.session_id for each in found.waiters] == [waiter.session_id]
        assert await kept.acquired(await kept.acquire("m", **MUTEX))
        asked = await waits.acquire("m", **MUTEX)
        await waits.pending(asked)
        assert await kept.released(await kept.release("m"))
        assert await waits.acquired(asked)
        (after,) = (await waits.described("m", include_owners=True)).owners
        assert after.order_id > before.order_id
