"""What the record makes of readings: events, requests and timelines."""

from __future__ import annotations

import dataclasses

import pytest

from tenure.console import record as module
from tenure.console.record import Span, StoreRecord
from tenure.console.timeline import NARROWEST, WIDTH, Bar, timeline
from tenure.model import EPHEMERAL_LIMIT, RequestDescription, SemaphoreDescription


def request(order_id: int, since: float | None, session: int = 0) -> RequestDescription:
    return RequestDescription(
        session or order_id,
        order_id,
        EPHEMERAL_LIMIT,
        b"",
        since=since,
        session_description=f"job {order_id}",
    )


def mutex(*owners: RequestDescription, waiting: int = 0, name: str = "a") -> SemaphoreDescription:
    held = EPHEMERAL_LIMIT if owners else 0
    return SemaphoreDescription(name, b"", EPHEMERAL_LIMIT, held, True, owners, waiting=waiting)


def lasting(data: bytes = b"", limit: int = 4, name: str = "gpu") -> SemaphoreDescription:
    return SemaphoreDescription(name, data, limit, 0, False, waiting=0)


class Readings:
    """Readings of one node, a second apart."""

    def __init__(self) -> None:
        self.record = StoreRecord()
        self.now = 1000.0

    def read(
        self,
        *found: SemaphoreDescription,
        waiters: tuple[RequestDescription, ...] | None = None,
        nodes: tuple[str, ...] = ("/n",),
    ) -> None:
        self.now += 1.0
        self.record.begin(self.now)
        self.record.saw_nodes(nodes, self.now)
        for each in found:
            self.record.saw("/n", each, self.now, waiters if each.name == "a" else None)
        self.record.finish("/n", self.now)
        self.record.forget_old(self.now)

    def events(self) -> list[tuple[str, str, float | None]]:
        found = self.record.events(lambda node: True, most=100)
        return [
            (str(each.what), each.label or each.name or each.node, each.lasted)
            for each in reversed(found)
        ]


@pytest.fixture
def readings() -> Readings:
    return Readings()


def test_the_first_reading_is_a_state_and_no_event(readings: Readings) -> None:
    readings.read(mutex(request(1, 50.0), waiting=1), lasting(), waiters=(request(2, 3.0),))
    assert readings.events() == []
    seen = readings.record.find("/n", "a")
    assert seen is not None
    assert [(each.granted, each.joined) for each in seen.spans()] == [(951.0, None), (None, 998.0)]


def test_a_hand_off_is_an_end_and_a_grant_at_the_same_time(readings: Readings) -> None:
    readings.read(mutex(request(1, 5.0), waiting=1), waiters=(request(2, 0.5),))
    readings.read(mutex(request(2, 0.25)))
    assert readings.events() == [
        ("ended", "job 1", 5.75),
        ("granted", "job 2", 1.25),
    ]
    seen = readings.record.find("/n", "a")
    assert seen is not None
    first, second = seen.spans()
    assert first.ended == second.granted == readings.now - 0.25
    assert (second.joined, second.ended) == (1000.5, None)


def test_a_release_is_placed_at_the_reading_that_missed_it(readings: Readings) -> None:
    readings.read(mutex(request(1, 5.0)))
    readings.read()
    assert readings.events() == [("ended", "job 1", 6.0)]
    seen = readings.record.find("/n", "a")
    assert seen is not None
    assert (seen.exists, seen.held) == (False, 0)
    readings.read(mutex(request(9, 0.5)))
    assert readings.events()[-1] == ("granted", "job 9", None)


def test_a_new_mutex_was_granted_when_the_store_says(readings: Readings) -> None:
    readings.read()
    readings.read(mutex(request(1, 0.25)))
    (event,) = readings.record.events(lambda node: True, most=9)
    assert (event.what, event.at) == ("granted", readings.now - 0.25)


def test_a_waiter_that_is_gone_was_granted_or_has_withdrawn(readings: Readings) -> None:
    owner = request(1, 5.0)
    two, three = request(2, 2.0), request(3, 1.0)
    readings.read(mutex(owner, waiting=2), waiters=(two, three))
    # Between the reading of the owners and that of the waiters, 2 was granted and 3 withdrew.
    readings.read(mutex(owner, waiting=2), waiters=())
    assert readings.events() == []
    readings.read(mutex(request(2, 0.5)))
    assert readings.events() == [
        ("ended", "job 1", 6.5),
        ("granted", "job 2", 3.5),
        ("withdrawn", "job 3", 2.0),
    ]


def test_a_new_waiter_is_queued_and_an_old_one_that_comes_into_sight_is_not(
    readings: Readings,
) -> None:
    owner = request(1, 5.0)
    readings.read(mutex(owner, waiting=1), waiters=(request(2, 1.0),))
    readings.read(
        mutex(owner, waiting=3), waiters=(request(2, 2.0), request(3, 90.0), request(4, 0.5))
    )
    assert readings.events() == [("queued", "job 4", None)]


def test_waiters_that_were_not_read_have_not_left(readings: Readings) -> None:
    owner = request(1, 5.0)
    readings.read(mutex(owner, waiting=1), waiters=(request(2, 1.0),))
    readings.read(mutex(owner, waiting=1), waiters=None)
    seen = readings.record.find("/n", "a")
    assert seen is not None
    assert list(seen.waiters) == [2]
    readings.read(mutex(owner, waiting=0), waiters=None)
    readings.read(mutex(owner, waiting=0), waiters=None)
    assert readings.events() == [("withdrawn", "job 2", 3.0)]


def test_changes_of_lasting_semaphores_are_events(readings: Readings) -> None:
    readings.read()
    readings.read(lasting(b"one"))
    readings.read(lasting(b"two"))
    readings.read(lasting(b"two", limit=6))
    readings.read()
    readings.read(lasting(b"two"))
    found = readings.record.events(lambda node: True, most=9)[::-1]
    assert [(each.what, each.detail) for each in found] == [
        ("created", ""),
        ("data changed", "two"),
        ("limit changed", "6"),
        ("deleted", ""),
        ("created", ""),
    ]


def test_a_leader_that_proclaims_is_an_event(readings: Readings) -> None:
    first = request(1, 1.0)
    readings.read(mutex(dataclasses.replace(first, data=b"10.0.0.7:80")))
    readings.read(mutex(dataclasses.replace(first, data=b"10.0.0.7:81")))
    readings.read(mutex(dataclasses.replace(first, data=b"10.0.0.7:81", count=3)))
    (event,) = readings.record.events(lambda node: True, most=9)
    assert (event.what, event.label, event.detail) == ("data changed", "job 1", "10.0.0.7:81")
    seen = readings.record.find("/n", "a")
    assert seen is not None
    (span,) = seen.spans()
    assert (span.data, span.count) == ("10.0.0.7:81", 3)


def test_nodes_come_and_go(readings: Readings) -> None:
    readings.read(mutex(request(1, 1.0)))
    readings.read(mutex(request(1, 2.0)), nodes=("/n", "/new"))
    readings.read(nodes=("/new",))
    assert [each[0] for each in readings.events()] == ["node created", "node dropped", "ended"]


def test_a_reader_sees_only_what_it_may(readings: Readings) -> None:
    readings.read()
    readings.read(mutex(request(1, 0.0), waiting=2))
    record = readings.record
    assert record.events(lambda node: node != "/n", most=9) == []
    assert record.liveliest(lambda node: False, 9) == []
    assert record.longest_queues(lambda node: False, 9) == []
    assert dataclasses.astuple(record.totals(lambda node: False)) == (0, 0, 0)
    assert dataclasses.astuple(record.totals(lambda node: True)) == (1, 1, 2)
    assert record.of_session(lambda node: False, "/n", 1, 9) == []
    assert len(record.of_session(lambda node: True, "/n", 1, 9)) == 1


def test_the_record_is_bounded(readings: Readings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SEMAPHORES", 10)
    monkeypatch.setattr(module, "MOST_PAST", 20)
    record = readings.record
    readings.read(*(mutex(request(1, 1.0), name=f"m{number}") for number in range(30)))
    assert (record.full, record.totals(lambda node: True).semaphores) == (True, 10)
    readings.read()
    for number in range(1, 60):
        readings.read(mutex(request(number, 0.5)))
    seen = record.find("/n", "a")
    assert seen is not None
    assert (record.full, len(seen.past) <= 20) == (False, True)
    for _ in range(2):
        readings.now += module.KEEP + 1
        readings.read()
    assert record.find("/n", "a") is None


def test_more_owners_than_are_followed_cause_no_false_events(
    readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OWNERS", 3)
    owners = [request(number, 100.0 - number) for number in range(1, 8)]

    def registry(first: int, waiting: int) -> SemaphoreDescription:
        found = tuple(owners[first:])
        return SemaphoreDescription("a", b"", 9, len(found), False, found, waiting=waiting)

    readings.read(registry(0, 1), waiters=(request(9, 1.0),))
    readings.read(registry(1, 0), waiters=())
    readings.read(registry(1, 0), waiters=())
    assert [each[0] for each in readings.events()] == ["ended"]


def test_hostile_descriptions_are_made_visible(readings: Readings) -> None:
    hostile = dataclasses.replace(request(1, 1.0), session_description="\x1b[2J\u202e")
    readings.read(mutex(hostile))
    seen = readings.record.find("/n", "a")
    assert seen is not None
    (span,) = seen.spans()
    assert span.label.isprintable()


# Timelines


def span(
    order_id: int, joined: float | None, granted: float | None, ended: float | None = None
) -> Span:
    return Span(order_id, order_id % 10, f"job {order_id}", None, joined, granted, ended)


def test_a_timeline_has_a_row_for_each_session() -> None:
    spans = [
        span(1, 900.0, 910.0, 920.0),
        span(2, 905.0, 920.0),
        span(3, 970.0, None),
        span(11, 960.0, None),
        span(5, 10.0, 20.0, 30.0),  # long ago
    ]
    found = timeline(spans, now=1000.0, window=100.0)
    assert [(row.session_id, row.state, row.seconds) for row in found.rows] == [
        (2, "holds", 80.0),
        (3, "waits", 30.0),
        (1, "waits", 40.0),
    ]
    assert found.rows[0].bars == (Bar("waiting", 50.0, 150.0), Bar("held", 200.0, 800.0))
    assert (found.rows[0].waited, found.rows[0].held) == (15.0, 80.0)
    assert found.rows[2].bars == (
        Bar("waiting", 0.0, 100.0),
        Bar("held", 100.0, 100.0),
        Bar("waiting", 600.0, 400.0),
    )


def test_a_short_lease_is_seen_and_stays_inside() -> None:
    found = timeline([span(1, None, 999.9999)], now=1000.0, window=300.0)
    (bar,) = found.rows[0].bars
    assert (bar.left + bar.width, bar.width) == (WIDTH, NARROWEST)


def test_an_owner_since_before_the_window_fills_it() -> None:
    for granted in (None, 5.0):
        (row,) = timeline([span(1, None, granted)], now=1000.0, window=60.0).rows
        assert row.bars == (Bar("held", 0.0, WIDTH),)
    assert row.state == "holds"


def test_more_sessions_than_rows_are_counted() -> None:
    found = timeline([span(n, 990.0, None) for n in range(9)], now=1000.0, window=60.0, most=4)
    assert (len(found.rows), found.more) == (4, 5)
