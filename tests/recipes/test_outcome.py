"""`run_once`: one caller runs the function, and all get its outcome."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import tenure
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    SelfDeadlock,
    SessionExpired,
)
from tenure.recipes import RunFailed, run_once
from tenure.testing.clock import VirtualClock
from tests.cancelling import cancellers
from tests.primitives.helpers import World, turns
from tests.recipes.conftest import program


class Work:
    """A function that counts its runs, and returns or raises what it is given."""

    def __init__(self, *outcomes: object) -> None:
        self.outcomes = list(outcomes)
        self.runs = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, lease: tenure.Lease) -> object:
        assert lease.held
        outcome = self.outcomes[min(self.runs, len(self.outcomes) - 1)]
        self.runs += 1
        await self.go.wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"\x00\xff", b"\x00\xff"),
        ({"version": 7, "tables": ["ä"]}, {"version": 7, "tables": ["ä"]}),
        ((1, 2), [1, 2]),
        (None, None),
        (b"", b""),
    ],
)
async def test_all_callers_get_the_value_of_one_run(url: str, value: object, kept: object) -> None:
    work = Work(value)
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        callers = [client, other] * 3
        results = await asyncio.gather(*(run_once(each, "w", work, keep=60) for each in callers))
        assert results == [kept] * 6
        assert await run_once(other, "w", work, keep=60) == kept
        assert work.runs == 1


async def test_the_others_get_the_error_of_the_runner(url: str) -> None:
    work = Work(ValueError("no such table"))
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        calls = [run_once(each, "w", work, keep=60) for each in (client, other, client)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, ValueError)
        for error in others:
            assert isinstance(error, RunFailed)
            assert error.error == "ValueError: no such table"
            assert str(error).startswith("the run of 'w' on /default by ")
            assert ", pid " in str(error)
            assert str(error).endswith(" failed: ValueError: no such table")
            assert (error.node, error.name) == ("/default", "w")
        with pytest.raises(RunFailed):
            await run_once(client, "w", work, keep=60)
        assert work.runs == 1


async def test_a_failure_that_is_not_kept_lets_the_next_one_run(world: World) -> None:
    work = Work(ValueError("no"), 7)
    async with world.client() as client, world.client() as other:
        calls = [run_once(each, "w", work, keep=60, keep_failed=False) for each in (client, other)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, ValueError)
        assert second == 7
        failing = Work(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await run_once(client, "v", failing, keep=60)
        assert await run_once(client, "v", work, keep=60, keep_failed=False) == 7
        assert await run_once(client, "v", failing, keep=60) == 7


async def test_an_outcome_counts_from_the_end_of_the_run(world: World, clock: VirtualClock) -> None:
    work = Work(1, 2, 3)
    async with world.client() as client, world.client() as other:
        work.go.clear()
        running = [
            asyncio.create_task(run_once(each, "w", work, keep=10)) for each in (client, other)
        ]
        await asyncio.sleep(15)  # longer than it is kept
        assert work.runs == 1
        work.go.set()
        assert await asyncio.gather(*running) == [1, 1]
        await asyncio.sleep(8)
        assert await run_once(other, "w", work, keep=10) == 1
        await asyncio.sleep(3)
        assert await run_once(other, "w", work, keep=10) == 2
        assert await run_once(other, "w", work, keep=0) == 3
        assert clock.now() > 0


async def test_an_outcome_from_the_future_counts_from_now_on(
    world: World, clock: VirtualClock
) -> None:
    work = Work(1, 2)
    async with world.client() as client:
        await run_once(client, "w", work, keep=10)
        record = client.semaphore("w:outcome")
        fields = json.loads((await record.describe()).data)
        fields["ended"] += 1000  # the store's clock was set back since
        await record.update(json.dumps(fields).encode())
        assert await run_once(client, "w", work, keep=10) == 1
        assert json.loads((await record.describe()).data)["ended"] < fields["ended"]
        await asyncio.sleep(11)
        assert await run_once(client, "w", work, keep=10) == 2
        assert clock.now() > 0


async def test_when_the_runner_loses_its_lease_the_next_waiter_runs(world: World) -> None:
    work = Work(1, 2)
    work.go.clear()
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        doomed = asyncio.create_task(run_once(session, "w", work, keep=60))
        await turns()
        waiting = [asyncio.create_task(run_once(client, "w", work, keep=60)) for _ in range(2)]
        await turns()
        assert work.runs == 1
        await world.end_sessions("doomed")
        with pytest.raises(LeaseLost):
            await doomed
        await turns()
        assert work.runs == 2
        work.go.set()
        assert await asyncio.gather(*waiting) == [2, 2]


async def test_a_function_that_returns_after_the_loss_leaves_no_outcome(world: World) -> None:
    async with world.client() as client, world.client() as other:

        async def work(lease: tenure.Lease) -> int:
            await other.evict("/default", "w", lease.fencing_token)
            lease._request.taken("it was evicted")
            return 1

        async def fail(lease: tenure.Lease) -> int:
            await work(lease)
            raise ValueError("too late")

        with pytest.raises(LeaseLost):
            await run_once(client, "w", work, keep=60)
        with pytest.raises(ValueError, match="too late"):
            await run_once(client, "w", fail, keep=60)
        assert await run_once(client, "w", Work(2), keep=60) == 2


@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_at_any_step_it_has_an_outcome_or_the_next_one_runs(
    world: World, late: bool
) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        for number, canceller in enumerate(cancellers(late=late)):
            name, work = f"w{number}", Work(1)
            waiting = asyncio.create_task(canceller.run(run_once(client, name, work, keep=60)))
            await turns(20)
            assert await run_once(other, name, work, keep=60, timeout=5) == 1
            await waiting
            assert 1 <= work.runs <= 2
            await turns()
            assert await world.queue(name) == []


async def test_a_waiter_waits_as_long_as_it_may(world: World, clock: VirtualClock) -> None:
    work = Work(1)
    work.go.clear()
    async with world.client() as client, world.client() as other:
        running = asyncio.create_task(run_once(client, "w", work, keep=60))
        await turns()
        begun = clock.now()
        with pytest.raises(AcquireTimeout):
            await run_once(other, "w", work, keep=60, timeout=3)
        assert clock.now() - begun == pytest.approx(3, abs=0.1)
        work.go.set()
        assert await running == 1


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"x" * 2**20])
async def test_a_result_that_cannot_be_kept_is_an_error_for_all(world: World, value: Any) -> None:
    work = Work(value)
    async with world.client() as client:
        with pytest.raises(InvalidArgument):
            await run_once(client, "w", work, keep=60)
        with pytest.raises(RunFailed, match="failed: InvalidArgument: "):
            await run_once(client, "w", work, keep=60)
        assert work.runs == 1


async def test_an_error_that_cannot_be_kept_is_raised_with_a_note(world: World) -> None:
    async with world.client() as client:

        async def work(_: tenure.Lease) -> None:
            await client.semaphore("w:outcome").delete()
            raise ValueError("no")

        with pytest.raises(ValueError, match="no") as raised:
            await run_once(client, "w", work, keep=60)
        assert any("keeping the outcome of 'w' failed" in each for each in raised.value.__notes__)


async def test_a_function_that_waits_for_itself_gets_an_error(world: World) -> None:
    async with world.client() as client:

        async def work(_: tenure.Lease) -> object:
            return await run_once(client, "w", work, keep=60)

        with pytest.raises(SelfDeadlock):
            await run_once(client, "w", work, keep=60)


async def test_an_outcome_is_forgotten_when_its_semaphore_is_deleted(world: World) -> None:
    work = Work(1, 2)
    async with world.client() as client:
        assert await run_once(client, "w", work, keep=60) == 1
        await client.semaphore("w:outcome").delete()
        assert await run_once(client, "w", work, keep=60) == 2


async def test_what_is_something_else_is_refused(world: World) -> None:
    work = Work(1)
    async with world.client() as client:
        record = client.semaphore("w:outcome")
        await record.create(4)
        with pytest.raises(InvalidArgument, match="of limit 4, and is used here for an outcome"):
            await run_once(client, "w", work, keep=60)
        await record.delete()
        await record.create(1)
        for data in (
            b"text",
            b"[]",
            b"{}",
            b'{"v":1}',
            b'{"v":1,"ended":1e999,"by":""}',
            b'{"v":1,"ended":1,"by":"","error":7}',
            b'{"v":1,"ended":1,"by":"","bytes":"?"}',
            b'{"v":1,"ended":[],"by":""}',
            b"[" * 100_000,
        ):
            await record.update(data)
            with pytest.raises(InvalidArgument, match="cannot be read as an outcome"):
                await run_once(client, "w", work, keep=60)
        await record.delete()
        async with client.mutex("w:outcome").lock():
            with pytest.raises(InvalidArgument):
                await run_once(client, "w", work, keep=60)
        for name, keep in (("x" * 1020, 60), ("w", -1)):
            with pytest.raises(InvalidArgument):
                await run_once(client, name, work, keep=keep)
    assert work.runs == 0


async def test_a_runner_without_an_identity_is_another_program(world: World) -> None:
    async with world.client() as client:
        for by, who in (("", "another program"), ("nightly", "nightly")):
            record = client.semaphore("w:outcome", limit=1)
            await record.create(1, exist_ok=True)
            now = (await client._core.engine.store_time()) - 1
            outcome = {"v": 1, "ended": now, "by": by, "error": "ValueError: no"}
            await record.update(json.dumps(outcome).encode())
            with pytest.raises(RunFailed, match=f"'w' on /default by {who} failed: ValueError: no"):
                await run_once(client, "w", Work(1), keep=60)


async def test_the_end_of_a_session_ends_its_wait(world: World) -> None:
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        async with client.mutex("w").lock():
            waiting = asyncio.create_task(run_once(session, "w", Work(1), keep=60))
            await turns()
            await world.end_sessions("doomed")
            with pytest.raises((LeaseLost, SessionExpired)):
                await waiting


RUNNER = """
import asyncio, sys, tenure
from tenure.recipes import run_once
async def work(lease):
    print("inside", flush=True)
    await asyncio.Event().wait()
async def main():
    async with tenure.connect(sys.argv[1]) as client:
        await run_once(client, "w", work, keep=60)
asyncio.run(main())
"""


@pytest.mark.timeout(60)
async def test_when_the_runner_dies_the_next_waiter_runs(sqlite_url: str) -> None:
    async with tenure.connect(sqlite_url) as client, program(RUNNER, sqlite_url) as other:
        waiting = [asyncio.create_task(run_once(client, "w", Work(2), keep=60)) for _ in range(2)]
        other.kill()
        assert await asyncio.gather(*waiting) == [2, 2]
