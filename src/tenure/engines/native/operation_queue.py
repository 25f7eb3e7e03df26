"""Operation queue of a session, across all its connections.

Rules:

* An operation is kept until it is answered, and sent again over the next connection.
* The server keeps a limited number of answers until they are acknowledged. At most so many
  operations are sent, counted from the oldest unanswered one; answers before it are acknowledged.
  So only a program with one very slow operation among thousands of others waits here.
* A request that is withdrawn before it was sent is dropped, and so is its withdrawal. Otherwise
  programs that try again and again would fill the memory during a long outage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from msgspec import Struct, structs

from tenure.engines.contract import Enqueued, Place, Withdrawn
from tenure.engines.native.calls import NativeCall
from tenure.engines.native.connection import NativeConnection
from tenure.engines.native.reconcile import OWNED, REFUSED, Plan, Requests, reconcile
from tenure.engines.native.reconnector import NativeReconnector
from tenure.engines.prompt import Prompt
from tenure.errors import TenureError
from tenure.wire import messages as wire

_GRANTED, _WAITING = Place.GRANTED, Place.WAITING  # an enumeration's attributes are slow to read


class NativeOperationQueue:
    """Unanswered operations of one session, and its requests.

    Attributes:
        calls: the unanswered operations by number, in order.
        requests: the requests that are, or may be, in queues.
    """

    def __init__(self, channel: int, reconnector: NativeReconnector) -> None:
        self.calls: dict[int, NativeCall] = {}
        self.requests: Requests = {}
        self._channel = channel
        self._reconnector = reconnector
        self._loop = reconnector.loop
        self._now = reconnector.clock.now
        self._connection: NativeConnection | None = None
        self._unsent: dict[int, NativeCall] = {}  # `Enqueue`s without a connection, or waiting
        self._waiting: deque[NativeCall] = deque()  # until the server may drop some answers
        self._kept = 0  # number of answers that it keeps
        self._last = 0  # number of the latest operation
        self._acknowledged = 0  # all operations up to this number

    def call(self, rid: int, message: Struct) -> NativeCall:
        """Send an operation, now or when there is a connection."""
        call = NativeCall(rid, message, Prompt(self._loop), self)
        self.calls[rid] = call
        self._last = call.number = number = self._last + 1
        connection = self._connection
        if connection is not None:
            if (number - self._acknowledged) * 2 > self._kept:
                self._submit(call)
            else:
                connection.submit(call)
        else:
            self._note_unsent(call)
        return call

    def _note_unsent(self, call: NativeCall) -> None:
        message = call.message
        if isinstance(message, wire.Enqueue):
            if not call.sent:
                self._unsent[message.request_id] = call
        elif isinstance(message, wire.Alter):
            self._unsent.pop(message.request_id, None)  # the change expects the request

    def withdraw_unsent(self, request_id: int) -> bool:
        """Withdraw a request if it was not sent; return whether that is done."""
        call = self._unsent.pop(request_id, None)
        if call is None:
            return False
        if self._waiting:
            self._waiting.remove(call)
        self.failed(call)
        self._loop.call_soon(call.succeed, REFUSED)
        return True

    def _submit(self, call: NativeCall) -> None:
        assert self._connection is not None
        unacknowledged = call.number - self._acknowledged
        if unacknowledged * 2 > self._kept:
            self._acknowledge()
            if self._waiting or call.number - self._acknowledged > self._kept:
                self._waiting.append(call)
                self._note_unsent(call)
                return
        self._connection.submit(call)

    def _acknowledge(self) -> None:
        answered = self._answered
        if answered > self._acknowledged and self._connection is not None:
            self._acknowledged = answered
            self._connection.send(wire.Acknowledge(self._channel, self.answered_up_to()))

    @property
    def _answered(self) -> int:
        """Number of the operation before the oldest unanswered one."""
        oldest = next(iter(self.calls.values()), None)
        return self._last if oldest is None else oldest.number - 1

    def answered_up_to(self) -> int:
        """Return the `acknowledged` of the protocol."""
        oldest = next(iter(self.calls), None)
        return self._reconnector.last_rid if oldest is None else oldest - 1

    # Answers

    def placed(self, call: NativeCall, answer: wire.Placed) -> None:
        """Handle the answer to an `Enqueue`."""
        self.answered(call)
        message = call.message
        assert isinstance(message, wire.Enqueue)
        if answer.place == wire.REFUSED:
            self.requests.pop(message.request_id, None)
            call.succeed(REFUSED)
            return
        granted = answer.place == wire.GRANTED
        if message.request_id in self.requests:  # otherwise it has been withdrawn meanwhile
            waits_until = inf if call.until is None else call.until
            self.requests[message.request_id] = OWNED if granted else waits_until
        call.succeed(Enqueued(_GRANTED if granted else _WAITING, answer.order_id))

    def failed(self, call: NativeCall) -> None:
        """Record that an operation has failed."""
        self.answered(call)
        if isinstance(call.message, wire.Enqueue):
            self.requests.pop(call.message.request_id, None)

    def answered(self, call: NativeCall) -> None:
        """Record that an operation was answered."""
        self.calls.pop(call.rid, None)
        if self._waiting:
            self._acknowledge()
            waiting = self._waiting
            while waiting and waiting[0].number - self._acknowledged <= self._kept:
                assert self._connection is not None
                next_call = waiting.popleft()
                if isinstance(next_call.message, wire.Enqueue):
                    self._unsent.pop(next_call.message.request_id, None)
                self._connection.submit(next_call)

    # Connections

    def interrupt(self) -> None:
        """Keep the operations until there is another connection."""
        self._connection = None
        self._waiting.clear()
        for call in self.calls.values():
            call.interrupted = call.sent

    def resume(self, connection: NativeConnection, again: Iterable[NativeCall] = ()) -> None:
        """Use a new connection, and send these operations first."""
        self._connection = connection
        self._unsent.clear()
        self._kept = connection.welcome.kept_answers
        self._acknowledged = self._answered
        for call in again:
            self._submit(call)

    def reattached(self, connection: NativeConnection, answer: wire.Attached) -> Plan:
        """Compare with the server's state, and send the open operations again."""
        plan = reconcile(self.requests, self.calls.values(), answer, self._now())
        self.requests = plan.requests
        for call, placed in plan.placed:
            self.answered(call)
            call.succeed(placed)
        for call in plan.made:
            self.answered(call)
            call.succeed(None)
        again = [call for call in plan.again if self._in_time(call)]
        if not answer.kept:
            for call in again:
                call.may_have_run = call.sent
        connection.send(wire.Acknowledge(self._channel, self.answered_up_to()))
        self.resume(connection, again)
        for request_id in plan.orphans:
            rid = self._reconnector.next_rid()
            self.call(rid, wire.Withdraw(rid, self._channel, request_id))
        return plan

    def _in_time(self, call: NativeCall) -> bool:
        """Shorten the timeout of an operation; if it has passed, reject it and return false."""
        if call.until is not None:
            left = call.until - self._now()
            if left <= 0:
                self.failed(call)
                call.succeed(REFUSED)
                return False
            call.message = structs.replace(call.message, timeout=left)
        return True

    def end(self, error: TenureError, *, by_server: bool) -> None:
        """Settle all operations, because the session has ended. Operations that end it succeed.

        Args:
            error: raised by the unanswered operations.
            by_server: whether the server has reported the end. Then a withdrawal was too late,
                unless it may have been carried out over a lost connection.
        """
        calls = list(self.calls.values())
        self.calls.clear()
        self.requests.clear()
        self._unsent.clear()
        self._waiting.clear()
        self._connection = None
        for call in calls:
            message = call.message
            if isinstance(message, wire.Close | wire.Detach):
                call.succeed(None)
            elif isinstance(message, wire.Withdraw) and (call.interrupted or not by_server):
                call.succeed(Withdrawn.LEFT)
            else:
                call.fail(error)
