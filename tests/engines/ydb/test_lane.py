"""The order of operations over strands: on one name, and on several."""

from __future__ import annotations

from tenure.engines.ydb.lane import Lanes, Step

MAIN, SIBLING = "main", "sibling"


def through(lanes: Lanes, name: str, strand: str, said: list[str], what: str) -> Step:
    """An operation that is answered later."""

    def go() -> bool:
        lane = lanes.of(name)
        if not lane.free_for(strand):
            return False
        lane.begin(strand)
        said.append(what)
        return True

    return go


def test_an_operation_waits_for_answers_on_other_strands_about_its_name() -> None:
    lanes, said = Lanes(), list[str]()
    lanes.of("a").add(through(lanes, "a", MAIN, said, "first"))
    lanes.of("a").add(through(lanes, "a", SIBLING, said, "second"))
    lanes.of("a").add(through(lanes, "a", MAIN, said, "third"))
    assert said == ["first"]
    lanes.of("a").end(MAIN)
    assert said == ["first", "second"]
    lanes.of("a").end(SIBLING)
    assert said == ["first", "second", "third"]


def test_operations_on_one_strand_do_not_wait() -> None:
    lanes, said = Lanes(), list[str]()
    for what in ("first", "second"):
        lanes.of("a").add(through(lanes, "a", MAIN, said, what))
    assert said == ["first", "second"]
    assert not lanes.of("a").idle
    lanes.of("a").end(MAIN)
    assert not lanes.of("a").idle
    lanes.of("a").end(MAIN)
    assert lanes.of("a").idle


def test_names_do_not_wait_for_each_other() -> None:
    lanes, said = Lanes(), list[str]()
    lanes.of("a").add(through(lanes, "a", MAIN, said, "a"))
    lanes.of("a").add(through(lanes, "a", SIBLING, said, "a, held up"))
    lanes.of("b").add(through(lanes, "b", SIBLING, said, "b"))
    assert said == ["a", "b"]


def test_a_strand_that_is_over_holds_up_nobody() -> None:
    lanes, said = Lanes(), list[str]()
    for name in ("a", "b"):
        lanes.of(name).add(through(lanes, name, SIBLING, said, name))
        lanes.of(name).add(through(lanes, name, MAIN, said, f"{name}, held up"))
    lanes.forget(SIBLING)
    assert said == ["a", "b", "a, held up", "b, held up"]


def test_a_lane_is_kept_as_long_as_something_is_asked_there() -> None:
    lanes, said = Lanes(), list[str]()
    lane = lanes.of("a")
    lane.add(through(lanes, "a", MAIN, said, "first"))
    assert lanes.of("a") is lane
    lane.end(MAIN)
    assert lanes.of("a") is not lane


def test_an_answer_that_comes_after_the_end_concerns_nobody() -> None:
    lanes, said = Lanes(), list[str]()
    before = lanes.of("a")
    before.add(through(lanes, "a", MAIN, said, "first"))
    before.add(through(lanes, "a", SIBLING, said, "second"))
    lanes.clear()
    after = lanes.of("a")
    after.add(through(lanes, "a", SIBLING, said, "third"))
    before.end(MAIN)
    assert lanes.of("a") is after
    assert said == ["first", "third"]
