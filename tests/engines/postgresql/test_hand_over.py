"""The functions that release a mutex to its first waiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engines.postgresql.stepping import Actor, Store, a_store


@asynccontextmanager
async def two(chain: int = 1) -> AsyncIterator[tuple[Store, Actor, Actor, list[int]]]:
    """Create a store with two sessions, of which the first one has requests in the queue of "m".

    Args:
        chain: number of its requests, 1 and so on; the first one is the owner.
    """
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        order_ids = [await one.lock("m")]
        for _ in range(1, chain):
            order_id, ahead = await one.acquire("m")
            assert ahead == order_ids[-1]
            order_ids.append(order_id)
        yield store, one, other, order_ids
        await store.check()


async def requests(actor: Actor) -> list[tuple[Any, ...]]:
    """Return the sessions and numbers of the requests, in their order."""
    return await actor.execute("SELECT session, request_id FROM SCHEMA.requests ORDER BY order_id")


async def test_a_release_grants_to_the_first_waiter() -> None:
    async with two(2) as (store, one, other, (_, first)):
        second, ahead = await other.acquire("m")
        assert (second > first, ahead) == (True, first)
        assert await one.release("m", 1) == [0, f"g {one.session} 2 {first}"]
        assert await store.owner("m") == one.session
        assert await one.release("m", 2) == [0]  # the event goes to the other channel
        assert await store.owner("m") == other.session


async def test_a_turn_over_grants_to_the_first_that_stays() -> None:
    async with two(3) as (store, one, other, (_, _, last)):
        await other.acquire("m")
        zero, also, (first, ahead), (second, before), event = await one.turn_over(
            "m", [1, 2], [7, 8]
        )
        assert (zero, also, event) == (0, 0, f"g {one.session} 3 {last}")
        assert last < ahead < first == before < second
        assert await requests(one) == [
            (one.session, 3),
            (other.session, 1),
            (one.session, 7),
            (one.session, 8),
        ]
        assert await one.turn_over("m", [3]) == [0]  # the event goes to the other channel
        assert await store.owner("m") == other.session


async def test_a_session_that_is_alone_owns_it_again() -> None:
    async with two() as (store, one, _, (owner,)):
        zero, (token, ahead), event = await one.turn_over("m", [1], [7])
        assert (zero, ahead, event) == (0, 0, f"g {one.session} 7 {token}")
        assert token > owner
        assert await store.owner("m") == one.session


async def test_a_mutex_is_free_when_all_requests_have_left() -> None:
    async with two(3) as (store, one, other, _):
        assert await one.turn_over("m", [1, 2, 3]) == [0, 0, 0]
        assert await store.owner("m") == 0
        assert isinstance(await other.acquire("m"), int)


async def test_a_request_that_waits_is_withdrawn_and_queues_up_again() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        owner = await other.lock("m")
        first, ahead = await one.acquire("m")
        zero, (second, before) = await one.turn_over("m", [1], [7])
        assert (zero, second > first, ahead, before) == (0, True, owner, owner)
        assert await store.owner("m") == other.session
        await store.check()


async def test_a_request_that_has_left_is_missing() -> None:
    async with two(2) as (_, one, _, (_, second)):
        await one.release("m", 1)
        missing, zero, token = await one.turn_over("m", [1, 2], [7])
        assert (missing, zero, token > second) == (-1, 0, True)
        assert await requests(one) == [(one.session, 7)]


async def test_a_lease_that_is_guarded_is_kept() -> None:
    async with two() as (store, one, other, (token,)):
        guarding = await store.actor()
        await other.acquire("m")
        await guarding.begin()
        await guarding.call("guard", "/default", "m", token)
        answer, place = await one.turn_over("m", [1], [7])
        assert (answer, isinstance(place, list)) == (-2, True)
        await guarding.commit()
        assert await one.release("m", 1) == [0]
        assert await store.owner("m") == other.session


async def test_a_waiter_that_has_timed_out_is_passed_over() -> None:
    async with two() as (store, one, other, _):
        await other.operate([1, "e", 1, "m", "", "", "20000", "1"])
        await asyncio.sleep(0.03)
        zero, (token, _), event = await one.turn_over("m", [1], [7])
        assert (zero, event) == (0, f"g {one.session} 7 {token}")
        assert await one.execute("SELECT session, reason FROM SCHEMA.removals") == [
            (other.session, "t")
        ]
        assert await store.owner("m") == one.session


async def test_waiters_that_want_a_part_are_granted_together() -> None:
    async with two() as (_, one, other, _):
        for number in (1, 2):
            await other.operate([1, "e", number, "m", "1", "", "", "1"])
        await one.turn_over("m", [1], [7])
        assert await one.execute("SELECT owners, waiters, held FROM SCHEMA.queues") == [(2, 1, 2)]


async def test_a_request_that_is_kept_loses_its_timeout() -> None:
    async with two() as (store, one, _, _):
        second, _ = await one.acquire("m", wait=1000)
        await asyncio.sleep(0.01)
        zero, event = await one.turn_over("m", [1], kept=[2])
        assert (zero, event) == (0, f"g {one.session} 2 {second}")
        assert await one.execute("SELECT deadline FROM SCHEMA.requests") == [(None,)]
        assert await store.owner("m") == one.session


@pytest.mark.parametrize("others", [False, True])
async def test_nothing_is_released_without_the_request_that_is_kept(others: bool) -> None:
    async with two() as (store, one, other, _):
        await one.acquire("m", wait=1000)
        if others:
            await other.acquire("m")
        await asyncio.sleep(0.01)
        await other.call("tick", "", [["/default", "m"]], None)  # which finds it overdue
        assert await one.turn_over("m", [1], kept=[2]) == [["unkept", "t"]]
        words = [1, "w", 1, "m", 2, "", "", "1"]
        assert await one.operate(words) == [["unkept", "t"]]
        assert (await one.operate(words, [1, "m", 9, "n"], fresh=("n",)))[0] == ["unkept", "t"]
        assert await store.owner("m") == one.session
        assert (await requests(one))[0] == (one.session, 1)
        assert await one.turn_over("m", [1]) == [0]
        assert await store.owner("m") == (other.session if others else 0)


async def test_requests_join_with_their_timeouts() -> None:
    async with two(2) as (_, one, _, _):
        await one.turn_over("m", [1], [7, 8], waits=[1000, 60_000_000])
        await asyncio.sleep(0.01)
        await one.release("m", 2)
        assert await requests(one) == [(one.session, 8)]


@pytest.mark.parametrize("wait", [0, 60_000_000, None])
async def test_a_single_acquisition_waits_as_long_as_it_may(wait: int | None) -> None:
    async with two() as (_, _, other, _):
        answer = await other.acquire("m", wait)
        assert (answer == 0) == (wait == 0)
        found = await other.execute("SELECT deadline > clock_timestamp() FROM SCHEMA.requests")
        assert found[1:] == ([] if wait == 0 else [(None if wait is None else True,)])


@pytest.mark.parametrize("watched", [False, True])
async def test_watchers_learn_of_the_new_owner(watched: bool) -> None:
    async with two(2) as (_, one, _, _):
        await one.execute("LISTEN tenure_q1")
        if watched:
            await one.call("watch", one.session, one.token, "m", "tenure_q1")
        before = await one.execute("SELECT owner_changes FROM SCHEMA.queues")
        await one.turn_over("m", [1], [7])
        after = await one.execute("SELECT owner_changes FROM SCHEMA.queues")
        assert after[0][0] == before[0][0] + 1
        assert await one.notifications() == ["o"] * watched
