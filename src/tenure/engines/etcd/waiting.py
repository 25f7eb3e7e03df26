"""Waiting in a queue until a request becomes an owner.

* **Ownership is the prefix rule** over the queue in the order of the create revisions, as this
  session read it at a revision of a majority, under its own attachment.
* **A waiter is woken by the request before it.** A request for the whole limit waits for its
  predecessor to leave. Other requests wait for their predecessor to leave, to shrink, or to be
  marked as an owner; the first waiter watches the owners. An owner that had to wait, and that
  leaves room for others, marks itself to wake the next waiter. If it dies before that, the next
  waiter notices when it reads the queue, every few seconds.
* A waiter whose predecessor is in this engine is notified directly: see `gone`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenure.background import Failures
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import WatchEvent
from tenure.engines.etcd.attachment import EtcdAttachment
from tenure.engines.etcd.errors import Lost, Refused
from tenure.engines.etcd.keys import EVICTED, Entry, entries, number_owning
from tenure.engines.etcd.request import EtcdRequest
from tenure.errors import TenureError

_log = logging.getLogger("tenure")

_POLL, _POLL_BY_PLACE = 2.5, 0.02
"""Seconds between two reads of a waiter behind others: the minimum, and the time per request before
it."""

_MISSED = 0.1
"""Seconds until the first read of a waiter far from the head, if its watch began late."""


class Waiting:
    """The waiting requests of one session.

    Args:
        taken_out: called with the number of a request that another client removed, and the reason.
    """

    def __init__(self, session: EtcdAttachment, taken_out: Callable[[int, bytes], None]) -> None:
        self._session = session
        self._engine = session.engine
        self._taken_out = taken_out
        self._failures = Failures("reading a queue", _log)

    def place(self, request: EtcdRequest, queue: Sequence[Entry], revision: int) -> None:
        """Conclude from a queue, as of a revision, whether a request is an owner.

        For a request for the whole limit, only its predecessor matters.
        """
        before = [each for each in queue if each.created < request.created]
        if request.whole:
            owning = 0
        else:
            mine = [each for each in queue if each.created == request.created]
            owning = number_owning([*before, *mine], request.limit)
        if not before or owning > len(before):
            request.owns = True
            self.stop(request)
            return
        if request.gone:
            return
        self._time_late(request, before)
        ahead = self._engine.local.get(before[-1].key)
        if ahead is not None and request.whole:
            self.unwatch(request)
            if request not in ahead.followers:
                ahead.followers.append(request)
            return
        if owning == len(before) > 1:  # the first waiter
            watched = frozenset(each.key for each in before)
        else:
            watched = frozenset([before[-1].key])
            if owning < len(before) and not request.whole and not request.poll:
                self._poll(request, max(_POLL, _POLL_BY_PLACE * len(before)))
        self._watch(request, watched, revision)

    def _time_late(self, request: EtcdRequest, before: Sequence[Entry]) -> None:
        """Set the timer that removes overdue waiters before a request."""
        due = self._engine.late.next_due(before)
        if due is not None and request.late is None:
            pause = due - self._engine.clock.now()
            # An overdue request may be an owner already: its value shows that only after the next
            # put.
            pause = pause if pause > 0 else _POLL
            request.late = self._engine.loop.call_later(pause, self._remove_overdue, request)

    def _remove_overdue(self, request: EtcdRequest) -> None:
        request.late = None
        if not (request.decided or self._session.over):
            self._engine.spawn(self._take_out_and_read(request))

    async def _take_out_and_read(self, request: EtcdRequest) -> None:
        try:
            await self._engine.late.take_out(request.name)
        except (TenureError, Lost, Refused) as error:
            _log.warning(
                "could not remove overdue waiters: node=%s name=%r error=%s",
                *(request.name.path, request.name.name, error),
            )
        except Exception as error:
            self._failures.report(error)
        self.read_soon(request)

    def _watch(self, request: EtcdRequest, watched: frozenset[bytes], revision: int) -> None:
        if request.watch is not None and request.watched == watched:
            return
        self.unwatch(request)
        request.watched = watched
        prefix = request.name.requests
        key, end = (*watched, b"") if len(watched) == 1 else (prefix, wire.after(prefix))
        happened, missed = partial(self._happened, request), partial(self._missed, request)
        request.watch = self._engine.watching.add(
            *(key, end, revision + 1, happened, missed),
            puts=not request.whole,
            at_once=True,
            once=not end,
        )

    def _missed(self, request: EtcdRequest) -> None:
        """Read the queue after an interruption before the watch began."""
        if request.near:
            self.read_soon(request)
        elif request.poll is None:  # so far behind, most probably nothing has changed
            self._poll(request, _MISSED)

    def _happened(self, request: EtcdRequest, events: Sequence[WatchEvent]) -> None:
        if any(event.kv.key in request.watched for event in events):
            self.read_soon(request)

    def read_soon(self, request: EtcdRequest) -> None:
        """Read the queue; if it is being read, read it again."""
        if request.reading:
            request.read_again = True
        elif not (request.decided or self._session.over or not request.created):
            request.reading = True
            self._engine.spawn(self._read_until_current(request))

    async def _read_until_current(self, request: EtcdRequest) -> None:
        try:
            request.read_again = True
            while request.read_again and not request.decided:
                request.read_again = False
                await self.read(request, report=True)
        except Exception as error:
            if not isinstance(error, TenureError | Refused):
                self._failures.report(error)
            elif not self._session.over:
                _log.warning(
                    "could not read the queue, retrying: node=%s name=%r error=%s",
                    *(request.name.path, request.name.name, error),
                )
            if not self._session.over:
                self._poll(request, _POLL)
        finally:
            request.reading = False

    def _poll(self, request: EtcdRequest, delay: float) -> None:
        request.poll = self._engine.loop.call_later(delay, self.read_soon, request)

    async def read(self, request: EtcdRequest, *, report: bool) -> None:
        """Read the queue before a request, and process it; report a grant or a removal, too."""
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None
        build = partial(request.reading_before, self._session)
        answer, _ = await self._session.transact(build)
        settled = request.decided if report else request.owns
        if settled:
            return
        if answer.ok:
            self.place(request, entries(answer.parts[0].found), answer.revision)
            if request.owns and report:
                self.granted(request)
        elif report:
            left = answer.parts[1].first
            self._taken_out(request.request_id, EVICTED if left is None else left.value)

    def granted(self, request: EtcdRequest) -> None:
        """Report that a request is an owner."""
        self._session.events.granted(request.request_id, self._session.order_id(request))
        if not request.whole:
            answer = self._session.operations.take(request.name.name, lambda: self._mark(request))
            answer.add_done_callback(log_failure)

    async def _mark(self, request: EtcdRequest) -> None:
        """Wake the next waiter."""
        if not request.gone:
            request.marked = True
            count = request.count
            build = partial(request.changing, self._session, count, None)
            await self._session.transact(build)

    def unwatch(self, request: EtcdRequest) -> None:
        """End the watch and the poll of a request."""
        if request.watch is not None:
            self._engine.watching.remove(request.watch)
            request.watch = None
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None

    def stop(self, request: EtcdRequest) -> None:
        """End the watch and the timers of a request that no longer waits."""
        self.unwatch(request)
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if request.late is not None:
            request.late.cancel()
            request.late = None

    def gone(self, request: EtcdRequest) -> None:
        """Forget a request that left its queue, or whose session has ended; its followers read."""
        request.gone = True
        self._engine.local.pop(request.key, None)
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.waiting.read_soon(follower)


def log_failure(answer: asyncio.Future[Any]) -> None:
    """Log the failure of an operation without a caller."""
    if not answer.cancelled() and answer.exception() is not None:
        _log.debug("an operation failed in the background: error=%s", answer.exception())
