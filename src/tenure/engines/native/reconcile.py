"""Reconciliation of a reattached session's state with the server's.

It is a pure function of both states. Even for a server that never lost the session, and so answers
every repeated operation, its list of requests takes precedence, because it contains later changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple, TypeAlias

from tenure.engines.contract import Enqueued, Place, Removal
from tenure.engines.native.calls import NativeCall
from tenure.wire import messages as wire
from tenure.wire.values import Found

OWNED = -inf
"""In `Requests`: the request is an owner."""

Requests: TypeAlias = dict[int, float]
"""Requests of a session: the end of each one's timeout, or `OWNED`."""

REFUSED = Enqueued(Place.REFUSED, None)

REMOVALS: Mapping[str, Removal] = {
    "timed out": Removal.TIMED_OUT,
    "deleted": Removal.DELETED,
    "evicted": Removal.EVICTED,
    "unconfirmed": Removal.UNCONFIRMED,
}


def removal(word: str, limit: int | None) -> Removal:
    """Return the reason for a removal: `limit` is the new one of a waiter too large for it."""
    return REMOVALS[word] if limit is None else Removal.resized(limit)


class Plan(NamedTuple):
    """Steps of a reconciliation, in this order.

    Attributes:
        requests: the requests that are in queues now.
        placed: `Enqueue`s that need not be sent again, and their answers.
        granted: requests that have become owners.
        removed: requests that have left their queues, with the reasons.
        orphans: the ids of abandoned requests, to be withdrawn.
        made: changes of requests that need not be sent again.
        again: operations to be sent again, in order.
    """

    requests: Requests
    placed: list[tuple[NativeCall, Enqueued]]
    granted: list[Found]
    removed: list[tuple[int, Removal]]
    orphans: list[int]
    made: list[NativeCall]
    again: list[NativeCall]


def reconcile(
    requests: Requests, calls: Collection[NativeCall], answer: wire.Attached, now: float
) -> Plan:
    """Compare the client's state of a session with the server's.

    Args:
        requests: the requests that the client knows to be in queues, or has sent, without withdrawn
            ones.
        calls: its unanswered operations, in order.
        answer: the server's state of the session.
        now: the local time, in seconds.
    """
    found = {each.request_id: each for each in answer.requests}
    limits = dict(answer.resized)
    why = {number: removal(word, limits.get(number)) for number, word in answer.removed}
    withdrawn = {
        call.message.request_id for call in calls if isinstance(call.message, wire.Withdraw)
    }
    plan = Plan({}, [], [], [], [], [] if answer.kept else _made(calls, found), [])
    unplaced = _compare_calls(plan, requests, calls, found, why, withdrawn)
    for request_id, until in requests.items():
        if request_id in unplaced:
            continue
        here = found.get(request_id)
        if here is None or (until == OWNED and not here.granted):
            # An owner that waits there has lost its lease in between.
            late = Removal.TIMED_OUT if until != OWNED and until <= now else Removal.EVICTED
            plan.removed.append((request_id, why.get(request_id, late)))
            continue
        if here.granted and until != OWNED:
            plan.granted.append(here)
        plan.requests[request_id] = OWNED if here.granted else until
    plan.orphans.extend(
        request_id
        for request_id in found
        if request_id not in plan.requests and request_id not in withdrawn
    )
    return plan


def _made(calls: Collection[NativeCall], found: Mapping[int, Found]) -> list[NativeCall]:
    """Return the changes that a server without its former answers has made, as later ones show.

    If sent again, an earlier shrink would make the request grow.
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
    requests: Requests,
    calls: Collection[NativeCall],
    found: Mapping[int, Found],
    why: Mapping[int, Removal],
    withdrawn: Collection[int],
) -> Collection[int]:
    """Assign the calls to the plan; return the ids of the requests whose places are open.

    An `Enqueue` is sent again unless the server's list, or a push before the interruption, shows
    that the request was in its queue.
    """
    unplaced = set()
    for call in calls:
        message = call.message
        if not isinstance(message, wire.Enqueue):
            if call not in plan.made:
                plan.again.append(call)
            continue
        request_id = message.request_id
        here, until = found.get(request_id), requests.get(request_id)
        if here is not None:
            place = Place.GRANTED if here.granted else Place.WAITING
            plan.placed.append((call, Enqueued(place, here.order_id)))
            if until is not None and until != OWNED:
                waits_until = inf if call.until is None else call.until
                plan.requests[request_id] = OWNED if here.granted else waits_until
                unplaced.add(request_id)
        elif not call.sent or (until not in (None, OWNED) and request_id not in why):
            plan.again.append(call)
            if until is not None:
                plan.requests[request_id] = inf if call.until is None else call.until
                unplaced.add(request_id)
        else:
            left = REFUSED if request_id in withdrawn else Enqueued(Place.WAITING, None)
            plan.placed.append((call, left))
    return unplaced
