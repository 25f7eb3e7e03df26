"""A session's operations without an answer, through all its connections.

Rules:

* An operation is kept until it is answered, and asked again over the next connection.
* The server keeps an answer until it is acknowledged. No more operations are sent than it keeps
  answers, counted from the oldest that is not acknowledged; and since everything up to the oldest
  unanswered one can be, and is, acknowledged, that holds up only a program with one operation that
  takes very long among thousands that do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from msgspec import Struct, structs

from tenure.engines.contract import Enqueued, Place
from tenure.engines.native.calls import Call
from tenure.engines.native.connection import Connection
from tenure.engines.native.link import Link
from tenure.engines.native.reconcile import OWNED, REFUSED, Holds, Plan, reconcile
from tenure.engines.prompt import Prompt
from tenure.errors import TenureError
from tenure.wire import messages as wire

__all__ = ["Operations"]

_GRANTED, _WAITING = Place.GRANTED, Place.WAITING  # an enumeration's attributes are slow to read


class Operations:
    """The operation queue of one session, and what the session has in queues.

    Attributes:
        calls: the unanswered operations, by their numbers, in the order in which they were asked.
        holds: the requests that are, or may be, in queues.
    """

    def __init__(self, channel: int, link: Link) -> None:
        """Start with an empty queue."""
        self.calls: dict[int, Call] = {}
        self.holds: Holds = {}
        self._channel = channel
        self._link = link
        self._loop = link.loop
        self._now = link.clock.now
        self._connection: Connection | None = None
        self._waiting: deque[Call] = deque()  # until the server may forget some answers
        self._kept = 0  # how many answers it keeps
        self._asked = 0
        self._acknowledged = 0  # of those that were asked, how many from the beginning

    def ask(self, rid: int, message: Struct) -> Call:
        """Ask, now or when there is a connection."""
        call = Call(rid, message, Prompt(self._loop), self)
        self.calls[rid] = call
        self._asked = call.number = number = self._asked + 1
        connection = self._connection
        if connection is not None:
            if (number - self._acknowledged) * 2 > self._kept:
                self._submit(call)
            else:
                connection.submit(call)
        return call

    def _submit(self, call: Call) -> None:
        assert self._connection is not None
        unacknowledged = call.number - self._acknowledged
        if unacknowledged * 2 > self._kept:
            self._acknowledge()
            if self._waiting or call.number - self._acknowledged > self._kept:
                self._waiting.append(call)
                return
        self._connection.submit(call)

    def _acknowledge(self) -> None:
        oldest = next(iter(self.calls.values()), None)
        answered = self._asked if oldest is None else oldest.number - 1
        if answered > self._acknowledged and self._connection is not None:
            self._acknowledged = answered
            self._connection.send(wire.Acknowledge(self._channel, self.answered_up_to()))

    def answered_up_to(self) -> int:
        """The `acknowledged` of the protocol."""
        oldest = next(iter(self.calls), None)
        return self._link.last_rid if oldest is None else oldest - 1

    # Answers

    def placed(self, call: Call, answer: wire.Placed) -> None:
        """Handle the answer to an `Enqueue`."""
        self.landed(call)
        message = call.message
        assert isinstance(message, wire.Enqueue)
        if answer.place == wire.REFUSED:
            self.holds.pop(message.request_id, None)
            call.succeed(REFUSED)
            return
        granted = answer.place == wire.GRANTED
        if message.request_id in self.holds:  # or else it has been withdrawn meanwhile
            waits_until = inf if call.until is None else call.until
            self.holds[message.request_id] = OWNED if granted else waits_until
        call.succeed(Enqueued(_GRANTED if granted else _WAITING, answer.order_id))

    def refused(self, call: Call) -> None:
        """Note that an operation has failed."""
        self.landed(call)
        if isinstance(call.message, wire.Enqueue):
            self.holds.pop(call.message.request_id, None)

    def landed(self, call: Call) -> None:
        """Note that an operation was answered."""
        self.calls.pop(call.rid, None)
        if self._waiting:
            self._acknowledge()
            waiting = self._waiting
            while waiting and waiting[0].number - self._acknowledged <= self._kept:
                assert self._connection is not None
                self._connection.submit(waiting.popleft())

    # Connections

    def cut_off(self) -> None:
        """The connection is lost."""
        self._connection = None
        self._waiting.clear()
        for call in self.calls.values():
            call.cut_off = call.sent

    def go_on(self, connection: Connection, again: Iterable[Call] = ()) -> None:
        """Send these again on a new connection, the oldest of all unanswered ones first."""
        self._connection = connection
        self._kept = connection.welcome.kept_answers
        oldest = next(iter(self.calls.values()), None)
        self._acknowledged = self._asked if oldest is None else oldest.number - 1
        for call in again:
            self._submit(call)

    def reattached(self, connection: Connection, answer: wire.Attached) -> Plan:
        """Find out what became of everything, and ask again what is open."""
        plan = reconcile(self.holds, self.calls.values(), answer, self._now())
        self.holds = plan.holds
        for call, placed in plan.placed:
            self.landed(call)
            call.succeed(placed)
        for call in plan.made:
            self.landed(call)
            call.succeed(None)
        again = [each for each in map(self._renewed, plan.again) if each is not None]
        if not answer.kept:
            for call in again:
                call.perhaps_done = call.sent
        self.go_on(connection, again)
        for request_id in plan.orphans:
            rid = self._link.next_rid()
            self.ask(rid, wire.Withdraw(rid, self._channel, request_id))
        return plan

    def _renewed(self, call: Call) -> Call | None:
        """An operation as it is asked again; ``None`` when it is too late for it."""
        if call.until is not None:
            left = call.until - self._now()
            if left <= 0:
                self.refused(call)
                call.succeed(REFUSED)
                return None
            call.message = structs.replace(call.message, timeout=left)
        return call

    def end(self, error: TenureError, *, by_server: bool) -> None:
        """The session is over: nothing of it will be answered, and what was to end it is done.

        Args:
            error: raised by the operations that have no answer.
            by_server: a server has said so. Then a withdrawal came too late, unless it may have
                been carried out over a connection that was lost.
        """
        calls = list(self.calls.values())
        self.calls.clear()
        self.holds.clear()
        self._waiting.clear()
        self._connection = None
        for call in calls:
            message = call.message
            if isinstance(message, wire.Close | wire.Detach):
                call.succeed(None)
            elif isinstance(message, wire.Withdraw) and (call.cut_off or not by_server):
                call.succeed(True)
            else:
                call.fail(error)
