"""Delivery of news to an engine's sessions, from the file and from its own commits.

Everything goes to the sessions on the loop, in order, and never from inside the operation that
caused it. News of a request whose place is not known yet wait until it is.
"""

from __future__ import annotations

from collections.abc import Callable

from tenure.background import BackgroundQueue, Failures
from tenure.engines.contract import Removal
from tenure.engines.sqlite.over import Attachment
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

__all__ = ["Newsroom"]

_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_KINDS = {CHANGED_DATA: DATA, CHANGED_OWNERS: OWNERS}


class Newsroom:
    """Passes on what concerns an engine's sessions.

    Args:
        over: called with a session and a request's number when a request does not wait any more.
        acknowledge: called with an attachment that was taken over, and is over here already.
    """

    def __init__(
        self,
        store: Store,
        watches: SqliteWatches,
        over: Callable[[int, int], None],
        acknowledge: Callable[[Attachment], None],
    ) -> None:
        """Start without sessions."""
        self.sessions: dict[int, SqliteSession] = {}
        self._watches = watches
        self._store = store
        self._over = over
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
        """Read what others have written for this engine."""
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
            self._last = self._store.tx.news_read = rows[-1][0]

    def pass_on(self, pushes: list[Push]) -> None:
        """Tell the sessions, soon."""
        self._pushes.put(pushes)

    def answered(self) -> None:
        """Places have become known."""
        if self._early:
            early, self._early = self._early, []
            self.pass_on(early)

    def _deliver(self, push: Push) -> None:
        kind, number, request_id, order_id, why = push
        if kind in _KINDS:
            self._watches.tell((number, why), _KINDS[kind])
            return
        session = self.sessions.get(number)
        if kind == TAKEN_OVER:
            self._tell_superseded(session, (number, request_id))
        elif session is None:
            return
        elif kind == ENDED:
            session.end(why)
        elif kind == ACKNOWLEDGED:
            session.look.set()
        elif session.put_by is not None:
            session.put_by.append(push)
        elif request_id in session.asked:
            self._early.append(push)
        elif session.known is None or request_id in session.known:
            self._over(number, request_id)
            if kind == GRANTED:
                session.events.granted(request_id, order_id)
            else:
                session.events.removed(request_id, _REMOVALS[kind])

    def _tell_superseded(self, session: SqliteSession | None, former: Attachment) -> None:
        if session is not None and session.attach_number <= former[1]:
            session.superseded()
        else:  # that attachment has already ended here
            self._acknowledge(former)
