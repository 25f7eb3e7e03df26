"""A Redis that refuses what takes memory, or everything that it would have to write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import pytest

import tenure
from tenure.events import EventStream, Renewed
from tests.engines.redis.helpers import PATIENCE, is_waited_for, queue_of, until
from tests.engines.redis.servers import Server


@contextlib.contextmanager
def while_it_is(server: Server, setting: str, value: str) -> Iterator[None]:
    """Have a server refuse writes for a while."""
    server.tell("CONFIG", "SET", setting, value)
    yield
    server.tell("CONFIG", "SET", setting, "0")


async def renewed(events: EventStream, times: int) -> None:
    """Return when that many renewals have been proven."""
    async with asyncio.timeout(PATIENCE):
        async for event in events:
            times -= isinstance(event, Renewed)
            if times <= 0:
                return


async def test_a_full_memory_takes_no_lease_and_hands_over(server: Server) -> None:
    async with (
        tenure.connect(server.url) as client,
        tenure.connect(server.url) as other,
        client.events() as events,
    ):
        session = await client.session(recovery_window=1, resumable=True)
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(other, "m")
        with while_it_is(server, "maxmemory", "1000"):
            with pytest.raises(tenure.EngineError, match="OOM"):
                await session.mutex("more").lock()
            server.tell("CLIENT", "KILL", "TYPE", "normal")
            await renewed(events, 6)  # more than a window
            assert lease.held
            await lease.release()
            assert (await waiting).held
            async with tenure.connect(server.url) as third, asyncio.timeout(PATIENCE):
                again = await third.session(resume=session.resume_token)
                await again.aclose()


async def test_a_grant_that_was_not_confirmed_is_given_back_as_soon_as_that_is_possible(
    server: Server,
) -> None:
    async with (
        tenure.connect(server.url) as eye,
        tenure.connect(f"{server.url}&min_replicas=1") as client,
        client.session() as session,
    ):
        async with eye.mutex("m").lock(timeout=PATIENCE) as lease:
            waiting = asyncio.ensure_future(session.mutex("m").lock())
            await is_waited_for(eye, "m")
            await lease.release()
            async with asyncio.timeout(PATIENCE):
                while await queue_of(eye, "m") != (1, 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        with while_it_is(server, "min-replicas-to-write", "1"):
            with pytest.raises(tenure.LeaseLost, match="not confirmed"):
                await waiting
            with pytest.raises(tenure.AcquireTimeout, match="too few replicas"):
                await session.mutex("more").lock(timeout=0.5)
        async with eye.mutex("m").lock(timeout=PATIENCE):
            assert session.state == "attached"


@pytest.mark.parametrize("when", ["it begins to watch", "it watches"])
async def test_who_watches_misses_nothing_after_the_server_has_refused_to_tell(
    server: Server, when: str
) -> None:
    told = "{tenure}:meta", "v"
    async with (
        tenure.connect(server.url) as client,
        client.session() as session,
        tenure.connect(server.url) as other,
        other.session() as writer,
    ):
        await writer.semaphore("s").create(1)
        states = session.semaphore("s").watch(data=True)
        if when == "it begins to watch":
            with while_it_is(server, "maxmemory", "1000"):
                assert (await anext(states)).data == b""
        else:
            assert (await anext(states)).data == b""
            server.tell("HDEL", *told)
            await until(lambda: bool(server.tell("HEXISTS", *told)))  # it says so again and again
            with while_it_is(server, "min-replicas-to-write", "1"):
                await until(lambda: session.state == "detached")
            server.tell("HDEL", *told)  # as after a minute
        async with asyncio.timeout(PATIENCE):
            await writer.semaphore("s").update(b"new")
            assert (await anext(states)).data == b"new"
        await states.aclose()


async def test_a_password_that_is_changed_is_asked_for_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.tell("ACL", "SETUSER", "anna", "on", ">word", "allkeys", "allchannels", "allcommands")
    caplog.set_level(logging.DEBUG, "tenure")
    url = f"redis+unix://anna:word@{server.socket}?fresh=true"
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=PATIENCE) as lease:
        server.tell("ACL", "SETUSER", "anna", "resetpass", ">another")
        server.tell("CLIENT", "KILL", "USER", "anna")
        await until(lambda: "Check the user and the password" in caplog.text)
        server.tell("ACL", "SETUSER", "anna", "resetpass", ">word")
        async with client.mutex("another").lock(timeout=PATIENCE):
            assert lease.held
    assert "word@" not in caplog.text
    assert "was closed" not in caplog.text  # closing the client does not connect again
