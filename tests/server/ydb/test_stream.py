"""A session's stream: how it starts, goes on, and ends."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from grpclib.const import Status as GrpcStatus

from tenure.server.limits import Limits
from tenure.server.ydb.messages import Request, Status, coordination
from tests.server.ydb.raw import (
    NODE,
    call,
    channel,
    detached,
    eventually,
    known,
    serving,
    session,
    stream,
)


async def test_session_started_is_the_first_message_and_a_ping_the_second() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over)
        start = Request.SessionStart(path=NODE, timeout_millis=5000)
        await client.send(session_start=start)
        first, second = await client.hear(), await client.hear()
        assert first.session_started.session_id > 0
        assert first.session_started.timeout_millis == 5000
        assert second.ping.opaque > 0


@pytest.mark.parametrize("what", ["ping", "acquire_semaphore", "nothing"])
async def test_a_first_message_that_is_no_session_start_ends_the_stream(what: str) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over)
        messages = {
            "ping": {"ping": Request.PingPong(opaque=1)},
            "acquire_semaphore": {"acquire_semaphore": Request.AcquireSemaphore(name="m")},
            "nothing": {},
        }
        await client.send(**messages[what])
        assert await client.status() is GrpcStatus.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "request_",
    [
        {"session_start": Request.SessionStart(path=NODE)},
        {},
        {"unsupported_13": coordination.Unsupported()},
    ],
)
async def test_what_cannot_be_served_ends_the_stream_with_a_failure(request_: object) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.send(**request_)  # type: ignore[arg-type]
        await client.fails(Status.BAD_REQUEST)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"path": ""}, Status.BAD_REQUEST),
        ({"path": "/local/missing"}, Status.NOT_FOUND),
        ({"path": "/"}, Status.BAD_REQUEST),
        ({"path": "//"}, Status.BAD_REQUEST),
        ({"path": "/local/bad name"}, Status.NOT_FOUND),
        ({"path": "/remote/default"}, Status.NOT_FOUND),
        ({"path": "/local"}, Status.NOT_FOUND),
        ({"timeout_millis": 30 * 60 * 1000 + 1}, Status.BAD_REQUEST),
        ({"description": "d" * 1025}, Status.BAD_REQUEST),
        ({"protection_key": b"k" * 17}, Status.BAD_REQUEST),
        ({"session_id": 12345}, Status.SESSION_EXPIRED),
        ({"session_id": 2**64 - 1}, Status.SESSION_EXPIRED),
    ],
)
async def test_a_session_that_cannot_be_started_is_told_why(
    wrong: dict[str, Any], status: int
) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over)
        start: dict[str, Any] = {"path": NODE, "timeout_millis": 5000, **wrong}
        await client.send(session_start=Request.SessionStart(**start))
        assert await client.fails(status)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("an SDK", "an SDK [host=127.0.0.1]"),
        ("", "[host=127.0.0.1]"),
        ("x [host=db-1 pid=4 program=p]", "x [host=db-1 pid=4 program=p]"),
    ],
)
async def test_a_client_that_tells_no_identity_is_known_by_its_address(
    said: str, kept: str
) -> None:
    async with serving() as server, channel(server.target) as over:
        await session(over, timeout=30, description=said)
        (found,) = await server.context.engine.list_sessions("/default")
        assert found.description == kept


async def test_the_longest_of_everything_is_taken() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(
            over, timeout=30 * 60, description="d" * 1024, protection_key=b"k" * 16
        )
        assert client.timeout_millis == 30 * 60 * 1000
        (found,) = await server.context.engine.list_sessions("/default")
        assert (found.description, found.recovery_window) == ("d" * 1024, 30 * 60)


async def test_too_many_sessions_are_refused_and_a_restored_one_never_is() -> None:
    limits = Limits(sessions=1)
    async with serving(limits=limits) as server, channel(server.target) as over:
        first = await session(over)
        second = await stream(over)
        await second.send(session_start=Request.SessionStart(path=NODE, timeout_millis=5000))
        assert "sessions = 1" in await second.fails(Status.PRECONDITION_FAILED)
        await session(over, session_id=first.session_id)


async def test_sessions_that_were_left_count_until_their_window_has_passed() -> None:
    limits = Limits(sessions=1)
    async with serving(limits=limits) as server, channel(server.target) as over:
        first = await session(over, timeout=1)
        await first.call.cancel()
        await detached(server, first.session_id)
        second = await stream(over)
        await second.send(session_start=Request.SessionStart(path=NODE, timeout_millis=5000))
        await second.fails(Status.PRECONDITION_FAILED)

        async def one_is_started() -> bool:
            # The server's count and the identity's end by different timers.
            client = await stream(over)
            await client.send(session_start=Request.SessionStart(path=NODE, timeout_millis=5000))
            message = await client.receive()
            return message is not None and message.WhichOneof("response") == "session_started"

        await eventually(one_is_started)


@pytest.mark.parametrize("path", ["/local/n/", "local/n", "/local//n", "//local///n//"])
async def test_the_path_of_a_session_is_read_as_ydb_reads_it(path: str) -> None:
    async with serving() as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        await session(over, path)
        (found,) = await server.context.engine.list_sessions("/n")
        assert found.attached


# --- the end


async def test_session_stop_releases_everything_at_once_and_answers_nothing_more() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        waits = await other.acquire("m", 2**64 - 1, ephemeral=True)
        await other.pending(waits)
        await other.acquire("n", 1, ephemeral=True)
        await other.acquired(2)
        pending = await client.acquire("n", 2**64 - 1, ephemeral=True)
        await client.pending(pending)
        await client.send(session_stop=Request.SessionStop())
        assert (await client.expect("session_stopped")).session_id == client.session_id
        await client.ends()
        assert await other.acquired(waits)
        assert not await known(server, client.session_id)


@pytest.mark.parametrize("how", ["half-close", "cancel", "connection"])
async def test_a_stream_that_ends_otherwise_leaves_its_session_detached(how: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving())
        over = await stack.enter_async_context(channel(server.target))
        leaving = contextlib.AsyncExitStack()
        its_own = await leaving.enter_async_context(channel(server.target))
        client, other = await session(its_own), await session(over)
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        waits = await other.acquire("m", 2**64 - 1, ephemeral=True)
        await other.pending(waits)
        if how == "half-close":
            await client.call.end()
            assert await client.receive() is None
        elif how == "cancel":
            await client.call.cancel()
        await leaving.aclose()
        await detached(server, client.session_id)
        again = await session(over, session_id=client.session_id)
        assert await again.released(await again.release("m"))
        assert await other.acquired(waits)


async def test_a_session_of_timeout_zero_ends_with_its_stream() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over, timeout=0), await session(over)
        assert client.timeout_millis == 0
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        waits = await other.acquire("m", 2**64 - 1, ephemeral=True)
        await other.pending(waits)
        await client.call.cancel()
        assert await other.acquired(waits)
        assert not await known(server, client.session_id)


async def test_a_node_dropped_by_force_ends_its_sessions() -> None:
    async with serving() as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        client = await session(over, "/local/n")
        await server.context.engine.drop_node("/n", force=True)
        await client.fails(Status.SESSION_EXPIRED)


async def test_a_session_that_an_administrator_ends_is_told() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await server.context.engine.end_session("/default", client.session_id)
        await client.fails(Status.SESSION_EXPIRED)
        again = await stream(over)
        await again.send(
            session_start=Request.SessionStart(path=NODE, session_id=client.session_id)
        )
        await again.fails(Status.SESSION_EXPIRED)
