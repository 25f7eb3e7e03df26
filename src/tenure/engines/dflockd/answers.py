"""Answers about one request: its place, its end, and its withdrawals."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tenure.clock import Clock
from tenure.engines.contract import Enqueued, Place, Removal, SessionEvents, Withdrawn
from tenure.errors import TenureError


class RequestSession(Protocol):
    """Session of a request.

    Attributes:
        path: the path of the node.
        lease: duration of its leases in seconds.
        over: whether it no longer accepts or renews anything.
    """

    path: str
    clock: Clock
    loop: asyncio.AbstractEventLoop
    events: SessionEvents
    lease: int
    over: bool

    def covers(self, sent: float) -> bool:
        """Return true if a grant of a request sent at that time is as fresh as the proof."""

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""


class RequestAnswers:
    """Answers about one request.

    Attributes:
        place: the future that `enqueue` returns.
        given: whether the caller has an answer, so that events follow.
        withdrawals: callers that wait for the end of the request.
    """

    def __init__(self, session: RequestSession, number: int) -> None:
        self.place: asyncio.Future[Enqueued] = session.loop.create_future()
        self.given = False
        self.withdrawals: list[asyncio.Future[Withdrawn]] = []
        self._session = session
        self._number = number

    def granted(self, order_id: int | None) -> None:
        """Report a grant."""
        if self.given:
            self._session.events.granted(self._number, order_id)
        else:
            self._set_place(Enqueued(Place.GRANTED, order_id))

    def waits(self) -> None:
        """Report that the request waits, once."""
        if not self.given:
            self._set_place(Enqueued(Place.WAITING, None))

    def timed_out(self) -> None:
        """Report that the request was not granted in time."""
        if self.given:
            self.removed(Removal.TIMED_OUT)
        else:
            self._set_place(Enqueued(Place.REFUSED, None))

    def failed(self, error: TenureError) -> None:
        """Report that the server rejected the request, perhaps after it had accepted it."""
        if self.given:
            self.removed(Removal.LAPSED)
        else:
            self.given = True
            if not self.place.done():
                self.place.set_exception(error)

    def removed(self, why: Removal) -> None:
        """Report the end of a request that waited or was granted."""
        self._session.events.removed(self._number, why)

    def withdrawal(self) -> asyncio.Future[Withdrawn]:
        """Return the answer to a withdrawal, which comes with the end of the request."""
        gone: asyncio.Future[Withdrawn] = self._session.loop.create_future()
        self.withdrawals.append(gone)
        return gone

    def over(self, withdrawn: Withdrawn) -> None:
        """Answer every caller that has no answer yet."""
        if not self.given:
            self._set_place(Enqueued(Place.REFUSED, None))
        for gone in self.withdrawals:
            if not gone.done():
                gone.set_result(withdrawn)

    def _set_place(self, place: Enqueued) -> None:
        self.given = True
        if not self.place.done():
            self.place.set_result(place)
