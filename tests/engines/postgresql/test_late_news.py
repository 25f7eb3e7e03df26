"""Hand-off of a mutex while the news of something that others did has not arrived yet.

An administrator removes a request, or a transaction guards a lease that is released.
"""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

import tenure
from tenure._client.guarding import guard_in_thread
from tenure._client.internals import request_of, session_core
from tenure.clock import SystemClock
from tenure.engines._kit.commands.pipeline import HANDED, OWNS, WAITING
from tenure.engines.contract import Attach
from tenure.engines.postgresql.handoff import MARGIN
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder, Removed
from tests.engines.postgresql.helpers import PATIENCE, an_engine, is_waited_for
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import a_schema, shared
from tests.engines.postgresql.test_handing_on import NAME, SHORT, Scene, a_scene


async def _join_while_one_is_evicted(scene: Scene) -> asyncio.Task[tenure.Lease]:
    """Have the waiter evicted, and another one join before the program knows that."""
    with scene.blocked() as blocking:
        evicting = asyncio.create_task(scene.other.evict("/default", NAME, scene.order_ids[1]))
        await scene.until_called("evict")
        joining = asyncio.create_task(scene.session.mutex(NAME).lock())
        await scene.until_called("acquire")
        blocking.rollback()
    assert await evicting
    await asyncio.wait(scene.waiting, timeout=PATIENCE)
    await scene.session.mutex(NAME).locked()
    return joining


@pytest.mark.parametrize("timeout", [None, PATIENCE])
async def test_a_lease_is_lost_when_it_is_evicted_before_the_release_ahead_arrives(
    timeout: float | None,
) -> None:
    async with a_scene() as scene:
        await scene.join(timeout=timeout)
        with scene.blocked() as blocking:
            evicting = asyncio.create_task(scene.other.evict("/default", NAME, scene.order_ids[1]))
            await scene.until_called("evict")
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            blocking.rollback()
        assert await evicting
        await releasing
        assert "evicted" in str(await lease.wait_lost())
        assert scene.order_ids == []


async def test_a_request_that_joins_behind_an_evicted_one_is_granted_and_released() -> None:
    async with a_scene(waiting=1) as scene:
        joining = await _join_while_one_is_evicted(scene)
        await scene.owner.release()
        lease = await joining
        results = await asyncio.gather(
            scene.session.mutex("before").lock(), lease.release(), scene.session.mutex("n").lock()
        )
        assert results[0].held
        assert results[2].held
        assert scene.owners == []


async def test_a_request_that_joins_behind_an_evicted_one_may_be_cancelled() -> None:
    async with a_scene(waiting=1) as scene:
        joining = await _join_while_one_is_evicted(scene)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await scene.owner.release()
        async with scene.session.mutex(NAME).lock(timeout=PATIENCE):
            assert len(scene.order_ids) == 1


async def test_behind_a_pooler_a_request_joins_behind_an_evicted_one() -> None:
    """There the program learns of an eviction from a look, seconds later."""
    with a_pooler(shared()) as pooler, a_schema() as url:
        pooled = f"{pooler}?schema={url.rpartition('schema=')[2]}"
        async with tenure.connect(pooled) as client, tenure.connect(url) as other:
            session = await client.session(recovery_window=60)
            owner = await session.mutex(NAME).lock()
            second = asyncio.create_task(session.mutex(NAME).lock())
            await is_waited_for(other, NAME)
            async with other.session() as administrator:
                found = await administrator.semaphore(NAME).describe(owners=True, waiters=True)
            assert await other.evict("/default", NAME, found.waiters[0].order_id)
            third = asyncio.create_task(session.mutex(NAME).lock())
            await is_waited_for(other, NAME)
            with pytest.raises(tenure.TenureError, match="evicted"):
                await asyncio.wait_for(second, PATIENCE)
            await owner.release()
            async with asyncio.timeout(PATIENCE):
                await (await third).release()


async def test_the_token_of_a_guarded_lease_is_forgotten_with_it() -> None:
    async with (
        a_scene() as scene,
        await psycopg.AsyncConnection.connect(shared().url) as connection,
    ):
        engine = session_core(scene.session).client.engine
        await scene.owner.guard(connection)
        await connection.commit()
        assert engine.guarded == {scene.owner.fencing_token}  # type: ignore[attr-defined]
        await scene.owner.release()
        assert engine.guarded == set()  # type: ignore[attr-defined]


async def test_a_lease_guarded_after_its_hand_off_hands_nothing_on() -> None:
    """A thread guards the lease in between: the loop does not know that the release arrived."""
    async with a_scene(waiting=2) as scene:
        releasing = [asyncio.create_task(scene.owner.release())]
        second = await scene.waiting[0]
        with psycopg.connect(shared().url) as connection:
            end = time.monotonic() + PATIENCE
            while scene.owners != [second.fencing_token]:  # the loop does not run meanwhile
                assert time.monotonic() < end
                time.sleep(0.001)  # noqa: ASYNC251
            guard_in_thread(request_of(second), connection)  # as `blocking.Lease.guard` does
            releasing.append(asyncio.create_task(second.release()))
            done, _ = await asyncio.wait(scene.waiting[1:], timeout=SHORT)
            assert not done
        await asyncio.gather(*releasing)
        assert (await scene.waiting[1]).held


async def test_a_guard_of_another_program_delays_the_next_guard_of_the_session() -> None:
    async with (
        a_scene(waiting=1) as scene,
        await psycopg.AsyncConnection.connect(shared().url) as theirs,
        await psycopg.AsyncConnection.connect(shared().url) as connection,
    ):
        guard = f"SELECT {scene.schema}.guard('/default', '{NAME}', {scene.owner.fencing_token})"
        await theirs.execute(guard.encode())
        releasing = asyncio.create_task(scene.owner.release())
        lease = await scene.waiting[0]
        guarding = asyncio.create_task(lease.guard(connection))
        done, _ = await asyncio.wait([guarding], timeout=SHORT)
        assert not done
        await theirs.commit()
        await guarding
        await connection.commit()
        await releasing
        await lease.release()
        session = next(iter(session_core(scene.session).client.engine.all_sessions()))  # type: ignore[attr-defined]
        assert session.unkept == set()


async def test_a_long_wait_of_a_guard_is_a_failure_to_serialize_and_no_loss() -> None:
    async with (
        a_scene(waiting=1) as scene,
        await psycopg.AsyncConnection.connect(shared().url) as connection,
    ):
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            with pytest.raises(psycopg.errors.SerializationFailure, match="granted just now"):
                await lease.guard(connection)
            assert lease.held
        await connection.rollback()
        await releasing
        await lease.guard(connection)


async def test_the_event_of_a_lease_that_was_handed_on_has_its_token() -> None:
    with a_schema() as url:
        async with tenure.connect(url) as client, client.events() as events:
            session = await client.session(recovery_window=60)
            owner = await session.mutex(NAME).lock()
            waiting = asyncio.create_task(session.mutex(NAME).lock())
            await is_waited_for(client, NAME)
            await session.mutex(NAME).locked()
            await owner.release()
            lease = await waiting
            tokens = []
            async with asyncio.timeout(PATIENCE):
                async for event in events:
                    if isinstance(event, tenure.events.Acquired):
                        tokens.append(event.fencing_token)
                    if len(tokens) == 2:
                        break
            assert tokens == [owner.fencing_token, lease.fencing_token]


async def test_a_release_that_is_sent_again_keeps_the_lease_that_was_handed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_scene() as scene:
        task = await scene.join(timeout=2 * MARGIN)
        at = asyncio.get_running_loop().time()
        functions = {
            str(name): str(definition)
            for name, definition in shared().execute(
                "SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE proname IN "
                f"('release', 'turn_over') AND pronamespace = '{scene.schema}'::regnamespace"
            )
        }
        for name, each in functions.items():
            head, mark, _ = each.partition("AS $function$")
            broken = f"{head}{mark} BEGIN RAISE '{name} is broken' USING ERRCODE = 'XX000'; END"
            shared().execute(f"{broken} $function$")
        with pytest.raises(tenure.EngineError, match="turn_over is broken"):
            await scene.owner.release()
        lease = await task
        async with asyncio.timeout(PATIENCE):
            while asyncio.get_running_loop().time() < at + MARGIN:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            tries = len(caplog.messages)
            while len(caplog.messages) < tries + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for each in functions.values():
            shared().execute(each)
        assert not [each for each in caplog.messages if "release is broken" in each]
        assert lease.held


async def test_a_request_that_is_shrunk_before_its_answer_is_not_exclusive() -> None:
    clock = SystemClock()
    with a_schema() as url:
        async with an_engine(url, clock) as engine, an_engine(url, clock) as far:
            session = await engine.attach(Attach("/default", 60.0), Recorder())
            other = await far.attach(Attach("/default", 60.0), Recorder())
            await answer_of(other.enqueue(1, NAME, 1, b"", timeout=None, ephemeral=True))
            first = session.enqueue(1, NAME, EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
            shrunk = session.alter(1, count=1, data=None)
            second = session.enqueue(2, NAME, EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
            await answer_of(first)
            await answer_of(shrunk)
            await answer_of(second)
            await answer_of(session.withdraw(1))
            found = await other.describe_semaphore(NAME, owners=True, waiters=True)
            assert len(found.owners) == 1
            assert session.requests[2] == WAITING  # type: ignore[attr-defined]


async def test_the_timeout_of_a_request_that_was_handed_on_to_is_over() -> None:
    clock = SystemClock()
    with a_schema() as url:
        async with (
            an_engine(url, clock) as engine,
            await psycopg.AsyncConnection.connect(shared().url) as theirs,
        ):
            events = Recorder()
            session = await engine.attach(Attach("/default", 60.0), events)
            first, second = (
                session.enqueue(each, NAME, EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
                for each in (1, 2)
            )
            placed = await answer_of(first)
            await answer_of(second)
            guard = f"SELECT {url.rpartition('schema=')[2]}.guard('/default', '{NAME}', "
            await theirs.execute(f"{guard}{placed.order_id})".encode())
            releasing = session.withdraw(1)  # it waits for the end of the transaction
            assert session.requests[2] == HANDED  # type: ignore[attr-defined]
            await answer_of(session.alter(2, count=None, data=b"", timeout=0))
            await theirs.commit()
            await answer_of(releasing)
            assert not [each for each in events.said if isinstance(each, Removed)]
            assert session.requests[2] == OWNS  # type: ignore[attr-defined]
