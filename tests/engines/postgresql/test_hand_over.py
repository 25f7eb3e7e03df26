"""The function that releases a mutex to its first waiter, and queues up again."""

from __future__ import annotations

import asyncio

import pytest

from tests.engines.postgresql.stepping import a_store


@pytest.mark.parametrize(("again", "before"), [(None, False), (7, False), (7, True)])
async def test_the_first_waiter_is_granted(again: int | None, before: bool) -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        owner = await one.lock("m")
        (first,), (second,) = await one.acquire("m"), await other.acquire("m")
        *answers, event = await one.release("m", 1, again, before=before)
        assert event == f"g {one.session} 2 {first}"
        assert owner < first < second
        if again is None:
            assert answers == [0]
        else:
            assert answers[before] == 0
            assert answers[not before] > [second]
        assert await store.owner("m") == one.session
        await store.check()
        answers = await one.release("m", 2)  # whose event goes to the other channel
        assert answers == [0]
        assert await store.owner("m") == other.session
        await store.check()


@pytest.mark.parametrize("before", [False, True])
async def test_a_session_that_is_alone_owns_it_again(before: bool) -> None:
    async with a_store() as store:
        one = await store.actor()
        owner = await one.lock("m")
        answers = await one.release("m", 1, 7, before=before)
        if before:  # it waits for itself
            (token,), zero, event = answers
            assert event == f"g {one.session} 7 {token}"
        else:
            zero, token = answers
        assert zero == 0
        assert token > owner
        await store.check()


async def test_a_request_that_waits_is_withdrawn_and_queues_up_again() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await other.lock("m")
        (first,) = await one.acquire("m")
        zero, (second,) = await one.release("m", 1, 7)
        assert (zero, second > first) == (0, True)
        assert await store.owner("m") == other.session
        await store.check()


async def test_a_lease_that_is_guarded_is_kept() -> None:
    async with a_store() as store:
        one, other, guarding = await store.actor(), await store.actor(), await store.actor()
        token = await one.lock("m")
        await other.acquire("m")
        await guarding.begin()
        await guarding.call("guard", "/default", "m", token)
        answer, place = await one.release("m", 1, 7)
        assert (answer, isinstance(place, list)) == (-2, True)
        await guarding.commit()
        assert await one.release("m", 1) == [0]
        assert await store.owner("m") == other.session
        await store.check()


async def test_a_waiter_that_has_timed_out_is_passed_over() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("m")
        await other.operate([1, "e", 1, "m", "", "", "20000", "1"])
        await asyncio.sleep(0.03)
        zero, token = await one.release("m", 1, 7)
        assert (zero, isinstance(token, int)) == (0, True)
        assert await one.execute("SELECT session, reason FROM SCHEMA.removals") == [
            (other.session, "t")
        ]
        await store.check()


async def test_waiters_that_want_a_part_are_granted_together() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("m")
        for number in (1, 2):
            await other.operate([1, "e", number, "m", "1", "", "", "1"])
        await one.release("m", 1, 7)
        assert await one.execute("SELECT owners, waiters, held FROM SCHEMA.queues") == [(2, 1, 2)]
        await store.check()
