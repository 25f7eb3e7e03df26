"""Session of the PostgreSQL engine: its requests and takeover, upon its attachment."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tenure.core import rules
from tenure.engines._kit.commands.values import count_text, microseconds
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Place,
    Removal,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.postgresql import values
from tenure.engines.postgresql.attachment import PostgresAttachment, PostgresSessionEngine
from tenure.engines.postgresql.guarded import GuardedRelease
from tenure.engines.postgresql.statements import Operation, SessionCall, enqueue_words
from tenure.errors import SessionExpired
from tenure.model import UNCHANGED, Unchanged

__all__ = ["OWNS", "WAITING", "PostgresSession"]

SENT, WAITING, OWNS = range(3)
"""States of a request, as far as they are known here."""

_REMOVALS = {"t": Removal.TIMED_OUT, "x": Removal.DELETED, "e": Removal.EVICTED}
_REFUSED = Enqueued(Place.REFUSED, None)
_SOON = 4.5
"""Seconds that a request which does not wait spends in a quarantine, at the most."""


class PostgresEnqueue(Operation[Enqueued]):
    """Operation that adds a request to a queue."""

    __slots__ = ("count", "name", "request_id")

    session: PostgresSession

    def __init__(
        self,
        session: PostgresSession,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        *,
        ephemeral: bool,
    ) -> None:
        """Describe the request."""
        super().__init__(session, session.loop)
        self.request_id = request_id
        self.name = name
        self.count = count
        self.words = enqueue_words(request_id, name, count, data, timeout, ephemeral=ephemeral)

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.placed(self, reply)

    def repeat(self) -> None:
        """Have an earlier sending looked up first."""
        if self.words[0] == "m":
            self.words = [*self.words, None, "", "", "1"]
        self.words[0] = "E"


class PostgresWithdraw(Operation[Withdrawn]):
    """Operation that takes a request out of its queue.

    Attributes:
        may_have_run: it was sent before, without an answer.
        guarded: its wait for a transaction that guards the lease.
    """

    __slots__ = ("guarded", "may_have_run", "request_id")

    session: PostgresSession

    def __init__(self, session: PostgresSession, request_id: int, name: str) -> None:
        """Describe the withdrawal."""
        super().__init__(session, session.loop)
        self.request_id = request_id
        self.words = ["w", request_id, values.to_text(name)]
        self.may_have_run = False
        self.guarded: GuardedRelease | None = None

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.withdrawn(self, reply)

    def repeat(self) -> None:
        """Note that a request which is not there may have been there before."""
        self.may_have_run = True


class PostgresSession(PostgresAttachment):
    """An attached session, as the contract defines it.

    Attributes:
        requests: the states of its requests.
        names: their semaphores.
    """

    def __init__(
        self,
        engine: PostgresSessionEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        """Start attached, with the token that the store has."""
        super().__init__(engine, how, events, number, token, window)
        self.requests: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._ahead: dict[int, str] = {}  # events that came before the answers to their requests

    async def begin(self, description: str) -> None:
        """Complete a takeover with the requests of the session."""
        _, found = await self.call("begin_session", values.to_text(description))
        requests = values.recovered(found)
        for each in requests:
            self._engine.order_ids.saw(each.order_id)
            self.requests[each.request_id] = OWNS if each.granted else WAITING
            self.names[each.request_id] = each.name
        self.resume(requests)
        if WAITING in self.requests.values():
            self._engine.note_waiter()

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
        rules.check_name(name, self.path)
        operation = PostgresEnqueue(
            self, request_id, name, count, data, timeout, ephemeral=ephemeral
        )
        self.requests[request_id] = SENT
        self.names[request_id] = name
        self._engine.operate(operation)
        return operation

    def placed(self, operation: PostgresEnqueue, reply: Any) -> None:
        """Handle the answer to a request."""
        request_id = operation.request_id
        if type(reply) is int and reply:
            self._engine.order_ids.saw(reply)
            if request_id in self.requests:  # otherwise it has been withdrawn meanwhile
                self.requests[request_id] = OWNS
            operation.settle(Enqueued(Place.GRANTED, reply))
        elif type(reply) is list and type(reply[0]) is int:
            self._engine.order_ids.saw(reply[0])
            if request_id in self.requests:
                self.requests[request_id] = WAITING
            self._engine.note_waiter()
            operation.settle(Enqueued(Place.WAITING, reply[0]))
        elif type(reply) is list and reply[0] == "quarantined":
            self._held_up(operation, reply[1])
            return
        else:
            self._drop(request_id)
            self.names.pop(request_id, None)
            if reply == 0:
                self._engine.quarantined(0.0)
                operation.settle(_REFUSED)
            else:
                error = self._wrong(reply)
                operation.fail(error or self._error(reply, operation.name, operation.count))
        if early := self._ahead.pop(request_id, ""):
            self._engine.push_all([early])

    def _held_up(self, operation: PostgresEnqueue, left: float) -> None:
        """Retry a request that does not wait at the end of the quarantine, if that is soon."""
        self._engine.quarantined(left)
        if left <= _SOON and not self.over:
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self._drop(operation.request_id)
            self.names.pop(operation.request_id, None)
            operation.settle(_REFUSED)  # and `Engine.trouble` says why

    def _try_again(self, operation: PostgresEnqueue) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.request_id in self.requests:
            self._engine.operate(operation)
        else:
            operation.settle(_REFUSED)  # it was withdrawn meanwhile

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
                self._engine.note_waiter()
        name = self.names.get(request_id, "")
        return self.change(
            "alter",
            name,
            0 if count is None else count,
            request_id,
            None if count is None else count_text(count),
            None if data is None else values.base64(data),
            "-" if timeout is UNCHANGED else microseconds(timeout),
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        operation = PostgresWithdraw(self, request_id, self._drop(request_id))
        self._engine.operate(operation)
        return operation

    def withdrawn(self, operation: PostgresWithdraw, reply: Any) -> None:
        """Handle the answer to a withdrawal."""
        if isinstance(reply, int) and reply >= -1:  # it is in no queue any more
            self.names.pop(operation.request_id, None)
        if reply == 0:
            operation.settle(Withdrawn.LEFT)
        elif reply == -1:
            operation.settle(Withdrawn.LEFT if operation.may_have_run else Withdrawn.MISSING)
        elif reply == -2:  # a transaction guards the lease until it ends
            if operation.guarded is None:
                name = self.names.get(operation.request_id, "")
                operation.guarded = GuardedRelease(self.loop, self.path, name, self.id)
            operation.guarded.again(partial(self._withdraw_again, operation))
        else:
            error = self._wrong(reply)
            if operation.may_have_run and isinstance(error, SessionExpired):
                operation.settle(Withdrawn.LEFT)
            else:
                operation.fail(error or self._failure(f"unexpected reply {reply!r}"))

    def _withdraw_again(self, operation: PostgresWithdraw) -> None:
        if self.over:
            operation.fail(self.reason)
        else:
            self._engine.operate(operation)

    def _drop(self, request_id: int) -> str:
        """Expect nothing more of a request; return its name, which its withdrawals need."""
        self.requests.pop(request_id, None)
        self._ahead.pop(request_id, None)
        return self.names.get(request_id, "")

    # Events

    def push(self, kind: str, rest: str) -> None:
        """Handle an event of the session, or of one of its requests."""
        if self.over:
            return
        if kind == "T":
            if rest in self.tokens:
                self.superseded()
        elif kind == "E":
            self.end(rest)
        elif kind == "A":
            self.recheck.set()
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            request_id, order_id = map(int, rest.split())
            standing = self.requests.get(request_id)
            if standing == SENT:
                self._ahead[request_id] = f"{kind} {self.id} {rest}"
            elif standing is not None and kind != "g":
                self._removed(request_id, _REMOVALS[kind])
            elif standing == WAITING:
                self._granted(request_id, order_id)

    def _granted(self, request_id: int, order_id: int) -> None:
        self._engine.order_ids.saw(order_id)
        self.requests[request_id] = OWNS
        self.events.granted(request_id, order_id)

    def _removed(self, request_id: int, why: Removal) -> None:
        self._withdraw_unnoticed(request_id, self._drop(request_id))  # with the store's reason
        self.events.removed(request_id, why)

    def _withdraw_unnoticed(self, request_id: int, name: str) -> None:
        """Withdraw a request for no caller."""
        operation = PostgresWithdraw(self, request_id, name)
        self._engine.operate(operation)
        operation.add_done_callback(_retrieve)

    def compare(self, found: list[list[Any]]) -> None:
        """Compare the requests with those of a store that has lost data.

        Leases that it does not know, or knows as waiting, are lost. What has been released here is
        released there once more.

        Args:
            found: request id, name, and whether it is an owner, for each request of the store.
        """
        owns = {request_id: granted for request_id, _, granted in found}
        for request_id, standing in list(self.requests.items()):
            if standing == OWNS and not owns.get(request_id):
                self._removed(request_id, Removal.LAPSED)
        if self.early is None:  # otherwise its requests are not known here yet
            for request_id, name, _ in found:
                if request_id not in self.requests:
                    self._withdraw_unnoticed(request_id, values.from_text(name))

    def look_up(self, standings: tuple[int, ...]) -> None:
        """Look up requests in these states, in case an event was missed."""
        if self.early is not None or self.over:
            return
        found = {number: each for number, each in self.requests.items() if each in standings}
        if found:
            self._engine.send(
                SessionCall("look", self, (list(found),), partial(self._found, found))
            )
        elif OWNS in standings:
            self.probe()

    def _found(self, requests: dict[int, int], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        for (request_id, before), place in zip(requests.items(), reply or (), strict=True):
            standing = self.requests.get(request_id)
            if standing is None or standing == SENT:
                continue
            if isinstance(place, list):
                if before == OWNS:
                    self._removed(request_id, Removal.LAPSED)
                else:
                    self._engine.note_ahead(place[0])
            elif isinstance(place, int):
                if standing == WAITING:
                    self._granted(request_id, place)
            else:
                self._removed(request_id, _REMOVALS.get(place, Removal.LAPSED))


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a withdrawal without a caller."""
    if not done.cancelled():
        done.exception()
