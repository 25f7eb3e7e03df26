"""Session of an engine that sends commands: its requests and takeover, based on its attachment.

Rules:

* `placed` handles the answer to a request, before any event of that request. An event that arrives
  before the request's caller knows the answer is delayed.
* A request that the store has removed is withdrawn as well, so that the store can forget the
  reason.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar

from tenure.core import rules
from tenure.engines._kit.commands.attachment import (
    CommandAttachment,
    CommandSender,
    CommandSessionEngine,
    SessionParameters,
)
from tenure.engines._kit.commands.operations import (
    HANDED,
    OWNS,
    REMOVALS,
    SENT,
    WAITING,
    EnqueueOperation,
    WithdrawOperation,
)
from tenure.engines._kit.commands.replies import first_word
from tenure.engines._kit.commands.values import count_text, microseconds
from tenure.engines.contract import (
    Answer,
    Enqueued,
    Place,
    Removal,
    Withdrawn,
)
from tenure.errors import SessionExpired
from tenure.model import UNCHANGED, Recovered, Unchanged

_GRANTED, _LEFT = Place.GRANTED, Withdrawn.LEFT
_REFUSED = Enqueued(Place.REFUSED, None)
_SOON = 4.5
"""Longest time that a request with timeout 0 waits for the end of a quarantine, in seconds."""


class CommandSession(CommandAttachment):
    """An attached session, as defined by the contract.

    Attributes:
        enqueuing: the class of its operations that add requests.
        withdrawing: the class of its operations that withdraw requests.
        time_unit: unit of times in the store's replies, as a fraction of a second.
        requests: the states of its requests.
        names: their semaphores, until the store has confirmed a withdrawal.
    """

    enqueuing: ClassVar[type[EnqueueOperation]] = EnqueueOperation
    withdrawing: ClassVar[type[WithdrawOperation]] = WithdrawOperation
    time_unit: ClassVar[float] = 1.0

    def __init__(
        self, engine: CommandSessionEngine, sender: CommandSender, given: SessionParameters
    ) -> None:
        super().__init__(engine, given)
        self.requests: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._sender = sender
        self._ahead: dict[int, tuple[str, str]] = {}  # events that arrived before their answers
        self._fresh: set[int] = set()  # began to wait in this turn, unknown to their callers yet
        self._unremoved: dict[int, str] = {}  # the store refused to; tried again later

    # Defined by each engine

    @abstractmethod
    def _note_waiter(self, reply: Any) -> None:
        """Check for expired sessions soon, because this reply shows that a request waits."""

    @abstractmethod
    def _look(self, requests: dict[int, int], standings: Collection[int]) -> None:
        """Look up some requests, given with their states."""

    @abstractmethod
    def _send_begin(self, description: str, answered: Callable[[Any], None]) -> None:
        """Complete a takeover; the reply begins with "ok" and a list for `Values.recovered`."""

    # Requests

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
        operation = self.enqueuing(self, request_id, name, count, data, timeout, ephemeral)
        rules.check_name(name, self.path)
        self.requests[request_id] = SENT
        self.names[request_id] = name
        self._sender.operate(operation)
        return operation

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        request_id = operation.request_id
        if type(reply) is int:
            if reply == 0:
                self._refuse(operation, 0.0)
                return
            self.order_ids.highest = max(self.order_ids.highest, reply)
            if request_id in self.requests:  # otherwise it has been withdrawn meanwhile
                self.requests[request_id] = OWNS
            if not operation.done():
                operation.set_result(Enqueued(_GRANTED, reply))
            if self._ahead:
                self._push_ahead(request_id)
        elif type(reply) is list and type(reply[0]) is int:
            self.order_ids.saw(reply[0])
            self._note_waiter(reply)
            if request_id in self.requests:
                self.requests[request_id] = WAITING
                if not self._fresh:
                    self.loop.call_soon(self._fresh.clear)
                self._fresh.add(request_id)
            operation.settle(Enqueued(Place.WAITING, reply[0]))
            self._push_ahead(request_id)
        elif first_word(reply) == "quarantined":
            self._retry_after_quarantine(operation, reply[1] * self.time_unit)
        else:
            self._drop(request_id)
            if not isinstance(reply, Exception):  # else it is withdrawn: it may be queued
                self.names.pop(request_id, None)
            error = self._wrong(reply)
            operation.fail(error or self._error(reply, operation.name, operation.count))

    def _refuse(self, operation: EnqueueOperation, left: float) -> None:
        self._engine.quarantined(left)
        self._drop(operation.request_id)
        self.names.pop(operation.request_id, None)
        operation.settle(_REFUSED)  # in a quarantine, `Engine.trouble` has the reason

    def _retry_after_quarantine(self, operation: EnqueueOperation, left: float) -> None:
        """Retry a request with timeout 0 at the end of the quarantine, if that is soon."""
        if left <= _SOON and not self.over:
            self._engine.quarantined(left)
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self._refuse(operation, left)

    def _try_again(self, operation: EnqueueOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.request_id in self.requests:
            self._sender.operate(operation)
        else:
            operation.settle(_REFUSED)  # it was withdrawn meanwhile

    def _push_ahead(self, request_id: int) -> None:
        if early := self._ahead.pop(request_id, None):
            self.loop.call_soon(self.push, *early)

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
            "alter",
            self.names.get(request_id, ""),
            0 if count is None else count,
            request_id,
            None if count is None else count_text(count),
            data,
            "-" if timeout is UNCHANGED else microseconds(timeout),
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        operation = self.withdrawing(self, request_id, self._drop(request_id))
        self._sender.operate(operation)
        return operation

    def confirmed(self, request_id: int) -> None:
        """Forget a request whose withdrawal the store has confirmed."""
        self.names.pop(request_id, None)

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal."""
        error = self._wrong(reply)
        if operation.retried:
            if not self.over:
                self._unremoved[operation.request_id] = operation.name
        elif operation.may_have_run and isinstance(error, SessionExpired):
            operation.settle(_LEFT)
        else:
            operation.fail(error or self._failure(f"unexpected reply {reply!r}"))

    def _withdraw(self, request_id: int, name: str) -> None:
        """Take a request out of its queue, without a caller."""
        if not self.over:
            self._sender.operate(self.withdrawing(self, request_id, name, retried=True))

    def _drop(self, request_id: int) -> str:
        """Forget a request; return its name, which its withdrawals need."""
        self.requests.pop(request_id, None)
        if self._ahead:
            self._ahead.pop(request_id, None)
        return self.names.get(request_id, "")

    def held(self) -> list[int]:
        """Return the requests that this program owns. On any thread.

        One that was handed on is a negative number: the store may have it as waiting.
        """
        return [
            each if standing == OWNS else -each
            for each, standing in list(self.requests.items())
            if standing >= HANDED
        ]

    def waiting_names(self) -> set[str]:
        """Return the names for which requests wait."""
        return {self.names[each] for each, state in self.requests.items() if state == WAITING}

    # Events

    def push(self, kind: str, rest: str) -> None:
        """Handle an event of the session, or of one of its requests.

        Args:
            kind: "T" taken over, "E" ended, "A" a former attachment has acknowledged a takeover,
                "g" granted, or a key of `REMOVALS`.
            rest: the reason of the end, or the request id and order id of a request.
        """
        if self.over:
            return
        if kind == "T":
            self.superseded()
        elif kind == "E":
            self.end(rest)
        elif kind == "A":
            self.recheck.set()
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            request_id, *order_id = map(int, rest.split())
            standing = self.requests.get(request_id)
            if request_id in self._fresh:
                self.loop.call_soon(self.push, kind, rest)
            elif standing == SENT:
                self._ahead[request_id] = (kind, rest)
            elif standing is not None and kind != "g":
                self._removed(request_id, REMOVALS[kind])
            elif standing in (WAITING, HANDED):
                self._granted(request_id, order_id[0])

    def _granted(self, request_id: int, order_id: int) -> None:
        self.order_ids.saw(order_id)
        self.requests[request_id] = OWNS
        self.events.granted(request_id, order_id)

    def _removed(self, request_id: int, why: Removal) -> None:
        name = self._drop(request_id)
        with self._engine.failures.contained():
            self._withdraw(request_id, name)  # the store need not keep the reason
        self.events.removed(request_id, why)

    def look_up(self, standings: Collection[int]) -> None:
        """Look up requests in these states, in case an event was missed."""
        if self.early is not None or self.over:
            return
        while self._unremoved:
            self._withdraw(*self._unremoved.popitem())
        found = {number: each for number, each in self.requests.items() if each in standings}
        self._look(found, standings)

    # Takeover

    async def begin(self, description: str) -> None:
        """Set the description of a session that was taken over, and resume its requests."""

        def send(answered: Callable[[Any], None]) -> None:
            self._send_begin(description, partial(begun, answered))

        def begun(answered: Callable[[Any], None], reply: Any) -> None:
            if self._wrong(reply) is None and not self.over:
                found = self._engine.values.recovered(reply[1])
                for each in found:
                    self._recovered(each)
                self._note_waiter(reply)
                self.resume(found)
            answered(reply)

        await self._answer(send)

    def _recovered(self, request: Recovered) -> None:
        """Resume a request of a session that was taken over."""
        self.order_ids.saw(request.order_id)
        self.requests[request.request_id] = OWNS if request.granted else WAITING
        self.names[request.request_id] = request.name
