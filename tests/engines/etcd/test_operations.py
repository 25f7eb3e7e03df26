"""Operations of one session: in their order, and told of whatever becomes of them."""

from __future__ import annotations

import asyncio

import pytest

from tenure.engines.etcd.answers import Refused
from tenure.engines.etcd.attachment import EtcdOperations
from tenure.engines.etcd.grpc import Code
from tenure.errors import EngineError, SessionExpired, TenureError

PATIENCE = 30.0


class Told:
    """Operations, and what becomes of them."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.operations = EtcdOperations(self.tasks, self._told)
        self.seen: list[object] = []

    def _told(self, error: BaseException, name: str) -> TenureError:
        kind = EngineError if isinstance(error, Refused) else SessionExpired
        return kind(f"{name}: {error!r}")

    def take(
        self, what: object, until: asyncio.Future[None] | None = None, *, name: str = "a"
    ) -> asyncio.Future[object]:
        """Do something, which waits for a future if there is one."""

        async def operation() -> object:
            self.seen.append(what)
            try:
                if until is not None:
                    await until
            except asyncio.CancelledError:
                self.seen.append(f"{what} was cut off")
                raise
            if isinstance(what, Exception):
                raise what
            return what

        return self.operations.take(name, operation)


async def test_who_is_alone_begins_within_the_call_and_others_in_their_order() -> None:
    told, gate = Told(), asyncio.get_running_loop().create_future()
    answers = [told.take(1, gate), told.take(2), told.take(3), told.take(4, name="another")]
    assert told.seen == [1, 4]
    gate.set_result(None)
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*answers) == [1, 2, 3, 4]
        await told.operations.finish(PATIENCE)
    assert told.seen == [1, 4, 2, 3]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_failure_is_told_and_holds_up_nobody(waits: bool) -> None:
    told, gate = Told(), asyncio.get_running_loop().create_future()
    failed = told.take(EngineError("of the program"), gate if waits else None)
    refused = told.take(Refused(Code.INTERNAL, "of etcd"))
    done = told.take("done")
    gate.set_result(None)
    with pytest.raises(EngineError, match="of the program"):
        await failed
    with pytest.raises(EngineError, match="of etcd"):
        await refused
    assert await done == "done"


async def test_a_mistake_is_told_to_who_waits_and_to_who_began_it() -> None:
    told = Told()
    answer = told.take(ZeroDivisionError())
    (task,) = told.tasks
    for each in answer, task:
        with pytest.raises(ZeroDivisionError):
            await each


async def test_what_is_cut_off_is_told_to_all_who_wait_however_far_it_was() -> None:
    for turns_of_the_loop in range(3):
        told, gate = Told(), asyncio.get_running_loop().create_future()
        answers = [told.take(1, gate), told.take(2)]
        unwanted = told.take(3)
        unwanted.cancel()
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        told.operations.cut_off()
        for answer in answers:
            with pytest.raises(SessionExpired):
                await answer
        assert told.seen[:1] == [1]
        assert 2 not in told.seen
        if turns_of_the_loop:
            assert told.seen == [1, "1 was cut off"]


async def test_an_operation_that_cuts_off_the_others_goes_on() -> None:
    told, gate = Told(), asyncio.get_running_loop().create_future()
    other = told.take("other", asyncio.get_running_loop().create_future(), name="other")

    async def end() -> str:
        await gate
        told.operations.cut_off()
        return "ended"

    ended = told.operations.take("a", end)
    gate.set_result(None)
    assert await ended == "ended"
    with pytest.raises(SessionExpired):
        await other


async def test_nothing_is_answered_before_what_must_come_first() -> None:
    told, gate = Told(), asyncio.get_running_loop().create_future()

    async def first() -> None:
        await gate

    waited = asyncio.create_task(first())
    told.operations.wait_for(waited)
    answer = told.take("answer")
    await told.operations.finish(0.001)
    assert not answer.done()
    gate.set_result(None)
    assert await answer == "answer"
