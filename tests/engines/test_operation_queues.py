"""The order of operations over members: on one name, and on several."""

from __future__ import annotations

from tenure.engines._kit.operations import OperationQueues, Step

MAIN, SIBLING = "main", "sibling"


def through(queues: OperationQueues, name: str, member: str, said: list[str], what: str) -> Step:
    """An operation that is answered later."""

    def go() -> bool:
        queue = queues.of(name)
        if not queue.free_for(member):
            return False
        queue.begin(member)
        said.append(what)
        return True

    return go


def test_an_operation_waits_for_answers_on_other_members_about_its_name() -> None:
    queues, said = OperationQueues(), list[str]()
    queues.of("a").add(through(queues, "a", MAIN, said, "first"))
    queues.of("a").add(through(queues, "a", SIBLING, said, "second"))
    queues.of("a").add(through(queues, "a", MAIN, said, "third"))
    assert said == ["first"]
    queues.of("a").end(MAIN)
    assert said == ["first", "second"]
    queues.of("a").end(SIBLING)
    assert said == ["first", "second", "third"]


def test_operations_on_one_member_do_not_wait() -> None:
    queues, said = OperationQueues(), list[str]()
    for what in ("first", "second"):
        queues.of("a").add(through(queues, "a", MAIN, said, what))
    assert said == ["first", "second"]
    assert not queues.of("a").idle
    queues.of("a").end(MAIN)
    assert not queues.of("a").idle
    queues.of("a").end(MAIN)
    assert queues.of("a").idle


def test_an_operation_that_is_dropped_does_not_begin_and_holds_up_no_other() -> None:
    queues, said = OperationQueues(), list[str]()
    queues.of("a").add(through(queues, "a", MAIN, said, "first"))
    second = through(queues, "a", SIBLING, said, "second")
    queues.of("a").add(second)
    queues.of("a").add(through(queues, "a", MAIN, said, "third"))
    queues.of("a").drop(second)
    queues.of("a").drop(second)
    assert said == ["first", "third"]


def test_names_do_not_wait_for_each_other() -> None:
    queues, said = OperationQueues(), list[str]()
    queues.of("a").add(through(queues, "a", MAIN, said, "a"))
    queues.of("a").add(through(queues, "a", SIBLING, said, "a, held up"))
    queues.of("b").add(through(queues, "b", SIBLING, said, "b"))
    assert said == ["a", "b"]


def test_a_member_that_is_over_holds_up_nobody() -> None:
    queues, said = OperationQueues(), list[str]()
    for name in ("a", "b"):
        queues.of(name).add(through(queues, name, SIBLING, said, name))
        queues.of(name).add(through(queues, name, MAIN, said, f"{name}, held up"))
    queues.forget(SIBLING)
    assert said == ["a", "b", "a, held up", "b, held up"]


def test_a_queue_is_kept_as_long_as_something_is_asked_there() -> None:
    queues, said = OperationQueues(), list[str]()
    queue = queues.of("a")
    queue.add(through(queues, "a", MAIN, said, "first"))
    assert queues.of("a") is queue
    queue.end(MAIN)
    assert queues.of("a") is not queue


def test_an_answer_that_comes_after_the_end_concerns_nobody() -> None:
    queues, said = OperationQueues(), list[str]()
    before = queues.of("a")
    before.add(through(queues, "a", MAIN, said, "first"))
    before.add(through(queues, "a", SIBLING, said, "second"))
    queues.clear()
    after = queues.of("a")
    after.add(through(queues, "a", SIBLING, said, "third"))
    before.end(MAIN)
    assert queues.of("a") is after
    assert said == ["first", "third"]
