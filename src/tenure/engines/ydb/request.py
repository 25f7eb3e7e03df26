"""One request of a session, and the member through which it is in its queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from tenure.engines.contract import Enqueued, Withdrawn
from tenure.engines.ydb import messages
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.protocol import Ask
from tenure.errors import TenureError
from tenure.wire.ydb import Message

__all__ = ["LONGEST_WAIT", "State", "YdbRequest", "settle"]

LONGEST_WAIT = 24 * 3600.0
"""Seconds: what waits longer waits for ever on the server, and is withdrawn from here."""


class State(Enum):
    """Last known state of a request."""

    ASKED = "asked"  # no answer yet
    WAITS = "waits"
    TAKEN = "taken"  # it owns; the order id is awaited
    OWNS = "owns"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class YdbRequest:
    """A request, from when the program made it until it is out of its queue.

    Attributes:
        request_id: the program's number for it.
        deadline: when it gives up waiting, on the clock; ``None`` for never.
        at_once: it is granted at once or not at all.
        state: where it stands.
        member: the one that it was sent through.
        ask: what was asked of the server and will be answered with the grant.
        taken: it was granted, sooner or later.
        release: what was asked of the server to have it out of its queue.
        perhaps_out: the server may have taken it out, and its answer has not been seen.
        refused: the server did not take it; the error is known, or looked for.
        order_id: once known.
        owned_at: the session's step at which it was known to own, with its order id.
        order_id_asked: a description that will contain it is on its way.
        answer: what `enqueue` returned.
        leavers: callers that wait for it to be out of its queue.
        lost: it has left its queue though the program did not ask for it.
    """

    request_id: int
    name: str
    count: int
    data: bytes
    deadline: float | None
    at_once: bool
    ephemeral: bool
    answer: asyncio.Future[Enqueued]
    state: State = State.ASKED
    member: Member | None = None
    ask: Ask | None = None
    taken: bool = False
    release: Ask | None = None
    perhaps_out: bool = False
    refused: bool = False
    order_id: int | None = None
    owned_at: int = 0
    order_id_asked: bool = False
    leavers: list[asyncio.Future[Withdrawn]] = field(default_factory=list)
    lost: bool = False

    def left_at(self, now: float) -> float | None:
        """Return the seconds that it still waits, for the server."""
        if self.at_once:
            return 0.0
        if self.deadline is None:
            return None
        left = self.deadline - now
        return None if left > LONGEST_WAIT else max(left, 0.0)

    def message(self, req_id: int, left: float | None) -> Message:
        """Return what joins the queue, or changes the request there, and waits for so long."""
        return messages.acquire(
            req_id, self.name, self.count, self.data, left, ephemeral=self.ephemeral
        )

    def answer_with(self, enqueued: Enqueued) -> bool:
        """Give the answer to `enqueue`, if it has none yet; return false if it has one."""
        if self.answer.done():
            return False
        self.answer.set_result(enqueued)
        return True

    def fail(self, error: TenureError) -> None:
        """Give the answer to `enqueue`, if it has none yet."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def answer_leavers(self, withdrawn: Withdrawn) -> None:
        """Answer the withdrawals: it is out of its queue."""
        for answer in self.leavers:
            if not answer.done():
                answer.set_result(withdrawn)


def settle(answer: asyncio.Future[None], error: TenureError | None = None) -> None:
    """Settle the answer, unless it is settled or abandoned."""
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
