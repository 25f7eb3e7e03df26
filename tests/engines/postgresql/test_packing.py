"""Batches of operations as calls of functions in the database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenure.engines._kit.commands.pipeline import Operation, OrderIds
from tenure.engines.postgresql.batch import Batch
from tests.engines.postgresql.helpers import SessionOfStatements

ONE, OTHER = SessionOfStatements(1), SessionOfStatements(2)
LOCK, RELEASE = ("m", 2, "x"), ("w", 1, "x")
TRY = ("m", 3, "x", "", "", "0", "1")
IN_TIME = ("m", 4, "x", "", "", "5000000", "1")
KEEPING = ("w", 1, "x", 4, "", "", "1")
ENQUEUE = ("e", 5, "x", "1", "", "", "1")


def a_batch(*operations: tuple[object, tuple[Any, ...]], known: bool = True) -> Batch:
    """Return a batch of operations, given by session and words."""
    places = {("/default", "x")} if known else set()
    batch = Batch("", OrderIds(), places, relaxed=False, pushed=lambda _: None)
    for session, words in operations:
        operation: Operation[object] = Operation(asyncio.get_running_loop())
        operation.session, operation.words = session, words
        assert batch.add(operation)
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
        ("turn_over", [(ONE, RELEASE), (ONE, ("w", 2, "x"))]),
        ("acquire", [(ONE, TRY)]),
        ("acquire", [(ONE, IN_TIME)]),
        ("turn_over", [(ONE, RELEASE), (ONE, IN_TIME)]),
        ("turn_over", [(ONE, KEEPING)]),
        ("operate", [(ONE, ENQUEUE)]),
        ("operate", [(ONE, RELEASE), (OTHER, LOCK)]),
        ("operate", [(ONE, RELEASE), (ONE, TRY)]),
        ("operate", [(ONE, RELEASE), (ONE, ("m", 2, "y"))]),
        ("operate", [(ONE, LOCK), (ONE, ("m", 3, "x"))]),
        ("operate", [(ONE, LOCK), (ONE, ("w", 2, "x"))]),
        ("operate", [(ONE, RELEASE), (OTHER, RELEASE)]),
        ("operate", [(ONE, RELEASE), (ONE, LOCK), (ONE, TRY)]),
    ],
)
async def test_what_is_simple_has_a_function_of_its_own(
    called: str, operations: list[tuple[object, tuple[Any, ...]]]
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
    replies: list[tuple[object, object]] = []

    class Answered(Operation[object]):
        def answered(self, reply: object) -> None:
            replies.append((self.words[1], reply))

    batch = a_batch()
    for words in (("m", 7, "x"), ("w", 1, "x"), ("m", 8, "x"), ("w", 2, "x")):
        operation = Answered(asyncio.get_running_loop())
        operation.session, operation.words = ONE, words
        batch.add(operation)
    _, arguments = batch.packed("s")
    assert arguments[-5:] == [b"x", b"{1,2}", b"{7,8}", b"{NULL,NULL}", b"{}"]
    batch.answered([0, -1, [10, 9], [11, 10]])
    assert replies == [(1, 0), (2, -1), (7, [10, 9]), (8, [11, 10])]


async def test_times_to_wait_and_kept_requests_are_in_the_order_of_the_requests() -> None:
    batch = a_batch((ONE, ("w", 9, "x")), (ONE, IN_TIME), (ONE, KEEPING), (ONE, LOCK))
    _, arguments = batch.packed("s")
    assert arguments[-4:] == [b"{9,1}", b"{4,2}", b"{5000000,NULL}", b"{NULL,4}"]


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

    class Answered(Operation[object]):
        def answered(self, reply: object) -> None:
            answers.append(reply)
            if len(answers) == 1:
                raise ZeroDivisionError

    batch = Batch("", OrderIds(), set(), relaxed=False, pushed=pushed.extend)
    for words in (LOCK, RELEASE):
        operation = Answered(asyncio.get_running_loop())
        operation.session, operation.words = ONE, words
        batch.add(operation)
    with pytest.raises(ZeroDivisionError):
        batch.answered([1, 0, "g 1 2 3"])
    assert answers == [1, 0]
    assert pushed == ["g 1 2 3"]
