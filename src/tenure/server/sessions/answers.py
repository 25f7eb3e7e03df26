"""Kept answers: each operation of a session's holder is carried out once, however often it is sent.

The answer to what changes something is kept, by its rid, until the holder acknowledges it; what is
sent again meanwhile gets the same answer. How many are kept is limited.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from tenure.server.limits import Count
from tenure.wire.errors import to_wire
from tenure.wire.messages import Failed

__all__ = ["Answers"]


class Answers:
    """The answers that are kept for one session, of the node `node`; `most` at a time.

    Attributes:
        kept: these, by the rids of the requests.
        unanswered: the rids of operations that are under way.
    """

    __slots__ = ("_acknowledged", "_last_rid", "_most", "_node", "kept", "unanswered")

    def __init__(self, node: str, most: int) -> None:
        """Start without answers."""
        self.kept: dict[int, Struct] = {}
        self.unanswered: set[int] = set()
        self._node = node
        self._most = most
        self._acknowledged = 0
        self._last_rid = 0

    def is_new(self, rid: int, send: Callable[[Struct], None]) -> bool:
        """Return true if an operation is new. Otherwise it is answered as it was before."""
        if rid > self._last_rid:
            self._last_rid = rid
        else:
            answer = self.kept.get(rid)
            if answer is not None:
                send(answer)
                return False
            if rid in self.unanswered or rid <= self._acknowledged:
                return False
        if len(self.kept) + len(self.unanswered) >= self._most:
            refusal = Count("kept_answers", self._most, "this session")
            send(Failed(rid, to_wire(refusal.reached(node=self._node))))
            return False
        return True

    def acknowledge(self, upto: int) -> None:
        """Forget the answers to what came up to that rid."""
        if upto > self._acknowledged:
            self._acknowledged = upto
            if self.kept:
                self.kept = {rid: answer for rid, answer in self.kept.items() if rid > upto}

    def clear(self) -> None:
        """Forget all answers: the session has ended."""
        self.kept.clear()
        self.unanswered.clear()
