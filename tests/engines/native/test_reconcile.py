"""What a session does when it is attached again, for every way in which two accounts can differ."""

from __future__ import annotations

import asyncio
from math import inf

import pytest
from msgspec import structs

from tenure.engines.contract import Enqueued, Place, Removal
from tenure.engines.native.calls import NativeCall
from tenure.engines.native.reconcile import OWNED, REFUSED, Requests, reconcile
from tenure.wire.messages import Alter, Attached, Enqueue, Withdraw
from tenure.wire.values import Found

NOW = 100.0


def call(message: Enqueue | Withdraw | Alter, *, sent: bool = True) -> NativeCall:
    made = NativeCall(message.rid, message, asyncio.get_running_loop().create_future())
    made.sent = sent
    return made


def enqueue(rid: int, hold: int) -> Enqueue:
    return Enqueue(rid, 1, hold, "m", 1, b"", None, ephemeral=False)


def found(hold: int, *, granted: bool) -> Found:
    return Found(hold, "m", 1000 + hold, 1, b"", ephemeral=False, granted=granted)


def alter_of(count: int, *, hold: int = 1, sent: bool = True) -> tuple[int, int, bool]:
    return count, hold, sent


def attached(*requests: Found, removed: list[tuple[int, str]] | None = None) -> Attached:
    return Attached(1, 1, 2, 0.0, False, list(requests), removed or [])  # type: ignore[arg-type]


async def test_what_both_sides_know_stays_as_it_is() -> None:
    requests: Requests = {1: OWNED, 2: inf, 3: NOW + 5}
    here = (found(1, granted=True), found(2, granted=False), found(3, granted=False))
    plan = reconcile(requests, [], attached(*here), NOW)
    assert plan == (requests, [], [], [], [], [], [])


async def test_a_waiter_that_owns_there_is_told() -> None:
    plan = reconcile({2: inf}, [], attached(found(2, granted=True)), NOW)
    assert plan.granted == [found(2, granted=True)]
    assert plan.requests == {2: OWNED}


@pytest.mark.parametrize(
    ("until", "removed", "why"),
    [
        (OWNED, [], Removal.EVICTED),
        (inf, [], Removal.EVICTED),
        (NOW + 1, [], Removal.EVICTED),
        (NOW - 1, [], Removal.TIMED_OUT),
        (NOW - 1, [(1, "deleted")], Removal.DELETED),
        (inf, [(1, "timed out")], Removal.TIMED_OUT),
        (OWNED, [(1, "deleted")], Removal.DELETED),
    ],
)
async def test_what_is_not_there_any_more_is_told_with_the_best_reason_known(
    until: float, removed: list[tuple[int, str]], why: Removal
) -> None:
    plan = reconcile({1: until}, [], attached(removed=removed), NOW)
    assert plan.removed == [(1, why)]
    assert plan.requests == {}


async def test_who_owned_and_waits_there_has_lost_it_and_does_not_want_another() -> None:
    plan = reconcile({1: OWNED}, [], attached(found(1, granted=False)), NOW)
    assert plan.removed == [(1, Removal.EVICTED)]
    assert plan.orphans == [1]
    assert plan.requests == {}


async def test_what_nobody_here_wants_is_withdrawn() -> None:
    plan = reconcile({}, [], attached(found(7, granted=True)), NOW)
    assert plan.orphans == [7]


@pytest.mark.parametrize("granted", [True, False])
async def test_a_request_without_an_answer_is_answered_by_the_queue(granted: bool) -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({1: inf}, [asked], attached(found(1, granted=granted)), NOW)
    place = Place.GRANTED if granted else Place.WAITING
    assert plan.placed == [(asked, Enqueued(place, 1001))]
    assert plan.requests == {1: OWNED if granted else inf}
    assert plan.again == []


@pytest.mark.parametrize("sent", [True, False])
async def test_a_request_that_is_not_there_is_asked_for_again(sent: bool) -> None:
    asked = call(enqueue(5, 1), sent=sent)
    plan = reconcile({1: inf}, [asked], attached(), NOW)
    assert plan.again == [asked]
    assert plan.requests == {1: inf}
    assert plan.removed == []


async def test_a_request_that_came_and_went_is_answered_and_its_removal_told() -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({1: inf}, [asked], attached(removed=[(1, "evicted")]), NOW)
    assert plan.placed == [(asked, Enqueued(Place.WAITING, None))]
    assert plan.removed == [(1, Removal.EVICTED)]
    assert plan.requests == {}
    assert plan.again == []


async def test_what_was_given_up_meanwhile_is_only_withdrawn() -> None:
    asked, given_up = call(enqueue(5, 1)), call(Withdraw(6, 1, 1))
    plan = reconcile({}, [asked, given_up], attached(), NOW)
    assert plan.placed == [(asked, REFUSED)]
    assert plan.again == [given_up]
    plan = reconcile({}, [asked, given_up], attached(found(1, granted=True)), NOW)
    assert plan.placed == [(asked, Enqueued(Place.GRANTED, 1001))]
    assert plan.again == [given_up]
    assert plan.orphans == []
    assert plan.requests == {}


@pytest.mark.parametrize("removed", [[], [(1, "deleted")]])
async def test_a_grant_that_came_before_its_answer_is_not_asked_for_again(
    removed: list[tuple[int, str]],
) -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({1: OWNED}, [asked], attached(removed=removed), NOW)
    assert plan.placed == [(asked, Enqueued(Place.WAITING, None))]
    assert plan.removed == [(1, Removal.DELETED if removed else Removal.EVICTED)]
    assert (plan.requests, plan.again) == ({}, [])


async def test_a_grant_that_came_before_its_answer_is_still_there() -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({1: OWNED}, [asked], attached(found(1, granted=True)), NOW)
    assert plan.placed == [(asked, Enqueued(Place.GRANTED, 1001))]
    assert plan.requests == {1: OWNED}
    assert (plan.granted, plan.removed, plan.again) == ([], [], [])


async def test_a_grant_that_came_before_its_answer_and_waits_there_is_lost() -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({1: OWNED}, [asked], attached(found(1, granted=False)), NOW)
    assert plan.removed == [(1, Removal.EVICTED)]
    assert plan.orphans == [1]
    assert (plan.requests, plan.again) == ({}, [])


async def test_what_was_removed_before_its_answer_is_not_asked_for_again() -> None:
    asked = call(enqueue(5, 1))
    plan = reconcile({}, [asked], attached(), NOW)
    assert plan.placed == [(asked, Enqueued(Place.WAITING, None))]
    assert (plan.requests, plan.removed, plan.again) == ({}, [], [])


async def test_everything_else_is_asked_again_in_its_order() -> None:
    calls = [
        call(Alter(5, 1, 1, 2, None)),
        call(enqueue(6, 2), sent=False),
        call(Withdraw(7, 1, 3)),
    ]
    plan = reconcile({1: OWNED, 2: inf}, calls, attached(found(1, granted=True)), NOW)
    assert plan.again == calls
    assert plan.requests == {1: OWNED, 2: inf}


def alter(rid: int, hold: int, count: int | None, *, sent: bool = True) -> NativeCall:
    return call(Alter(rid, 1, hold, count, b"x", False, None), sent=sent)


async def test_a_change_is_not_asked_again_when_a_later_one_shows_that_it_was_made() -> None:
    first, second, data, third = alter(1, 1, 5), alter(2, 1, 3), alter(3, 1, None), alter(4, 1, 1)
    here = attached(found(1, granted=True))
    plan = reconcile({1: OWNED}, [first, second, data, third], here, NOW)
    assert plan.made == [second, first]
    assert plan.again == [data, third]


async def test_a_server_that_has_had_the_session_all_the_time_answers_every_change() -> None:
    changes = [alter(1, 1, 5), alter(2, 1, 1)]
    here = attached(found(1, granted=True))
    plan = reconcile({1: OWNED}, changes, structs.replace(here, kept=True), NOW)
    assert (plan.made, plan.again) == ([], changes)


@pytest.mark.parametrize(
    "changes",
    [
        [alter_of(5)],
        [alter_of(5), alter_of(2)],
        [alter_of(5), alter_of(1, sent=False)],
        [alter_of(5), alter_of(1, hold=2)],
        [alter_of(5), alter_of(1, hold=3)],
    ],
)
async def test_changes_of_which_nothing_is_seen_are_asked_again(
    changes: list[tuple[int, int, bool]],
) -> None:
    """The one request has one token there, and the other too; of a third there is nothing."""
    calls = [
        alter(rid, hold, count, sent=sent) for rid, (count, hold, sent) in enumerate(changes, 1)
    ]
    here = attached(found(1, granted=True), found(2, granted=True))
    plan = reconcile({1: OWNED, 2: OWNED}, calls, here, NOW)
    assert (plan.made, plan.again) == ([], calls)
