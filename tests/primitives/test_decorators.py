"""Decorated functions: what a call holds, under which name, and what happens when it is busy."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from tenure._client.client import Client
from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    Misuse,
    SelfDeadlock,
    SemaphoreExists,
)
from tenure.model import DEFAULT_NODE
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def test_one_call_runs_at_a_time(world: World) -> None:
    inside: list[int] = []
    async with world.client() as client, world.client() as other:

        async def work(number: int) -> int:
            inside.append(number)
            assert len(inside) == 1
            await asyncio.sleep(1)
            inside.remove(number)
            return number

        here, there = client.exclusive("work")(work), other.exclusive("work")(work)
        found = await asyncio.gather(here(1), there(2), here(number=3))
        assert list(found) == [1, 2, 3]


async def test_at_most_as_many_calls_run_as_the_limit_allows(world: World) -> None:
    inside: list[int] = []
    most = 0
    async with world.client() as client:

        @client.limited("gpu", 4, count=2)
        async def work(number: int) -> None:
            nonlocal most
            inside.append(number)
            most = max(most, len(inside))
            await asyncio.sleep(1)
            inside.remove(number)

        await asyncio.gather(*map(work, range(7)))
        assert most == 2
        assert (await client.describe_semaphore("gpu")).limit == 4
        with pytest.raises(SemaphoreExists):
            await client.limited("gpu", 5)(work)(0)


async def test_a_job_runs_once_in_a_period(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:

        async def job(number: int) -> int:
            return number

        here = client.once_per("job", hours=1)(job)
        there = other.once_per("job", minutes=60)(job)
        assert [await here(1), await there(2), await here(3)] == [1, None, None]
        await asyncio.sleep(3600)
        assert await there(4) == 4
        run = await client.last_run("job")
        assert run is not None
        assert run.succeeded


async def test_a_failed_job_is_due_again(world: World) -> None:
    async with world.client() as client:

        @client.once_per("job", days=1)
        async def job(divisor: int) -> float:
            return 1 / divisor

        with pytest.raises(ZeroDivisionError):
            await job(0)
        assert await job(1) == 1


class Order:
    """Has a decorated method and a decorated class method."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def pay(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("text", "call", "name"),
    [
        ("report", lambda make: make(1), "report"),
        ("report {user}", lambda make: make(7), "report 7"),
        ("report {user}", lambda make: make(user=7), "report 7"),
        ("report {user:03d}/{kind!r}", lambda make: make(7), "report 007/'full'"),
        ("report {user.number}", lambda make: make(Order(5)), "report 5"),
        ("report {user[id]}", lambda make: make({"id": 6}), "report 6"),
        ("report {more}", lambda make: make(1, more="x"), "report x"),
        ("{{report}}", lambda make: make(1), "{report}"),
        ("report {others}", lambda make: make(1, more="x"), "report {'more': 'x'}"),
        ("report {others[more]}", lambda make: make(1, more="x"), "report x"),
    ],
)
async def test_the_name_is_made_of_the_arguments(
    world: World, text: str, call: Callable[[Any], Any], name: str
) -> None:
    async with world.client() as client:

        @client.exclusive(text)
        async def make(user: Any, kind: str = "full", **others: object) -> list[str]:
            return [each.name for each in await client.list_semaphores()]

        assert await call(make) == [name]


async def test_a_positional_argument_prevails_over_a_keyword_of_its_name(world: World) -> None:
    async with world.client() as client:

        @client.exclusive("{user}")
        async def work(user: int, /, **more: object) -> list[str]:
            return [each.name for each in await client.list_semaphores()]

        assert await work(1, user=2) == ["1"]


async def test_partial_functions_are_decorated(world: World) -> None:
    async with world.client() as client:

        async def work(user: int, kind: str) -> bool:
            return await client.mutex(f"{user} {kind}").locked()

        async def count() -> AsyncIterator[bool]:
            yield await client.mutex("count").locked()

        assert await client.exclusive("{user} {kind}")(functools.partial(work, user=7))(kind="x")
        counted = client.exclusive("count")(functools.partial(count))
        assert [each async for each in counted()] == [True]


async def test_functions_without_a_signature_have_names_without_arguments(world: World) -> None:
    async with world.client() as client:
        decorate = client.exclusive("{user}")
        with pytest.raises(InvalidArgument, match=r"arguments of max\(\) are not known"):
            decorate(max)


async def test_a_semaphore_is_created_once_and_again_when_it_was_deleted(world: World) -> None:
    client, engine = world.slow()
    async with client:

        @client.limited("gpu", 4)
        async def work() -> None: ...

        for _ in range(5):
            await work()
        assert engine.calls.count("create") == 1
        await client.semaphore("gpu").delete()
        await work()
        assert (await client.describe_semaphore("gpu")).limit == 4


async def test_methods_keep_their_names_and_signatures(world: World) -> None:
    async with world.client() as client:

        class Account:
            def __init__(self, number: int) -> None:
                self.number = number

            @client.exclusive("account {self.number}")
            async def close(self, reason: str = "") -> str:
                """Close it."""
                return (await client.list_semaphores())[0].name + reason

            @classmethod
            @client.exclusive("accounts of {cls.__name__}")
            async def close_all(cls) -> str:
                return (await client.list_semaphores())[0].name

        assert await Account(7).close("!") == "account 7!"
        assert await Account.close_all() == "accounts of Account"
        assert inspect.iscoroutinefunction(Account.close)
        assert Account.close.__doc__ == "Close it."
        assert list(inspect.signature(Account.close).parameters) == ["self", "reason"]


async def test_a_busy_call_waits_raises_or_is_skipped(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:

        async def work() -> str:
            return "done"

        async with other.mutex("work").lock():
            begun = clock.now()
            with pytest.raises(AcquireTimeout, match="within 5 s"):
                await client.exclusive("work", wait=5)(work)()
            assert clock.now() - begun == pytest.approx(5, abs=0.1)
            with pytest.raises(AcquireTimeout, match="at once"):
                await client.exclusive("work", wait=0)(work)()
            assert await client.exclusive("work", skip=True)(work)() is None
            begun = clock.now()
            assert await client.exclusive("work", skip=True, wait=5)(work)() is None
            assert clock.now() - begun == pytest.approx(5, abs=0.1)
            waiting = asyncio.create_task(client.exclusive("work")(work)())
            await turns()
            assert not waiting.done()
        assert await waiting == "done"
        assert await client.exclusive("work", skip=True)(work)() == "done"

        async with other.semaphore("seats", limit=2).acquire(2):
            assert await client.limited("seats", 2, skip=True)(work)() is None
            assert await client.limited("seats", 2, skip=True, wait=1)(work)() is None
        assert await client.limited("seats", 2, skip=True)(work)() == "done"


@pytest.mark.parametrize("wait", [None, 5])
async def test_an_outage_skips_no_call(world: World, wait: float | None) -> None:
    client, engine = world.slow()
    async with client:

        @client.exclusive("work", skip=True, wait=wait)
        async def work() -> str:
            return "done"

        assert await work() == "done"
        engine.cut()
        with pytest.raises(AcquireTimeout) as raised:
            await work()
        assert isinstance(raised.value.__cause__, EngineUnavailable)
        engine.mend()


async def test_an_error_of_the_function_releases_the_lease(world: World) -> None:
    async with world.client() as client:

        @client.exclusive("work", skip=True)
        async def work(error: Exception) -> None:
            raise error

        # Not even a timeout of its own is taken for a busy mutex.
        for error in (ZeroDivisionError(), AcquireTimeout("of another one")):
            with pytest.raises(type(error)) as raised:
                await work(error)
            assert raised.value is error
            assert not await client.mutex("work").locked()


async def test_a_cancelled_call_leaves_nothing_behind(world: World) -> None:
    async with world.client() as client:
        entered = asyncio.Event()

        @client.exclusive("work")
        async def work() -> None:
            entered.set()
            await asyncio.Event().wait()

        holding, waiting = asyncio.create_task(work()), asyncio.create_task(work())
        await entered.wait()
        await turns()
        for task in (waiting, holding):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await client.mutex("work").describe(waiters=True)).held == 0


async def test_the_loss_of_the_lease_cancels_the_call(world: World) -> None:
    async with world.client() as client:
        entered = asyncio.Event()

        @client.exclusive("work")
        async def work() -> None:
            entered.set()
            await asyncio.Event().wait()

        calling = asyncio.create_task(work())
        await entered.wait()
        (owner,) = (await client.describe_semaphore("work")).owners
        await client.evict(DEFAULT_NODE, "work", owner.order_id)
        with pytest.raises(LeaseLost):
            await calling


async def test_tasks_that_execute_calls_wait_for_each_other(world: World) -> None:
    # They are no deadlock of the program with itself, even if it has no other task.
    async with world.client() as client:

        @client.exclusive("work")
        async def work() -> None:
            await asyncio.sleep(5)

        calls = [asyncio.create_task(work()) for _ in range(3)]
        for each in calls:
            await each


async def test_a_deadlock_names_the_function_that_a_task_executes(world: World) -> None:
    async with world.client() as client:

        @client.exclusive("work")
        async def work() -> None:
            await client.mutex("work").lock()

        lines, first = inspect.getsourcelines(work)
        with pytest.raises(SelfDeadlock) as raised:
            await asyncio.create_task(work())
        named = re.search(r"acquired at .*test_decorators.py:(\d+)", str(raised.value))
        assert named is not None
        assert first <= int(named[1]) < first + len(lines)


async def test_a_call_from_inside_is_a_deadlock_with_itself(world: World) -> None:
    async with world.client() as client:

        @client.exclusive("work")
        async def work(depth: int) -> None:
            if depth:
                await work(depth - 1)

        with pytest.raises(SelfDeadlock):
            await work(1)


def _counting(client: Client, log: list[object]) -> Callable[[int], AsyncIterator[int]]:
    @client.exclusive("counting")
    async def count(to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                try:
                    log.append((yield number))
                except ValueError as error:
                    log.append(repr(error))
        finally:
            log.append("closed")

    return count


async def test_a_generator_holds_its_lease_until_it_ends(world: World) -> None:
    async with world.client() as client:
        mutex, log = client.mutex("counting"), list[object]()
        count = _counting(client, log)
        assert inspect.isasyncgenfunction(count)
        iterator = count(2)
        assert not await mutex.locked()
        found = []
        async for number in iterator:
            assert await mutex.locked()
            found.append(number)
        assert (found, log) == ([0, 1], [None, None, "closed"])
        assert not await mutex.locked()


async def test_a_generator_that_is_closed_releases_its_lease(world: World) -> None:
    async with world.client() as client:
        mutex, log = client.mutex("counting"), list[object]()
        count: Any = _counting(client, log)
        async with aclosing(count(5)) as iterator:
            async for number in iterator:
                if number == 1:
                    break
            assert await mutex.locked()
        assert log == [None, "closed"]
        assert not await mutex.locked()


async def test_a_generator_that_is_dropped_releases_its_lease(world: World) -> None:
    async with world.client() as client:
        log = list[object]()
        async for _ in _counting(client, log)(5):
            break
        gc.collect()
        await turns()
        assert log == ["closed"]
        assert not await client.mutex("counting").locked()


async def test_a_generator_gets_what_is_sent_and_thrown(world: World) -> None:
    async with world.client() as client:
        log = list[object]()
        count: Any = _counting(client, log)
        iterator = count(5)
        assert await anext(iterator) == 0
        assert await iterator.asend("sent") == 1
        assert await iterator.athrow(ValueError("thrown")) == 2
        with pytest.raises(ZeroDivisionError):
            await iterator.athrow(ZeroDivisionError())
        assert log == ["sent", "ValueError('thrown')", "closed"]
        assert not await client.mutex("counting").locked()


async def test_a_skipped_generator_is_empty(world: World) -> None:
    async with world.client() as client, world.client() as other:

        @client.exclusive("work", skip=True)
        async def work() -> AsyncIterator[int]:
            yield 1

        async with other.mutex("work").lock():
            assert [each async for each in work()] == []
        assert [each async for each in work()] == [1]


async def test_decorating_does_not_use_the_store(world: World) -> None:
    client = world.client()
    try:

        @client.exclusive("work")
        async def work() -> None: ...

        await turns()
        assert not await world.sessions()
    finally:
        await client.aclose()


def _plain() -> None: ...


async def _coroutine(user: int) -> None: ...


async def _generator() -> AsyncIterator[int]:
    yield 1


class _Callable:
    async def __call__(self, user: int) -> int:
        return user


async def test_an_object_with_an_asynchronous_call_is_decorated(world: World) -> None:
    async with world.client() as client:
        called: Any = client.exclusive("work {user}")(_Callable())
        assert await called(3) == 3


@pytest.mark.parametrize(
    ("decorate", "kind", "message"),
    [
        (lambda client: client.exclusive(_coroutine), Misuse, "needs a name"),
        (lambda client: client.exclusive(3), InvalidArgument, "a name is a text"),
        (lambda client: client.exclusive("")(_coroutine), InvalidArgument, "name"),
        (lambda client: client.exclusive("a")(_plain), Misuse, "tenure.blocking"),
        (lambda client: client.exclusive("a")(Order), Misuse, "decorates a function"),
        (lambda client: client.exclusive("a")(3), Misuse, "decorates a function"),
        (lambda client: client.exclusive("a")(staticmethod(_coroutine)), Misuse, "@staticmethod"),
        (
            lambda client: client.exclusive("a {id}")(_coroutine),
            InvalidArgument,
            "no argument 'id'",
        ),
        (lambda client: client.exclusive("a {}")(_coroutine), InvalidArgument, "by their names"),
        (lambda client: client.exclusive("a {0}")(_coroutine), InvalidArgument, "by their names"),
        (lambda client: client.exclusive("a {")(_coroutine), InvalidArgument, "written twice"),
        (
            lambda client: client.exclusive("{user!z}")(_coroutine),
            InvalidArgument,
            "by their names",
        ),
        (
            lambda client: client.exclusive("{user:{user}}")(_coroutine),
            InvalidArgument,
            "by their names",
        ),
        (lambda client: client.exclusive("a", wait=-1), InvalidArgument, "zero or more"),
        (lambda client: client.limited("a", 0), InvalidArgument, "limit"),
        (lambda client: client.limited("a", 2, count=3), InvalidArgument, "count"),
        (lambda client: client.once_per("a"), InvalidArgument, "hours=1"),
        (lambda client: client.once_per("a", hours=-1), InvalidArgument, "zero or more"),
        (lambda client: client.once_per("a", hours="1"), InvalidArgument, "period"),
        (lambda client: client.once_per("a", hours=1)(_generator), Misuse, "async def"),
    ],
)
async def test_what_cannot_work_is_refused_at_once(
    world: World, decorate: Callable[[Client], object], kind: type[Exception], message: str
) -> None:
    async with world.client() as client:
        with pytest.raises(kind, match=message):
            decorate(client)


async def test_wrong_arguments_of_a_call_acquire_nothing(world: World) -> None:
    async with world.client() as client:
        work: Any = client.exclusive("work {user.name}")(_coroutine)
        with pytest.raises(TypeError, match=r"_coroutine\(\): missing a required argument: 'user'"):
            await work()
        with pytest.raises(InvalidArgument, match="cannot be made from the arguments"):
            await work(3)
        for text in ("{user:03d}", "{user[id]}", "{user!s:d}"):
            with pytest.raises(InvalidArgument, match="cannot be made from the arguments"):
                await client.exclusive(text)(_coroutine)("7")  # type: ignore[arg-type]
        assert await client.list_semaphores() == []
