"""Waiting in a queue until a request owns.

* **Ownership is the prefix rule** over the queue in the order of the create revisions, as it was
  read by the one who concludes it, at a revision of a majority, and under its own attachment.
* **A waiter is woken by the request before it.** A request for the whole waits for its predecessor
  to go. Another one waits for its predecessor to go, to shrink, or to be marked as an owner; the
  first that waits watches the owners. An owner that had to wait, and that others may own beside,
  marks itself to wake the next. The mark has no other meaning. If that owner dies before it marks
  itself, the next one finds out when it looks, every few seconds.
* A waiter whose predecessor is in this engine is notified directly: see `gone`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenure.background import Failures
from tenure.engines.etcd import transactions, wire
from tenure.engines.etcd.answers import WatchEvent
from tenure.engines.etcd.attachment import Attachment
from tenure.engines.etcd.keys import EVICTED, Entry, entries, number_owning
from tenure.engines.etcd.members import Lost, Refused
from tenure.engines.etcd.request import EtcdRequest
from tenure.errors import TenureError

__all__ = ["Waiting", "heard"]

_log = logging.getLogger("tenure")

_POLL, _POLL_BY_PLACE = 2.5, 0.02
"""Seconds between two looks of one behind other waiters: at least, and for each before it."""

_MISSED = 0.1
"""Seconds after which a waiter far from the head looks, when its watch began late."""


class Waiting:
    """Of one session's requests.

    Args:
        taken_out: called with the number of a request that another client took out, and the reason.
    """

    def __init__(
        self,
        session: Attachment,
        taken_out: Callable[[int, bytes], None],
    ) -> None:
        """Start without waiting requests."""
        self._session = session
        self._engine = session.engine
        self._taken_out = taken_out
        self._failures = Failures("looking at a queue", _log)

    def place(self, request: EtcdRequest, queue: Sequence[Entry], revision: int) -> None:
        """Conclude from a queue, as it was at that revision, whether a request owns.

        Of the queue of one that wants the whole only its predecessor matters.
        """
        before = [each for each in queue if each.created < request.created]
        if request.count == request.limit:
            owning = 0
        else:
            mine = [each for each in queue if each.created == request.created]
            owning = number_owning([*before, *mine], request.limit)
        if not before or owning > len(before):
            request.owns = True
            self.stop(request)
            return
        if request.gone:  # it is being withdrawn already
            return
        self._look_for_late(request, before)
        ahead = self._engine.local.get(before[-1].key)
        if ahead is not None and request.count == request.limit:
            self.unwatch(request)
            if request not in ahead.followers:
                ahead.followers.append(request)
            return
        if owning == len(before) > 1:  # the first that waits
            watched = frozenset(each.key for each in before)
        else:
            watched = frozenset([before[-1].key])
            if owning < len(before) and request.count != request.limit and not request.poll:
                delay = max(_POLL, _POLL_BY_PLACE * len(before))
                request.poll = self._engine.loop.call_later(delay, self.look_soon, request)
        self._watch(request, watched, revision)

    def _look_for_late(self, request: EtcdRequest, before: Sequence[Entry]) -> None:
        """See to it that those before a request do not wait for longer than they wanted to."""
        due = self._engine.late.next_due(before)
        if due is not None and request.late is None:
            pause = due - self._engine.clock.now()
            # What is due already owns: its value says so only once it has been put again.
            pause = pause if pause > 0 else _POLL
            request.late = self._engine.loop.call_later(pause, self._take_out_late, request)

    def _take_out_late(self, request: EtcdRequest) -> None:
        request.late = None
        if not (request.decided or self._session.over):
            self._engine.spawn(self._take_out_and_look(request))

    async def _take_out_and_look(self, request: EtcdRequest) -> None:
        try:
            await self._engine.late.take_out(request.name)
        except (TenureError, Lost, Refused) as error:
            _log.warning(
                "could not remove overdue waiters: node=%s name=%r error=%s",
                *(request.name.path, request.name.name, error),
            )
        except Exception as error:
            self._failures.report(error)
        self.look_soon(request)

    def _watch(self, request: EtcdRequest, watched: frozenset[bytes], revision: int) -> None:
        if request.watch is not None and request.watched == watched:
            return
        self.unwatch(request)
        request.watched = watched
        key, end = request.name.requests, b""
        if len(watched) == 1:
            (key,) = watched
        else:
            end = wire.after(key)
        happened, missed = partial(self._happened, request), partial(self._missed, request)
        request.watch = self._engine.watching.add(
            *(key, end, revision + 1, happened, missed),
            puts=request.count != request.limit,
            at_once=True,
            once=not end,
        )

    def _missed(self, request: EtcdRequest) -> None:
        """Something may have happened before the watch began."""
        if request.near:
            self.look_soon(request)
        elif request.poll is None:  # most probably not, so far behind
            request.poll = self._engine.loop.call_later(_MISSED, self.look_soon, request)

    def _happened(self, request: EtcdRequest, events: Sequence[WatchEvent]) -> None:
        if any(event.kv.key in request.watched for event in events):
            self.look_soon(request)

    def look_soon(self, request: EtcdRequest) -> None:
        """Look, and once more if it is being looked already."""
        if request.looking:
            request.look_again = True
        elif not (request.decided or self._session.over or not request.created):
            request.looking = True
            self._engine.spawn(self._look_until_seen(request))

    async def _look_until_seen(self, request: EtcdRequest) -> None:
        try:
            request.look_again = True
            while request.look_again and not request.decided:
                request.look_again = False
                await self.look(request, tell=True)
        except (TenureError, Refused) as error:
            if not self._session.over:
                _log.warning(
                    "could not read the queue, retrying: node=%s name=%r error=%s",
                    *(request.name.path, request.name.name, error),
                )
                request.poll = self._engine.loop.call_later(_POLL, self.look_soon, request)
        except Exception as error:
            self._failures.report(error)
            if not self._session.over:
                request.poll = self._engine.loop.call_later(_POLL, self.look_soon, request)
        finally:
            request.looking = False

    async def look(self, request: EtcdRequest, *, tell: bool) -> None:
        """Read what stands before a request, and act on it."""
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None
        answer, _ = await self._session.ask(partial(transactions.looking, self._session, request))
        settled = request.decided if tell else request.owns
        if settled:
            return
        if answer.ok:
            self.place(request, entries(answer.parts[0].found), answer.revision)
            if request.owns and tell:
                self.granted(request)
        elif tell:
            left = answer.parts[1].first
            self._taken_out(request.request_id, EVICTED if left is None else left.value)

    def granted(self, request: EtcdRequest) -> None:
        """Tell that it owns."""
        self._session.events.granted(request.request_id, self._session.order_id(request))
        if request.count != request.limit:
            answer = self._session.operations.take(request.name.name, lambda: self._mark(request))
            answer.add_done_callback(heard)

    async def _mark(self, request: EtcdRequest) -> None:
        """Wake the next."""
        if not request.gone:
            request.marked = True
            await self._session.ask(
                partial(transactions.changing, self._session, request, request.count, None)
            )

    def unwatch(self, request: EtcdRequest) -> None:
        """End the watch and the poll of a request."""
        if request.watch is not None:
            self._engine.watching.remove(request.watch)
            request.watch = None
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None

    def stop(self, request: EtcdRequest) -> None:
        """Nothing is waited for any more."""
        self.unwatch(request)
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if request.late is not None:
            request.late.cancel()
            request.late = None

    def gone(self, request: EtcdRequest) -> None:
        """Forget a request that left its queue, or whose session is over; its followers look."""
        request.gone = True
        self._engine.local.pop(request.key, None)
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.waiting.look_soon(follower)


def heard(answer: asyncio.Future[Any]) -> None:
    """Log the failure of an operation without a caller."""
    if not answer.cancelled() and answer.exception() is not None:
        _log.debug("could not notify the next waiter: error=%s", answer.exception())
