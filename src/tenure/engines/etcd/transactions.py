"""Transactions about the requests of one session, built and prepared.

Nothing is asked here, and nothing is known but what is said again and again: the transactions that
join and leave without data differ in the number of the hold alone, and are prepared once for each
name, as long as the attachment has the same number.
"""

from __future__ import annotations

from tenure.engines.etcd import wire
from tenure.engines.etcd.attachment import Attachment
from tenure.engines.etcd.keys import request_value
from tenure.engines.etcd.request import EtcdRequest

__all__ = ["LARGE", "Transactions"]

LARGE = 64 * 1024
"""Bytes of data; more are sent but once, at the price of reading the queue though it be empty."""

_ANY_HOLD, _LAST_HOLD = b"\xfftenure: a hold\xff", 2**64 - 1
"""What stands for the number of a hold in a prepared transaction, and is as long."""
_MOST_TEMPLATES = 4096


class Transactions:
    """Builder of the transactions of one session."""

    def __init__(self, session: Attachment) -> None:
        self._session = session
        self._any_hold = b"%016x-" % session.id + _ANY_HOLD
        self._templates: dict[tuple[object, ...], bytes] = {}
        self._prepared_for = 0

    def joining(
        self, request: EtcdRequest, condition: bytes, whole: bool, at_once: bool, newest: int
    ) -> bytes:
        """Join the queue.

        Args:
            condition: what must hold of the semaphore.
            whole: it wants all that there is.
            at_once: it does not wait.
            newest: put it only if no request has joined since this revision; 0: only if the queue
                is empty.
        """
        session, name = self._session, request.name
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

    def joining_as_before(
        self, request: EtcdRequest, condition: bytes, whole: bool, at_once: bool
    ) -> bytes:
        """The same for one without data: only the number of the hold is another one."""
        if request.hold > _LAST_HOLD:
            return self.joining(request, condition, whole, at_once, 0)
        timeout = None if at_once else request.timeout
        what = (request.name.name, request.count, request.ephemeral, condition, at_once, timeout)
        template = self._template(what)
        if template is None:
            hold, request.key = request.key, request.name.requests + self._any_hold
            template = self.joining(request, condition, whole, at_once, 0)
            request.key = hold
            self._templates[what] = template
        return template.replace(_ANY_HOLD, b"%016x" % request.hold)

    def _template(self, what: tuple[object, ...]) -> bytes | None:
        """Return the transaction prepared for that under the number of this attachment."""
        if self._prepared_for != self._session.version or len(self._templates) >= _MOST_TEMPLATES:
            self._prepared_for = self._session.version
            self._templates.clear()
        return self._templates.get(what)

    def looking(self, request: EtcdRequest) -> bytes:
        """Read what stands before a request; of one that wants the whole, its predecessor."""
        session, name = self._session, request.name
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
        note = wire.get(wire.range_(session.key + b"/h/%x" % request.hold))
        return wire.txn(
            (session.mine, wire.created_at(request.key, request.created)),
            (before,),
            (session.get, note),
        )

    def changing(self, request: EtcdRequest, count: int, data: bytes | None) -> bytes:
        """Put a request again; the data is left alone if it is ``None``."""
        session = self._session
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

    def handing_over(self, request: EtcdRequest) -> bytes:
        """Delete a request, and read which request is the first then."""
        session = self._session
        then = (wire.delete(request.key), wire.delete(request.data_key), request.name.head)
        return wire.txn((session.mine,), then, (session.get,))

    def relieving(self, request: EtcdRequest, leaving: EtcdRequest) -> bytes:
        """Join the queue behind an owner of the whole, read what stands before, and then delete it.

        It also reads which request is the first then.
        """
        session, name = self._session, request.name
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

    def deleting(self, request: EtcdRequest) -> bytes:
        """Delete a request."""
        session, key = self._session, request.key
        if request.data or request.hold > _LAST_HOLD:
            then = (wire.delete(key), wire.delete(request.data_key))
            return wire.txn((session.mine,), then, (session.get,))
        template = self._template((request.name.name,))
        if template is None:
            key = request.name.requests + self._any_hold
            template = wire.txn((session.mine,), (wire.delete(key),), (session.get,))
            self._templates[request.name.name,] = template
        return template.replace(_ANY_HOLD, request.key[-16:])
