"""Describes that ask to be told of a change: once, and after everything else."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.errors import EngineUnavailable
from tenure.server.limits import Limits
from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.parties import parties
from tests.server.ydb.raw import Client, call, channel, serving, session

MUTEX: dict[str, Any] = {"count": 2**64 - 1, "ephemeral": True}


async def watch(client: Client, name: str, **how: bool) -> int:
    """Ask to be told of changes; returns the request id."""
    asked = await client.describe(name, **how)
    result = await client.expect("describe_semaphore_result")
    assert (result.req_id, result.status, result.watch_added) == (asked, Status.SUCCESS, True)
    return asked


async def nothing_is_told(client: Client) -> None:
    """A describe is answered, and nothing stands before its answer."""
    asked = await client.describe("nothing of that name")
    assert await client.refused(asked, "describe_semaphore_result") == Status.NOT_FOUND


async def test_a_describe_without_flags_adds_no_watch(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        await client.create("s")
        asked = await client.describe("s")
        result = await client.expect("describe_semaphore_result")
        assert (result.req_id, result.watch_added) == (asked, False)
        await client.update("s", b"other")
        await client.expect("update_semaphore_result")
        await nothing_is_told(client)


async def test_other_data_are_told_once_and_equal_data_never(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, writer = await session(over), await session(over)
        await writer.create("s", data=b"one")
        asked = await watch(watcher, "s", watch_data=True)
        await writer.refused(await writer.update("s", b"one"), "update_semaphore_result")
        await writer.refused(await writer.update("s", b"two"), "update_semaphore_result")
        assert await watcher.changed(asked) == (True, False)
        await writer.refused(await writer.update("s", b"three"), "update_semaphore_result")
        await nothing_is_told(watcher)


async def test_what_changes_among_owners_is_told_and_waiters_never(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, owner, waiter = [await session(over) for _ in range(3)]
        await owner.create("s", 3)

        async def tells(what: Any) -> None:
            asked = await watch(watcher, "s", watch_owners=True)
            await what
            assert await watcher.changed(asked) == (False, True)

        async def acquires(count: int, data: bytes = b"") -> None:
            assert await owner.acquired(await owner.acquire("s", count, data=data))

        async def releases() -> None:
            assert await owner.released(await owner.release("s"))

        async def leaves() -> None:
            await owner.send(session_stop={})
            await owner.expect("session_stopped")

        await tells(acquires(3))
        await tells(acquires(3, b"other data"))
        asked = await watch(watcher, "s", watch_owners=True)
        waits = await waiter.acquire("s", 3)
        await waiter.pending(waits)
        await waiter.acquire("s", 3, data=b"waiting")
        await waiter.refused(waits)
        await waiter.expect("acquire_semaphore_pending")
        await waiter.release("s")
        await waiter.expect("acquire_semaphore_result")
        await waiter.expect("release_semaphore_result")
        await waiter.refused(await waiter.update("s", b"data"), "update_semaphore_result")
        await nothing_is_told(watcher)
        await acquires(1, b"other data")
        assert await watcher.changed(asked) == (False, True)
        await tells(releases())
        await acquires(1)
        await tells(leaves())


async def test_an_expiry_is_told(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, owner = await session(over), await session(over)
        await owner.acquired(await owner.acquire("m", **MUTEX))
        asked = await watch(watcher, "m", watch_owners=True)
        assert await server.context.engine.end_session("/default", owner.session_id)
        assert await watcher.changed(asked) == (True, True)  # the semaphore went with its owner


async def test_a_release_that_grants_the_next_one_is_told_once(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, owner, waiter = [await session(over) for _ in range(3)]
        await owner.acquired(await owner.acquire("m", **MUTEX))
        waits = await waiter.acquire("m", **MUTEX)
        await waiter.pending(waits)
        asked = await watch(watcher, "m", watch_owners=True, watch_data=True)
        await owner.released(await owner.release("m"))
        assert await watcher.changed(asked) == (False, True)
        assert await waiter.acquired(waits)
        await nothing_is_told(watcher)


async def test_deletion_is_told_as_both_to_whatever_kind_of_watcher(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        data, owners, both, who = [await session(over) for _ in range(4)]
        await who.create("s")
        asked = [
            await watch(data, "s", watch_data=True),
            await watch(owners, "s", watch_owners=True),
            await watch(both, "s", watch_data=True, watch_owners=True),
        ]
        await who.refused(await who.delete("s"), "delete_semaphore_result")
        for client, number in zip((data, owners, both), asked, strict=True):
            assert await client.changed(number) == (True, True)


async def test_a_new_watch_replaces_the_old_one_which_is_told_first(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, writer = await session(over), await session(over)
        await writer.create("s")
        first = await watch(watcher, "s", watch_data=True)
        plain = await watcher.describe("s")
        assert (await watcher.expect("describe_semaphore_result")).req_id == plain
        second = await watcher.describe("s", watch_data=True)
        assert await watcher.changed(first) == (False, False)
        assert (await watcher.expect("describe_semaphore_result")).req_id == second
        await writer.update("s", b"other")
        assert await watcher.changed(second) == (True, False)
        await nothing_is_told(watcher)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_describe_that_fails_replaces_no_watch(kept: bool) -> None:
    engine, (watcher, writer) = await parties(2)
    try:
        await writer.session.create_semaphore("s", 1, b"", exist_ok=False)
        flags: dict[str, Any] = {"name": "s", "watch_data": True}
        await watcher.ask(describe_semaphore=Request.DescribeSemaphore(req_id=1, **flags))
        await watcher.answer_all()
        await watcher.ask(describe_semaphore=Request.DescribeSemaphore(req_id=2, **flags))
        job, _, _ = watcher.done.popleft()
        watcher.heard()
        await writer.session.update_semaphore("s", b"other")
        if not kept:
            await watcher.session.close()  # after which no watch can begin
        watcher.conversation.refused(job, EngineUnavailable("the store is out of reach"))
        watcher.conversation.report_changes()
        await watcher.work()
        await watcher.answer_all()
        refused, changed = watcher.heard()
        assert refused.describe_semaphore_result.req_id == 2
        assert refused.describe_semaphore_result.status == Status.UNAVAILABLE
        told = changed.describe_semaphore_changed
        assert (told.req_id, told.data_changed, told.owners_changed) == (1, True, not kept)
    finally:
        await engine.aclose()


async def test_a_describe_of_what_is_not_there_adds_no_watch(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher = await session(over)
        asked = await watcher.describe("s", watch_data=True, watch_owners=True)
        result = await watcher.expect("describe_semaphore_result")
        assert (result.req_id, result.status, result.watch_added) == (
            asked,
            Status.NOT_FOUND,
            False,
        )
        await watcher.create("s")
        await nothing_is_told(watcher)


async def test_a_watch_ends_with_its_stream(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        watcher, writer = await session(over), await session(over)
        await writer.create("s")
        await watch(watcher, "s", watch_data=True)
        again = await session(over, session_id=watcher.session_id)
        await writer.refused(await writer.update("s", b"other"), "update_semaphore_result")
        await nothing_is_told(again)


async def test_replies_come_first_then_grants_then_changes(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client, owner = await session(over), await session(over)
        await client.create("s", data=b"one")
        asked = await watch(client, "s", watch_data=True)
        updated = await client.update("s", b"two")
        assert (await client.expect("update_semaphore_result")).req_id == updated
        assert await client.changed(asked) == (True, False)

        await owner.acquired(await owner.acquire("s"))
        waits = await client.acquire("s")
        await client.pending(waits)
        asked = await watch(client, "s", watch_owners=True)
        await owner.released(await owner.release("s"))
        assert await client.acquired(waits)
        assert await client.changed(asked) == (False, True)

        asked = await watch(client, "s", watch_owners=True)
        released = await client.release("s")
        assert await client.released(released)
        assert await client.changed(asked) == (False, True)


async def test_watches_of_a_session_are_limited() -> None:
    limits = Limits(watches_per_session=1)
    async with serving(limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        await client.create("a")
        await client.create("b")
        first = await watch(client, "a", watch_data=True)
        asked = await client.describe("b", watch_data=True)
        kind = "describe_semaphore_result"
        assert await client.refused(asked, kind) == Status.OVERLOADED
        await client.describe("a", watch_data=True)
        assert await client.changed(first) == (False, False)


async def test_watches_that_are_not_answered_yet_count_against_the_limit(store: str) -> None:
    limits = Limits(watches_per_session=3)
    async with serving(store, limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        names = [f"s{number}" for number in range(10)]
        for name in names:
            await client.create(name)
        for name in names:
            await client.describe(name, watch_data=True)
        added = 0
        for _ in names:
            added += (await client.expect("describe_semaphore_result")).watch_added
        assert added == 3
        await client.describe("s0", watch_data=True)  # replaces one
        await client.expect("describe_semaphore_changed")
        assert (await client.expect("describe_semaphore_result")).watch_added
        await client.describe("none", watch_data=True)  # is refused for its own reason, or this
        assert not (await client.expect("describe_semaphore_result")).watch_added


async def test_a_watch_that_could_not_be_added_does_not_count(store: str) -> None:
    limits = Limits(watches_per_session=1)
    async with serving(store, limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        await client.create("s")
        kind = "describe_semaphore_result"
        asked = await client.describe("none", watch_data=True)
        assert await client.refused(asked, kind) == Status.NOT_FOUND
        await watch(client, "s", watch_data=True)


async def test_a_node_that_is_dropped_ends_watchers_too() -> None:
    async with serving() as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        client = await session(over, "/local/n")
        await client.create("s")
        await watch(client, "s", watch_data=True, watch_owners=True)
        await server.context.engine.drop_node("/n", force=True)
        await client.fails(Status.SESSION_EXPIRED)
