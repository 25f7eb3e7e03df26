"""Batches of operations as calls of functions in the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tenure.engines._kit.commands.pipeline import EnqueueOperation, Operation, OrderIds
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.handoff import HandoffWithdraw
from tests.engines.postgresql.helpers import SessionOfStatements, a_lock

ONE, OTHER = SessionOfStatements(1), SessionOfStatements(2)
Making: TypeAlias = Callable[[SessionOfStatements], Operation[Any]]
"""Makes an operation of a session."""


def lock(number: int, name: str = "x", timeout: float | None = None, data: bytes = b"") -> Making:
    return lambda session: a_lock(session, number, name, timeout=timeout, data=data)


def release(number: int, kept: int | None = None) -> Making:
    return lambda session: HandoffWithdraw(session, number, "x", kept=kept)


def enqueue(session: SessionOfStatements) -> Operation[Any]:
    return EnqueueOperation(session, 5, "x", 1, b"", None, ephemeral=True)


LOCK, RELEASE = lock(2), release(1)
TRY, IN_TIME = lock(3, timeout=0), lock(4, timeout=5)
KEEPING = release(1, kept=4)


def a_batch(*operations: tuple[SessionOfStatements, Making], known: bool = True) -> Batch:
    """Return a batch of operations of sessions."""
    places = {("/default", "x")} if known else set()
    batch = Batch("", OrderIds(), places, relaxed=False, pushed=lambda _: None)
    for session, make in operations:
        assert batch.add(make(session))
    return batch


def function(batch: Batch) -> str:
    """Return the name of the function that a batch calls."""
    sql, _ = batch.packed("s")
    return sql.decode().removeprefix("SELECT s.").partition("(")[0]


@pytest.mark.parametrize(
    ("called", "operations"),
    [
        ("acquire", [(ONE, LOCK)]),
        ("release", [(ONE, RELEASE)]),
        ("turn_over", [(ONE, RELEASE), (ONE, LOCK)]),
        ("turn_over", [(ONE, LOCK), (ONE, RELEASE)]),
        ("turn_over", [(ONE, RELEASE), (ONE, release(2))]),
        ("acquire", [(ONE, TRY)]),
        ("acquire", [(ONE, IN_TIME)]),
        ("turn_over", [(ONE, RELEASE), (ONE, IN_TIME)]),
        ("turn_over", [(ONE, KEEPING)]),
        ("operate", [(ONE, enqueue)]),
        ("operate", [(ONE, RELEASE), (OTHER, LOCK)]),
        ("operate", [(ONE, RELEASE), (ONE, TRY)]),
        ("operate", [(ONE, RELEASE), (ONE, lock(2, "y"))]),
        ("operate", [(ONE, LOCK), (ONE, lock(3))]),
        ("operate", [(ONE, LOCK), (ONE, release(2))]),
        ("operate", [(ONE, RELEASE), (OTHER, RELEASE)]),
        ("operate", [(ONE, RELEASE), (ONE, LOCK), (ONE, TRY)]),
    ],
)
async def test_what_is_simple_has_a_function_of_its_own(
    called: str, operations: list[tuple[SessionOfStatements, Making]]
) -> None:
    assert function(a_batch(*operations)) == called


async def test_a_semaphore_that_may_have_no_row_gets_one() -> None:
    for operations in ([(ONE, LOCK)], [(ONE, RELEASE), (ONE, LOCK)]):
        batch = a_batch(*operations, known=False)
        sql, arguments = batch.packed("s")
        assert b"operate" in sql
        assert arguments[-2] == b"{%d}" % len(operations)  # the place of the request
        assert function(batch) in {"acquire", "turn_over"}  # sent again


async def test_requests_that_leave_come_before_those_that_join_in_the_reply_too() -> None:
    batch = a_batch((ONE, lock(7)), (ONE, RELEASE), (ONE, lock(8)), (ONE, release(2)))
    _, arguments = batch.packed("s")
    assert arguments[-5:] == [b"x", b"{1,2}", b"{7,8}", b"{NULL,NULL}", b"{}"]
    assert [each.request_id for each in batch.operations] == [1, 2, 7, 8]


async def test_times_to_wait_and_kept_requests_are_in_the_order_of_the_requests() -> None:
    batch = a_batch((ONE, release(9)), (ONE, IN_TIME), (ONE, KEEPING), (ONE, LOCK))
    _, arguments = batch.packed("s")
    assert arguments[-4:] == [b"{9,1}", b"{4,2}", b"{5000001,NULL}", b"{NULL,4}"]


async def test_options_of_operations_are_in_lists_only_if_one_has_any() -> None:
    _, arguments = a_batch((ONE, RELEASE), (OTHER, LOCK)).packed("s")
    assert arguments[9:13] == [b"{}"] * 4
    again = a_lock(ONE, 6, "x")
    again.again()
    named = lock(7, timeout=0.5, data=b"n")
    batch = a_batch((OTHER, KEEPING), (ONE, lambda _: again), (ONE, named), (ONE, enqueue))
    _, arguments = batch.packed("s")
    assert arguments[6] == b"{w,E,e,e}"
    assert arguments[9:13] == [
        b"{4,NULL,18446744073709551615,1}",
        b'{"","","bg==",""}',
        b"{NULL,NULL,500001,NULL}",
        b"{1,1,1,1}",
    ]


async def test_a_batch_that_is_sent_again_after_expired_sessions_have_ended_says_so() -> None:
    batch = a_batch((ONE, TRY))
    batch.judged()
    sql, arguments = batch.packed("s")
    assert b"operate" in sql
    assert arguments[-1] == b"t"


async def test_sessions_are_locked_in_order() -> None:
    _, arguments = a_batch((OTHER, LOCK), (ONE, RELEASE)).packed("s")
    assert arguments[3] == b"{1,2}"
    assert arguments[5] == b"{2,1}"


async def test_an_operation_that_fails_does_not_keep_others_from_their_answers() -> None:
    answers: list[object] = []
    pushed: list[str] = []

    class Answered(EnqueueOperation):
        def answered(self, reply: object) -> None:
            answers.append(reply)
            if len(answers) == 1:
                raise ZeroDivisionError

    batch = Batch("", OrderIds(), set(), relaxed=False, pushed=pushed.extend)
    for number in (1, 2):
        batch.add(Answered(ONE, number, "x", 1, b"", None, ephemeral=True))
    with pytest.raises(ZeroDivisionError):
        batch.answered([1, 0, "g 1 2 3"])
    assert answers == [1, 0]
    assert pushed == ["g 1 2 3"]
