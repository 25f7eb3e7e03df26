"""Session of the Redis engine: its requests and takeover, upon its attachment.

`EnqueueOperation` and `WithdrawOperation` are the operations in the words of ``operate.lua``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from tenure.core import rules
from tenure.engines._kit.commands.replies import ignore, settle
from tenure.engines._kit.commands.values import WHOLE, count_text, microseconds
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.redis import values
from tenure.engines.redis.attachment import RedisAttachment
from tenure.engines.redis.commands import SCRIPTS, LargeRead, Operation, ScriptCall
from tenure.errors import EngineError, SessionExpired
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Unchanged

__all__ = ["OWNS", "WAITING", "RedisSession"]

SENT, WAITING, OWNS = range(3)
"""States of a request, as far as they are known here."""

_init = asyncio.Future.__init__
"""Constructor of operations, called directly because it is on the hot path."""

REMOVALS = {b"t": Removal.TIMED_OUT, b"x": Removal.DELETED, b"e": Removal.EVICTED}

_GRANTED, _LEFT = Place.GRANTED, Withdrawn.LEFT
_REFUSED = Enqueued(Place.REFUSED, None)
NOT_THERE = -1
"""The answer to the withdrawal of a request that was in no queue."""

_CHUNK = 256
_SOON = 4.5
"""Seconds that a request which does not wait spends in a quarantine, at the most."""


class EnqueueOperation(Operation[Enqueued]):
    """Operation that adds a request to a queue."""

    __slots__ = ("count", "name", "request_id")

    session: RedisSession

    def __init__(
        self,
        session: RedisSession,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.name = name
        self.count = count
        if count == EPHEMERAL_LIMIT and ephemeral and timeout is None and not data:
            self.words = ("m", request_id, name)
        else:
            flags = (microseconds(timeout), "1" if ephemeral else "0")
            self.words = ("e", request_id, name, count_text(count), data, *flags)

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.placed(self, reply)

    def again(self) -> None:
        if self.words[0] == "m":
            self.words = ("E", self.request_id, self.name, WHOLE, b"", "", "1")
        else:
            self.words = ("E", *self.words[1:])


class WithdrawOperation(Operation[Withdrawn]):
    """Operation that takes a request out of its queue.

    Attributes:
        may_have_run: it was sent before, without an answer.
        retried: no caller waits for it; if it fails, the session tries again later.
    """

    __slots__ = ("may_have_run", "request_id", "retried")

    session: RedisSession

    def __init__(self, session: RedisSession, request_id: int, *, retried: bool = False) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.words = ("w", request_id)
        self.may_have_run = False
        self.retried = retried

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        if reply == 0:
            self.settle(_LEFT)
        elif reply == NOT_THERE:
            self.settle(_LEFT if self.may_have_run else Withdrawn.MISSING)
        else:
            self.session.not_withdrawn(self, reply)

    def again(self) -> None:
        self.may_have_run = True


class RedisSession(RedisAttachment):
    """An attached session, as the contract defines it."""

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue."""
        if self.over:
            self.check()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        operation = EnqueueOperation(self, request_id, name, count, data, timeout, ephemeral)
        rules.check_name(name, self.path)
        self.requests[request_id] = SENT
        self._reconnector.operate(operation)
        return operation

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        request_id = operation.request_id
        if type(reply) is int:
            confirmer, requests = self._engine.confirmer, self.requests
            if reply == 0:
                requests.pop(request_id, None)
                self._engine.quarantine.end()
                operation.settle(_REFUSED)
                return
            self.order_ids.highest = max(self.order_ids.highest, reply)
            if request_id in requests:
                if confirmer is not None:
                    confirmer.confirm(self, partial(self._confirmed_at_once, operation, reply))
                    return
                requests[request_id] = OWNS
            if not operation.done():
                operation.set_result(Enqueued(_GRANTED, reply))
            if self._ahead:
                self._push_ahead(request_id)
        elif type(reply) is list and type(reply[0]) is int:
            order_id, due = reply
            self.order_ids.saw(order_id)
            self._engine.expect(due)
            if request_id in self.requests:  # otherwise it has been withdrawn meanwhile
                self.requests[request_id] = WAITING
                self.waited[request_id] = operation.name
                if not self._fresh:
                    self.loop.call_soon(self._fresh.clear)
                self._fresh.add(request_id)
            operation.settle(Enqueued(Place.WAITING, order_id))
            self._push_ahead(request_id)
        elif type(reply) is list and reply[0] == b"quarantined":
            self._held_up(operation, reply[1] / 1e6)
        else:
            self.requests.pop(request_id, None)
            error = self._wrong(reply)
            operation.fail(error or self._error(reply, operation.name, operation.count))

    def _held_up(self, operation: EnqueueOperation, left: float) -> None:
        """Retry a request that does not wait at the end of the quarantine, if that is soon."""
        self._engine.quarantine.prolong(left)
        if left <= _SOON and not self.over:
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self.requests.pop(operation.request_id, None)
            operation.settle(_REFUSED)  # and `Engine.trouble` says why

    def _try_again(self, operation: EnqueueOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.request_id in self.requests:
            self._reconnector.operate(operation)
        else:
            operation.settle(_REFUSED)  # it was withdrawn meanwhile

    def _push_ahead(self, request_id: int) -> None:
        if early := self._ahead.pop(request_id, None):
            self.loop.call_soon(self.push, *early)

    def _confirmed_at_once(
        self, operation: EnqueueOperation, order_id: int, error: EngineError | None
    ) -> None:
        if error is None:
            if operation.request_id in self.requests:
                self.requests[operation.request_id] = OWNS
            operation.settle(Enqueued(_GRANTED, order_id))
            self._push_ahead(operation.request_id)
        else:
            if self.requests.pop(operation.request_id, None) is not None:
                self._withdraw(operation.request_id)
            operation.fail(error)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self.check()
        if request_id in self.requests:
            if data is not None:
                rules.check_data(data, self.path)
            if timeout is not UNCHANGED:
                rules.check_timeout(timeout, self.path)
        return self._change(
            *("", 0 if count is None else count, "alter", request_id),
            "" if count is None else count_text(count),
            *("0" if data is None else "1", data or b""),
            "-" if timeout is UNCHANGED else microseconds(timeout),
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        self._drop(request_id)
        operation = WithdrawOperation(self, request_id)
        self._reconnector.operate(operation)
        return operation

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal."""
        error = self._wrong(reply)
        if operation.retried:
            if not self.over:
                self._unremoved.add(operation.request_id)
        elif operation.may_have_run and isinstance(error, SessionExpired):
            operation.settle(_LEFT)
        else:
            operation.fail(error or self._failure(f"unexpected reply {reply!r}"))

    def _withdraw(self, request_id: int) -> None:
        """Take a request out of its queue, without a caller."""
        if not self.over:
            self._reconnector.operate(WithdrawOperation(self, request_id, retried=True))

    def _drop(self, request_id: int) -> None:
        self.requests.pop(request_id, None)
        if self.waited:
            self.waited.pop(request_id, None)
        if self._ahead:
            self._ahead.pop(request_id, None)

    def push(self, kind: bytes, rest: bytes) -> None:
        """Handle an event of the session, or of one of its requests."""
        if self.over:
            return
        if kind == b"T":
            self.superseded()
        elif kind == b"E":
            self.end(rest.decode())
        elif kind == b"A":
            self.recheck.set()
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            request_id = int(rest.split()[0])
            standing = self.requests.get(request_id)
            if request_id in self._fresh:
                self.loop.call_soon(self.push, kind, rest)
            elif standing == SENT:
                self._ahead[request_id] = (kind, rest)
            elif standing is not None and kind != b"g":
                self._removed(request_id, REMOVALS[kind])
            elif standing == WAITING:
                self._granted(request_id, int(rest.split()[1]))

    def _granted(self, request_id: int, order_id: int) -> None:
        self.order_ids.saw(order_id)
        if self._engine.confirmer is None:
            self._report_granted(request_id, order_id)
        else:
            self._engine.confirmer.confirm(self, partial(self._confirmed, request_id, order_id))

    def _report_granted(self, request_id: int, order_id: int) -> None:
        self.requests[request_id] = OWNS
        self.waited.pop(request_id, None)
        self.events.granted(request_id, order_id)

    def _confirmed(self, request_id: int, order_id: int, error: EngineError | None) -> None:
        if self.over or self.requests.get(request_id) != WAITING:
            return
        if error is None:
            self._report_granted(request_id, order_id)
        else:
            self._removed(request_id, Removal.UNCONFIRMED)

    def _removed(self, request_id: int, why: Removal) -> None:
        self._drop(request_id)
        with self._engine.failures.contained():
            self._withdraw(request_id)  # the store need not keep the reason
        self.events.removed(request_id, why)

    # Looking up

    def look_up(self, standings: Sequence[int]) -> None:
        """Look up requests in these states, in case a push was missed."""
        if self.early is not None or self.over:
            return
        while self._unremoved:
            self._withdraw(self._unremoved.pop())
        found = [request_id for request_id, each in self.requests.items() if each in standings]
        for start in range(0, len(found), _CHUNK):
            requests = tuple(found[start : start + _CHUNK])
            look = ScriptCall(SCRIPTS["look"], self, requests, partial(self._found, requests))
            self._reconnector.send(look)

    def _found(self, requests: tuple[int, ...], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        _, *found, due = reply
        self._engine.expect(due)
        for request_id, place in zip(requests, found, strict=True):
            standing = self.requests.get(request_id)
            if standing is None or standing == SENT or self.over:
                continue
            if isinstance(place, bytes) and place.startswith(b"!"):
                self._removed(request_id, REMOVALS[place[1:2]])
            elif not isinstance(place, int) or (place < 0 and standing == OWNS):
                self._lost_something()
            elif place > 0 and standing == WAITING:
                self._granted(request_id, place)

    def _lost_something(self) -> None:
        """End the session, because the store has lost some grant or place that it reported."""
        self.end("the store has lost what it had granted or queued (a failover, or old data)")
        self._send_leave("close", ignore)

    # Takeover

    async def begin(self, description: str) -> None:
        """Set the description of a session that was taken over, and resume its requests."""
        answer: asyncio.Future[Any] = self.loop.create_future()

        def begun(reply: Any) -> None:
            if self._wrong(reply) is None and not self.over:
                found = values.recovered(reply[1])
                self.requests = {
                    each.request_id: OWNS if each.granted else WAITING for each in found
                }
                self.waited = {each.request_id: each.name for each in found if not each.granted}
                self._engine.expect(reply[2])
                self.resume(found)
            settle(answer, reply)

        self._reconnector.send(LargeRead(SCRIPTS["begin"], self, (description,), begun))
        self._raise(await answer)
