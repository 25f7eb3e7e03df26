"""A mutex passes from task to task of a session before the store has confirmed the release.

The tests lock the row of the queue, so that a release is sent and does not complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
import pytest

import tenure
from tenure.engines.postgresql.handoff import MARGIN
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, queue_of, until
from tests.engines.postgresql.servers import a_schema, shared

NAME = "m"
SHORT = 0.3
"""Seconds in which a grant that must not happen would."""


class Scene:
    """Requests of one session in the queue of a mutex, and a session of another program.

    Attributes:
        schema: of the store.
        session: it has the requests.
        other: another program's.
        owner: the lease of the first request.
        waiting: the tasks that wait for the others.
    """

    def __init__(self, schema: str, session: tenure.Session, other: tenure.Client) -> None:
        self.schema = schema
        self.session = session
        self.other = other
        self.owner: tenure.Lease
        self.waiting: list[asyncio.Task[tenure.Lease]] = []

    async def join(self, timeout: float | None = None) -> asyncio.Task[tenure.Lease]:
        """Add a request of the session, and return when it is in the queue."""
        task = asyncio.create_task(self.session.mutex(NAME).lock(timeout=timeout))
        self.waiting.append(task)
        await self.until_waiting(len(self.waiting))
        return task

    async def until_waiting(self, number: int) -> None:
        """Return when so many requests wait, and the programs know it."""
        async with asyncio.timeout(PATIENCE):
            while (await queue_of(self.other, NAME))[1] < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await self.session.mutex(NAME).locked()  # its answer follows those of the requests

    @contextmanager
    def blocked(self) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        """Let nothing change the queue meanwhile."""
        with psycopg.connect(shared().url) as connection:
            connection.execute(f"SELECT FROM {self.schema}.queues FOR UPDATE".encode())
            yield connection

    def time_out(self, blocking: psycopg.Connection[tuple[object, ...]], order_id: int) -> None:
        """Have a request time out in the store, in a transaction that has the queue."""
        overdue = (
            f"UPDATE {self.schema}.requests SET deadline = 'epoch' WHERE order_id = {order_id}"
        )
        blocking.execute(overdue.encode())
        look = f"SELECT {self.schema}.tick('', '[[\"/default\", \"{NAME}\"]]', NULL)"
        blocking.execute(look.encode())

    @property
    def order_ids(self) -> list[int]:
        """The order ids of all requests in the store."""
        found = shared().execute(f"SELECT order_id FROM {self.schema}.requests ORDER BY order_id")
        return [int(str(order_id)) for (order_id,) in found]

    @property
    def owners(self) -> list[int]:
        """The order ids of the owners in the store."""
        found = shared().execute(
            f"SELECT y.order_id FROM {self.schema}.requests y JOIN {self.schema}.queues x "
            f"ON x.id = y.queue AND y.order_id <= x.last_owner WHERE x.name = '{NAME}'"
        )
        return [int(str(order_id)) for (order_id,) in found]

    async def until_called(self, function: str) -> None:
        """Return when a call of a function waits for a lock."""
        await until(lambda: self._calls(function) == 1)

    def _calls(self, function: str) -> int:
        ((found,),) = shared().execute(
            f"SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%{self.schema}.{function}%' "
            "AND pg_blocking_pids(pid) <> '{}'"
        )
        return int(str(found))


@asynccontextmanager
async def a_scene(waiting: int = 0, *, resumable: bool = False) -> AsyncIterator[Scene]:
    """Lock a mutex, and let requests of the same session wait for it."""
    with a_schema() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            session = await client.session(recovery_window=60, resumable=resumable)
            scene = Scene(url.rpartition("schema=")[2], session, other)
            scene.owner = await session.mutex(NAME).lock()
            for _ in range(waiting):
                await scene.join()
            yield scene
            for task in scene.waiting:
                task.cancel()
            await asyncio.gather(*scene.waiting, return_exceptions=True)


async def test_a_request_is_granted_while_the_release_ahead_is_on_the_way() -> None:
    async with a_scene(waiting=2) as scene:
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            second = await scene.waiting[0]
            also = asyncio.create_task(second.release())
            third = await scene.waiting[1]
            assert scene.owner.fencing_token < second.fencing_token < third.fencing_token
            assert scene.owners == [scene.owner.fencing_token]
            assert third.held
            assert not releasing.done()
            assert not also.done()
        await releasing
        await also
        assert scene.owners == [third.fencing_token]
        await third.release()
        assert scene.owners == []


async def test_the_request_of_another_program_in_between_is_granted_first() -> None:
    async with a_scene() as scene:
        theirs = asyncio.create_task(scene.other.mutex(NAME).lock())
        await is_waited_for(scene.other, NAME)
        scene.waiting.append(asyncio.create_task(scene.session.mutex(NAME).lock()))
        await scene.until_waiting(2)
        await scene.owner.release()
        lease = await theirs
        done, _ = await asyncio.wait(scene.waiting, timeout=SHORT)
        assert not done
        await lease.release()
        assert (await scene.waiting[0]).fencing_token > lease.fencing_token


async def test_another_program_waits_until_the_last_one_has_released() -> None:
    async with a_scene(waiting=2) as scene:
        theirs = asyncio.create_task(scene.other.mutex(NAME).lock())
        await scene.until_waiting(3)
        lease = scene.owner
        for task in scene.waiting:
            assert not theirs.done()
            await lease.release()
            lease = await task
        done, _ = await asyncio.wait([theirs], timeout=SHORT)
        assert not done
        await lease.release()
        assert (await theirs).fencing_token > lease.fencing_token


async def test_a_request_with_a_timeout_is_handed_on_to_and_its_timeout_is_over() -> None:
    async with a_scene() as scene:
        await scene.join(timeout=PATIENCE)
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
        await releasing
        assert scene.owners == [lease.fencing_token]
        assert lease.held
        await lease.release()
        assert scene.order_ids == []


async def test_a_request_that_soon_times_out_is_granted_by_the_store() -> None:
    async with a_scene() as scene:
        task = await scene.join(timeout=MARGIN)
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            done, _ = await asyncio.wait([task], timeout=SHORT)
            assert not done
        await releasing
        assert (await task).held


async def test_requests_with_timeouts_are_handed_on_to_one_after_the_other() -> None:
    async with a_scene() as scene:
        for _ in range(3):
            await scene.join(timeout=PATIENCE)
        with scene.blocked():
            lease, releasing = scene.owner, list[asyncio.Task[None]]()
            for task in scene.waiting:
                releasing.append(asyncio.create_task(lease.release()))
                lease = await task
        await asyncio.gather(*releasing)
        assert scene.owners == [lease.fencing_token]


async def test_a_request_that_times_out_in_the_store_is_lost_before_another_one_is_granted() -> (
    None
):
    async with a_scene() as scene:
        await scene.join(timeout=PATIENCE)
        theirs = asyncio.create_task(scene.other.mutex(NAME).lock())
        await scene.until_waiting(2)
        with scene.blocked() as blocking:
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            scene.time_out(blocking, lease.fencing_token)
            blocking.commit()
        lost = asyncio.create_task(lease.wait_lost())
        await asyncio.wait([lost, theirs], return_when=asyncio.FIRST_COMPLETED)
        assert lost.done()
        await releasing
        assert (await theirs).fencing_token > lease.fencing_token
        await (await theirs).release()


async def test_a_request_that_times_out_after_its_release_was_sent_harms_nothing() -> None:
    async with a_scene() as scene:
        for _ in range(2):
            await scene.join(timeout=PATIENCE)
        with scene.blocked() as blocking:
            releasing = asyncio.create_task(scene.owner.release())
            second = await scene.waiting[0]
            also = asyncio.create_task(second.release())
            third = await scene.waiting[1]
            scene.time_out(blocking, second.fencing_token)
            blocking.commit()
        await releasing
        await also  # the session owned the mutex when it was released
        assert third.held
        assert scene.owners == [third.fencing_token]


async def test_a_writer_waits_for_all_readers_of_its_session() -> None:
    async with a_scene() as scene:
        await scene.owner.release()
        shared = scene.session.semaphore(NAME, ephemeral=True)
        readers = [await shared.acquire() for _ in range(3)]
        writer = await scene.join()
        for reader in readers[::-1]:
            done, _ = await asyncio.wait([writer], timeout=SHORT)
            assert not done
            await reader.release()
        assert (await writer).held


async def test_a_lease_that_was_shrunk_hands_nothing_on() -> None:
    async with a_scene(waiting=1) as scene:
        await scene.owner.update(count=1)
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            done, _ = await asyncio.wait(scene.waiting, timeout=SHORT)
            assert not done
        await releasing
        assert (await scene.waiting[0]).held


async def test_a_session_that_may_be_resumed_hands_nothing_on() -> None:
    async with a_scene(waiting=1, resumable=True) as scene:
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            done, _ = await asyncio.wait(scene.waiting, timeout=SHORT)
            assert not done
        await releasing
        assert (await scene.waiting[0]).held


async def test_nothing_is_handed_on_during_an_outage() -> None:
    async with a_scene(waiting=1) as scene:
        state = scene.session
        shared().execute(
            f"UPDATE {scene.schema}.meta SET serves = 1000"  # so that no program can reconnect
        )
        shared().execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tenure'"
        )
        await until(lambda: state.state == "detached")
        releasing = asyncio.create_task(scene.owner.release())
        done, _ = await asyncio.wait(scene.waiting, timeout=SHORT)
        assert not done
        shared().execute(f"UPDATE {scene.schema}.meta SET serves = 1")
        await releasing
        assert (await scene.waiting[0]).held


async def test_a_lease_survives_a_connection_that_is_lost_with_the_release_ahead() -> None:
    async with a_scene(waiting=1) as scene:
        with scene.blocked() as blocking:
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            shared().execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE application_name = 'tenure' AND query LIKE '%{scene.schema}.release%'"
            )
            await until(lambda: scene.session.state == "detached")
            blocking.rollback()
        await releasing
        assert lease.held
        assert scene.owners == [lease.fencing_token]
        await lease.release()
        assert scene.owners == []


async def test_a_request_that_is_withdrawn_is_passed_over() -> None:
    async with a_scene(waiting=2) as scene:
        with scene.blocked():
            scene.waiting[0].cancel()
            await asyncio.wait(scene.waiting[:1])
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[1]
        await releasing
        assert scene.owners == [lease.fencing_token]


async def test_a_guarded_lease_is_handed_on_by_the_store() -> None:
    async with a_scene(waiting=1) as scene:
        async with await psycopg.AsyncConnection.connect(shared().url) as connection:
            await scene.owner.guard(connection)
            releasing = asyncio.create_task(scene.owner.release())
            done, _ = await asyncio.wait(scene.waiting, timeout=SHORT)
            assert not done
        await releasing
        assert (await scene.waiting[0]).held


async def test_a_guard_waits_for_the_release_ahead() -> None:
    async with (
        a_scene(waiting=1) as scene,
        await psycopg.AsyncConnection.connect(shared().url) as connection,
    ):
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            guarding = asyncio.create_task(lease.guard(connection))
            done, _ = await asyncio.wait([guarding], timeout=SHORT)
            assert not done
        await releasing
        await guarding
        assert scene.owners == [lease.fencing_token]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_guard_with_a_snapshot_is_a_serialization_failure_until_then(
    isolation: str,
) -> None:
    async with (
        a_scene(waiting=1) as scene,
        await psycopg.AsyncConnection.connect(shared().url) as connection,
    ):
        await connection.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
        await connection.commit()
        with scene.blocked():
            releasing = asyncio.create_task(scene.owner.release())
            lease = await scene.waiting[0]
            with pytest.raises(psycopg.errors.SerializationFailure, match="granted just now"):
                await lease.guard(connection)
        await releasing
        await connection.rollback()
        await lease.guard(connection)


async def test_the_guard_of_a_request_behind_another_program_is_refused_at_once() -> None:
    async with a_scene() as scene:
        theirs = asyncio.create_task(scene.other.mutex(NAME).lock())
        await is_waited_for(scene.other, NAME)
        scene.waiting.append(asyncio.create_task(scene.session.mutex(NAME).lock()))
        await scene.until_waiting(2)
        guard = f"SELECT {scene.schema}.guard('/default', '{NAME}', {scene.order_ids[-1]})"
        with pytest.raises(psycopg.Error, match="not held any more"):
            await asyncio.to_thread(shared().execute, guard)
        theirs.cancel()
