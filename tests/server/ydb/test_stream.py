"""A session's stream: how it starts, goes on, and ends."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Status as GrpcStatus

from tenure.server.limits import Limits
from tenure.server.ydb.messages import Request, Status, coordination
from tests.server.ydb.raw import (
    NODE,
    PATIENCE,
    Client,
    Server,
    call,
    channel,
    eventually,
    serving,
    session,
    stream,
)


async def known(server: Server, number: int) -> bool:
    """Whether the store has a session."""
    sessions = await server.context.engine.list_sessions("/default")
    return number in {each.id for each in sessions}


async def detached(server: Server, number: int) -> None:
    """Return when the store says that the session is detached."""

    async def so() -> bool:
        sessions = await server.context.engine.list_sessions("/default")
        return any(each.id == number and each.attached is False for each in sessions)

    await eventually(so)


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
        ({"path": "/elsewhere/default"}, Status.NOT_FOUND),
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

        async def nobody_counts() -> bool:
            return server.context.counts.sessions.taken == 0

        await eventually(nobody_counts)
        await session(over)


# --- pings


async def test_a_ping_is_answered_with_a_pong() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        for opaque in (0, 1, 2**64 - 1):
            await client.send(ping=Request.PingPong(opaque=opaque))
            assert (await client.expect("pong")).opaque == opaque


async def test_the_server_goes_on_pinging_with_new_numbers() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=1)  # and so pings come every third of a second
        seen = set()
        for _ in range(3):
            opaque = (await client.hear()).ping.opaque
            seen.add(opaque)
            await client.send(pong=Request.PingPong(opaque=opaque))
        assert len(seen) == 3
        assert 0 not in seen


async def test_a_client_that_does_not_answer_a_ping_times_out_and_is_detached() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=3)
        await client.fails(Status.TIMEOUT)
        assert len(client.pings) == 1
        await detached(server, client.session_id)


@pytest.mark.parametrize(("timeout", "least"), [(30.0, 5.0), (6.0, 2.0)])
async def test_a_ping_may_be_unanswered_for_a_third_of_the_timeout_and_five_seconds_at_most(
    timeout: float, least: float
) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        before = asyncio.get_running_loop().time()
        await client.start(timeout=timeout)
        await client.fails(Status.TIMEOUT)
        assert least <= asyncio.get_running_loop().time() - before < 4 * least
        assert len(client.pings) == 1


async def test_a_ping_that_was_answered_late_is_answered() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=30)
        late = (await client.hear()).ping.opaque
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.5):  # longer than the pause between two pings
                assert await client.call.recv_message() is None, "another ping, or a Failure"
        await client.send(pong=Request.PingPong(opaque=late))
        assert (await client.hear()).HasField("ping")


async def test_a_ping_that_carries_the_servers_number_counts_as_the_pong() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=1)
        async with asyncio.timeout(PATIENCE):
            for _ in range(4):
                message = await client.hear()
                while not message.HasField("ping"):
                    assert message.HasField("pong"), message
                    message = await client.hear()
                await client.send(ping=Request.PingPong(opaque=message.ping.opaque))


async def test_a_pong_that_does_not_answer_the_ping_is_a_bad_request() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.send(pong=Request.PingPong(opaque=7))
        await client.fails(Status.BAD_REQUEST)


async def test_a_pong_without_a_ping_is_ignored() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=30)
        answered = (await client.hear()).ping.opaque
        for opaque in (answered, answered, 0, 7):
            await client.send(pong=Request.PingPong(opaque=opaque))
        assert await client.acquired(await client.acquire("m", ephemeral=True))


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


# --- restoring a session


async def test_the_stream_from_which_a_session_is_taken_is_told_so() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over, protection_key=b"key")
        assert await first.acquired(await first.acquire("m", 2**64 - 1, ephemeral=True))
        second = await session(over, session_id=first.session_id, protection_key=b"key")
        assert second.session_id == first.session_id
        await first.fails(Status.BAD_SESSION)
        assert await second.released(await second.release("m"))


async def test_a_wrong_key_is_refused_before_anything_happens_to_the_session() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over, protection_key=b"key")
        for wrong in (b"", b"other"):
            second = await stream(over)
            await second.send(
                session_start=Request.SessionStart(
                    path=NODE, session_id=first.session_id, protection_key=wrong
                )
            )
            await second.fails(Status.BAD_SESSION)
        assert await first.acquired(await first.acquire("m", 1, ephemeral=True))


async def test_a_session_without_a_key_accepts_any() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over)
        await session(over, session_id=first.session_id, protection_key=b"whatever")
        await first.fails(Status.BAD_SESSION)


async def test_a_lower_sequence_number_is_refused_and_an_equal_one_accepted() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over, seq_no=5)
        lower = await stream(over)
        await lower.send(
            session_start=Request.SessionStart(path=NODE, session_id=first.session_id, seq_no=4)
        )
        await lower.fails(Status.BAD_SESSION)
        equal = await session(over, session_id=first.session_id, seq_no=5)
        await first.fails(Status.BAD_SESSION)
        higher = await session(over, session_id=first.session_id, seq_no=9)
        await equal.fails(Status.BAD_SESSION)
        late = await stream(over)
        await late.send(
            session_start=Request.SessionStart(path=NODE, session_id=first.session_id, seq_no=5)
        )
        await late.fails(Status.BAD_SESSION)
        assert await higher.acquired(await higher.acquire("m", 1, ephemeral=True))


async def test_of_many_who_restore_at_a_time_one_has_it_in_the_end() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over)
        several = [await stream(over) for _ in range(8)]

        async def restore(client: Client) -> str:
            start = Request.SessionStart(
                path=NODE, timeout_millis=30_000, session_id=first.session_id
            )
            await client.send(session_start=start)
            await client.expect("session_started")
            asked = await client.acquire("m", 2**64 - 1, ephemeral=True)
            message = await client.receive()
            if message.HasField("failure"):
                assert message.failure.status == Status.BAD_SESSION
                return "superseded"
            assert message.acquire_semaphore_result.req_id == asked
            return "has it"

        outcomes = await asyncio.gather(*map(restore, several))
        assert "has it" in outcomes
        winners = [c for c, outcome in zip(several, outcomes, strict=True) if outcome == "has it"]
        told = 0
        for client in winners:
            await client.send(ping=Request.PingPong(opaque=1))
            message = await client.receive()
            told += message.HasField("failure")
        assert told == len(winners) - 1


async def test_a_restored_session_has_the_timeout_and_the_description_of_the_newest_start(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        first = await session(over, timeout=7, description="first")
        assert await first.acquired(await first.acquire("m", 2**64 - 1, ephemeral=True))
        for timeout, description in ((60, "second"), (3, ""), (20, "last")):
            again = await session(
                over, timeout=timeout, description=description, session_id=first.session_id
            )
            assert again.timeout_millis == timeout * 1000
            (found,) = await server.context.engine.list_sessions("/default")
            assert found.recovery_window == timeout
            assert found.description == f"{description} [host=127.0.0.1]".lstrip()
        assert await again.released(await again.release("m"))


async def test_a_session_that_was_restored_with_a_timeout_outlives_its_stream() -> None:
    async with serving() as server, channel(server.target) as over:
        first = await session(over, timeout=0)
        second = await session(over, timeout=30, session_id=first.session_id)
        await first.fails(Status.BAD_SESSION)
        await second.call.cancel()
        await detached(server, second.session_id)
        third = await session(over, timeout=0, session_id=first.session_id)
        await third.call.cancel()

        async def is_over() -> bool:
            return not await known(server, third.session_id)

        await eventually(is_over)


async def test_a_session_of_a_server_that_is_gone_gets_the_timeout_of_its_new_start(
    tmp_path: Path,
) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    async with serving(store) as server, channel(server.target) as over:
        first = await session(over, timeout=40)
    async with serving(store) as server, channel(server.target) as over:
        second = await session(over, timeout=9, session_id=first.session_id)
        assert second.timeout_millis == 9000
        (found,) = await server.context.engine.list_sessions("/default")
        assert found.recovery_window == 9


async def test_a_draining_server_sends_its_clients_elsewhere_and_ends_no_session() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await server.listener.drain()
        await client.fails(Status.UNAVAILABLE)
        await detached(server, client.session_id)


async def test_a_server_whose_store_is_stuck_can_be_closed_without_waiting_for_it() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        (stream_,) = server.listener._streams
        stuck, released = asyncio.Event(), asyncio.Event()
        guarded: Any = stream_._session
        attached = guarded._session  # the store's own
        detach = attached.detach

        async def never() -> None:
            stuck.set()
            await released.wait()
            await detach()

        attached.detach = never
        closing = asyncio.create_task(server.listener.aclose())
        await client.fails(Status.UNAVAILABLE)
        await stuck.wait()
        assert not closing.done()
        closing.cancel()
        await asyncio.wait([closing])
        released.set()
