"""One who joins a queue as an owner before it leaves: one transaction does both, in this order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach, EngineSession, Enqueued, Place, Withdrawn
from tenure.engines.etcd import connect
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_prefix, shared

PATIENCE = 30.0


class Program:
    """A session that asks for the whole of one name."""

    def __init__(self, session: EngineSession, heard: Recorder) -> None:
        self.session = session
        self.heard = heard

    async def enqueue(
        self, hold: int, *, data: bytes = b"", timeout: float | None = None
    ) -> Enqueued:
        self.heard.sending(hold)
        answer = self.session.enqueue(
            *(hold, "m", EPHEMERAL_LIMIT, data), timeout=timeout, ephemeral=True
        )
        assert isinstance(answer, asyncio.Future)
        async with asyncio.timeout(PATIENCE):
            return await answer

    async def withdraw(self, hold: int) -> Withdrawn:
        async with asyncio.timeout(PATIENCE):
            return await answer_of(self.session.withdraw(hold))

    async def granted(self, *holds: int) -> None:
        await self.heard.wait_for(lambda heard: set(heard.grants) == set(holds), f"grants {holds}")


@asynccontextmanager
async def a_program(url: str) -> AsyncIterator[Program]:
    engine, heard = connect(url, SystemClock()), Recorder()
    await engine.open()
    try:
        yield Program(await engine.attach(Attach(DEFAULT_NODE, 30.0), heard), heard)
        assert not heard.broken
    finally:
        await engine.aclose()


async def revision() -> int:
    return await asyncio.to_thread(shared().revision)


def first_line_up(program: Program, *holds: int) -> list[asyncio.Task[Enqueued]]:
    """Have these join one after the other, with nothing in between."""
    return [asyncio.create_task(program.enqueue(hold)) for hold in holds]


async def test_a_hand_over_is_one_commit_though_the_former_owner_lines_up_again() -> None:
    with a_prefix() as url:
        async with a_program(url) as program:
            assert (await program.enqueue(1)).place is Place.GRANTED
            before = await revision()
            second, third = first_line_up(program, 2, 3)
            await asyncio.sleep(0)  # they are asked for
            await program.withdraw(1)
            assert (await second).place is (await third).place is Place.WAITING
            await program.granted(2)
            assert await revision() == before + 2  # for two that joined, and one that left
            assert (await second).order_id < (await third).order_id  # type: ignore[operator]
            await program.withdraw(2)
            await program.granted(2, 3)


async def test_who_joins_behind_the_owner_alone_waits_first_and_is_granted_then() -> None:
    with a_prefix() as url:
        async with a_program(url) as program:
            await program.enqueue(1)
            describing = asyncio.create_task(
                program.session.describe_semaphore("m", owners=True, waiters=True)
            )
            await asyncio.sleep(0)  # it goes first
            (second,) = first_line_up(program, 2)
            await asyncio.sleep(0)
            await program.withdraw(1)
            assert [len((await describing).owners), (await describing).waiting] == [1, 0]
            answer = await second
            assert answer.place is Place.WAITING
            await program.granted(2)
            assert program.heard.grants[2] == answer.order_id


async def test_an_owner_that_is_not_there_any_more_is_not_waited_for() -> None:
    with a_prefix() as url:
        prefix = f"{url.partition('=')[2]}/q"
        async with a_program(url) as program:
            await program.enqueue(1)
            assert await asyncio.to_thread(shared().delete, prefix) == 1  # somebody, by hand
            second, third = first_line_up(program, 2, 3)
            await asyncio.sleep(0)
            await program.withdraw(1)
            assert (await second).place is Place.GRANTED
            assert (await third).place is Place.WAITING
            await program.withdraw(2)
            await program.granted(3)


@pytest.mark.parametrize("size", [5, 100_000])
async def test_who_joins_so_has_its_data(size: int) -> None:
    with a_prefix() as url:
        async with a_program(url) as program:
            await program.enqueue(1)
            (second,) = first_line_up(program, 2)
            third = asyncio.create_task(program.enqueue(3, data=bytes(size)))
            await asyncio.sleep(0)
            await program.withdraw(1)
            await asyncio.gather(second, third)
            described = await program.session.describe_semaphore("m", owners=True, waiters=True)
            assert [len(each.data) for each in (*described.owners, *described.waiters)] == [0, size]


async def test_who_does_not_wait_is_refused_though_the_owner_leaves_just_then() -> None:
    with a_prefix() as url:
        async with a_program(url) as program:
            await program.enqueue(1)
            (second,) = first_line_up(program, 2)
            third = asyncio.create_task(program.enqueue(3, timeout=0))
            await asyncio.sleep(0)
            await program.withdraw(1)
            assert (await third).place is Place.REFUSED
            await second
            await program.granted(2)


async def test_tasks_that_take_turns_are_served_in_their_order_at_one_commit_a_turn() -> None:
    turns: list[int] = []
    tokens: list[int] = []
    with a_prefix() as url:
        async with tenure.connect(url) as client, client.session() as session:

            async def take_turns(number: int) -> None:
                for _ in range(20):
                    async with session.mutex("m").lock() as lease:
                        turns.append(number)
                        tokens.append(lease.fencing_token)

            before = await revision()
            async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
                for number in range(10):
                    group.create_task(take_turns(number))
            commits = await revision() - before
    assert turns == [*range(10)] * 20
    assert tokens == sorted(set(tokens))
    assert commits < 1.5 * len(turns)
