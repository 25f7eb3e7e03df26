"""Kept answers, so that each operation of a session's holder is carried out only once.

The answer to a changing operation is kept, by its rid, until the holder acknowledges it; a repeated
operation gets the same answer. The number of kept answers is limited.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from tenure.server.limits import Count
from tenure.wire.errors import to_wire
from tenure.wire.messages import Failed


class Answers:
    """Kept answers of one session on the node `node`; at most `most`.

    Attributes:
        kept: the answers by rid.
        unanswered: the rids of pending operations.
    """

    __slots__ = ("_acknowledged", "_last_rid", "_most", "_node", "kept", "unanswered")

    def __init__(self, node: str, most: int) -> None:
        self.kept: dict[int, Struct] = {}
        self.unanswered: set[int] = set()
        self._node = node
        self._most = most
        self._acknowledged = 0
        self._last_rid = 0

    def is_new(self, rid: int, send: Callable[[Struct], None]) -> bool:
        """Return true if an operation is new. Otherwise send its kept answer again."""
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
        """Forget the answers up to that rid."""
        if upto > self._acknowledged:
            self._acknowledged = upto
            if self.kept:
                self.kept = {rid: answer for rid, answer in self.kept.items() if rid > upto}

    def clear(self) -> None:
        """Forget all answers: the session has ended."""
        self.kept.clear()
        self.unanswered.clear()
