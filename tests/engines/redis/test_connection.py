"""One connection: what it does not stand, and what comes in an order that nobody expects."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import tenure
from tenure.engines.redis.commands import Command, ScriptCall, keys_of
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.lua import SCRIPTS
from tests.engines.redis.helpers import PATIENCE, is_waited_for, until
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server, a_server


async def test_an_answer_too_long_for_a_subscriber_fails_and_nothing_else() -> None:
    with a_server("--client-output-buffer-limit", "pubsub 300000 0 0") as server:
        async with (
            tenure.connect(server.url) as client,
            client.session() as session,
            session.mutex("m").lock() as lease,
        ):
            for number in range(20):
                await session.semaphore(f"s{number}").create(1, data=b"x" * 20_000)
            await session.semaphore("large").create(1, data=b"x" * 400_000)
            for asked in (
                client.list_semaphores("/default"),
                session.semaphore("large").describe(),
            ):
                with pytest.raises(tenure.EngineError, match="client-output-buffer-limit pubsub"):
                    async with asyncio.timeout(PATIENCE):
                        await asked
            async with session.mutex("another").lock(timeout=PATIENCE):
                assert lease.held
            async with tenure.connect(f"{server.url}&protocol=2") as other:
                assert len(await other.list_semaphores("/default")) == 22


async def test_what_cannot_be_sent_leaves_every_answer_to_who_asked(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        reconnector = cast("Any", client._core.engine).reconnector
        told: list[object] = []
        reconnector.send(ScriptCall(SCRIPTS["renew"], None, (cast("str", object()),), told.append))
        assert "cannot be sent" in str(told)
        assert not await client.end_session("/default", cast("int", None))
        for limit in range(1, 5):
            await session.semaphore(f"s{limit}").create(limit)
            assert (await session.semaphore(f"s{limit}").describe()).limit == limit


async def test_what_a_server_had_forgotten_is_sent_again_before_what_came_after() -> None:
    again: list[Command] = []
    wire = RedisConnection(
        keys_of("{x}:"), lambda *_: None, lambda _, unanswered: again.extend(unanswered), 0
    )
    calls = [ScriptCall(SCRIPTS["renew"], None, (n,), again.append) for n in range(3)]
    for call in calls:
        wire.send(call)
    wire.data_received(b"-NOSCRIPT No matching script.\r\n")
    wire.connection_lost(None)
    assert again == calls


async def test_who_begins_to_watch_while_the_connection_is_made_hears_of_changes(
    server: Server,
) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(f"{proxy.url}&protocol=2") as client,
        client.session() as session,
        tenure.connect(server.url) as other,
        other.session() as writer,
    ):
        for number in range(60):
            await writer.semaphore(f"s{number}").create(1)
        proxy.delay = 0.1
        proxy.cut()
        before = proxy.accepted
        watches = []
        for number in range(60):
            states = session.semaphore(f"s{number}").watch(data=True)
            watches.append((states, asyncio.ensure_future(anext(states))))
            await asyncio.sleep(0.02)  # at any moment of it
        assert proxy.accepted == before + 2
        proxy.delay = 0.0
        for number, (states, first) in enumerate(watches):
            assert (await first).data == b""
            for data in (b"new", b"newer"):  # after the gap it looks once in any case
                await writer.semaphore(f"s{number}").update(data)
                async with asyncio.timeout(PATIENCE):
                    assert (await anext(states)).data == data
            await states.aclose()


async def test_the_silent_end_of_the_connection_that_hears_is_noticed(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(f"{proxy.url}&protocol=2&socket_timeout=0.5") as client,
        client.session() as session,
        tenure.connect(server.url) as other,
        other.session() as writer,
    ):
        await writer.semaphore("s").create(1)
        states = session.semaphore("s").watch(data=True)
        assert (await anext(states)).data == b""
        assert proxy.accepted == 2
        proxy.mute = 2
        await writer.semaphore("s").update(b"new")
        async with asyncio.timeout(PATIENCE):
            assert (await anext(states)).data == b"new"
        await states.aclose()


async def test_a_queue_that_is_never_empty_lives_on(server: Server) -> None:
    keys = "{tenure}:m:/default:m", "{tenure}:w:/default:m"
    async with tenure.connect(server.url) as client:
        sessions = [await client.session() for _ in range(3)]
        lease = await sessions[0].mutex("m").lock()
        waiting = [asyncio.ensure_future(sessions[1].mutex("m").lock())]
        await is_waited_for(client, "m")
        for key in keys:
            server.tell("PEXPIRE", key, "1000000")  # as when others have come and gone for days
        waiting.append(asyncio.ensure_future(sessions[2].mutex("m").lock()))
        await until(lambda: all(cast("int", server.tell("PTTL", k)) > 10**7 for k in keys))
        await lease.release()
        for each in waiting:
            await (await each).release()
        for session in sessions:
            await session.aclose()


async def test_a_refusal_by_the_queue_shows_that_the_quarantine_is_over(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.mutex("m").lock():
        cast("Any", client._core.engine).quarantine.prolong(5.0)
        async with client.session() as other:
            assert await other.mutex("m").try_lock() is None
