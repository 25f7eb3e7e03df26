"""Sessions that are taken up again, and servers that go away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.raw import (
    NODE,
    Client,
    channel,
    detached,
    eventually,
    known,
    serving,
    session,
    stream,
)


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
