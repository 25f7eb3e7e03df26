"""How much a node may have."""

from __future__ import annotations

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.core import rules
from tenure.engines.contract import Attach
from tenure.engines.etcd import connect, semaphores
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_prefix


async def test_a_node_has_only_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SESSIONS_PER_NODE", 2)
    monkeypatch.setattr(semaphores, "_PAGE", 2)
    with a_prefix() as url:
        async with tenure.connect(url) as client:
            await client.create_node("/full")
            first = await client.session("/full")
            async with client.session("/full"), client.session():
                with pytest.raises(tenure.InvalidArgument, match="has 2 sessions") as raised:
                    await client.session("/full")
                assert raised.value.node == "/full"
                await first.aclose()
                async with client.session("/full") as session, session.mutex("m").lock() as lease:
                    assert lease.held


async def test_a_node_has_only_so_many_semaphores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SEMAPHORES_PER_NODE", 2)
    monkeypatch.setattr(semaphores, "_PAGE", 2)
    with a_prefix() as url:
        async with tenure.connect(url) as client, client.session() as session:
            await session.semaphore("pool").create(1)
            async with (
                session.semaphore("pool").acquire(),
                session.mutex("ephemeral").lock(),
            ):
                with pytest.raises(tenure.InvalidArgument, match="has 2 semaphores") as raised:
                    await session.semaphore("more").create(1)
                assert (raised.value.node, raised.value.name) == ("/default", "more")
                async with tenure.connect(url) as other:
                    await other.semaphore("pool").create(1, exist_ok=True)
                    with pytest.raises(tenure.SemaphoreExists):
                        await other.semaphore("pool").create(2)
                    with pytest.raises(tenure.InvalidArgument, match="ephemeral"):
                        await other.semaphore("ephemeral").create(2)
            await session.semaphore("more").create(1)
            await session.semaphore("more").delete()
            await session.semaphore("another").create(1)


async def test_what_has_many_keys_is_not_yet_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SEMAPHORES_PER_NODE", 3)
    monkeypatch.setattr(rules, "SESSIONS_PER_NODE", 3)
    with a_prefix() as url:
        async with (
            tenure.connect(url) as client,
            client.session() as one,
            client.session(),
        ):
            await one.semaphore("pool").create(5)
            async with one.semaphore("pool").acquire(), one.semaphore("pool").acquire():
                await one.semaphore("more").create(1)
            async with client.session() as three:
                assert three.state == "attached"


async def test_a_name_that_is_too_long_stays_refused_after_an_administrator_used_it() -> None:
    name = "x" * 1025
    with a_prefix() as url:
        engine = connect(url, SystemClock())
        await engine.open()
        try:
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
            with pytest.raises(tenure.InvalidArgument, match="1025"):
                await engine.evict(DEFAULT_NODE, name, 1)
            with pytest.raises(tenure.InvalidArgument, match="1025"):
                await answer_of(
                    session.enqueue(1, name, EPHEMERAL_LIMIT, b"", timeout=0, ephemeral=True)
                )
        finally:
            await engine.aclose()
