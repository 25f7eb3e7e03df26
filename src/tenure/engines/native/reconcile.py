"""Reconciliation of a reattached session's state with the server's.

A pure function of what both sides have written down. A server that has had the session all the
time would answer every operation that is sent again; even then the list of requests is believed
first, because it also tells what has happened since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple, TypeAlias

from tenure.engines.contract import Enqueued, Place, Removal
from tenure.engines.native.calls import Call
from tenure.wire import messages as wire
from tenure.wire.values import Found

__all__ = ["OWNED", "REFUSED", "REMOVALS", "Holds", "Plan", "reconcile"]

OWNED = -inf
"""In `Holds`: the request is an owner."""

Holds: TypeAlias = dict[int, float]
"""What a session has in queues, by its holds: until when each waits, or `OWNED`."""

REFUSED = Enqueued(Place.REFUSED, None)

REMOVALS: Mapping[str, Removal] = {
    "timed out": Removal.TIMED_OUT,
    "deleted": Removal.DELETED,
    "evicted": Removal.EVICTED,
    "unconfirmed": Removal.UNCONFIRMED,
}


class Plan(NamedTuple):
    """Steps of a reconciliation, in this order.

    Attributes:
        holds: what the session has in queues now.
        placed: `Enqueue`s that need not be asked again, and their answers.
        granted: requests that have become owners.
        removed: requests that are out of their queues, and why.
        orphans: the ids of abandoned requests, to be withdrawn.
        made: changes of requests that need not be asked again.
        again: operations to be asked again, in order.
    """

    holds: Holds
    placed: list[tuple[Call, Enqueued]]
    granted: list[Found]
    removed: list[tuple[int, Removal]]
    orphans: list[int]
    made: list[Call]
    again: list[Call]


def reconcile(holds: Holds, calls: Collection[Call], answer: wire.Attached, now: float) -> Plan:
    """Compare.

    Args:
        holds: what the session has in queues, as far as it knows, and what it has asked for; what
            it has withdrawn is not among it.
        calls: its unanswered operations, in order.
        answer: what the server has of it.
        now: the local time, in seconds.
    """
    found = {each.request_id: each for each in answer.requests}
    why = {request_id: REMOVALS[word] for request_id, word in answer.removed}
    withdrawn = {
        call.message.request_id for call in calls if isinstance(call.message, wire.Withdraw)
    }
    plan = Plan({}, [], [], [], [], [] if answer.kept else _made(calls, found), [])
    asked = _compare_calls(plan, calls, found, why, withdrawn)
    for request_id, until in holds.items():
        if request_id in asked:
            continue
        here = found.get(request_id)
        if here is None or (until == OWNED and not here.granted):
            # (What owned and waits now has lost what it owned, whatever came between.)
            late = Removal.TIMED_OUT if until != OWNED and until <= now else Removal.EVICTED
            plan.removed.append((request_id, why.get(request_id, late)))
            continue
        if here.granted and until != OWNED:
            plan.granted.append(here)
        plan.holds[request_id] = OWNED if here.granted else until
    plan.orphans.extend(
        request_id
        for request_id in found
        if request_id not in plan.holds and request_id not in withdrawn
    )
    return plan


def _made(calls: Collection[Call], found: Mapping[int, Found]) -> list[Call]:
    """The changes that a server has made which does not know it any more, as one after them shows.

    To shrink a request to what it was to have before it had less would be to let it grow.
    """
    made, seen = [], set()
    for call in reversed(list(calls)):
        message = call.message
        if not (call.sent and isinstance(message, wire.Alter)) or message.count is None:
            continue
        here = found.get(message.request_id)
        if here is None:
            continue
        if message.count == here.count:
            seen.add(message.request_id)
        elif message.count > here.count and message.request_id in seen:
            made.append(call)
    return made


def _compare_calls(
    plan: Plan,
    calls: Collection[Call],
    found: Mapping[int, Found],
    why: Mapping[int, Removal],
    withdrawn: Collection[int],
) -> Collection[int]:
    """Sort the calls out; returns the holds that were asked for and not answered."""
    asked = set()
    for call in calls:
        message = call.message
        if not isinstance(message, wire.Enqueue):
            if call not in plan.made:
                plan.again.append(call)
            continue
        request_id, here = message.request_id, found.get(message.request_id)
        asked.add(request_id)
        waits_until = inf if call.until is None else call.until
        if here is not None:
            place = Place.GRANTED if here.granted else Place.WAITING
            plan.placed.append((call, Enqueued(place, here.order_id)))
        elif call.sent and request_id in withdrawn:
            plan.placed.append((call, REFUSED))
        elif call.sent and request_id in why:
            plan.placed.append((call, Enqueued(Place.WAITING, None)))
            plan.removed.append((request_id, why[request_id]))
            continue
        else:
            plan.again.append(call)
        if request_id not in withdrawn:
            plan.holds[request_id] = OWNED if here is not None and here.granted else waits_until
    return asked
