"""Two `tenure serve` on one database: clients move between them, and one is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, until_detached_and_back
from tests.engines.postgresql.servers import a_schema
from tests.ports import free_port
from tests.server.serving import Served, serving

WINDOW = 20.0


@pytest.fixture
def store() -> Iterator[str]:
    """The URL of an empty store."""
    with a_schema() as url:
        yield url


@asynccontextmanager
async def two_servers(folder: Path, store: str) -> AsyncIterator[tuple[Served, Served]]:
    """Run two servers on one store."""
    async with (
        serving(folder, "--store", store) as first,
        serving(folder, "--store", store) as second,
    ):
        yield first, second


async def test_two_servers_serve_one_lock(tmp_path: Path, store: str) -> None:
    async with (
        two_servers(tmp_path, store) as (first, second),
        tenure.connect(first.address) as one,
        tenure.connect(second.address) as other,
        tenure.connect(store) as directly,
    ):
        clients = [one, other, directly]
        inside = turns = 0
        tokens: list[int] = []

        async def work(client: tenure.Client) -> None:
            nonlocal inside, turns
            for _ in range(10):
                async with client.mutex("m").lock(timeout=PATIENCE) as lease:
                    inside += 1
                    assert inside == 1
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0)
                    inside -= 1
                    turns += 1

        await asyncio.gather(*(work(client) for client in clients for _ in range(2)))
        assert turns == 60
        assert tokens == sorted(set(tokens))


async def test_a_killed_server_costs_no_lease_and_no_place(tmp_path: Path, store: str) -> None:
    later = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as servers, AsyncExitStack() as clients:
        first = await servers.enter_async_context(serving(tmp_path, "--store", store))
        both = f"{first.address},{later}"
        holder = await clients.enter_async_context(tenure.connect(both))
        waiter = await clients.enter_async_context(tenure.connect(both))
        session = await clients.enter_async_context(holder.session(recovery_window=WINDOW))
        waiting = await clients.enter_async_context(waiter.session(recovery_window=WINDOW))
        events = await clients.enter_async_context(holder.events())
        # They are connected with the first server, because the second one starts only now.
        await servers.enter_async_context(
            serving(tmp_path, "--store", store, listen=[f"tenure://{later}"])
        )
        behind = await clients.enter_async_context(tenure.connect(f"tenure://{later}"))
        lease = await session.mutex("m").lock(timeout=PATIENCE)
        request = asyncio.ensure_future(waiting.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(behind, "m")
        last = asyncio.ensure_future(behind.mutex("m").lock(timeout=PATIENCE))
        await first.end(signal.SIGKILL)
        await until_detached_and_back(events)
        assert lease.held
        assert not request.done()
        await lease.release()
        async with await request as granted:  # before the one behind it
            assert granted.fencing_token > lease.fencing_token
            assert not last.done()
        async with await last as granted_last:
            assert granted_last.fencing_token > granted.fencing_token


async def test_a_program_resumes_its_session_through_another_server(
    tmp_path: Path, store: str
) -> None:
    async with two_servers(tmp_path, store) as (first, second):
        async with tenure.connect(first.address) as client:
            session = await client.session(recovery_window=6, resumable=True)
            former = await session.mutex("m").lock(timeout=PATIENCE)
            token = session.resume_token
            assert token is not None
            await session.detach()
        await first.end(signal.SIGKILL)
        async with tenure.connect(second.address) as client:
            async with client.session(resume=token) as resumed:
                (found,) = resumed.recovered
                assert found.order_id == former.fencing_token
            async with client.mutex("m").lock(timeout=PATIENCE) as later:
                assert later.fencing_token > former.fencing_token
