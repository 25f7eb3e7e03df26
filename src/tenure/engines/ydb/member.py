"""One of the sessions on the server that a session of the program is made of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tenure.engines.ydb.channel import Channel
from tenure.engines.ydb.line import Line
from tenure.engines.ydb.strand import Strand
from tenure.wire.ydb import Message

if TYPE_CHECKING:
    from tenure.engines.ydb.hold import Hold
    from tenure.engines.ydb.session import YdbSession

__all__ = ["Member"]


class Member:
    """A strand, its line, and what stands in queues through it: one request for each name.

    Attributes:
        strand: what is said.
        line: what carries it.
        holds: the requests, by name.
        detached: its contact was lost, and is not back.
        stopping: it is to end, and takes no more requests.
        over: done when the session on the server has ended, or has no waiters left.
        idle_since: when its last request left, on the clock.
    """

    def __init__(
        self,
        session: YdbSession,
        channel: Channel,
        path: str,
        window: float,
        description: str,
        key: bytes,
    ) -> None:
        self._session = session
        self.detached = False
        self.stopping = False
        self.holds: dict[str, Hold] = {}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle_since = session.now()
        self.strand = Strand(path, window, description, key, session.now, self)
        self.line = Line(channel, self.strand, lost=self._lost, failed=self._failed)

    @property
    def id(self) -> int:
        return self.strand.id

    def drop(self, hold: Hold) -> None:
        """The request has left its queue."""
        if self.holds.get(hold.name) is hold:
            del self.holds[hold.name]
            self.idle_since = self._session.now()

    def stop(self) -> None:
        """End the session on the server. Safe to call twice."""
        self.stopping = True
        self.strand.stop()
        self.line.word()

    def give_up(self) -> None:
        """It will never be attached."""
        self.line.end()
        if not self.over.done():
            self.over.set_result(None)

    # StrandEvents

    def outgoing(self) -> None:
        self.line.outgoing()

    def started(self) -> None:
        self.detached = False
        self._session.member_started(self)

    def proven(self, at: float) -> None:  # noqa: ARG002  the strand knows
        self._session.member_proven()

    def refused(self, failure: Message) -> None:
        self._session.member_refused(self, failure)

    def ended(self, failure: Message | None) -> None:
        self.give_up()
        self._session.member_over(self, failure)

    # The line

    def _lost(self) -> None:
        self.detached = True
        self._session.tell_contact()

    def _failed(self, error: Exception) -> None:
        self._session.member_failed(self, error)
