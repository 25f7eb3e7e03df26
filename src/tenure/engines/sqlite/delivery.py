"""Delivery of events to an engine's sessions, from the file and from its own commits.

All events are delivered on the loop, in order, and never from inside the operation that caused
them. Events of a request wait until its place is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tenure.background import BackgroundQueue, Failures
from tenure.engines.contract import Removal
from tenure.engines.sqlite.expiry import Attachment
from tenure.engines.sqlite.session import SqliteSession
from tenure.engines.sqlite.store import Store, log
from tenure.engines.sqlite.transaction import (
    ACKNOWLEDGED,
    CHANGED_DATA,
    CHANGED_OWNERS,
    DATA,
    DELETED,
    ENDED,
    EVICTED,
    GRANTED,
    OWNERS,
    TAKEN_OVER,
    TIMED_OUT,
    Push,
    Transaction,
)
from tenure.engines.sqlite.watches import SqliteWatches

_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_KINDS = {CHANGED_DATA: DATA, CHANGED_OWNERS: OWNERS}


class EventDelivery:
    """Delivery of events to the sessions of one engine.

    Args:
        over: called with a session and a request's number when the request no longer waits.
        acknowledge: called with an attachment that was taken over, and has already ended here.
    """

    def __init__(
        self,
        store: Store,
        watches: SqliteWatches,
        over: Callable[[int, int], None],
        acknowledge: Callable[[Attachment], None],
    ) -> None:
        self.sessions: dict[int, SqliteSession] = {}
        self._watches = watches
        self._store = store
        self._request_ended = over
        self._acknowledge = acknowledge
        self._pushes: BackgroundQueue[Push] = BackgroundQueue(
            store.loop,
            store.clock.now,
            self._deliver,
            Failures(f"delivering events of {store.address.url}", log),
        )
        self._early: list[Push] = []
        self._last = 0

    def read(self, tx: Transaction) -> None:
        """Read the events that other participants have written for this engine."""
        if not tx.participant:
            return
        rows = tx.execute(
            "SELECT id, kind, session, hold, order_id, why, node, name FROM news "
            "WHERE participant = ? AND id > ? ORDER BY id",
            (tx.participant, self._last),
        ).fetchall()
        if rows:
            self.pass_on(
                [
                    (kind, session, request_id, order_id, why)
                    if name is None
                    else (kind, node, 0, None, name)
                    for _, kind, session, request_id, order_id, why, node, name in rows
                ]
            )
            self._last = self._store.tx.events_read = rows[-1][0]

    def pass_on(self, pushes: list[Push]) -> None:
        """Deliver events to the sessions, soon."""
        self._pushes.put(pushes)

    def answered(self) -> None:
        """Deliver the events that have waited for a place."""
        if self._early:
            early, self._early = self._early, []
            self.pass_on(early)

    def _deliver(self, push: Push) -> None:
        kind, number, request_id, order_id, why = push
        if kind in _KINDS:
            self._watches.changed((number, why), _KINDS[kind])
            return
        session = self.sessions.get(number)
        if kind == TAKEN_OVER:
            self._supersede(session, (number, request_id))
        elif session is None:
            return
        elif kind == ENDED:
            session.end(why)
        elif kind == ACKNOWLEDGED:
            session.recheck.set()
        elif session.early is not None:
            session.early.append(partial(self.pass_on, [push]))
        elif request_id in session.pending:
            self._early.append(push)
        elif session.known is None or request_id in session.known:
            self._request_ended(number, request_id)
            if kind == GRANTED:
                session.owned.add(request_id)
                session.events.granted(request_id, order_id)
            else:
                session.owned.discard(request_id)
                session.events.removed(request_id, _REMOVALS[kind])

    def _supersede(self, session: SqliteSession | None, former: Attachment) -> None:
        if session is not None and session.attach_number <= former[1]:
            session.superseded()
        else:  # that attachment has already ended here
            self._acknowledge(former)
