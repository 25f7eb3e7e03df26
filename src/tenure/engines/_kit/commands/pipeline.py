"""Statements of one connection: those that wait, and those that are under way. No I/O.

The server executes the statements of a connection one after the other. What is sent while it
executes another one begins at once, without waiting for the client. Rules:

* At most `MOST` statements are under way. Two of them may be batches: the server executes one
  while the client handles the reply to the other. Operations that are called for meanwhile are the
  next batch. If they are many it takes half of them, so that the two are of one size. Operations on
  one name are one batch at a time. Then it takes as many as will follow: the callers of those that
  were answered call for others, while the server executes these.
* A statement may be rolled back, and is sent again behind those that were sent meanwhile. So none
  is sent that depends on one under way: no operation on the same name, and nothing that changes a
  session while operations of the session are under way, or the other way round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from tenure.engines._kit.commands.operations import Operation, WithdrawOperation
from tenure.engines._kit.commands.statements import OperationBatch, Statement

MOST = 16
_BATCHES = 2
_FEW = 16
"""Operations that are one batch, however many others are under way."""


class StatementPipeline:
    """The statements of one connection.

    Args:
        new_batch: returns an empty batch.
        most: statements that may be under way.

    Attributes:
        under_way: those that were sent, the first one first.
    """

    def __init__(self, new_batch: Callable[[], OperationBatch], most: int = MOST) -> None:
        self.under_way: deque[Statement] = deque()
        self._new_batch = new_batch
        self._most = most
        self._waiting: deque[Statement] = deque()
        self._batch: OperationBatch | None = None  # the last one that waits, open for more
        self._batches = self._operations = 0  # under way
        self._latest = 0  # operations of the last batch, if others waited for its end
        self._held: set[object] = set()  # by statements under way
        self._shared: Counter[object] = Counter()

    @property
    def waits(self) -> bool:
        """True if a statement has not been sent."""
        return bool(self._waiting)

    def add(self, statement: Statement) -> None:
        """Add a statement behind all others."""
        self._batch = None
        self._waiting.append(statement)

    def operate(self, operation: Operation[Any]) -> None:
        """Add an operation, to the last batch if that waits and has room."""
        batch = self._batch
        if batch is None or not batch.add(operation):
            batch = self._batch = self._new_batch()
            self._waiting.append(batch)
            batch.add(operation)

    def drop(self, operation: Operation[Any]) -> bool:
        """Drop an operation and the request that it withdraws, if that waits; return whether."""
        if not isinstance(operation, WithdrawOperation):
            return False
        for statement in reversed(self._waiting):
            if not isinstance(statement, OperationBatch):
                break  # it may depend on the request
            request = statement.remove(operation.session, operation.request_id)
            if request is not None:
                if not statement.operations:
                    self._waiting.remove(statement)
                    if statement is self._batch:
                        self._batch = None
                operation.leave_unsent(request)
                return True
        return False

    def put_first(self, statements: Iterable[Statement]) -> None:
        """Send statements before all others that wait."""
        self._waiting.extendleft(reversed([*statements]))

    def begin(self) -> Statement | None:
        """Return the next statement, which is under way from now on; ``None`` if it has to wait."""
        under_way = self.under_way
        if not self._waiting or len(under_way) >= self._most:
            return None
        statement = self._waiting[0]
        if under_way and (statement.alone or under_way[-1].alone):
            return None
        if isinstance(statement, OperationBatch):
            portion = self._portion(statement)
            if portion is None:
                return None
            statement = portion
        elif any(key in self._held or key in self._shared for key in statement.holds):
            return None
        else:
            self._waiting.popleft()
        under_way.append(statement)
        self._held.update(statement.holds)
        self._shared.update(statement.shares)
        return statement

    def _portion(self, batch: OperationBatch) -> OperationBatch | None:
        """Take what may be sent of the first batch that waits."""
        held = self._held
        if self._batches >= _BATCHES or not held.isdisjoint(batch.shares) or held >= batch.holds:
            return None
        size = len(batch.operations)
        others = self._operations if len(batch.holds) > 1 else self._latest or size
        most = max(_FEW, (size + others + 1) // 2)
        portion = batch
        if size > most or not held.isdisjoint(batch.holds):
            portion = batch.take(most, held)
            if not portion.operations:
                return None
        if portion is batch or not batch.operations:  # it was taken as a whole
            self._waiting.popleft()
            if batch is self._batch:
                self._batch = None
        self._batches += 1
        self._operations += len(portion.operations)
        return portion

    def end(self) -> Statement:
        """Return the first statement under way, which is no longer."""
        statement = self.under_way.popleft()
        self._ended(statement)
        if isinstance(statement, OperationBatch):
            self._latest = len(statement.operations) if self._waiting else 0
        return statement

    def withdraw(self) -> None:
        """Note that the statement which began last was not sent."""
        self._ended(self.under_way.pop())

    def _ended(self, statement: Statement) -> None:
        if isinstance(statement, OperationBatch):
            self._batches -= 1
            self._operations -= len(statement.operations)
        self._held.difference_update(statement.holds)
        for key in statement.shares:
            self._shared[key] -= 1
            if not self._shared[key]:
                del self._shared[key]

    def take_all(self) -> list[Statement]:
        """Return all statements in order, and drop them."""
        found = [*self.under_way, *self._waiting]
        self.under_way.clear()
        self._waiting.clear()
        self._batch = None
        return found
