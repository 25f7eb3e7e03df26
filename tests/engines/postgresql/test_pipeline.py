"""Statements that are under way together, whatever the server rolls back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tenure.engines._kit.commands.pipeline import (
    EnqueueOperation,
    OrderIds,
    Statement,
    StatementPipeline,
)
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.statements import Call
from tests.engines.postgresql.helpers import SessionOfStatements as Session
from tests.engines.postgresql.helpers import a_lock


def a_pipeline() -> StatementPipeline:
    def new_batch() -> Batch:
        return Batch("", OrderIds(), set(), relaxed=False, pushed=lambda _: None)

    return StatementPipeline(new_batch)


def an_operation(session: Session, name: str, number: int = 1) -> EnqueueOperation:
    return a_lock(session, number, name)


def a_call(*holds: object) -> Call:
    return Call("f", (), lambda _: None, holds)


def names(statement: Statement | None) -> list[object]:
    assert isinstance(statement, Batch)
    return [each.name for each in statement.operations]


async def test_operations_of_one_iteration_are_one_statement() -> None:
    pipeline, session = a_pipeline(), Session(1)
    for name in "abc":
        pipeline.operate(an_operation(session, name))
    assert names(pipeline.begin()) == ["a", "b", "c"]
    assert pipeline.begin() is None


async def test_many_operations_are_two_statements_of_one_size() -> None:
    pipeline, session = a_pipeline(), Session(1)
    for number in range(64):
        pipeline.operate(an_operation(session, f"{number}"))
    assert len(names(pipeline.begin())) == 32
    assert len(names(pipeline.begin())) == 32
    assert not pipeline.waits


async def test_a_single_operation_under_way_does_not_unbalance_the_next_ones() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.operate(an_operation(session, "first"))
    assert names(pipeline.begin()) == ["first"]
    for number in range(63):
        pipeline.operate(an_operation(session, f"{number}"))
    assert len(names(pipeline.begin())) == 32
    assert pipeline.begin() is None  # two batches are under way
    pipeline.end()
    assert len(names(pipeline.begin())) == 31


async def test_operations_on_one_name_wait_for_each_other_and_others_do_not() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.operate(an_operation(session, "a"))
    assert names(pipeline.begin()) == ["a"]
    for name in "aba":
        pipeline.operate(an_operation(session, name))
    assert names(pipeline.begin()) == ["b"]
    assert pipeline.begin() is None
    pipeline.end()
    assert names(pipeline.begin()) == ["a", "a"]


async def test_many_operations_on_one_name_are_as_many_as_those_that_follow_the_last_ones() -> None:
    """The callers of the operations that were answered will soon call for as many."""
    pipeline, session = a_pipeline(), Session(1)
    for number in range(2):
        pipeline.operate(an_operation(session, "a", number))
    assert len(names(pipeline.begin())) == 2
    for number in range(2, 48):
        pipeline.operate(an_operation(session, "a", number))
    pipeline.end()
    first = pipeline.begin()
    assert isinstance(first, Batch)
    assert [each.request_id for each in first.operations] == [*range(2, 26)]
    for number in range(48, 50):
        pipeline.operate(an_operation(session, "a", number))
    assert pipeline.begin() is None
    pipeline.end()
    assert len(names(pipeline.begin())) == 24
    assert not pipeline.waits


async def test_operations_on_one_name_that_follow_none_are_one_statement() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.operate(an_operation(session, "a"))
    pipeline.begin()
    pipeline.end()
    for number in range(30):
        pipeline.operate(an_operation(session, "a", number))
    assert len(names(pipeline.begin())) == 30


async def test_a_name_on_another_node_is_another_one() -> None:
    pipeline = a_pipeline()
    pipeline.operate(an_operation(Session(1), "a"))
    pipeline.begin()
    pipeline.operate(an_operation(Session(2, path="/other"), "a"))
    assert names(pipeline.begin()) == ["a"]


async def test_what_changes_a_session_waits_for_its_operations_and_they_for_it() -> None:
    pipeline, session, another = a_pipeline(), Session(1), Session(2)
    pipeline.operate(an_operation(session, "a"))
    pipeline.begin()
    leaving = a_call(session)
    pipeline.add(leaving)
    assert pipeline.begin() is None
    pipeline.end()
    assert pipeline.begin() is leaving
    pipeline.operate(an_operation(session, "b"))
    assert pipeline.begin() is None
    pipeline.operate(an_operation(another, "c"))
    assert pipeline.begin() is None  # its order behind the other one is kept
    pipeline.end()
    assert names(pipeline.begin()) == ["b", "c"]


async def test_other_calls_do_not_wait() -> None:
    pipeline = a_pipeline()
    calls = [a_call() for _ in range(20)]
    for call in calls:
        pipeline.add(call)
    begun = [pipeline.begin() for _ in range(17)]
    assert begun == [*calls[:16], None]
    assert pipeline.end() is calls[0]
    assert pipeline.begin() is calls[16]


async def test_nothing_is_under_way_beside_a_statement_that_has_to_be_alone() -> None:
    pipeline = a_pipeline()
    alone = Call("expire", (), lambda _: None, alone=True)
    calls = a_call(), a_call()
    pipeline.add(calls[0])
    pipeline.add(alone)
    pipeline.add(calls[1])
    assert pipeline.begin() is calls[0]
    assert pipeline.begin() is None
    pipeline.end()
    assert pipeline.begin() is alone
    assert pipeline.begin() is None
    pipeline.end()
    assert pipeline.begin() is calls[1]


async def test_what_is_sent_again_comes_first() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.operate(an_operation(session, "a"))
    batch = pipeline.begin()
    assert batch is not None
    pipeline.operate(an_operation(session, "a", 2))
    pipeline.end()
    pipeline.put_first((batch,))
    assert pipeline.begin() is batch
    assert pipeline.begin() is None


async def test_a_statement_that_was_not_sent_holds_nothing_up() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.add(a_call(session))
    pipeline.begin()
    pipeline.withdraw()
    pipeline.operate(an_operation(session, "a"))
    assert names(pipeline.begin()) == ["a"]


async def test_all_statements_are_taken_in_order_for_the_next_connection() -> None:
    pipeline, session = a_pipeline(), Session(1)
    pipeline.operate(an_operation(session, "a"))
    first = pipeline.begin()
    second = a_call()
    pipeline.add(second)
    assert pipeline.take_all() == [first, second]
    assert not pipeline.waits
    assert not pipeline.under_way


@dataclass
class History:
    """What a server has executed that rolls some statements back."""

    executed: list[tuple[object, ...]] = field(default_factory=list)

    def execute(self, statement: Statement) -> None:
        if isinstance(statement, Batch):
            self.executed += [
                ("operation", each.session, each.name, each.request_id)
                for each in statement.operations
            ]
        else:
            (session,) = statement.holds
            self.executed.append(("change", session))


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("operate"), st.integers(0, 2), st.sampled_from("abcd")),
        st.tuples(st.just("change"), st.integers(0, 2)),
        st.tuples(st.just("send")),
        st.tuples(st.just("reply")),
        st.tuples(st.just("roll back"), st.booleans()),
    ),
    max_size=60,
)


@given(_STEPS)
def test_dependent_statements_are_executed_in_order_however_many_are_rolled_back(
    steps: list[tuple[Any, ...]],
) -> None:
    async def run() -> None:
        pipeline, sessions, history = a_pipeline(), [Session(each) for each in range(3)], History()
        called: list[tuple[object, ...]] = []

        def reply(*, rolled_back: bool, halves: bool = False) -> None:
            if not pipeline.under_way:
                return
            statement = pipeline.end()
            if rolled_back:
                pipeline.put_first((halves and statement.parts()) or (statement,))
            else:
                history.execute(statement)

        for number, (kind, *args) in enumerate(steps):
            if kind == "operate":
                session, name = sessions[args[0]], args[1]
                pipeline.operate(an_operation(session, name, number))
                called.append(("operation", session, name, number))
            elif kind == "change":
                pipeline.add(a_call(sessions[args[0]]))
                called.append(("change", sessions[args[0]]))
            elif kind == "send":
                while pipeline.begin():
                    pass
            else:
                reply(rolled_back=kind == "roll back", halves=bool(args and args[0]))
        while pipeline.begin() or pipeline.under_way:
            reply(rolled_back=False)

        assert sorted(map(str, history.executed)) == sorted(map(str, called))
        for name in "abcd":
            on_it = [each for each in called if each[2:3] == (name,)]
            assert [each for each in history.executed if each[2:3] == (name,)] == on_it
        for session in sessions:
            changes = [
                "change" if each[0] == "change" else each[3]
                for each in called
                if each[1] is session
            ]
            executed = [
                "change" if each[0] == "change" else each[3]
                for each in history.executed
                if each[1] is session
            ]
            assert _groups(executed) == _groups(changes)

    asyncio.run(run())


def _groups(events: list[object]) -> list[set[object]]:
    """Return the operations between the changes: among themselves they have no order."""
    groups: list[set[object]] = [set()]
    for each in events:
        if each == "change":
            groups.append(set())
        else:
            groups[-1].add(each)
    return groups
