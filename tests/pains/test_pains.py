"""What hurt the users of other locks, row by row: a check that tenure passes, and a defect that,
planted into tenure, makes that very check fail.

The checks run on virtual time: one that would wait for ever fails by its timeout. Rows that need
real time, real files or real processes are elsewhere: 2, a busy loop that starves renewal, in
``tests/primitives/test_keeper.py``; 5, a cancelled command, in ``tests/engines/sqlite``; 19, a
command that outlives its lock, in ``tests/cli/test_run_loss.py``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

import tenure
from tenure import fork, request, scope
from tenure.core import rules
from tenure.core.node import CHANGED, Store
from tenure.core.node import Session as CoreSession
from tenure.core.queue import Request
from tenure.core.queue import Semaphore as CoreSemaphore
from tenure.lease import Lease
from tenure.proof import Proof
from tenure.session import Session
from tenure.testing.clock import VirtualClock, VirtualLoop
from tests.primitives.helpers import World, is_held, this_task, turns

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Pain:
    """One row.

    Attributes:
        number: stays the same for ever, so that the documents can name it.
        what: what hurt.
        check: passes on a sound tenure.
        plant: puts the defect in.
    """

    number: int
    what: str
    check: Callable[[World], Coroutine[Any, Any, None]]
    plant: Plant


PAINS: list[Pain] = []


def pain(number: int, what: str, plant: Plant) -> Callable[..., Callable[[World], Any]]:
    def note(check: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[World], Any]:
        PAINS.append(Pain(number, what, check, plant))
        return check

    return note


def replacing(owner: object, name: str, by: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, by)


def does_nothing(*_: Any, **__: Any) -> None:
    return None


async def soon(operation: Awaitable[Any]) -> Any:
    """The result of what must not take for ever."""
    async with asyncio.timeout(120):
        return await operation


# The checks


@pain(1, "a lost lock is lost silently", replacing(scope.Scope, "trigger", does_nothing))
async def the_body_of_a_lost_lease_is_cancelled(world: World) -> None:
    went_on = False
    async with world.client() as client:
        session = await client.session(description="victim")

        async def hold() -> None:
            nonlocal went_on
            async with session.mutex("x").lock():
                await world.end_sessions("victim")
                await asyncio.sleep(100)
                went_on = True

        with pytest.raises(tenure.LeaseLost):
            await hold()
    assert not went_on


@pain(3, "a cancelled acquire leaks the lock", replacing(request, "_give_up", does_nothing))
async def a_cancelled_acquire_leaves_nothing_in_the_queue(world: World) -> None:
    for after in range(8):
        client, _ = world.slow(2)
        async with client, client.session() as session:
            acquiring = asyncio.create_task(session.mutex("x").lock())
            await turns(after)
            acquiring.cancel()
            await asyncio.wait([acquiring])
            await turns()
            if acquiring.cancelled():
                assert await world.queue("x") == []
            else:
                await acquiring.result().release()


async def _give_back_late(self: Lease) -> None:
    await asyncio.sleep(0)
    await _give_back(self)


_give_back = Lease._give_back


@pain(4, "a cancelled release deadlocks", replacing(Lease, "_give_back", _give_back_late))
async def a_cancelled_release_takes_effect(world: World) -> None:
    client, _ = world.slow(2)
    async with client:
        lease = await client.mutex("x").lock()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await turns()
        assert await world.queue("x") == []


def _raise_the_failure(error: BaseException | None, failure: Exception, what: str) -> None:
    raise failure


def _plant_hiding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tenure.lease.note_failure", _raise_the_failure)


@pain(6, "an error in release hides the body's error", _plant_hiding)
async def the_bodys_error_is_the_one_that_is_raised(world: World) -> None:
    client, engine = world.slow(1)
    async with client:

        async def fail_twice() -> None:
            async with client.mutex("x").lock():
                engine.fail("withdraw", tenure.EngineError("the disk is full"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as error:
            await fail_twice()
        assert any("the disk is full" in note for note in error.value.__notes__)
        await asyncio.sleep(10)
        assert await world.queue("x") == []


def _plant_believing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "lapse", does_nothing)
    patch.setattr(Session, "_proven", lambda self: self._ended is None)


@pain(7, "failing renewals never end the belief of the holder", _plant_believing)
async def renewals_that_fail_end_the_lease_at_its_deadline(world: World) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session(recovery_window=10)
        lease = await session.mutex("x").lock()
        engine.cut()
        await asyncio.sleep(6)
        assert is_held(lease)  # one blip kills nobody
        await asyncio.sleep(4)
        assert not is_held(lease)
        assert lease.loss is not None
        engine.mend()


@pain(8, "a dead waiter keeps waiting", replacing(Lease, "_fail", does_nothing))
async def a_waiter_learns_that_its_session_is_over(world: World) -> None:
    async with world.client() as client, client.mutex("x").lock():
        session = await client.session(description="victim")
        waiting = asyncio.create_task(session.mutex("x").lock())
        await turns()
        await world.end_sessions("victim")
        with pytest.raises(tenure.SessionExpired):
            await soon(waiting)


@pain(9, "two leaders after a reconnect", replacing(Lease, "_lose", does_nothing))
async def a_lease_of_an_earlier_session_is_not_held(world: World) -> None:
    async with world.client() as client:
        first = await client.session(description="victim")
        old = await first.election("x").campaign(b"old")
        await world.end_sessions("victim")
        await turns()
        second = await client.session()
        new = await soon(second.election("x").campaign(b"new"))
        assert is_held(new)
        assert not is_held(old)
        assert isinstance(old.loss, tenure.LeaseLost)
        assert new.fencing_token > old.fencing_token


def _plant_orphans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_refused", lambda lease, error: lease._fail(error))


@pain(10, "an orphan contender is left in the queue", _plant_orphans)
async def a_request_whose_answer_was_an_error_is_withdrawn(world: World) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session()
        engine.fail("enqueue", tenure.EngineError("the answer was lost"), done=True)
        with pytest.raises(tenure.EngineError):
            await session.mutex("x").lock()
        await turns()
        assert await world.queue("x") == []


def _plant_constant_numbers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "next_order_id", lambda last, seen, wall: int(wall))


@pain(12, "no fencing", _plant_constant_numbers)
async def fencing_tokens_rise_over_names_nodes_and_sessions(world: World) -> None:
    tokens = []
    async with world.client() as client:
        await client.create_node("/other")
        for path, name in itertools.product(("/default", "/other"), ("a", "b", "a")):
            async with client.session(path) as session, session.mutex(name).lock() as lease:
                tokens.append(lease.fencing_token)
    assert tokens == sorted(set(tokens))


@pain(
    13,
    "a step of the wall clock expires locks",
    replacing(VirtualClock, "now", VirtualClock.wall),
)
async def a_step_of_the_wall_clock_changes_nothing(world: World) -> None:
    clock = world.clock
    assert isinstance(clock, VirtualClock)
    async with world.client() as client:
        lease = await client.mutex("x").lock()
        clock.set_wall(clock.wall() + 1e6)
        assert is_held(lease)
        clock.set_wall(clock.wall() - 2e6)
        assert is_held(lease)
        await lease.release()
        again = await soon(client.mutex("x").lock())
        assert again.fencing_token > lease.fencing_token


@pain(
    14,
    "a client configured to outlive its lease",
    replacing(Proof, "interval", property(lambda self: 2 * self._window)),
)
async def renewal_comes_before_the_deadline_and_that_before_the_window(world: World) -> None:
    for window in (1.0, 5.0, 30.0, 1800.0):
        proof = Proof(window)
        assert 3 * proof.interval <= proof.span < window
        proof.add_stop_time(1, 0.49 * window)
        assert 3 * proof.interval <= proof.span <= window / 2 + 0.02 * window
    async with world.client() as client:
        with pytest.raises(tenure.InvalidArgument):
            await client.mutex("x").lock(stop_time=15)  # half the window


def _grant_the_last(self: CoreSemaphore, now: float) -> Request | None:
    last, first = self.last, self.first_waiting
    if last is None or first is None or last is first:
        return _grant_next(self, now)
    first.count, last.count = last.count, first.count
    first.session, last.session = last.session, first.session
    first.hold, last.hold = last.hold, first.hold
    for each in (first, last):
        each.session.requests[each.hold] = each
    return _grant_next(self, now)


_grant_next = CoreSemaphore.grant_next


@pain(15, "unfairness", replacing(CoreSemaphore, "grant_next", _grant_the_last))
async def who_comes_first_is_served_first(world: World) -> None:
    served: list[int] = []

    async def contend(client: tenure.Client, number: int) -> None:
        async with client.mutex("x").lock():
            served.append(number)

    async with world.client() as client:
        async with client.mutex("x").lock():
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(contend(client, number)))
                await turns(3)
        await soon(asyncio.gather(*tasks))
    assert served == [0, 1, 2, 3, 4]


def _leave_requests_behind(self: Store, session: CoreSession, why: str | None) -> dict[Any, Any]:
    waiting = [each for each in session.requests.values() if each.granted_at is None]
    for each in waiting:
        del session.requests[each.hold]
    return _remove_session(self, session, why)


_remove_session = Store._remove_session


@pain(
    16,
    "a fair queue stuck behind the dead",
    replacing(Store, "_remove_session", _leave_requests_behind),
)
async def a_dead_waiter_is_passed_over(world: World) -> None:
    async with world.client() as client:
        dying = await client.session(description="victim")
        async with client.mutex("x").lock():
            first = asyncio.create_task(dying.mutex("x").lock())
            await turns()
            second = asyncio.create_task(client.mutex("x").lock())
            await turns()
            await world.end_sessions("victim")
            await asyncio.wait([first])
            assert isinstance(first.exception(), tenure.SessionExpired)
        lease = await soon(second)
        await lease.release()


def _due_but_for_sessions(self: Store, when: float, entry: Any) -> None:
    if isinstance(entry, Request):
        _due(self, when, entry)


_due = Store._due


@pain(
    17, "a crashed holder's permits never return", replacing(Store, "_due", _due_but_for_sessions)
)
async def permits_of_a_silent_session_return_after_its_window(world: World) -> None:
    client, engine = world.slow(1)
    async with world.client() as other, client:
        pool = other.semaphore("pool")
        await pool.create(limit=3)
        session = await client.session(recovery_window=5)
        await session.semaphore("pool").acquire(3)
        engine.cut()
        lease = await pool.acquire(3, timeout=20)
        await lease.release()
        engine.mend()


@pain(18, "peers disagree on the limit", replacing(Store, "create", does_nothing))
async def another_limit_is_refused(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("pool").create(limit=4)
        with pytest.raises(tenure.SemaphoreExists) as error:
            await client.semaphore("pool").create(limit=5, exist_ok=True)
        assert error.value.limit == 4


@pain(20, "fork hangs", replacing(fork, "check", does_nothing))
async def a_forked_child_gets_a_clear_error(world: World) -> None:
    async with world.client() as client:
        lease = await client.mutex("x").lock()
        parent = fork._generation
        fork._generation = parent + 1  # what the fork's hook does in the child
        try:
            with pytest.raises(tenure.Misuse, match="connect"):
                lease.held  # noqa: B018  asking is what is tested
            with pytest.raises(tenure.Misuse, match="connect"):
                await client.mutex("x").try_lock()
        finally:
            fork._generation = parent


def _plant_one_hold(patch: pytest.MonkeyPatch) -> None:
    original = Session._request

    def request_again(self: Session, wanted: Any) -> Lease:
        self._last_hold = 0
        return original(self, wanted)

    patch.setattr(Session, "_request", request_again)


@pain(22, "ownership leaks between tasks", _plant_one_hold)
async def two_tasks_of_a_session_are_two_requests(world: World) -> None:
    async with world.client() as client, client.session() as session:
        first = await session.mutex("x").lock()
        second = asyncio.create_task(session.mutex("x").lock())
        await turns()
        assert not second.done()
        assert len(await world.queue("x")) == 2
        await first.release()
        lease = await soon(second)
        assert is_held(lease)
        assert not is_held(first)
        await lease.release()


def _plant_no_detection(patch: pytest.MonkeyPatch) -> None:
    async def find_nothing(lease: Lease) -> None:
        return None

    patch.setattr(request, "_check_self_deadlock", find_nothing)


@pain(23, "re-entry deadlocks", _plant_no_detection)
async def re_entry_is_refused_at_once(world: World) -> None:
    async with world.client() as client, client.mutex("x").lock():
        with pytest.raises(tenure.SelfDeadlock):
            await soon(client.mutex("x").lock())
    assert this_task().cancelling() == 0


def _plant_forgetful_watches(patch: pytest.MonkeyPatch) -> None:
    original = Store._changed

    def tell_once(self: Store, *arguments: Any, **named: Any) -> None:
        before = len(self.effects)
        original(self, *arguments, **named)
        told = getattr(tell_once, "told", 0)
        fresh = [each for each in self.effects[before:] if each[1] == CHANGED]
        tell_once.told = told + len(fresh)  # type: ignore[attr-defined]
        if told:
            del self.effects[before:]

    patch.setattr(Store, "_changed", tell_once)


@pain(24, "watches with gaps", _plant_forgetful_watches)
async def a_watch_ends_in_the_true_state(world: World) -> None:
    async with world.client() as client:
        config = client.semaphore("config")
        await config.create(limit=1, data=b"0")

        async def last() -> bytes:
            async with config.watch(data=True) as states:
                async for state in states:
                    if state.data == b"9":
                        return state.data
            raise AssertionError("a watch ended by itself")

        watching = asyncio.create_task(last())
        for number in range(1, 10):
            await turns(number % 4)
            await config.update(b"%d" % number)
        assert await soon(watching) == b"9"


# The proof that each check can fail


def run(check: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """One check in a world of its own, on virtual time."""
    clock = VirtualClock()

    async def in_a_world() -> None:
        world = World(clock)
        await world.open()
        try:
            await check(world)
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await world.close()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock, horizon=3600)) as runner:
        runner.run(in_a_world())


@pytest.mark.parametrize("row", PAINS, ids=lambda row: f"{row.number}: {row.what}")
def test_tenure_does_not_hurt_so(row: Pain) -> None:
    run(row.check)


@pytest.mark.filterwarnings("ignore")  # what is broken on purpose may complain in any way
@pytest.mark.parametrize("row", PAINS, ids=lambda row: f"{row.number}: {row.what}")
def test_the_defect_would_be_caught(row: Pain, monkeypatch: pytest.MonkeyPatch) -> None:
    row.plant(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        run(row.check)


def test_rows_are_numbered_once() -> None:
    numbers = [row.number for row in PAINS]
    assert numbers == sorted(set(numbers))
