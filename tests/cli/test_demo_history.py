"""The checks of the demo's record refuse what they are there to refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from tenure.cli.demo.command import timeline
from tenure.cli.demo.scenes import DemoEvent, History, Look, parse

NAME = "nightly"


def history(*events: DemoEvent) -> History:
    record = History()
    record.events += events
    return record


def turn(
    who: str, token: int, requested: float, granted: float, released: float
) -> list[DemoEvent]:
    return [
        DemoEvent(requested, who, "requested", NAME),
        DemoEvent(granted, who, "granted", NAME, token),
        DemoEvent(released, who, "released", NAME, token),
    ]


def in_turn() -> list[DemoEvent]:
    """Three processes, one after the other; the second is known to wait before the third asks."""
    return [
        *turn("w1", 10, 1.0, 1.1, 2.0),
        *turn("w2", 11, 1.2, 2.1, 3.0),
        DemoEvent(1.3, "w2", "queued", NAME, 11),
        *turn("w3", 12, 1.4, 3.1, 4.0),
    ]


def moved(who: str, what: str, **changes: object) -> History:
    """The good record, with one event of it changed."""
    return history(
        *(
            replace(each, **changes) if (each.who, each.what) == (who, what) else each  # type: ignore[arg-type]
            for each in in_turn()
        )
    )


def test_a_good_record_is_accepted() -> None:
    good = history(*in_turn())
    for finding in (
        good.check_limit(NAME, 1),
        good.check_tokens(NAME, 1),
        good.check_arrival(NAME),
    ):
        assert finding.holds, finding.text
    assert good.check_limit(NAME, 1).text == "nightly: 3 grants, at most 1 at once; overlaps: none"


@pytest.mark.parametrize("check", ["check_arrival", "check_looks"])
def test_a_check_that_has_nothing_to_look_at_fails(check: str) -> None:
    assert not getattr(history(), check)(NAME).holds
    assert not history().check_limit(NAME, 1).holds
    assert not history().check_tokens(NAME, 1).holds
    assert not history().check_takeover(NAME).holds
    assert not history().check_watchers(NAME, []).holds


def test_an_overlap_is_refused() -> None:
    planted = moved("w2", "granted", at=1.999)
    finding = planted.check_limit(NAME, 1)
    assert (finding.holds, finding.text) == (False, "nightly: 2 held at once, of 1")
    assert planted.check_limit(NAME, 2).holds


def test_a_hold_that_never_ends_overlaps_with_the_next() -> None:
    events = [each for each in in_turn() if (each.who, each.what) != ("w1", "released")]
    assert not history(*events).check_limit(NAME, 1).holds
    # Unless its process was killed before that.
    assert history(*events, DemoEvent(2.05, "w1", "killed", NAME)).check_limit(NAME, 1).holds


def test_counts_are_added_up() -> None:
    planted = moved("w1", "granted", count=2)
    assert not planted.check_limit(NAME, 1).holds
    assert planted.check_limit(NAME, 2).holds


@pytest.mark.parametrize("token", [10, 9])
def test_a_token_that_does_not_rise_is_refused(token: int) -> None:
    finding = moved("w2", "granted", token=token).check_tokens(NAME, 1)
    assert not finding.holds
    assert finding.text == f"nightly: w2 has token {token}, after w1 with 10"


def test_a_grant_among_several_may_be_recorded_late() -> None:
    # Granted first, w1 records that after w2 has already released another slot.
    late = history(*turn("w1", 10, 1.0, 3.0, 4.0), *turn("w2", 11, 1.1, 1.2, 2.0))
    assert not late.check_tokens(NAME, 1).holds
    later = history(*late.events, *turn("w3", 12, 2.1, 2.2, 5.0))
    assert later.check_tokens(NAME, 2).holds
    assert not moved("w3", "granted", token=9).check_tokens(NAME, 1).holds


def test_a_request_that_overtakes_is_refused() -> None:
    # w3 sent its request when w2 was in the queue, and has the lower token.
    planted = history(
        *turn("w1", 10, 1.0, 1.1, 2.0),
        *turn("w3", 11, 1.4, 2.1, 3.0),
        DemoEvent(1.3, "w2", "queued", NAME, 12),
        *turn("w2", 12, 1.2, 3.1, 4.0),
    )
    finding = planted.check_arrival(NAME)
    assert (finding.holds, finding.text) == (
        False,
        "nightly: w3 came after w2, and was served before",
    )
    assert planted.check_tokens(NAME, 1).holds
    assert planted.check_limit(NAME, 1).holds


def look(owners: list[tuple[int, int]], waiters: list[tuple[int, int]], limit: int = 4) -> History:
    record = History()
    record.looks.append(Look(NAME, limit, tuple(owners), tuple(waiters)))
    return record


@pytest.mark.parametrize(
    ("owners", "waiters", "holds"),
    [
        ([(1, 2), (2, 2)], [(3, 1)], True),
        ([(1, 3)], [(2, 2), (3, 1)], True),  # who does not fit lets nobody pass
        ([(1, 1)], [(2, 2)], False),  # it would fit: a slot lies idle
        ([(1, 3), (3, 1)], [(2, 2)], False),  # overtaken
        ([(1, 3), (2, 2)], [(3, 1)], False),  # more than the limit
        ([], [(1, 1)], False),
        ([(1, 4)], [], False),  # nobody waits: nothing was seen
    ],
)
def test_a_look_into_a_queue(
    owners: list[tuple[int, int]], waiters: list[tuple[int, int]], *, holds: bool
) -> None:
    assert look(owners, waiters).check_looks(NAME).holds == holds


def test_a_takeover_is_measured_from_the_kill() -> None:
    events = [
        DemoEvent(1.0, "w1", "requested", NAME),
        DemoEvent(1.1, "w1", "granted", NAME, 10),
        DemoEvent(2.0, "w1", "killed", NAME),
        *turn("w2", 11, 1.2, 2.025, 3.0),
    ]
    finding = history(*events).check_takeover(NAME)
    assert finding.holds
    assert finding.text == "nightly: w2 took over from w1 after its kill -9"
    assert finding.figure == pytest.approx(0.025)
    assert not history(*events[:3]).check_takeover(NAME).holds
    # Somebody who led already before the kill has taken nothing over.
    assert not history(*events[:3], *turn("w2", 11, 1.2, 1.9, 3.0)).check_takeover(NAME).holds


What = Literal["written", "seen"]


def states(*seen: str, written: tuple[str, ...] = ("one", "two", "three")) -> History:
    events = [
        DemoEvent(float(at), "demo", "written", NAME, data=state)
        for at, state in enumerate(written)
    ]
    events += [DemoEvent(at + 0.5, "w1", "seen", NAME, data=state) for at, state in enumerate(seen)]
    return history(*events)


@pytest.mark.parametrize(
    ("seen", "holds"),
    [
        (("one", "two", "three"), True),
        (("two", "three"), True),
        (("three",), True),
        (("one", "two"), False),  # the last one was missed
        (("one", "three", "two"), False),  # back to an older one
        (("one", "three", "three"), False),
        (("four", "three"), False),  # nobody wrote that
        ((), False),
    ],
)
def test_what_a_watcher_saw(seen: tuple[str, ...], *, holds: bool) -> None:
    assert states(*seen).check_watchers(NAME, ["w1"]).holds == holds


def test_an_event_survives_the_way_through_a_pipe() -> None:
    event = DemoEvent(1.5, "w1", "granted", NAME, 12, 2, "data")
    assert parse(event.to_json()) == event


def test_a_picture_shows_waiting_and_holding() -> None:
    rows = timeline(history(*in_turn()).holds(NAME), 30)
    assert [row.who for row in rows] == ["w1", "w2", "w3"]
    assert ["".join(cell[0] for cell in row.cells) for row in rows] == [
        "w" + "h" * 9 + "i" * 20,
        "i" + "w" * 10 + "h" * 9 + "i" * 10,
        "i" * 3 + "w" * 18 + "h" * 8 + "i",
    ]
    assert timeline([], 30) == []


def test_a_picture_shows_where_a_process_was_killed() -> None:
    events = [*in_turn()[:2], DemoEvent(2.0, "w1", "killed", NAME), *in_turn()[3:]]
    first = timeline(history(*events).holds(NAME), 30)[0]
    assert "".join(cell[0] for cell in first.cells) == "w" + "h" * 8 + "k" + "i" * 20
