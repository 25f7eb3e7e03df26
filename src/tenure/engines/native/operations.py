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
from typing import TYPE_CHECKING

from msgspec import Struct

from tenure.engines.native.calls import Call
from tenure.engines.prompt import Prompt
from tenure.errors import TenureError
from tenure.wire import messages as wire

if TYPE_CHECKING:
    from tenure.engines.native.connection import Connection
    from tenure.engines.native.link import Link
    from tenure.engines.native.session import NativeSession

__all__ = ["Operations"]


class Operations:
    """The unanswered operations of one session.

    Attributes:
        calls: these, by their numbers, in the order in which they were asked.
    """

    def __init__(self, session: NativeSession, link: Link) -> None:
        self.calls: dict[int, Call] = {}
        self._session = session
        self._link = link
        self._loop = link.loop
        self._connection: Connection | None = None
        self._waiting: deque[Call] = deque()  # until the server may forget some answers
        self._kept = 0  # how many answers it keeps
        self._asked = 0
        self._acknowledged = 0  # of those that were asked, how many from the beginning

    def ask(self, rid: int, message: Struct) -> Call:
        """Ask, now or when there is a connection."""
        call = Call(rid, message, Prompt(self._loop), self._session)
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
            self._connection.send(wire.Acknowledge(self._session.channel, self.answered_up_to()))

    def answered_up_to(self) -> int:
        """The `acknowledged` of the protocol."""
        oldest = next(iter(self.calls), None)
        return self._link.last_rid if oldest is None else oldest - 1

    def landed(self, call: Call) -> None:
        """It has been answered."""
        self.calls.pop(call.rid, None)
        if self._waiting:
            self._acknowledge()
            waiting = self._waiting
            while waiting and waiting[0].number - self._acknowledged <= self._kept:
                assert self._connection is not None
                self._connection.submit(waiting.popleft())

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

    def end(self, error: TenureError, *, by_server: bool) -> None:
        """The session is over: nothing of it will be answered, and what was to end it is done.

        Args:
            by_server: a server has said so. Then a withdrawal came too late, unless it may have
                been carried out over a connection that was lost.
        """
        calls = list(self.calls.values())
        self.calls.clear()
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
