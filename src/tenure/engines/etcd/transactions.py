"""Transactions about the requests of one session. Nothing is asked here."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core import rules
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.attachment import Attachment
from tenure.engines.etcd.cluster import not_found
from tenure.engines.etcd.keys import Entry, limit_of, request_value
from tenure.engines.etcd.request import EtcdRequest
from tenure.model import EPHEMERAL_LIMIT

__all__ = [
    "LARGE",
    "changing",
    "check_condition",
    "deleting",
    "handing_over",
    "joining",
    "looking",
    "may_relieve",
    "relieving",
]

LARGE = 64 * 1024
"""Bytes of data; more are sent but once, at the price of reading the queue though it be empty."""


def check_condition(request: EtcdRequest, limit: KeyValue | None, queue: Sequence[Entry]) -> bool:
    """Return true if the semaphore is as remembered; raise if the request does not fit it."""
    name, known = request.name, request.name.lasting
    name.lasting = None if limit is None else (limit.created, limit_of(limit.value))
    if request.ephemeral:
        rules.check_kind(True, limit is None, name.path, name.name)
        return True
    if name.lasting is None:
        if queue:
            rules.check_kind(False, True, name.path, name.name)
        raise not_found(name.name, name.path)
    request.limit = name.lasting[1]
    return name.lasting == known


def joining(
    session: Attachment,
    request: EtcdRequest,
    condition: bytes,
    whole: bool,
    at_once: bool,
    newest: int,
) -> bytes:
    """Join the queue.

    Args:
        session: the attachment that the request belongs to.
        request: the one that joins.
        condition: what must hold of the semaphore.
        whole: it wants all that there is.
        at_once: it does not wait.
        newest: put it only if no request has joined since this revision; 0: only if the queue
            is empty.
    """
    name = request.name
    put = [wire.put(request.key, request_value(request.count), session.id)]
    waiting = request_value(request.count, timeout=request.timeout)
    put_waiting = [wire.put(request.key, waiting, session.id)]
    if request.data:
        put_data = wire.put(request.data_key, request.data, session.id)
        put.append(put_data)
        put_waiting.append(put_data)
    get = wire.get(wire.range_(request.key))
    queue = name.newest_two if whole else name.queue
    wrong = (name.get_limit, get, name.first_request)
    if len(request.data) > LARGE and not at_once:  # which must not be sent twice
        fresh = (wire.nested(wire.txn((name.empty,), (name.drop_data,))),)
        return wire.txn(
            (session.mine, condition, wire.created_at(request.key, wire.ABSENT)),
            (*put_waiting, *(fresh if request.ephemeral else ()), queue),
            (session.get, *wrong),
        )
    if newest:  # the queue had room, and no request has joined it since
        room = wire.created_before(name.requests, newest)
        then = tuple(put)
    else:
        room = name.empty
        then = (*put, name.drop_data) if request.ephemeral else tuple(put)
    otherwise: tuple[bytes, ...]
    if at_once:
        there = name.first_request if whole else name.queue
        otherwise = (session.get, name.get_limit, get, there)
    else:
        inner = wire.txn(
            (session.mine, condition, wire.created_at(request.key, wire.ABSENT)),
            (*put_waiting, queue),
            wrong,
        )
        otherwise = (session.get, wire.nested(inner))
    return wire.txn((session.mine, condition, room), then, otherwise)


def looking(session: Attachment, request: EtcdRequest) -> bytes:
    """Read what stands before a request; of one that wants the whole, its predecessor."""
    name = request.name
    whole = request.count == request.limit
    before = wire.get(
        wire.range_(
            *(name.requests, wire.after(name.requests)),
            limit=1 if whole else 0,
            created_until=request.created - whole,
            newest_first=whole,
            oldest_first=not whole,
        )
    )
    note = wire.get(wire.range_(session.key + b"/h/%x" % request.request_id))
    return wire.txn(
        (session.mine, wire.created_at(request.key, request.created)),
        (before,),
        (session.get, note),
    )


def changing(session: Attachment, request: EtcdRequest, count: int, data: bytes | None) -> bytes:
    """Put a request again; the data is left alone if it is ``None``."""
    value = request_value(count, marked=request.marked, timeout=request.timeout)
    then = [wire.put(request.key, value, session.id)]
    if data:
        then.append(wire.put(request.data_key, data, session.id))
    elif data is not None:
        then.append(wire.delete(request.data_key))
    return wire.txn(
        (session.mine, wire.created_at(request.key, request.created)),
        tuple(then),
        (session.get,),
    )


def handing_over(session: Attachment, request: EtcdRequest) -> bytes:
    """Delete a request, and read which request is the first then."""
    then = (wire.delete(request.key), wire.delete(request.data_key), request.name.head)
    return wire.txn((session.mine,), then, (session.get,))


def may_relieve(request: EtcdRequest, leaving: EtcdRequest) -> bool:
    """Return true if one may join in the transaction that takes the other one out."""
    return (
        leaving.owns
        and leaving.created > 0
        and leaving.ephemeral
        and request.ephemeral
        and leaving.count == request.count == EPHEMERAL_LIMIT
        and len(request.data) <= LARGE
    )


def relieving(session: Attachment, request: EtcdRequest, leaving: EtcdRequest) -> bytes:
    """Join the queue behind an owner of the whole, read what stands before, and then delete it.

    It also reads which request is the first then.
    """
    name = request.name
    value = request_value(request.count, timeout=request.timeout)
    put = [wire.put(request.key, value, session.id)]
    if request.data:
        put.append(wire.put(request.data_key, request.data, session.id))
    return wire.txn(
        (
            *(session.mine, name.absent),
            wire.created_at(request.key, wire.ABSENT),
            wire.created_at(leaving.key, leaving.created),
        ),
        (
            *(*put, name.newest_two),
            *(wire.delete(leaving.key), wire.delete(leaving.data_key), name.head),
        ),
        (session.get, wire.get(wire.range_(request.key))),
    )


def deleting(session: Attachment, request: EtcdRequest) -> bytes:
    """Delete a request."""
    data = (wire.delete(request.data_key),) if request.data else ()
    return wire.txn((session.mine,), (wire.delete(request.key), *data), (session.get,))
