"""Replies in the order of the requests that they answer, over all names.

Requests for different names are carried out side by side; YDB answers all of a session in order.
A reply that is ready too early waits here for those before it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tenure.server.ydb.operations import Script

__all__ = ["Turn", "Turns"]


class Turn:
    """One request's script, and its replies while an earlier request is unanswered.

    Attributes:
        name: the semaphore that the request is about.
        script: what is left to do; ``None`` when the request is answered.
        replies: those that wait.
        parked: the script continues when every earlier request is answered.
    """

    __slots__ = ("name", "parked", "replies", "script")

    def __init__(self, name: str, script: Script | None) -> None:
        """Start without replies."""
        self.name = name
        self.script = script
        self.replies: list[Any] = []
        self.parked = False


class Turns:
    """The requests of one session that are unanswered, or whose replies wait for earlier ones.

    Args:
        replies: what is sent, in order.

    Attributes:
        said: replies of a running script; `collect` takes them from there.
    """

    def __init__(self, replies: list[Any]) -> None:
        """Start without requests; replies go to `replies`."""
        self.said: list[Any] = []
        self._replies = replies
        self._open: deque[Turn] = deque()

    def __len__(self) -> int:
        """Return the number of requests that are not done."""
        return len(self._open)

    def open(self, turn: Turn) -> None:
        """Put a new request behind all others."""
        self._open.append(turn)

    def is_first(self, turn: Turn) -> bool:
        """Return true if every earlier request is answered."""
        return self._open[0] is turn

    def collect(self, turn: Turn) -> None:
        """Take the replies of the script of `turn`."""
        if self.said:
            (self._replies if self._open[0] is turn else turn.replies).extend(self.said)
            self.said.clear()

    def collect_push(self) -> None:
        """Take replies to a push of the store: they come after all others."""
        if not self.said:
            return
        if not self._open:
            self._replies.extend(self.said)
        else:
            if self._open[-1].script is not None:
                self._open.append(Turn("", None))
            self._open[-1].replies.extend(self.said)
        self.said.clear()

    def finish(self, turn: Turn) -> Turn | None:
        """Note that a request is answered; returns a parked one that may go on, if there is one."""
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
        """Forget everything: nothing more is said."""
        self._open.clear()
        self.said.clear()
