"""Blocked tasks: what is published of them, the deadlocks among them, and the graph of waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tenure._client import blocked
from tenure._client import client as client_module
from tenure._client.internals import session_core
from tenure._client.session import Session
from tenure.core.deadlocks import WAITS, decode
from tenure.errors import (
    AcquireTimeout,
    AuthenticationFailed,
    Deadlock,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    NodeNotFound,
    SemaphoreNotFound,
    SessionExpired,
    Unsupported,
)
from tenure.model import EPHEMERAL_LIMIT, BlockedTask, Capabilities, WaitGraph
from tenure.recipes import RWLock
from tenure.testing import VirtualClock
from tests.primitives.helpers import World, turns


async def take(session: Session, *names: str, timeout: float | None = None) -> None:
    """Take mutexes one inside the other, with a moment between them, and leave them again."""
    async with AsyncExitStack() as stack:
        for number, name in enumerate(names):
            if number:
                await asyncio.sleep(0.1)
            await stack.enter_async_context(session.mutex(name).lock(timeout=timeout))


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[object]]]:
    """Tasks that are cancelled at the end, if they have not ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def sessions(world: World, *reactions: str) -> AsyncIterator[Sequence[Session]]:
    """Sessions with these reactions to a deadlock, each of a client of its own."""
    async with AsyncExitStack() as stack:
        made = []
        for each in reactions:
            client = await stack.enter_async_context(world.client())
            session = client.session(on_deadlock=each)  # type: ignore[arg-type]
            made.append(await stack.enter_async_context(session))
        yield made


# Deadlocks


async def test_the_youngest_wait_of_a_deadlock_raises_and_the_other_is_granted(
    world: World, clock: VirtualClock
) -> None:
    async with sessions(world, "raise", "raise") as (one, two):
        began = clock.now()
        async with running(take(one, "a", "b"), take(two, "b", "a")) as (first, second):
            await asyncio.wait([first, second])
        assert clock.now() - began < 2
        assert first.exception() is None
        error = second.exception()
        assert isinstance(error, Deadlock)
        assert (error.node, error.name) == ("/default", "a")
        assert [(each.name, each.leases[0][0]) for each in error.tasks] == [("b", "a"), ("a", "b")]
        assert [each.session_id for each in error.tasks] == [one.id, two.id]
        assert "is inside 'b' and waits for 'a'" in str(error)
        await turns()
        for name in ("a", "b", WAITS):
            assert await world.queue(name) == []


async def test_it_is_found_within_two_seconds_by_a_session_that_waited_before(
    world: World, clock: VirtualClock
) -> None:
    """The session that completes the deadlock looks for none."""
    for offset in (0.0, 0.3, 0.6, 0.9):
        async with (
            sessions(world, "raise", "wait") as (one, two),
            two.mutex("b").lock(),
            running(take(one, "a", "b")) as (waiting,),
        ):
            await asyncio.sleep(3 + offset)
            began = clock.now()
            async with running(take(two, "a")):
                pass
            inner = two.mutex("a").lock()
            async with inner:
                assert clock.now() - began < 2
            assert isinstance(waiting.exception(), Deadlock)


async def test_by_default_all_wait_and_the_deadlock_is_listed(world: World) -> None:
    async with sessions(world, "wait", "wait") as (one, two), world.client() as client:
        async with running(take(one, "a", "b"), take(two, "b", "a")) as (first, second):
            await asyncio.sleep(30)
            assert not first.done()
            assert not second.done()
            (deadlock,) = await client.deadlocks()
            assert [each.name for each in deadlock] == ["b", "a"]
            assert not any(each.raises or each.timeout for each in deadlock)
            graph = await client.waits("a")
            assert graph.deadlocks == (deadlock,)
            assert graph.roots == ()
            second.cancel()
            await asyncio.wait([first])
        assert await client.deadlocks() == []


async def test_a_timeout_of_the_call_does_not_hide_a_deadlock(
    world: World, clock: VirtualClock
) -> None:
    async with sessions(world, "raise", "wait") as (one, two):
        began = clock.now()
        async with running(take(two, "b", "a"), take(one, "a", "b", timeout=60)) as tasks:
            await asyncio.wait(tasks)
            assert tasks[0].exception() is None
            error = tasks[1].exception()
            assert isinstance(error, Deadlock)
            assert [each.timeout for each in error.tasks] == [False, True]
        assert clock.now() - began < 3


async def test_a_task_that_waits_in_time_for_its_own_lease_is_one(world: World) -> None:
    async with sessions(world, "raise") as (one,), one.mutex("a").lock():
        with pytest.raises(Deadlock) as found:
            await one.mutex("a").lock(timeout=60)
        assert len(found.value.tasks) == 1


async def test_two_tasks_of_a_session_are_not_one(world: World) -> None:
    """Merged into one, the first session would hold what the second one waits for in it."""
    async with sessions(world, "raise", "raise", "wait") as (one, two, other):
        x = await other.mutex("x").lock()
        tasks = (take(one, "a", "x"), take(two, "b", "a"), take(one, "c", "b"))
        async with running(*tasks) as waiting, world.client() as client:
            await asyncio.sleep(10)
            assert not any(each.done() for each in waiting)
            assert len(await world.queue(WAITS)) == 3
            assert await client.deadlocks() == []
            await x.release()
            await asyncio.gather(*waiting)


async def test_three_tasks_of_one_session_that_wait_in_a_circle_are_a_deadlock(
    world: World,
) -> None:
    async with (
        sessions(world, "raise") as (one,),
        running(*(take(one, *"ab"), take(one, *"bc"), take(one, *"ca"))) as tasks,
    ):
        await asyncio.wait(tasks)
        errors = [each.exception() for each in tasks]
        assert [isinstance(each, Deadlock) for each in errors] == [False, False, True]
        assert errors[:2] == [None, None]


async def test_a_cycle_of_which_another_holder_may_release_is_no_deadlock(world: World) -> None:
    async def pool_then_a(session: Session) -> None:
        async with session.semaphore("pool").acquire():
            await asyncio.sleep(0.1)
            async with session.mutex("a").lock():
                pass

    async def a_then_pool(session: Session) -> None:
        async with session.mutex("a").lock():
            await asyncio.sleep(0.1)
            async with session.semaphore("pool").acquire():
                pass

    async with sessions(world, "raise", "raise", "wait") as (one, two, other):
        pool = other.semaphore("pool")
        await pool.create(2)
        token = await pool.acquire()
        async with running(pool_then_a(one), a_then_pool(two)) as tasks:
            await asyncio.sleep(10)
            assert not any(each.done() for each in tasks)
            await token.release()
            await asyncio.gather(*tasks)
        async with running(pool_then_a(one), a_then_pool(two), pool_then_a(one)) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [each.exception() for each in tasks if each.done()]
            assert sum(isinstance(each, Deadlock) for each in errors) == 1


async def test_a_ticket_in_the_way_is_part_of_a_deadlock(world: World) -> None:
    async with sessions(world, "raise", "wait", "wait") as (one, two, other):

        async def parked() -> None:
            pool = one.semaphore("pool")
            async with pool.enqueue(2):
                await asyncio.sleep(0.1)
                async with one.mutex("a").lock():
                    pass

        async def behind() -> None:
            async with two.mutex("a").lock():
                await asyncio.sleep(0.05)
                async with two.semaphore("pool").acquire():
                    pass

        pool = other.semaphore("pool")
        await pool.create(2)
        async with pool.acquire(), running(parked(), behind()) as tasks:
            await asyncio.wait(tasks)
            assert isinstance(tasks[0].exception(), Deadlock)
            assert tasks[1].exception() is None


async def test_a_wait_for_a_ticket_raises_and_keeps_its_place(world: World) -> None:
    async with (
        sessions(world, "raise", "wait") as (one, two),
        running(take(two, "a", "b")),
        one.mutex("b").lock(),
    ):
        await asyncio.sleep(0.2)
        async with one.mutex("a").enqueue() as ticket:
            with pytest.raises(Deadlock):
                await ticket.wait()
            assert await ticket.position() == 1


async def test_a_writer_that_waits_is_in_the_way_of_readers(world: World) -> None:
    """It is inside nothing, and readers behind it are granted nothing before it."""

    async def write(session: Session) -> None:
        async with RWLock(session, "rw").write():
            pass

    async def read_then_a(session: Session) -> None:
        async with RWLock(session, "rw").read():
            await asyncio.sleep(0.2)
            async with session.mutex("a").lock():
                pass

    async def a_then_read(session: Session) -> None:
        async with session.mutex("a").lock():
            await asyncio.sleep(0.2)
            async with RWLock(session, "rw").read():
                pass

    async with (
        sessions(world, "wait", "raise", "wait") as (one, two, three),
        running(read_then_a(one), a_then_read(two)) as readers,
    ):
        await asyncio.sleep(0.1)
        async with running(write(three)) as (writer,):
            await asyncio.wait(readers)
            assert readers[0].exception() is None
            error = readers[1].exception()
            assert isinstance(error, Deadlock)
            assert [each.leases for each in error.tasks].count(()) == 1
            assert error.tasks[-1].session_id == two.id
            await writer


async def test_a_session_raises_its_own_waits_alone(world: World) -> None:
    async with (
        sessions(world, "wait", "raise", "wait") as (one, two, three),
        running(*(take(one, *"ab"), take(two, *"bc"), take(three, *"ca"))) as tasks,
    ):
        await asyncio.wait([tasks[1]])
        assert isinstance(tasks[1].exception(), Deadlock)
        await asyncio.wait(tasks)
        assert tasks[0].exception() is tasks[2].exception() is None


async def test_an_unknown_reaction_is_refused(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="on_deadlock is 'wait' or 'raise', not 'die'"):
            client.session(on_deadlock="die")  # type: ignore[arg-type]


async def test_the_retry_loops_pass_the_reaction_on(world: World) -> None:
    async def work(session: Session) -> str:
        async with session.mutex("a").lock():
            try:
                await session.mutex("a").lock(timeout=60)
            except Deadlock:
                return "found"
        return "not found"

    async with world.client() as client:
        assert await client.run(work, on_deadlock="raise") == "found"
        async for attempt in client.sessions(on_deadlock="raise"):
            async with attempt as session:
                assert await work(session) == "found"


async def test_a_store_that_does_not_show_waits_says_so(world: World) -> None:
    client, engine = world.slow(0)
    engine.inner.capabilities = Capabilities(waiter_order=False)  # type: ignore[misc]
    async with client, world.client() as other:
        with pytest.raises(Unsupported, match="does not show which task waits for which"):
            await client.session(on_deadlock="raise")
        with pytest.raises(Unsupported, match="does not show which task waits"):
            await client.deadlocks()
        with pytest.raises(Unsupported, match="does not show which task waits"):
            await client.waits("a")
        async with (
            client.session() as session,
            other.mutex("b").lock(),
            running(take(session, "a", "b")),
        ):
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []


# Publications


async def test_a_wait_for_several_tokens_is_published_and_one_for_one_is_not(
    world: World,
) -> None:
    async with sessions(world, "wait", "wait") as (one, two):
        pool = one.semaphore("pool")
        await pool.create(3)
        async with two.semaphore("pool").acquire(3):
            large, small = (asyncio.create_task(pool.acquire(count)) for count in (2, 1))
            await asyncio.sleep(3)
            (owner,) = await world.queue(WAITS)
            task = decode(owner)
            assert task is not None
            assert (task.name, task.leases) == ("pool", ())
        for each in (large, small):
            await (await each).release()
        assert await world.queue(WAITS) == []


async def test_only_a_wait_inside_a_lease_is_published(world: World) -> None:
    async with sessions(world, "raise", "wait") as (one, two), two.mutex("b").lock():
        async with running(take(one, "b")):
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []
        async with running(take(one, "a", "b")):
            await asyncio.sleep(0.5)
            assert await world.queue(WAITS) == []
            await asyncio.sleep(0.5)
            (owner,) = await world.queue(WAITS)
            assert owner.session_id == one.id
        await turns()
        assert await world.queue(WAITS) == []


async def test_a_lease_without_a_block_is_inside_no_task(world: World) -> None:
    async with sessions(world, "raise", "raise") as (one, two):
        a = await one.mutex("a").lock()
        async with running(take(two, "b", "a"), take(one, "b")) as tasks:
            await asyncio.sleep(5)
            assert not any(each.done() for each in tasks)
            await a.release()
            await asyncio.gather(*tasks)


async def test_a_lease_of_another_node_is_left_out(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await client.create_node("/n")
        async with client.session("/n") as there, other.mutex("b").lock(), there.mutex("a").lock():
            with pytest.raises(AcquireTimeout):
                await client.mutex("b").lock(timeout=5)
            assert await world.queue(WAITS) == []
            assert await world.queue(WAITS, "/n") == []


async def test_a_timeout_ends_a_publication(world: World) -> None:
    async with sessions(world, "wait", "wait") as (one, two), two.mutex("b").lock():
        with pytest.raises(AcquireTimeout):
            await take(one, "a", "b", timeout=3)
        await turns()
        assert await world.queue(WAITS) == []


@pytest.mark.parametrize("engine_turns", [0, 1, 7])
async def test_a_cancellation_at_any_moment_leaves_no_publication(
    world: World, engine_turns: int
) -> None:
    client, _ = world.slow(engine_turns)
    async with (
        client,
        world.client() as other,
        other.mutex("b").lock(),
        client.session(on_deadlock="raise") as session,
    ):
        for number in range(4 * engine_turns + 4):
            async with running(take(session, "a", "b")):
                await asyncio.sleep(0.1 + blocked.BLOCKED - 0.001)
                await asyncio.sleep(0.001)
                await turns(number)
            await turns(8 * engine_turns + 4)
            assert await world.queue(WAITS) == []


async def test_the_publications_of_a_session_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_PUBLISHED", 2)
    async with (
        sessions(world, "wait", "wait") as (one, two),
        two.mutex("x").lock(),
        running(*(take(one, name, "x") for name in "abcd")) as tasks,
    ):
        await asyncio.sleep(5)
        assert len(await world.queue(WAITS)) == 2
        tasks[0].cancel()
        await asyncio.sleep(5)
        assert len(await world.queue(WAITS)) == 2


async def test_a_missing_permission_is_remembered(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tenure")
    client, engine = world.slow(0)
    async with client, world.client() as other, other.mutex("x").lock():
        async with client.session(on_deadlock="raise") as session:
            async with running(take(session, "a", "x")):
                await asyncio.sleep(0.5)
                engine.fail("enqueue", AuthenticationFailed("not here"))
                await asyncio.sleep(5)
                assert await world.queue(WAITS) == []
                assert caplog.text.count("waits are not published: node=/default error=not here")
            async with running(take(session, "a", "x")):
                await asyncio.sleep(5)
                assert await world.queue(WAITS) == []
        assert caplog.text.count("waits are not published") == 1


async def test_after_another_failure_it_is_withdrawn_and_the_wait_goes_its_way(
    world: World,
) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        x = await other.mutex("x").lock()
        async with (
            client.session(on_deadlock="raise") as session,
            running(take(session, "a", "x")) as (waiting,),
        ):
            await asyncio.sleep(0.5)
            engine.fail("enqueue", EngineError("disk full"), done=True)
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []
            await x.release()
            await waiting


async def test_the_withdrawal_is_sent_until_the_store_confirms_it(world: World) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        x = await other.mutex("x").lock()
        async with client.session() as session, running(take(session, "a", "x")) as (waiting,):
            await asyncio.sleep(2)
            assert len(await world.queue(WAITS)) == 1
            engine.fail("withdraw", EngineError("disk full"))  # of the publication, which is first
            await x.release()
            await waiting
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []


@pytest.mark.parametrize("kind", ["enqueue", "withdraw"])
async def test_an_expired_session_is_noticed_by_it(world: World, kind: str) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        x = await other.mutex("x").lock()
        session = await client.session()
        async with running(take(session, "a", "x")) as (waiting,):
            await asyncio.sleep(0.5 if kind == "enqueue" else 2)
            engine.fail(kind, SessionExpired("gone"))
            if kind == "withdraw":
                await x.release()
            await asyncio.wait([waiting])
            assert isinstance(waiting.exception(), LeaseLost | SessionExpired)
        assert session.state == "expired"
        with contextlib.suppress(LeaseLost):
            await x.release()


async def test_a_name_that_is_in_use_for_something_else_is_left_alone(world: World) -> None:
    async with sessions(world, "raise", "wait") as (one, two):
        async with two.mutex(WAITS).lock(), two.mutex("x").lock(), running(take(one, "a", "x")):
            await asyncio.sleep(5)
            assert len(await world.queue(WAITS)) == 1
        async with one.semaphore(WAITS, ephemeral=True).acquire(data=b"10.0.0.7:80"):
            assert await one._core.client.engine.list_nodes()
            async with world.client() as client:
                assert await client.deadlocks() == []


async def test_a_lasting_semaphore_of_that_name_is_left_alone(world: World) -> None:
    async with sessions(world, "raise", "wait") as (one, two), two.mutex("x").lock():
        await two.semaphore(WAITS).create(1)
        async with running(take(one, "a", "x")):
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []


async def test_a_withdrawal_that_fails_at_once_is_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sessions(world, "wait", "wait") as (one, two), two.mutex("x").lock():
        engine = session_core(one).engine
        withdraw, errors = engine.withdraw, [EngineError("disk full")] * 4

        def fail_at_first(request_id: int) -> object:
            if errors:
                raise errors.pop()
            return withdraw(request_id)

        async with running(take(one, "a", "x")):
            await asyncio.sleep(2)
            assert len(await world.queue(WAITS)) == 1
            monkeypatch.setattr(engine, "withdraw", fail_at_first)
        await asyncio.sleep(1)
        assert await world.queue(WAITS) == []


async def test_a_publication_that_is_answered_after_its_wait_is_forgotten(world: World) -> None:
    client, engine = world.slow(0)
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("x").lock(),
    ):
        async with running(take(session, "a", "x")):
            await asyncio.sleep(0.5)
            engine.fail("enqueue", EngineError("disk full"), done=True)
            engine.back.flowing = False
            await asyncio.sleep(1)
        engine.back.flowing = True
        await asyncio.sleep(1)
        assert await world.queue(WAITS) == []


async def test_after_the_end_of_its_session_no_withdrawal_is_repeated(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        core = session_core(session)
        await session.aclose()
        blocked.Publication(core, 1, core.release_retries.add).withdrawal_failed(
            EngineError("too late")
        )
        await asyncio.sleep(1)
    assert client._core.closed


async def test_a_victim_that_waits_no_longer_raises_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled, or granted, while the search was on its way."""
    searched = 0
    async with sessions(world, "raise", "wait") as (one, two), two.mutex("x").lock():

        async def found_late(*_: object) -> object:
            nonlocal searched
            searched += 1
            former = BlockedTask("x", 1, (), raises=True, session_id=one.id)
            of_another = BlockedTask("x", 1, (), raises=True, session_id=two.id)
            return [(former,), (of_another,), (replace(former, raises=False),)]

        monkeypatch.setattr(blocked, "read_deadlocks", found_late)
        async with running(take(one, "a", "x")) as (waiting,):
            await asyncio.sleep(5)
            assert searched > 2
            assert not waiting.done()


async def test_the_end_of_a_session_ends_its_publications(world: World) -> None:
    async with (
        sessions(world, "wait", "wait") as (one, two),
        two.mutex("x").lock(),
        running(take(one, "a", "x")) as (waiting,),
    ):
        await asyncio.sleep(2)
        await one.aclose()
        await asyncio.wait([waiting])
        assert await world.queue(WAITS) == []


async def test_a_lease_that_another_task_has_released_holds_nothing_up(world: World) -> None:
    async def wait_inside() -> None:
        async with a:
            await one.mutex("x").lock()

    async with sessions(world, "wait", "wait") as (one, two), two.mutex("x").lock():
        a = await one.mutex("a").lock()
        async with running(wait_inside()):
            await turns()
            await a.release()
            await asyncio.sleep(5)
            assert await world.queue(WAITS) == []


async def test_a_request_without_an_answer_is_published_after_it(world: World) -> None:
    client, engine = world.slow(0)
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("x").lock(),
        running(take(session, "a", "x")),
    ):
        await asyncio.sleep(0.05)
        engine.back.flowing = False
        await asyncio.sleep(3)
        assert await world.queue(WAITS) == []
        engine.back.flowing = True
        await asyncio.sleep(2)
        assert len(await world.queue(WAITS)) == 1


async def test_an_abandoned_task_withdraws_its_publication_on_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        sessions(world, "wait", "wait") as (one, two),
        two.mutex("x").lock(),
        one.mutex("a").lock(),
    ):
        waiting = asyncio.create_task(one.mutex("x").lock())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        core = session_core(one)
        wait = blocked_wait(core)
        publication = blocked.Publication(core, 10**6, core.release_retries.add)
        core.blocked._published[wait] = publication
        withdrawn: list[object] = []
        monkeypatch.setattr(
            blocked.Publication,
            "withdraw",
            lambda it: withdrawn.append(it),  # noqa: PLW0108  it is bound
        )
        thread = threading.Thread(target=core.blocked.end, args=(wait,))
        thread.start()
        thread.join()
        await turns()
        assert withdrawn == [publication]


def blocked_wait(core: Any) -> Any:
    """A wait that is none any more."""
    from tenure._client.request import Request, RequestOptions

    options = RequestOptions("mutex", "x", 1, handle=lambda request: request, ephemeral=True)
    request = Request(core, 10**6, options)
    return blocked.Wait(request, None, since=0.0, for_ever=True)


async def test_a_program_that_takes_a_session_over_withdraws_its_publications(
    world: World,
) -> None:
    async with (
        world.client() as first,
        world.client() as second,
        world.client() as other,
        other.mutex("x").lock(),
    ):
        session = await first.session(resumable=True)
        async with running(take(session, "a", "x")) as (waiting,):
            await asyncio.sleep(2)
            assert len(await world.queue(WAITS)) == 1
            async with second.session(resume=session.resume_token) as resumed:
                assert [each.name for each in resumed.recovered] == ["a", "x"]
                await turns()
                assert await world.queue(WAITS) == []
            await asyncio.wait([waiting])


async def test_lists_leave_the_publications_out(world: World) -> None:
    async with (
        sessions(world, "wait", "wait") as (one, two),
        two.mutex("x").lock(),
        running(take(one, "a", "x")),
        world.client() as client,
    ):
        await asyncio.sleep(2)
        assert [each.name for each in await client.list_semaphores()] == ["a", "x"]
        assert (await client.describe_semaphore(WAITS)).ephemeral


# Searches


async def test_a_search_costs_one_reading_a_second_where_there_is_nothing_to_find(
    world: World,
) -> None:
    client, engine = world.slow(0)
    async with (
        client,
        world.client() as other,
        other.mutex("x").lock(),
        client.session(on_deadlock="raise") as session,
    ):
        names = [f"m{at}" for at in range(20)]
        async with running(*(take(session, name, "x") for name in names)):
            await asyncio.sleep(5)
            before = engine.calls.count("describe")
            await asyncio.sleep(10)
            assert 9 <= engine.calls.count("describe") - before <= 11


async def test_what_a_search_reads_bounds_how_often_it_is_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_READ", 2)
    client, engine = world.slow(0)
    async with (
        client,
        world.client() as other,
        other.mutex("x").lock(),
        client.session(on_deadlock="raise") as session,
        running(*(take(session, name, "x") for name in "abcdefgh")),
    ):
        await asyncio.sleep(1.5)
        before = engine.calls.count("describe")
        await asyncio.sleep(8)
        assert engine.calls.count("describe") - before == 2


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), RuntimeError("a defect")])
async def test_after_a_failed_search_another_one_follows(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    client, engine = world.slow(0)
    async with (
        client,
        client.session(on_deadlock="raise") as one,
        world.client() as other,
        other.session() as two,
    ):
        engine.fail("describe", error, error)
        async with running(take(two, "b", "a"), take(one, "a", "b")) as tasks:
            await asyncio.wait(tasks)
            assert isinstance(tasks[1].exception(), Deadlock)
    assert ("could not look for deadlocks" in caplog.text) == isinstance(error, RuntimeError)


async def test_the_queues_of_a_search_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_DESCRIBED", 1)
    async with (
        sessions(world, "raise", "wait") as (one, two),
        running(take(two, "b", "a"), take(one, "a", "b")) as tasks,
    ):
        await asyncio.sleep(5)
        assert not any(each.done() for each in tasks)


async def test_a_grant_that_arrives_with_the_finding_wins(world: World) -> None:
    """The deadlock ends while its victim is read; the victim has its lease, and no error."""
    client, engine = world.slow(0)
    async with (
        client,
        client.session(on_deadlock="raise") as one,
        world.client() as other,
        other.session() as two,
        running(take(two, "b", "a"), take(one, "a", "b")) as (first, second),
    ):
        await asyncio.sleep(0.1 + blocked.BLOCKED - 0.01)
        engine.back.flowing = False  # what the search reads is true, and late
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.wait([first])
        engine.back.flowing = True
        await asyncio.wait([second])
        assert second.exception() is None or isinstance(second.exception(), Deadlock)


# The graph


async def test_a_graph_leads_from_the_waiters_to_the_holders_at_the_root(world: World) -> None:
    async with (
        sessions(world, "wait", "wait", "wait", "wait") as (one, two, three, last),
        world.client() as client,
        last.mutex("c").lock(),
        running(take(three, "b", "c"), take(two, "a", "b"), take(one, "a")),
    ):
        await asyncio.sleep(3)
        graph = await client.waits("a")
    assert (graph.node, graph.name, graph.complete) == ("/default", "a", True)
    assert [each.name for each in graph.semaphores] == ["a", "b", "c"]
    assert [each.session_id for each in graph.holders] == [two.id]
    assert [each.session_id for each in graph.waiters] == [one.id]
    assert [each.session_id for each in graph.roots] == [last.id]
    holder = graph.task("a", graph.holders[0].order_id)
    assert holder is not None
    assert (holder.name, holder.session_id) == ("b", two.id)
    assert graph.task("a", graph.waiters[0].order_id) is None
    assert {each.id for each in graph.sessions} == {one.id, two.id, three.id, last.id}
    session = graph.session(last.id)
    assert session is not None
    assert session.attached
    assert graph.session(0) is None
    third = graph.semaphore("c")
    assert third is not None
    assert third.limit == EPHEMERAL_LIMIT
    assert graph.semaphore("d") is None
    assert graph.deadlocks == ()


async def test_a_chain_is_the_part_of_the_graph_that_explains_one_request(world: World) -> None:
    async with (
        sessions(world, *5 * ["wait"]) as (one, two, three, four, last),
        world.client() as client,
        last.mutex("c").lock() as c,
        four.mutex("d").lock(),
    ):
        pool = client.semaphore("pool")
        await pool.create(2)

        async def work(session: Session, name: str) -> None:
            async with session.semaphore("pool").acquire():
                await take(session, name)

        async with running(work(one, "c"), work(two, "d")):
            await asyncio.sleep(1)
            async with three.semaphore("pool").enqueue(), four.semaphore("pool").enqueue():
                await asyncio.sleep(3)
                graph = await client.waits("pool")
    assert {each.name for each in graph.semaphores} == {"pool", "c", "d"}
    first, second = graph.waiters
    holder = next(each for each in graph.holders if each.session_id == one.id)

    chain = graph.chain(first.order_id)
    assert chain is not None
    assert (chain.waiters, chain.holders, chain.roots) == ((first,), graph.holders, graph.roots)
    assert chain.semaphores[0].waiting == 2
    assert four.id in {each.id for each in chain.sessions}  # of d
    assert graph.chain(second.order_id) == graph

    chain = graph.chain(holder.order_id)
    assert chain is not None
    assert (chain.waiters, chain.holders) == ((), (holder,))
    assert [each.order_id for each in chain.roots] == [c.fencing_token]
    assert [each.name for each in chain.semaphores] == ["pool", "c"]
    assert [(each.name, each.session_id) for each in chain.tasks] == [("c", one.id)]
    assert {each.id for each in chain.sessions} == {one.id, last.id}
    assert graph.chain(c.fencing_token) is None
    assert WaitGraph("/default", "a", ()).chain(1) is None


async def test_a_chain_has_the_deadlock_that_its_request_waits_for(world: World) -> None:
    async with (
        sessions(world, *3 * ["wait"]) as (one, two, three),
        world.client() as client,
        running(take(one, "a", "b"), take(two, "b", "a"), take(three, "b")),
    ):
        await asyncio.sleep(3)
        graph = await client.waits("b")
    (deadlock,) = graph.deadlocks
    for each in (*graph.holders, *graph.waiters):
        chain = graph.chain(each.order_id)
        assert chain is not None
        assert (chain.deadlocks, chain.roots) == ((deadlock,), ())
        assert set(chain.tasks) == set(deadlock)


async def test_a_chain_has_what_the_owner_of_a_ticket_ahead_waits_for(world: World) -> None:
    async def parked(session: Session) -> None:
        async with session.mutex("a").enqueue():
            await asyncio.sleep(0.1)
            await take(session, "b")

    async with (
        sessions(world, *4 * ["wait"]) as (one, two, three, four),
        world.client() as client,
        one.mutex("a").lock(),
        two.mutex("b").lock() as b,
        running(parked(three)),
    ):
        await asyncio.sleep(1)
        async with running(take(four, "a")):
            await asyncio.sleep(3)
            graph = await client.waits("a")
    (owner,) = graph.holders
    behind = graph.chain(graph.waiters[1].order_id)
    assert behind is not None
    assert [each.order_id for each in behind.roots] == [owner.order_id, b.fencing_token]
    holding = graph.chain(owner.order_id)
    assert holding is not None
    assert (holding.roots, holding.tasks) == ((owner,), ())


async def test_a_graph_is_bounded_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MOST_IN_GRAPH", 2)
    async with (
        sessions(world, "wait", "wait", "wait") as (one, two, three),
        world.client() as client,
        three.mutex("c").lock(),
        running(take(two, "b", "c"), take(one, "a", "b")),
    ):
        await asyncio.sleep(3)
        graph = await client.waits("a")
    assert not graph.complete
    assert [each.name for each in graph.semaphores] == ["a", "b"]
    assert [each.name for each in graph.tasks] == ["b"]


async def test_a_graph_of_nothing(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(SemaphoreNotFound):
            await client.waits("a")
        with pytest.raises(NodeNotFound):
            await client.waits("a", "/missing")
        with pytest.raises(NodeNotFound):
            await client.deadlocks("/missing")
        await client.semaphore("s").create(1)
        graph = await client.waits("s")
        assert graph.holders == graph.waiters == graph.roots == ()
        assert WaitGraph("/default", "a", ()).holders == ()
        assert WaitGraph("/default", "a", ()).waiters == ()
