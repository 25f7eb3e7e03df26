"""Replies in the order of their requests, over all names.

Requests for different names are carried out concurrently, but YDB answers all requests of a session
in order. A reply that is ready too early waits here for those before it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tenure.server.ydb.operations import Script


class Turn:
    """One request's script, and its replies while an earlier request is unanswered.

    Attributes:
        name: the semaphore of the request.
        script: the remaining steps; ``None`` when the request is answered.
        replies: the waiting replies.
        parked: whether the script waits until every earlier request is answered.
    """

    __slots__ = ("name", "parked", "replies", "script")

    def __init__(self, name: str, script: Script | None) -> None:
        self.name = name
        self.script = script
        self.replies: list[Any] = []
        self.parked = False


class Turns:
    """Unanswered requests of a session, and those whose replies wait for earlier ones.

    Args:
        replies: the messages to send, in order.

    Attributes:
        produced: replies of a running script, taken by `collect`.
    """

    def __init__(self, replies: list[Any]) -> None:
        """Start without requests; replies go to `replies`."""
        self.produced: list[Any] = []
        self._replies = replies
        self._open: deque[Turn] = deque()

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._open)

    def open(self, turn: Turn) -> None:
        """Append a new request."""
        self._open.append(turn)

    def is_first(self, turn: Turn) -> bool:
        """Return true if every earlier request is answered."""
        return self._open[0] is turn

    def collect(self, turn: Turn) -> None:
        """Take the replies of the script of `turn`."""
        if self.produced:
            (self._replies if self._open[0] is turn else turn.replies).extend(self.produced)
            self.produced.clear()

    def collect_push(self) -> None:
        """Append replies to an event of the store: they come after all others."""
        if not self.produced:
            return
        if not self._open:
            self._replies.extend(self.produced)
        else:
            if self._open[-1].script is not None:
                self._open.append(Turn("", None))
            self._open[-1].replies.extend(self.produced)
        self.produced.clear()

    def finish(self, turn: Turn) -> Turn | None:
        """Record that a request is answered; return a parked one that may continue, if any."""
        turn.script = None
        pending = self._open
        if pending[0] is not turn:
            return None
        pending.popleft()
        while pending:
            first = pending[0]
            self._replies.extend(first.replies)
            first.replies.clear()
            if first.script is not None:
                unparked, first.parked = first.parked, False
                return first if unparked else None
            pending.popleft()
        return None

    def clear(self) -> None:
        """Drop everything: nothing more is sent."""
        self._open.clear()
        self.produced.clear()
