"""Recorded work with limits is in order and ends, and what is made false in it is found.

Nothing here fails, so that every request ends by itself: no order of arguments is a deadlock, and
no key starves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeVar

import pytest

import tenure
from tenure._client import several
from tenure.testing import VirtualClock, VirtualLoop
from tenure.testing.history import (
    Called,
    Deadlocked,
    Described,
    Gone,
    Granted,
    Held,
    History,
    Journal,
    Leaves,
    Record,
    Requested,
    Returned,
    Takes,
    Took,
    check,
)
from tests.guarantees.vocabulary import MEMORY, guarantee
from tests.testing.history.recorded import PER_KEY, Recorded, Work

SEEDS = range(6)
TASKS = 8

R = TypeVar("R")


@pytest.fixture(autouse=True)
def in_virtual_time(loop_factory: Callable[[], VirtualLoop]) -> None:
    """All of this takes no time."""


def explained(records: list[Record]) -> str:
    return "\n\n".join(map(str, check(History(records))))


def of(records: list[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


@guarantee("none", "one owner", "in order", "others proceed", on=MEMORY)
@pytest.mark.parametrize("kind", ["take_all", "take_any", "share", "resize", "nest", "take_rate"])
async def test_all_work_ends_and_breaks_no_rule(clock: VirtualClock, kind: str) -> None:
    granted = 0
    for seed in SEEDS:
        recorded = Recorded(clock, seed)
        await recorded.run(getattr(recorded, kind), TASKS)
        assert not explained(recorded.records)
        granted += sum(isinstance(each, Granted | Took) for each in recorded.records)
    assert granted > 25 * len(SEEDS)


async def any_of_them(
    random: Random, kinds: list[Work], client: tenure.Client, journal: Journal
) -> None:
    await random.choice(kinds)(client, journal)


async def test_many_things_at_once_end_and_break_no_rule(clock: VirtualClock) -> None:
    for seed in SEEDS:
        recorded = Recorded(clock, seed)
        kinds: list[Work] = [recorded.take_all, recorded.take_any, recorded.share]
        await recorded.run(partial(any_of_them, recorded.random, kinds), 2 * TASKS)
        assert not explained(recorded.records)


@guarantee("none", "in order", "others proceed", on=MEMORY)
async def test_no_key_waits_for_more_than_a_turn_of_each_other_key(clock: VirtualClock) -> None:
    for seed in SEEDS:
        recorded = Recorded(clock, seed)
        await recorded.run(recorded.share, 3 * TASKS)
        assert most_grants_before(recorded.records) <= 2 * PER_KEY  # those of two other keys


def most_grants_before(records: list[Record]) -> int:
    """The greatest number of grants to other keys before that to the only request of a key."""
    present: dict[str, dict[str, int]] = defaultdict(dict)  # requests by key, and grants since
    keys: dict[str, str] = {}
    most = 0
    for record in records:
        if isinstance(record, Requested) and "/key/" in record.name:
            keys[record.request] = record.name
            present[record.name][record.request] = 0
        elif isinstance(record, Granted) and record.request in keys:
            mine = keys[record.request]
            for key, those in present.items():
                if key != mine and len(those) == 1:
                    [label] = those
                    those[label] += 1
            most = max(most, present[mine][record.request])
            present[mine][record.request] = -len(records)  # it does not wait any more
        elif isinstance(record, Leaves | Gone) and record.request in keys:
            present[keys[record.request]].pop(record.request, None)
    return most


async def test_a_deadlock_is_found(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "sorted", lambda locks, key: list(locks), raising=False)
    recorded = Recorded(clock, 1)
    with pytest.raises(TimeoutError):
        await recorded.run(recorded.take_all, TASKS)


# What is made false. Each changes the records of one kind of work.


def instead(records: list[Record], *changes: tuple[Record, Record]) -> list[Record]:
    """The records with some replaced."""
    new = {id(old): changed for old, changed in changes}
    found = [new.get(id(record), record) for record in records]
    return sorted(found, key=lambda record: record.at)


def asked_for(records: list[Record]) -> dict[str, Requested]:
    return {each.request: each for each in of(records, Requested)}


def in_a_row(records: list[Record], name: str, more_than: int) -> tuple[Granted, Leaves, Granted]:
    """Two grants that follow each other and do not fit together, with the end of the first."""
    asked = asked_for(records)
    left = {each.request: each for each in of(records, Leaves)}
    grants = [each for each in of(records, Granted) if asked[each.request].name == name]
    return next(
        (one, left[one.request], other)
        for number, one in enumerate(grants)
        for other in grants[number + 1 :]
        if one.request in left
        and one.at < left[one.request].at <= other.at
        and asked[one.request].count + asked[other.request].count > more_than
    )


def granted_too_early(records: list[Record], name: str, more_than: int) -> list[Record]:
    first, end, second = in_a_row(records, name, more_than)
    at, asked = (first.at + end.at) / 2, asked_for(records)[second.request]
    return instead(
        records,
        (second, replace(second, at=at)),
        (asked, replace(asked, at=min(asked.at, at))),
    )


def hold_a_part_too_early(records: list[Record]) -> list[Record]:
    """One of several locks is granted while another caller has it."""
    return granted_too_early(records, "a", 1)


def hold_two_of_any(records: list[Record]) -> list[Record]:
    """A lock that was withdrawn for another one is held nevertheless."""
    gone = next(each for each in of(records, Gone) if each.why == "withdrawn")
    return sorted([*records, Held(gone.at, gone.request, 1e9)], key=lambda record: record.at)


def hold_too_much_of_a_key(records: list[Record]) -> list[Record]:
    """A request has a key's tokens before the one that had them has left."""
    return granted_too_early(records, "shared/key/a", PER_KEY)


def queue_too_much_of_a_key(records: list[Record]) -> list[Record]:
    """A request is in the queue of all before it has tokens of its key."""
    first, end, second = in_a_row(records, "shared/key/a", PER_KEY)
    ids = {each.request: each.order_id or 0 for each in of(records, Granted)}
    here, there = (ids[each.request.removesuffix("/key")] for each in (first, second))
    shown = Described((first.at + end.at) / 2, "p", "/default", "shared", (here,), (there,))
    return sorted([*records, shown], key=lambda record: record.at)


def overtake_within_a_key(records: list[Record]) -> list[Record]:
    """A request enters the queue of all before an earlier one of its key."""
    first, _, second = in_a_row(records, "shared/key/a", PER_KEY)
    return instead(
        records,
        (first, replace(first, order_id=second.order_id)),
        (second, replace(second, order_id=first.order_id)),
    )


def resize_to_less(records: list[Record]) -> list[Record]:
    """The limit was lower than what was granted."""
    asked, calls = asked_for(records), of(records, Called)
    ends = {each.call: each.at for each in of(records, Returned)}
    call = next(
        call
        for call in calls
        for each in of(records, Granted)
        if asked[each.request].count > 1
        and ends[call.call] < asked[each.request].at
        and not any(call.at <= other.at <= each.at for other in calls if other is not call)
    )
    return instead(records, (call, replace(call, argument=b"1")))


def take_too_much(records: list[Record]) -> list[Record]:
    """As many tokens again are granted, as by a refund that is carried out twice."""
    took = next(each for each in of(records, Took) if each.granted)
    takes = next(each for each in of(records, Takes) if each.take == took.take)
    again = replace(takes, take="again", count=takes.burst), replace(took, take="again")
    return sorted([*records, *again], key=lambda record: record.at)


def overtake_a_take(records: list[Record]) -> list[Record]:
    """A take is granted before one whose answer had come when it was sent."""
    sent = {each.take: each for each in of(records, Takes)}
    granted = [each for each in of(records, Took) if each.granted]
    refunded = {getattr(each, "take", "") for each in records} - sent.keys()
    first, second = next(
        (one, other)
        for one in granted
        for other in granted
        if one.at < sent[other.take].at and one.take not in refunded and not other.waited
    )
    return instead(records, (second, replace(second, granted=(first.granted or 0) - 1)))


def report_too_late(records: list[Record]) -> list[Record]:
    """The last wait of a deadlock begins when the other tasks have left, and their sessions too."""
    label = of(records, Deadlocked)[0].request
    changes = [
        (each, replace(each, at=each.at + 1000.0))
        for each in records
        if getattr(each, "request", None) == label
    ]
    return instead(records, *changes)


def wait_for_nothing(records: list[Record]) -> list[Record]:
    """A task in a deadlock waits for what no other task of it has."""
    report = next(each for each in of(records, Deadlocked) if len(each.waits) == 2)
    asked = asked_for(records)[report.waits[0]]
    return instead(records, (asked, replace(asked, name="z")))


def report_a_granted_wait(records: list[Record]) -> list[Record]:
    """A task in a deadlock had been granted what it waits for before another one waited."""
    asked = asked_for(records)
    waits = [
        sorted((asked[label] for label in each.waits), key=lambda request: request.at)
        for each in of(records, Deadlocked)
    ]
    first = next(each[0] for each in waits if each[0].at < each[-1].at)
    [granted] = [each for each in of(records, Granted) if each.request == first.request]
    return instead(records, (granted, replace(granted, at=first.at)))


def begin_before_the_grant(records: list[Record]) -> list[Record]:
    """A program does not wait for the time of its grant."""
    took = next(each for each in of(records, Took) if each.waited > 0.1)
    return instead(records, (took, replace(took, at=took.at - took.waited / 2)))


@pytest.mark.parametrize(
    ("kind", "make_false", "rule"),
    [
        ("take_all", hold_a_part_too_early, "limit"),
        ("take_any", hold_two_of_any, "never again"),
        ("share", hold_too_much_of_a_key, "limit"),
        ("share", queue_too_much_of_a_key, "turns"),
        ("share", overtake_within_a_key, "turns"),
        ("resize", resize_to_less, "limit"),
        ("nest", report_too_late, "deadlock"),
        ("nest", wait_for_nothing, "deadlock"),
        ("nest", report_a_granted_wait, "deadlock"),
        ("take_rate", take_too_much, "rate"),
        ("take_rate", overtake_a_take, "rate"),
        ("take_rate", begin_before_the_grant, "rate"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_what_is_made_false_is_found(
    clock: VirtualClock,
    kind: str,
    make_false: Callable[[list[Record]], list[Record]],
    rule: str,
) -> None:
    for seed in SEEDS[:3]:
        recorded = Recorded(clock, seed)
        await recorded.run(getattr(recorded, kind), TASKS)
        false = make_false(recorded.records)
        found = {violation.rule for violation in check(History(false))}
        assert rule in found, seed
