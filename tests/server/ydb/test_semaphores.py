"""What is asked of semaphores on a stream, and what is answered."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.server.limits import Limits
from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.raw import FOREVER, channel, eventually, serving, session, waiting

MUTEX: dict[str, Any] = {"count": 2**64 - 1, "ephemeral": True}
DAY = 24 * 60 * 60 * 1000


# --- create, update, delete


async def test_a_semaphore_is_created_updated_described_and_deleted(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        assert (await client.create("s", 3, b"one")).status == Status.SUCCESS
        asked = await client.update("s", b"two")
        assert await client.refused(asked, "update_semaphore_result") == Status.SUCCESS
        found = await client.described("s")
        assert (found.name, found.data, found.limit, found.count) == ("s", b"two", 3, 0)
        assert not found.ephemeral
        asked = await client.delete("s")
        assert await client.refused(asked, "delete_semaphore_result") == Status.SUCCESS
        asked = await client.describe("s")
        assert await client.refused(asked, "describe_semaphore_result") == Status.NOT_FOUND


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"name": ""}, {"name": "n" * 1025}, {"data": b"d" * (2**20 + 1)}],
)
async def test_what_no_semaphore_can_be_is_a_bad_request(wrong: dict[str, Any]) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        ask = {"name": "s", "limit": 1, "data": b"", **wrong}
        assert (await client.create(**ask)).status == Status.BAD_REQUEST


async def test_creating_what_exists_says_in_which_way(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        await client.create("lasting")
        assert (await client.create("lasting")).status == Status.ALREADY_EXISTS
        assert (await client.create("lasting", 7)).status == Status.ALREADY_EXISTS
        await client.acquired(await client.acquire("ephemeral", **MUTEX))
        assert (await client.create("ephemeral")).status == Status.PRECONDITION_FAILED


async def test_updating_wants_what_exists_and_can_be_held() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        kind = "update_semaphore_result"
        assert await client.refused(await client.update("s", b""), kind) == Status.NOT_FOUND
        big = b"d" * (2**20 + 1)
        assert await client.refused(await client.update("s", big), kind) == Status.BAD_REQUEST
        assert await client.refused(await client.update("", b""), kind) == Status.NOT_FOUND
        long = "n" * 1025
        assert await client.refused(await client.update(long, b""), kind) == Status.BAD_REQUEST


@pytest.mark.parametrize("name", ["", "n" * 1025], ids=["empty", "long"])
async def test_a_name_that_no_semaphore_can_have_is_one_that_is_not_there(name: str) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        for asked, kind in (
            (await client.describe(name), "describe_semaphore_result"),
            (await client.describe(name, watch_data=True), "describe_semaphore_result"),
            (await client.delete(name), "delete_semaphore_result"),
            (await client.acquire(name), "acquire_semaphore_result"),
        ):
            assert await client.refused(asked, kind) == Status.NOT_FOUND, kind
        assert not await client.released(await client.release(name))
        asked = await client.acquire(name, ephemeral=True)  # which could not be stored
        assert await client.refused(asked) == Status.BAD_REQUEST


async def test_three_mebibytes_of_data_are_a_bad_request_and_the_stream_goes_on() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.create("s")
        large = b"d" * (3 * 2**20)
        assert (await client.create("t", data=large)).status == Status.BAD_REQUEST
        asked = await client.update("s", large)
        assert await client.refused(asked, "update_semaphore_result") == Status.BAD_REQUEST
        asked = await client.acquire("s", data=large)
        assert await client.refused(asked) == Status.BAD_REQUEST
        assert await client.acquired(await client.acquire("s"))


async def test_deleting_says_why_it_does_not(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        kind = "delete_semaphore_result"
        assert await client.refused(await client.delete("s"), kind) == Status.NOT_FOUND
        await client.create("s")
        await other.acquired(await other.acquire("s"))
        assert await client.refused(await client.delete("s"), kind) == Status.PRECONDITION_FAILED
        await other.acquired(await other.acquire("m", **MUTEX))
        for force in (False, True):
            asked = await client.delete("m", force=force)
            assert await client.refused(asked, kind) == Status.PRECONDITION_FAILED
        assert await other.released(await other.release("m"))


async def test_deleted_by_force_waiters_and_watchers_learn_it_before_who_asked(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, client, other = [await session(over) for _ in range(3)]
        await client.create("s")
        await owner.acquired(await owner.acquire("s"))
        waits = await client.acquire("s")
        await client.pending(waits)
        watches = await client.describe("s", watch_data=True)
        await client.expect("describe_semaphore_result")
        others = await other.acquire("s")
        await other.pending(others)
        asked = await client.delete("s", force=True)
        assert await client.refused(waits) == Status.ABORTED
        assert await client.changed(watches) == (True, True)
        assert await client.refused(asked, "delete_semaphore_result") == Status.SUCCESS
        assert await other.refused(others) == Status.ABORTED
        assert not await owner.released(await owner.release("s"))
        assert not await client.released(await client.release("s"))  # and nothing more before it


# --- acquire


async def test_what_is_wrong_with_an_acquire_is_found_in_order(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        await client.create("s", 3)
        await client.acquired(await client.acquire("m", **MUTEX))
        big = b"d" * (2**20 + 1)
        for wrong, status in (
            ({"name": "none", "count": 0}, Status.BAD_REQUEST),
            ({"name": "none", "timeout_millis": DAY + 1}, Status.BAD_REQUEST),
            ({"name": "none", "data": big}, Status.BAD_REQUEST),
            ({"name": "none"}, Status.NOT_FOUND),
            ({"name": "s", "ephemeral": True, "count": 9}, Status.PRECONDITION_FAILED),
            ({"name": "m", "count": 1}, Status.PRECONDITION_FAILED),
            ({"name": "s", "count": 4}, Status.BAD_REQUEST),
            ({"name": ""}, Status.NOT_FOUND),
            ({"name": "", "data": big}, Status.BAD_REQUEST),
        ):
            ask: dict[str, Any] = wrong
            assert await client.refused(await client.acquire(**ask)) == status, wrong
        other = await session(over)
        assert await other.refused(await other.acquire("m", 1)) == Status.PRECONDITION_FAILED


async def test_it_is_granted_at_once_or_later_in_order(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        first, second, third = [await session(over) for _ in range(3)]
        await first.create("s", 2)
        await first.acquired(await first.acquire("s", 2, timeout_millis=0))
        waits = await second.acquire("s", 2, timeout_millis=DAY)
        await second.pending(waits)
        behind = await third.acquire("s", 1)
        await third.pending(behind)
        refused = await session(over)
        assert not await refused.acquired(await refused.acquire("s", 1, timeout_millis=0))
        found = await first.described("s", include_owners=True, include_waiters=True)
        assert [(each.session_id, each.count) for each in found.owners] == [(first.session_id, 2)]
        assert [each.session_id for each in found.waiters] == [
            second.session_id,
            third.session_id,
        ]
        assert found.owners[0].timeout_millis == 0
        assert 0 < found.waiters[0].timeout_millis <= DAY
        assert found.waiters[1].timeout_millis == FOREVER
        assert found.owners[0].order_id < found.waiters[0].order_id < found.waiters[1].order_id
        assert await first.released(await first.release("s"))
        assert await second.acquired(waits)
        assert await second.released(await second.release("s"))
        assert await third.acquired(behind)


async def test_who_waited_in_vain_has_not_acquired(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        await owner.acquired(await owner.acquire("m", **MUTEX))
        waits = await waiter.acquire("m", **MUTEX, timeout_millis=50)
        await waiter.pending(waits)
        assert not await waiter.acquired(waits)
        assert not await waiter.released(await waiter.release("m"))


async def test_request_ids_are_only_echoed() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        for name in ("a", "b"):
            ask = Request.AcquireSemaphore(req_id=0, name=name, **MUTEX)
            await client.send(acquire_semaphore=ask)
            assert await client.acquired(0)


async def test_counts_and_limits_near_the_ends_of_their_ranges(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        await client.create("s", 2**64 - 1)
        assert await client.acquired(await client.acquire("s", 2**53 - 1))
        assert await other.refused(await other.acquire("s", 2**53)) == Status.BAD_REQUEST
        waits = await other.acquire("s", 2**64 - 1)
        await other.pending(waits)
        await client.released(await client.release("s"))
        assert await other.acquired(waits)
        assert (await client.described("s")).count == 2**64 - 1


# --- release


async def test_a_waiter_is_released_after_its_acquire_was_aborted(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        asked = await waiter.release("s")
        assert await waiter.refused(waits) == Status.ABORTED
        assert await waiter.released(asked)
        assert not await waiter.released(await waiter.release("s"))


async def test_releasing_what_is_not_there_is_a_success_that_released_nothing() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.create("s")
        for name in ("s", "none", "", "n" * 2000):
            assert not await client.released(await client.release(name))


async def test_requests_for_different_names_are_answered_in_their_order(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        expected = []
        for number in range(40):
            name = f"n{number}"
            create = Request.CreateSemaphore(req_id=client.next_id(), name=name, limit=2)
            await client.send(create_semaphore=create)
            asked = [await client.delete(f"none{number}"), await client.describe(name)]
            asked += [await client.acquire(name), await client.release(f"m{number}")]
            expected += [create.req_id, *asked, await client.delete(name, force=True)]
        answered: list[int] = []
        while len(answered) < len(expected):
            message = await client.receive()
            answered.append(getattr(message, message.WhichOneof("response")).req_id)
        assert answered == expected


async def test_many_requests_on_one_name_are_answered_in_their_order(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        client = await session(over)
        asked = []
        for _ in range(50):
            asked.append(("acquire_semaphore_result", await client.acquire("m", **MUTEX)))
            asked.append(("release_semaphore_result", await client.release("m")))
        for kind, number in asked:
            result = await client.expect(kind)
            assert (result.req_id, result.status) == (number, Status.SUCCESS)
            assert getattr(result, "acquired", True)
            assert getattr(result, "released", True)


# --- after a new attachment


async def test_places_survive_a_new_attachment_and_request_ids_do_not(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter, behind = [await session(over) for _ in range(3)]
        await waiting(owner, waiter)
        others = await behind.acquire("s", 1)
        await behind.pending(others)
        await waiter.call.cancel()
        again = await session(over, session_id=waiter.session_id)
        assert await again.refused(await again.acquire("s", 3)) == Status.BAD_REQUEST
        asked = await again.acquire("s", 2)
        await again.pending(asked)
        found = (await owner.described("s", include_waiters=True)).waiters
        assert [each.session_id for each in found] == [waiter.session_id, behind.session_id]
        await owner.released(await owner.release("s"))
        assert await again.acquired(asked)
        third = await session(over, session_id=waiter.session_id)
        assert await third.acquired(await third.acquire("s", 2))
        assert await third.released(await third.release("s"))


async def test_who_was_granted_while_nobody_listened_is_told_when_it_asks(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        await waiting(owner, waiter)
        await waiter.call.cancel()
        await owner.released(await owner.release("s"))
        again = await session(over, session_id=waiter.session_id)
        assert await again.acquired(await again.acquire("s", 2))


async def test_a_waiter_times_out_while_nobody_listens(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter, other = [await session(over) for _ in range(3)]
        await owner.acquired(await owner.acquire("m", **MUTEX))
        await waiter.pending(await waiter.acquire("m", **MUTEX, timeout_millis=100))
        await waiter.call.cancel()

        async def over_time() -> bool:
            found = (await owner.described("m", include_waiters=True)).waiters
            return not any(each.timeout_millis for each in found)

        await eventually(over_time)
        await owner.released(await owner.release("m"))
        assert await other.acquired(await other.acquire("m", **MUTEX, timeout_millis=0))
        again = await session(over, session_id=waiter.session_id)
        assert not await again.released(await again.release("m"))


# --- limits


async def test_requests_of_a_session_are_limited() -> None:
    limits = Limits(requests_per_session=2)
    async with serving(limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        for name in ("a", "b"):
            await client.acquired(await client.acquire(name, **MUTEX))
        assert await client.refused(await client.acquire("c", **MUTEX)) == Status.OVERLOADED
        await client.released(await client.release("a"))
        assert await client.acquired(await client.acquire("c", **MUTEX))


async def test_semaphores_and_queues_are_limited() -> None:
    limits = Limits(semaphores=2, queue_length=2)
    async with serving(limits=limits) as server, channel(server.target) as over:
        several = [await session(over) for _ in range(3)]
        client = several[0]
        await client.create("a", 1)
        await client.create("b", 1)
        assert (await client.create("c", 1)).status == Status.OVERLOADED
        for each in several[:2]:
            asked = await each.acquire("a")
            message = await each.receive()
            assert asked in {
                message.acquire_semaphore_result.req_id,
                message.acquire_semaphore_pending.req_id,
            }
        assert await several[2].refused(await several[2].acquire("a")) == Status.OVERLOADED
        kind = "delete_semaphore_result"
        assert await client.refused(await client.delete("b"), kind) == Status.SUCCESS
        assert (await client.create("c", 1)).status == Status.SUCCESS


async def test_data_are_limited_by_what_the_server_says() -> None:
    limits = Limits(data_bytes=10)
    async with serving(limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        assert (await client.create("s", 1, b"d" * 11)).status == Status.BAD_REQUEST
        assert (await client.create("s", 1, b"d" * 10)).status == Status.SUCCESS
        asked = await client.acquire("s", data=b"d" * 11)
        assert await client.refused(asked) == Status.BAD_REQUEST
