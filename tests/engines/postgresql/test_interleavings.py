"""Transactions of the store that meet at the worst moments."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tests.engines.postgresql.stepping import a_store


@pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "b")])
async def test_a_row_that_appears_after_the_locks_of_a_batch_is_not_used(
    names: tuple[str, ...],
) -> None:
    async with a_store() as store:
        one, other, holding = await store.actor(), await store.actor(), await store.actor()
        for name in {*names} - {"b"}:
            await holding.lock(name)
        await holding.begin()
        await holding.execute("SELECT FROM SCHEMA.queues WHERE name = 'a' FOR UPDATE")
        batch = asyncio.create_task(one.operate(*(one.operation("m", name) for name in names)))
        assert await store.blocked(one, batch)
        # The statement that locks the rows found none of "b". Now there is one, and soon an owner.
        await other.call("watch", other.session, other.token, "b", "")
        await other.execute("UPDATE SCHEMA.queues SET watched_until = 'epoch' WHERE name = 'b'")
        await other.begin()
        assert isinstance(await other.lock("b"), int)
        await holding.commit()
        await store.blocked(one, batch)
        await other.commit()
        with pytest.raises(psycopg.Error, match="the semaphore has no row"):
            await batch
        await store.check()
        answers = await one.operate(*(one.operation("m", name) for name in names))
        assert [type(each) for each in answers] == [list] * len(names)
        await store.check()
