"""A session of the store, for one connection: the owner of what its client claims.

Rules:

* The store decides: a claim is held when the store has granted it, and over when its session is.
* A lease is promised as far as the session is known to live, and no further (`can_promise`). A
  session that may have expired by now is over (`lapsed`).
* A grant is reported to the client only if the session was proven to live a short time ago. After
  an outage another listener may have taken the session over, and news of its grants may be old.
* A holder may have no connection: its client has gone and what it holds is kept for its lease, or
  it was found in the store after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tenure.engines.contract import Attach, EngineSession, Removal
from tenure.errors import NodeNotFound, SessionExpired
from tenure.model import NodeConfig, Recovered
from tenure.server.dflockd.claims import HELD, WAITING, Claim
from tenure.wire.lines.replies import ERROR, ERROR_NOT_ENQUEUED, TIMEOUT

if TYPE_CHECKING:
    from tenure.server.dflockd.connection import DflockdServerConnection
    from tenure.server.dflockd.locks import Locks

__all__ = ["LAPSED", "Holder", "attached"]

LAPSED = "the store has not been reached for too long"

_SHORTEST, _LONGEST = 60.0, 30 * 60.0  # windows, in seconds


class Holder:
    """Session of the store and its claims; receives the session's events (`SessionEvents`).

    Attributes:
        session: once it is attached.
        window: seconds that it lives without proof.
        connection: the connection of its client; ``None`` when that is gone.
        claims: by their numbers.
        hold: the greatest of these numbers.
        proof: the latest time at which the session was proven to live.
        found: the requests that it had in queues when it was taken over.
        letters: to other listeners, by their numbers, until they are answered
            (`tenure.server.dflockd.elsewhere`).
        over: its session is over, or left in the store.
    """

    session: EngineSession

    __slots__ = (
        "_doubted",
        "claims",
        "connection",
        "found",
        "hold",
        "letters",
        "locks",
        "over",
        "proof",
        "renewed_at",
        "session",
        "window",
    )

    def __init__(
        self, locks: Locks, window: float, connection: DflockdServerConnection | None
    ) -> None:
        self.locks = locks
        self.window = window
        self.connection = connection
        self.claims: dict[int, Claim] = {}
        self.hold = 0
        self.proof = float("-inf")
        self.renewed_at = locks.now()
        self.found: Sequence[Recovered] = ()
        self.letters: dict[int, asyncio.Future[bool]] = {}
        self.over = False
        self._doubted: dict[int, int] = {}  # order ids of grants, by their numbers

    def tick(self, now: float) -> None:
        """Prove that it lives, when it is time to; tell of the grants that waited for a proof."""
        if self._doubted and not self.doubts(now):
            doubted, self._doubted = self._doubted, {}
            for hold, order_id in doubted.items():
                self.granted(hold, order_id)
        if now - self.renewed_at >= self.window / 6:
            self.renewed_at = now
            self.session.renew()

    def lapsed(self, now: float) -> bool:
        """Return true if the store may have ended it without an event here."""
        return now - self.proof > self.window * 0.95

    def doubts(self, now: float) -> bool:
        """Return true if another listener may have taken it over: the store's events may be old.

        That takes half a window of silence.
        """
        return now - self.proof > self.window / 3

    def doubt(self, hold: int, order_id: int) -> None:
        """Tell of this grant when the session is proven to be this listener's still."""
        self._doubted[hold] = order_id
        self.session.renew()

    def can_promise(self, lease: int, now: float) -> bool:
        """Return true if it will live for so long, even if the store were lost now."""
        return now + min(lease, self.window / 2) <= self.proof + self.window

    # What the store says

    def proven(self, at: float) -> None:
        """From any thread."""
        self.proof = max(self.proof, at)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.found = requests

    def granted(self, hold: int, order_id: int | None) -> None:
        claim = self.claims.get(hold)
        if claim is None:
            return  # it is being withdrawn
        self._see_answer(claim)
        now = self.locks.now()
        if self.lapsed(now):  # and so this may be over as well
            self.locks.lose(self, LAPSED)
        elif claim.stage is not WAITING or order_id is None:
            return
        elif self.doubts(now):
            self.doubt(hold, order_id)
        else:
            self.locks.give(claim, order_id, now)
            self._tell(claim)

    def removed(self, hold: int, why: Removal) -> None:
        letter = self.letters.pop(hold, None)
        if letter is not None and not letter.done():
            letter.set_result(why is Removal.EVICTED)
        claim = self.claims.get(hold)
        if claim is None:
            return
        self._see_answer(claim)
        if why is Removal.TIMED_OUT:
            verdict = TIMEOUT
        else:  # an owner is evicted, by another listener when its client releases it there
            verdict = ERROR_NOT_ENQUEUED if claim.stage is HELD else ERROR
        self.locks.drop(claim, verdict, self.locks.now())
        self._tell(claim)

    def detached(self, cause: BaseException | None = None) -> None:
        """Do nothing: the store cannot be reached. `lapsed` says when that is too long."""

    def attached(self) -> None:
        """Renew the session: the store can be reached again."""
        self.session.renew()

    def ended(self, error: SessionExpired) -> None:
        self.locks.lose(self, str(error))

    def _see_answer(self, claim: Claim) -> None:
        """Process the answer before the push, even if its callback has not been called yet."""
        if claim.answer is not None and claim.answer.done():
            self.locks.answered(claim, claim.answer)

    def _tell(self, claim: Claim) -> None:
        if self.connection is not None:
            self.connection.news(claim)


async def attached(connection: DflockdServerConnection, lease: int, description: str) -> Holder:
    """Return a new holder for a connection whose first claim is for `lease` seconds.

    Raises what the store raises, and `LimitReached`.
    """
    locks = connection.locks
    context, node = locks.context, locks.options.node
    longest = min(_LONGEST, context.engine.capabilities.longest_window)
    window = min(max(2.0 * lease, _SHORTEST), longest)
    holder = Holder(locks, window, connection)
    how = Attach(node, window, description, "window", context.session_keys.of_dflockd())
    async with connection.reader.beginning():
        try:
            holder.session = await connection.engine.attach(how, holder)
        except NodeNotFound:  # it has been dropped
            await context.engine.create_node(node, NodeConfig(), exist_ok=True)
            holder.session = await connection.engine.attach(how, holder)
    context.counts.sessions.take_anyway()
    locks.holders.add(holder)
    return holder
