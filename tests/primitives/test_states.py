"""The tables of states: each event from each state, and what is final."""

from __future__ import annotations

import pytest

from tenure._client import session_life
from tenure._client.request import EVENTS, GONE, HELD, LOST, RELEASED, SENT, WAITING
from tenure._client.request import RequestState as State
from tenure._client.session_life import LIVING, REPORTED, SessionPhase

# For each state what the events make of it, in the order of the columns; "" changes nothing.
COLUMNS = ("queued", "granted", "rejected", "withdrawn", "taken", "missing")
REQUESTS = {
    SENT: ("WAITING", "HELD", "GONE", "GONE", "", ""),
    WAITING: ("", "HELD", "GONE", "GONE", "", ""),
    HELD: ("", "", "", "RELEASED", "LOST", ""),
    RELEASED: ("", "", "", "", "", "LOST"),
    LOST: ("", "", "", "", "", ""),
    GONE: ("", "", "", "", "", ""),
}


def test_each_event_takes_a_request_where_the_table_says() -> None:
    assert set(COLUMNS) == set(EVENTS)
    assert set(REQUESTS) == set(State)
    for state, row in REQUESTS.items():
        for event, after in zip(COLUMNS, row, strict=True):
            found = EVENTS[event].get(state)
            assert ("" if found is None else found.name) == after, (state, event)


@pytest.mark.parametrize("event", COLUMNS)
def test_an_event_that_is_reported_twice_changes_nothing_more(event: str) -> None:
    for after in EVENTS[event].values():
        assert after not in EVENTS[event]


def test_a_request_that_was_never_granted_is_never_lost() -> None:
    assert all(
        LOST not in (EVENTS[event].get(SENT), EVENTS[event].get(WAITING)) for event in EVENTS
    )


def test_the_end_of_a_session_is_final() -> None:
    events = (
        session_life.ATTACHED,
        session_life.CONTACT_LOST,
        session_life.CONTACT_RESTORED,
        session_life.EXPIRED,
        session_life.CLOSED,
        session_life.LEFT,
    )
    for ended in set(SessionPhase) - LIVING:
        assert all(ended not in event for event in events)
    for end in events[3:]:
        assert set(end) == LIVING
        assert not LIVING & set(end.values())


def test_each_state_of_a_session_is_reported() -> None:
    assert set(REPORTED) == set(SessionPhase)
    assert REPORTED[SessionPhase.LEFT] == "detached"
