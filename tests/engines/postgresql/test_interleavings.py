"""Transactions of the store that meet at the worst moments."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tests.engines.postgresql.helpers import PATIENCE
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


async def test_a_grant_under_way_during_a_takeover_is_in_what_the_takeover_finds() -> None:
    async with a_store() as store:
        one, other, taking = (
            await store.actor(),
            await store.actor(),
            await store.actor(window=None),
        )
        await one.lock("m")
        (waiting,) = await other.operate(other.operation("m", "m"))
        await one.begin()
        assert await one.operate(one.operation("w", "m", 1)) == [0]  # which grants it to `other`
        reply = await taking.call(
            *("take_over", "/default", other.session, "secret", taking.channel, "", None)
        )
        token = reply[1]
        beginning = asyncio.create_task(taking.call("begin_session", other.session, token, ""))
        assert await store.blocked(taking, beginning)
        await one.commit()
        _, ((*_, order_id, _, _, _, owns),) = await beginning
        assert (order_id, owns) == (waiting[0], True)


async def test_an_attach_that_is_sent_again_while_the_first_is_under_way_attaches_once() -> None:
    async with a_store() as store:
        first, again = await store.actor(window=None), await store.actor(window=None)
        again.token = first.token
        await first.begin()
        await first.attach()
        attaching = asyncio.create_task(again.attach())
        assert await store.blocked(again, attaching)
        await first.commit()
        await attaching
        assert again.session == first.session
        assert await first.execute("SELECT count(*) FROM SCHEMA.sessions") == [(1,)]


async def test_a_quarantine_that_begins_during_a_takeover_is_no_deadlock() -> None:
    async with a_store() as store:
        one, other, holding = await store.actor(), await store.actor(), await store.actor()
        await holding.begin()
        await holding.execute("SELECT FROM SCHEMA.sessions WHERE id = %s FOR UPDATE", one.session)
        takeover = "take_over", "/default", one.session, "secret", "tenure_x", "", 60.0
        taking = asyncio.create_task(one.call(*takeover))
        assert await store.blocked(one, taking)  # after it has found that there is no quarantine
        await store.lose_data()
        beginning = asyncio.create_task(other.call("tick", other.channel, None, None))
        assert await store.blocked(other, beginning)
        await holding.commit()
        assert (await taking)[0] == "ok"
        assert (await beginning)["quarantine"] == pytest.approx(60, abs=5)


async def test_a_release_grants_nothing_after_a_loss_of_data_that_it_has_not_noticed() -> None:
    async with a_store() as store:
        one, other, holding = await store.actor(), await store.actor(), await store.actor()
        await one.lock("m")
        await other.operate(other.operation("m", "m"))
        await holding.begin()
        await holding.execute("SELECT FROM SCHEMA.sessions WHERE id = %s FOR UPDATE", one.session)
        tokens = [one.token]
        leaving = asyncio.create_task(
            one.call("leave", one.session, tokens, False, one.channel, False)
        )
        assert await store.blocked(one, leaving)
        await store.lose_data()
        await holding.commit()
        assert await leaving == ["ok"]
        assert await one.execute("SELECT owners, waiters FROM SCHEMA.queues") == [(0, 1)]


async def test_a_request_is_altered_in_its_own_queue_alone() -> None:
    async with a_store() as store:
        one = await store.actor()
        await one.lock("a")
        await one.lock("b")
        words = ["b", 1, "1", None, "-"]
        alter = one.session, one.token, 1, "alter", words, one.channel, False
        assert await one.call("change", *alter) == ["released"]
        await store.check()


async def test_a_queue_whose_rows_were_deleted_by_hand_is_granted_again() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("m")
        await other.operate(other.operation("m", "m"))
        await other.execute("DELETE FROM SCHEMA.requests WHERE session = %s", other.session)
        assert await one.operate(one.operation("w", "m", 1)) == [0]
        await store.check()
        assert await other.lock("m") > 0


async def test_a_watched_queue_that_was_removed_is_watched_again() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.call("watch", one.session, one.token, "m", "tenure_q1")
        await one.execute("UPDATE SCHEMA.queues SET watched_until = 'epoch'")
        await other.call("tick", other.channel, None, None)
        assert await one.execute("SELECT FROM SCHEMA.queues") == []
        await other.lock("m")
        watched = [["/default", "m", "tenure_q1"], ["/default", "n", "tenure_q2"]]
        reply = await one.call("tick", one.channel, [], watched)
        assert [len(each) for each in reply["seen"]] == [3, 3]
        assert await one.execute(
            "SELECT name, watch_channel, watched_until > now() FROM SCHEMA.queues ORDER BY name"
        ) == [("m", "tenure_q1", True), ("n", "tenure_q2", True)]


async def test_order_ids_that_are_drawn_during_a_jump_stay_below_it() -> None:
    async with a_store() as store:
        one = await store.actor()
        ((drawn,),) = await one.execute("SELECT nextval('SCHEMA.order_ids') + 10")
        ((jumped,),) = await one.execute("SELECT SCHEMA.next_order_id(%s)", drawn)
        assert jumped >= drawn + 900_000


async def test_an_acquisition_waits_for_a_queue_without_the_lock_of_the_order_ids() -> None:
    async with a_store() as store:
        one, holding = await store.actor(), await store.actor()
        await holding.lock("m")
        await holding.operate(holding.operation("w", "m", 1))
        ((drawn,),) = await one.execute(
            "SELECT setval('SCHEMA.order_ids', nextval('SCHEMA.order_ids') - 100000000)"
        )
        await holding.begin()
        await holding.execute("SELECT FROM SCHEMA.queues WHERE name = 'm' FOR NO KEY UPDATE")
        acquiring = asyncio.create_task(one.acquire("m"))
        assert await store.blocked(one, acquiring)
        ((jumped,),) = await holding.execute(
            "SELECT SCHEMA.next_order_id(%s)", drawn + 1_000_000_000
        )
        await holding.commit()
        assert await acquiring > jumped


async def test_a_batch_locks_what_was_acquired_and_released_while_it_waited() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("b")
        await one.operate(one.operation("w", "b", 1))
        first = await other.lock("a")
        await other.begin()
        await other.release("a", 1)
        again = await other.acquire("a")
        assert again > first
        await other.release("a", 2)
        batch = asyncio.create_task(one.operate(one.operation("m", "a"), one.operation("m", "b")))
        assert await store.blocked(one, batch)
        await other.commit()
        answers = await batch
        assert min(answers) > again
        assert (await store.owner("a"), await store.owner("b")) == (one.session, one.session)
        await store.check()


async def test_a_batch_queues_up_for_what_was_acquired_while_it_waited() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        for number, name in enumerate(("a", "b"), 1):
            await other.lock(name)
            await other.release(name, number)
        await other.begin()
        await other.acquire("a")
        batch = asyncio.create_task(one.operate(one.operation("m", "a"), one.operation("m", "b")))
        assert await store.blocked(one, batch)
        await other.commit()
        waiting, granted = await batch
        assert isinstance(waiting, list)
        assert isinstance(granted, int)
        assert (await store.owner("a"), await store.owner("b")) == (other.session, one.session)
        await store.check()


async def test_a_batch_grants_to_a_request_that_queued_up_while_it_waited() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("a")
        await one.lock("b")
        await other.begin()
        assert isinstance(await other.acquire("a"), list)
        batch = asyncio.create_task(
            one.operate(one.operation("w", "a", 1), one.operation("w", "b", 2))
        )
        assert await store.blocked(one, batch)
        await other.commit()
        assert await batch == [0, 0]
        assert (await store.owner("a"), await store.owner("b")) == (other.session, 0)
        await store.check()


@pytest.mark.parametrize("batch", [False, True])
async def test_a_request_that_changes_while_its_release_waits_is_released(batch: bool) -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("a")
        await one.lock("b")
        await other.begin()
        words = ["a", 1, None, "eHh4", "-"]
        alter = one.session, one.token, 1, "alter", words, one.channel, False
        assert (await other.call("change", *alter))[0] == "ok"
        operations = one.operation("w", "a", 1), one.operation("w", "b", 2)
        releasing = asyncio.create_task(
            one.operate(*operations) if batch else one.release("a", 1),
        )
        assert await store.blocked(one, releasing)
        await other.commit()
        assert await releasing == [0] * (1 + batch)
        assert await store.owner("a") == 0
        await store.check()


async def test_a_release_grants_to_a_request_that_queued_up_while_it_waited() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("m")
        await other.begin()
        assert isinstance(await other.acquire("m"), list)
        releasing = asyncio.create_task(one.release("m", 1))
        assert await store.blocked(one, releasing)
        await other.commit()
        assert await releasing == [0]
        assert await store.owner("m") == other.session
        await store.check()


async def test_an_acquisition_finds_what_happened_while_it_waited() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        await one.lock("m")
        await one.begin()
        await one.release("m", 1)
        acquiring = asyncio.create_task(other.acquire("m"))
        assert await store.blocked(other, acquiring)
        await one.commit()
        assert isinstance(await acquiring, int)
        await other.begin()
        await other.release("m", 1)
        assert isinstance(await other.acquire("m"), int)
        acquiring = asyncio.create_task(one.acquire("m"))
        assert await store.blocked(one, acquiring)
        await other.commit()
        assert isinstance(await acquiring, list)
        assert await store.owner("m") == other.session
        await store.check()


@pytest.mark.parametrize("setting", ["off", "local"])
@pytest.mark.parametrize("crashed", [False, True])
async def test_no_grant_commits_less_durably_than_it_must(setting: str, crashed: bool) -> None:
    async with a_store() as store:
        one = await store.actor()
        await one.execute(f"SET synchronous_commit = {setting}")
        if crashed:
            await one.execute("TRUNCATE SCHEMA.witness")
        await one.begin()
        assert await one.lock("m") > 0
        assert await one.execute("SHOW synchronous_commit") == [("on",)]
        await one.commit()


async def test_an_order_id_waits_for_a_transaction_that_has_not_moved_the_sequence() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor(window=None)
        ((restored,),) = await one.execute("SELECT setval('SCHEMA.order_ids', 1000)")
        await other.begin()
        await other.attach(60)  # the longest window
        locking = asyncio.create_task(one.lock("m"))
        assert await store.blocked(one, locking)
        await other.commit()
        ((now,),) = await one.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        assert await locking > 1e6 * (now - PATIENCE) > restored


async def test_order_ids_are_above_lost_ones_of_a_server_whose_clock_was_ahead() -> None:
    async with a_store() as store:
        one = await store.actor(window=40)
        await store.lose_data()
        (order_id, ahead), *_ = await one.operate(one.operation("m", "m"), fresh=("m",))
        assert ahead == 0
        ((now,),) = await one.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        assert order_id > 1e6 * (now + 30)


async def test_a_quarantine_does_not_begin_in_a_transaction_that_has_locks() -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        lease = await one.lock("m")
        await other.begin()
        await other.execute("SELECT FROM SCHEMA.queues WHERE name = 'm' FOR UPDATE")
        turning = asyncio.create_task(one.turn_over("m", [1]))
        assert await store.blocked(one, turning)  # after it has found that there is no quarantine
        await store.lose_data()
        holding = await store.actor(window=None)
        await holding.begin()
        await holding.call("guard", "/default", "m", lease)
        await other.commit()
        with pytest.raises(psycopg.Error, match="begins before all locks") as refused:
            await turning
        assert refused.value.sqlstate == "TN001"  # it is sent again
        assert await one.operate(one.operation("w", "m", 1)) == [-2]
        await holding.commit()
        assert await one.turn_over("m", [1]) == [0]
        await store.check()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_guard_with_an_old_snapshot_takes_no_renewed_lease_for_lost(level: str) -> None:
    async with a_store() as store:
        one, other = await store.actor(), await store.actor()
        lease = await one.lock("m")
        overdue = "UPDATE SCHEMA.sessions SET seen = seen - interval '1 h' WHERE id = %s"
        await one.execute(overdue, one.session)
        await other.execute(f"BEGIN ISOLATION LEVEL {level}")
        await other.execute("SELECT FROM SCHEMA.meta")
        ((epoch,),) = await one.execute("SELECT epoch FROM SCHEMA.meta")
        await one.execute("UPDATE SCHEMA.sessions SET seen = clock_timestamp()")
        assert await one.call("renew", False, [[one.session, one.token]], epoch) == [one.session]
        with pytest.raises(psycopg.errors.SerializationFailure):
            await other.call("guard", "/default", "m", lease)
        await other.execute("ROLLBACK")
        await one.execute(overdue, one.session)
        await other.execute(f"BEGIN ISOLATION LEVEL {level}")
        with pytest.raises(psycopg.Error, match="is not held any more"):
            await other.call("guard", "/default", "m", lease)
        await other.execute("ROLLBACK")
