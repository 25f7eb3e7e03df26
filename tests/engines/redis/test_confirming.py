"""Only the server that grants a lease confirms it (``min_replicas``), also in a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

import tenure
from tenure.engines.redis.commands import AttachedSession
from tenure.engines.redis.confirming import Confirmer
from tenure.engines.redis.connecting import Server as Greeted
from tenure.engines.redis.url import parse
from tenure.errors import EngineError
from tests.engines.redis.helpers import PATIENCE, replicates, until
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server, a_server, free_port


@pytest.fixture
def three() -> Iterator[tuple[Server, Server, Server]]:
    """A master and its two replicas."""
    with ExitStack() as running:
        port = free_port()
        master = running.enter_context(a_server(port=port))
        replica = ("--replicaof", f"127.0.0.1 {port}")
        one, other = (running.enter_context(a_server(*replica, port=free_port())) for _ in range(2))
        yield master, one, other


def run_id(server: Server) -> str:
    told = server.tell("INFO", "server")
    assert isinstance(told, dict)
    return str(told["run_id"])


class _Session:
    """A session as the confirmations see it; nothing of that name is in a store."""

    id = 1
    token = "1.none"


async def confirmed(confirmer: Confirmer) -> EngineError | None:
    """The outcome of a grant that is to be confirmed now."""
    heard: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()
    confirmer.confirm(cast("AttachedSession", _Session()), heard.set_result)
    async with asyncio.timeout(PATIENCE):
        return await heard


async def test_a_server_that_took_the_masters_address_does_not_confirm_its_grants(
    three: tuple[Server, Server, Server],
) -> None:
    master, promoted, replica = three
    await replicates(promoted)
    await replicates(replica)
    async with Proxy(master.socket, f"{master.socket}.proxy") as proxy:
        url = f"{proxy.url}&min_replicas=1&max_window=60"
        async with tenure.connect(url) as client, client.session() as session:
            await until(lambda: any(":s:" in key for key in promoted.all_keys()))
            promoted.tell("REPLICAOF", "NO", "ONE")
            replica.tell("REPLICAOF", "127.0.0.1", str(promoted.port))
            await replicates(replica)
            proxy.server = promoted.socket  # for new connections
            with pytest.raises(EngineError, match="no replica confirmed the grant"):
                await session.mutex("m").lock()
            proxy.server = master.socket


async def test_a_connection_to_a_former_master_that_is_late_confirms_nothing(
    three: tuple[Server, Server, Server],
) -> None:
    master, promoted, replica = three
    await replicates(replica)
    async with Proxy(master.socket, f"{master.socket}.proxy") as proxy:
        address = parse(f"{proxy.url}&min_replicas=1")
        former = Greeted(proxy.path, 3, run_id(master), clustered=False)
        later = Greeted(promoted.socket, 3, run_id(promoted), clustered=False)
        confirmer = Confirmer(address, "return 0")
        try:
            confirmer.serve(former)
            proxy.delay = 0.1
            first = asyncio.create_task(confirmed(confirmer))
            await until(lambda: proxy.late > 0)  # it is being greeted
            confirmer.disconnect()
            promoted.tell("REPLICAOF", "NO", "ONE")
            confirmer.serve(later)
            assert "the connection to the server ended" in str(await first)
            accepted = proxy.accepted
            assert await confirmed(confirmer) is not None
            assert proxy.accepted == accepted
        finally:
            await confirmer.aclose()


async def test_a_session_that_is_over_is_not_confirmed() -> None:
    port = free_port()
    with a_server(port=port) as master, a_server("--replicaof", f"127.0.0.1 {port}") as replica:
        await replicates(replica)
        async with tenure.connect(f"{master.url}&min_replicas=1") as client:
            await client.list_nodes()  # it loads the scripts
            confirmer = Confirmer(parse(f"{master.url}&min_replicas=1"), "return 0")
            try:
                confirmer.serve(Greeted(master.socket, 3, run_id(master), clustered=False))
                assert "the session was over" in str(await confirmed(confirmer))
            finally:
                await confirmer.aclose()
