"""Session of the Redis engine: its requests and takeover, upon its attachment.

`EnqueueOperation` and `WithdrawOperation` are the operations in the words of ``operate.lua``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Place,
    Removal,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.redis import values
from tenure.engines.redis.attachment import Attachment, SessionEngine
from tenure.engines.redis.commands import SCRIPTS, LargeRead, Operation, ScriptCall, ignore, settle
from tenure.errors import EngineError, SessionExpired
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Unchanged

__all__ = ["OWNS", "WAITING", "RedisSession"]

ASKED, WAITING, OWNS = range(3)
"""States of a request, as far as they are known here."""

_init = asyncio.Future.__init__
"""The constructor of operations, which are often made: those between would cost as much again."""

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

    __slots__ = ("count", "hold", "name")

    session: RedisSession

    def __init__(
        self,
        session: RedisSession,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> None:
        _init(self, loop=session.loop)
        self.hearers = ()
        self.session = session
        self.hold = hold
        self.name = name
        self.count = count
        if count == EPHEMERAL_LIMIT and ephemeral and timeout is None and not data:
            self.words = ("m", hold, name)
        else:
            flags = (values.microseconds(timeout), "1" if ephemeral else "0")
            self.words = ("e", hold, name, values.count_text(count), data, *flags)

    def answered(self, reply: Any) -> None:
        self.session.placed(self, reply)

    def again(self) -> None:
        if self.words[0] == "m":
            self.words = ("E", self.hold, self.name, values.WHOLE, b"", "", "1")
        else:
            self.words = ("E", *self.words[1:])


class WithdrawOperation(Operation[Withdrawn]):
    """Operation that takes a request out of its queue.

    Attributes:
        may_have_run: it was sent before, without an answer.
        retried: no caller waits for it; if it fails, the session tries again later.
    """

    __slots__ = ("hold", "may_have_run", "retried")

    session: RedisSession

    def __init__(self, session: RedisSession, hold: int, *, retried: bool = False) -> None:
        _init(self, loop=session.loop)
        self.hearers = ()
        self.session = session
        self.hold = hold
        self.words = ("w", hold)
        self.may_have_run = False
        self.retried = retried

    def answered(self, reply: Any) -> None:
        if reply == 0:
            self.settle(_LEFT)
        elif reply == NOT_THERE:
            self.settle(_LEFT if self.may_have_run else Withdrawn.MISSING)
        else:
            self.session.not_withdrawn(self, reply)

    def again(self) -> None:
        self.may_have_run = True


class RedisSession(Attachment):
    """An attached session, as the contract defines it.

    Attributes:
        holds: the states of its requests.
        waited: the names for which requests wait.
    """

    def __init__(
        self,
        engine: SessionEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        super().__init__(engine, how, events, number, token, window)
        self.holds: dict[int, int] = {}
        self.waited: dict[int, str] = {}
        self._ahead: dict[int, tuple[bytes, bytes]] = {}
        self._fresh: set[int] = set()  # began to wait in this turn, unknown to their callers yet
        self._unwanted: set[int] = set()  # the store refused to remove them; tried again later

    # Requests

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        if self.over:
            self.check()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        operation = EnqueueOperation(self, hold, name, count, data, timeout, ephemeral)
        rules.check_name(name, self.path)
        self.holds[hold] = ASKED
        self._reconnector.operate(operation)
        return operation

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        hold = operation.hold
        if type(reply) is int:
            confirmer, holds = self._engine.confirmer, self.holds
            if reply == 0:
                holds.pop(hold, None)
                operation.settle(_REFUSED)
                return
            self.order_ids.highest = max(self.order_ids.highest, reply)
            if hold in holds:
                if confirmer is not None:
                    confirmer.confirm(self, partial(self._confirmed_at_once, operation, reply))
                    return
                holds[hold] = OWNS
            if not operation.done():
                operation.set_result(Enqueued(_GRANTED, reply))
            if self._ahead:
                self._push_ahead(hold)
        elif type(reply) is list and type(reply[0]) is int:
            order_id, due = reply
            self.order_ids.saw(order_id)
            self._engine.expect(due)
            if hold in self.holds:  # otherwise it has been withdrawn meanwhile
                self.holds[hold] = WAITING
                self.waited[hold] = operation.name
                if not self._fresh:
                    self.loop.call_soon(self._fresh.clear)
                self._fresh.add(hold)
            operation.settle(Enqueued(Place.WAITING, order_id))
            self._push_ahead(hold)
        elif type(reply) is list and reply[0] == b"quarantined":
            self._held_up(operation, reply[1] / 1e6)
        else:
            self.holds.pop(hold, None)
            error = self._wrong(reply)
            operation.fail(error or self._error(reply, operation.name, operation.count))

    def _held_up(self, operation: EnqueueOperation, left: float) -> None:
        """Retry a request that does not wait at the end of the quarantine, if that is soon."""
        self._engine.quarantine.prolong(left)
        if left <= _SOON and not self.over:
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self.holds.pop(operation.hold, None)
            operation.settle(_REFUSED)  # and `Engine.trouble` says why

    def _try_again(self, operation: EnqueueOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.hold in self.holds:
            self._reconnector.operate(operation)
        else:
            operation.settle(_REFUSED)  # it was withdrawn meanwhile

    def _push_ahead(self, hold: int) -> None:
        if early := self._ahead.pop(hold, None):
            self.loop.call_soon(self.push, *early)

    def _confirmed_at_once(
        self, operation: EnqueueOperation, order_id: int, error: EngineError | None
    ) -> None:
        if error is None:
            if operation.hold in self.holds:
                self.holds[operation.hold] = OWNS
            operation.settle(Enqueued(_GRANTED, order_id))
            self._push_ahead(operation.hold)
        else:
            if self.holds.pop(operation.hold, None) is not None:
                self._withdraw(operation.hold)
            operation.fail(error)

    def alter(
        self,
        hold: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        self.check()
        if hold in self.holds:
            if data is not None:
                rules.check_data(data, self.path)
            if timeout is not UNCHANGED:
                rules.check_timeout(timeout, self.path)
        return self._change(
            *("", 0 if count is None else count, "alter", hold),
            "" if count is None else values.count_text(count),
            *("0" if data is None else "1", data or b""),
            "-" if timeout is UNCHANGED else values.microseconds(timeout),
        )

    def withdraw(self, hold: int) -> Answer[Withdrawn]:
        if self.over:
            self.check()
        self._drop(hold)
        operation = WithdrawOperation(self, hold)
        self._reconnector.operate(operation)
        return operation

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal."""
        error = self._wrong(reply)
        if operation.retried:
            if not self.over:
                self._unwanted.add(operation.hold)
        elif operation.may_have_run and isinstance(error, SessionExpired):
            operation.settle(_LEFT)
        else:
            operation.fail(error or self._failure(f"it answered {reply!r}"))

    def _withdraw(self, hold: int) -> None:
        """Take a request out of its queue, without a caller."""
        if not self.over:
            self._reconnector.operate(WithdrawOperation(self, hold, retried=True))

    def _drop(self, hold: int) -> None:
        self.holds.pop(hold, None)
        if self.waited:
            self.waited.pop(hold, None)
        if self._ahead:
            self._ahead.pop(hold, None)

    # Pushes

    def push(self, kind: bytes, rest: bytes) -> None:
        """Handle an event of the session, or of one of its requests."""
        if self.over:
            return
        if kind == b"T":
            self.superseded()
        elif kind == b"E":
            self.end(rest.decode())
        elif kind == b"A":
            self.news.set()
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            hold = int(rest.split()[0])
            standing = self.holds.get(hold)
            if hold in self._fresh:
                self.loop.call_soon(self.push, kind, rest)
            elif standing == ASKED:
                self._ahead[hold] = (kind, rest)
            elif standing is not None and kind != b"g":
                self._removed(hold, REMOVALS[kind])
            elif standing == WAITING:
                self._granted(hold, int(rest.split()[1]))

    def _granted(self, hold: int, order_id: int) -> None:
        self.order_ids.saw(order_id)
        if self._engine.confirmer is None:
            self._tell_granted(hold, order_id)
        else:
            self._engine.confirmer.confirm(self, partial(self._confirmed, hold, order_id))

    def _tell_granted(self, hold: int, order_id: int) -> None:
        self.holds[hold] = OWNS
        self.waited.pop(hold, None)
        self.events.granted(hold, order_id)

    def _confirmed(self, hold: int, order_id: int, error: EngineError | None) -> None:
        if self.over or self.holds.get(hold) != WAITING:
            return
        if error is None:
            self._tell_granted(hold, order_id)
        else:
            self._removed(hold, Removal.UNCONFIRMED)

    def _removed(self, hold: int, why: Removal) -> None:
        self._drop(hold)
        with self._engine.failures.contained():
            self._withdraw(hold)  # the store need not keep the reason
        self.events.removed(hold, why)

    # Looking up

    def look_up(self, standings: Sequence[int]) -> None:
        """Look up requests in these states, in case a push was missed."""
        if self.early is not None or self.over:
            return
        while self._unwanted:
            self._withdraw(self._unwanted.pop())
        found = [hold for hold, each in self.holds.items() if each in standings]
        for start in range(0, len(found), _CHUNK):
            holds = tuple(found[start : start + _CHUNK])
            look = ScriptCall(SCRIPTS["look"], self, holds, partial(self._found, holds))
            self._reconnector.send(look)

    def _found(self, holds: tuple[int, ...], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        _, *found, due = reply
        self._engine.expect(due)
        for hold, place in zip(holds, found, strict=True):
            standing = self.holds.get(hold)
            if standing is None or standing == ASKED or self.over:
                continue
            if isinstance(place, bytes) and place.startswith(b"!"):
                self._removed(hold, REMOVALS[place[1:2]])
            elif not isinstance(place, int) or (place < 0 and standing == OWNS):
                self._lost_something()
            elif place > 0 and standing == WAITING:
                self._granted(hold, place)

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
                self.holds = {each.request_id: OWNS if each.granted else WAITING for each in found}
                self.waited = {each.request_id: each.name for each in found if not each.granted}
                self._engine.expect(reply[2])
                self.resume(found)
            settle(answer, reply)

        self._reconnector.send(LargeRead(SCRIPTS["begin"], self, (description,), begun))
        self._raise(await answer)
