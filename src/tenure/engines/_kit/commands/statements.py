"""Statements for a database, and batches of operations as one statement. No I/O.

A statement may be rolled back, and is sent again then. Its keys say which others may not be under
way at the same time (`tenure.engines._kit.commands.pipeline`).
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

from tenure.engines._kit.commands.operations import EnqueueOperation, Operation

_MOST_OPERATIONS = 1000
_MOST_TEXT = 1024 * 1024
"""Characters of data in one batch, unless one operation has more."""


class Statement:
    """A statement, which is a transaction of its own, and the receiver of its reply.

    Attributes:
        recurs: its SQL is sent again and again, with other parameters.
        alone: no other one is under way at the same time.
        holds: no other one that holds or shares one of these is under way at the same time.
        shares: the same for another one that holds one of these.
    """

    __slots__ = ()

    recurs = True
    alone = False
    holds: Collection[object] = ()
    shares: Collection[object] = ()

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
        """Return the SQL and its parameters as of now."""
        raise NotImplementedError

    def answered(self, reply: Any) -> None:
        """Handle the reply: a value, or an exception of the store."""
        raise NotImplementedError

    def judged(self) -> None:
        """Note that the sessions which hold it up have been ended, if that was possible."""

    def rolled_back(self) -> None:
        """Note that the database has rolled it back; it is sent again."""

    def parts(self) -> list[Statement]:
        """Return statements that do the same together; empty if this does one thing."""
        return []

    def lost(self) -> bool:
        """Note the end of the connection; return whether the next one sends the statement."""
        return True


class OperationBatch(Statement):
    """Operations of sessions, in order; their words begin with kind, request id and name.

    One that the database refuses does not fail the others: the batch is sent again in parts.

    Attributes:
        operations: the operations.
        holds: the names of the operations, with their nodes.
        shares: the sessions of the operations.
    """

    __slots__ = ("_room", "holds", "operations", "shares")

    holds: set[object]
    shares: set[object]

    def _like(self) -> OperationBatch:
        """Return an empty batch with the options of this one."""
        raise NotImplementedError

    def _clear(self) -> None:
        """Start empty, or start again."""
        self.operations: list[Operation[Any]] = []
        self.holds = set()
        self.shares = set()
        self._room = _MOST_TEXT

    def add(self, operation: Operation[Any]) -> bool:
        """Add an operation; return false if there is no room for it."""
        operations, size = self.operations, _size(operation)
        if operations and (size > self._room or len(operations) >= _MOST_OPERATIONS):
            return False
        self._room -= size
        operations.append(operation)
        self.holds.add(_place(operation))
        self.shares.add(operation.session)
        return True

    def remove(self, session: object, request_id: int) -> EnqueueOperation | None:
        """Remove a request, and return it, unless the store may have carried it out."""
        operations = self.operations
        for at, each in enumerate(operations):
            if each.words[1] != request_id or each.session is not session:
                continue
            if isinstance(each, EnqueueOperation) and each.is_new:
                del operations[at]
                self._room += _size(each)
                place = _place(each)
                if all(_place(other) != place for other in operations):
                    self.holds.remove(place)
                return each
        return None

    def take(self, most: int, held: Container[object]) -> OperationBatch:
        """Remove operations, the first ones on names that are not held; return a batch of them."""
        taken, operations, several = self._like(), self.operations, len(self.holds) > 1
        self._clear()
        for each in operations:
            place = _place(each)
            free = len(taken.operations) < most or (several and place in taken.holds)
            (taken if free and place not in held else self).add(each)
        return taken

    def parts(self) -> list[Statement]:
        """Return the two halves of the batch."""
        middle = len(self.operations) // 2
        if not middle:
            return []
        halves = self._like(), self._like()
        for at, each in enumerate(self.operations):
            halves[at >= middle].add(each)
        return [*halves]

    def lost(self) -> bool:
        """Have the operations looked up first."""
        for operation in self.operations:
            operation.again()
        return True


def _place(operation: Operation[Any]) -> tuple[str, object]:
    """Return the node and the name of an operation."""
    return operation.session.path, operation.words[2]


def _size(operation: Operation[Any]) -> int:
    words = operation.words
    return len(str(words[4])) if len(words) > 4 else 0
