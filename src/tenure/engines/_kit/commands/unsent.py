"""Operations and statements that wait for a connection, in the order of their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenure.engines._kit.commands.operations import EnqueueOperation, Operation, WithdrawOperation
from tenure.engines._kit.commands.statements import OperationBatch, Statement


class UnsentOperations:
    """Operations that were never sent, of an engine without a connection.

    A request that is withdrawn before it was sent is dropped, and so is its withdrawal. Otherwise
    programs that try again and again would fill the memory during a long outage, and keep the
    server busy after it.
    """

    def __init__(self) -> None:
        self._operations: dict[Operation[Any], None] = {}  # in order
        self._requests: dict[tuple[Any, int], EnqueueOperation] = {}  # of these operations

    def operate(self, operation: Operation[Any]) -> None:
        """Add an operation, unless it withdraws a request that was not sent."""
        if isinstance(operation, WithdrawOperation):
            request = self._requests.pop((operation.session, operation.request_id), None)
            if request is not None:
                del self._operations[request]
                operation.leave_unsent(request)
                return
        elif isinstance(operation, EnqueueOperation) and operation.is_new:
            self._requests[operation.session, operation.request_id] = operation
        self._operations[operation] = None

    def take_all(self) -> list[Operation[Any]]:
        """Remove and return all operations."""
        taken = list(self._operations)
        self._operations.clear()
        self._requests.clear()
        return taken


class UnsentStatements:
    """Statements and operations of an engine without a connection.

    Args:
        new_batch: returns an empty batch.

    Attributes:
        operate: adds an operation, unless it withdraws a request that was not sent.
    """

    def __init__(self, new_batch: Callable[[], OperationBatch]) -> None:
        self._new_batch = new_batch
        self._statements: list[Statement] = []
        self._operations = UnsentOperations()  # after the statements
        self.operate = self._operations.operate

    def put_first(self, statements: list[Statement]) -> None:
        """Add statements before all others, because they may have been sent before."""
        self._statements[:0] = statements

    def add(self, statement: Statement) -> None:
        """Add a statement."""
        self._make_batches()
        self._statements.append(statement)

    def take_all(self) -> list[Statement]:
        """Remove all, and return it as statements."""
        self._make_batches()
        taken, self._statements = self._statements, []
        return taken

    def _make_batches(self) -> None:
        batch: OperationBatch | None = None
        for each in self._operations.take_all():
            if batch is None or not batch.add(each):
                batch = self._new_batch()
                batch.add(each)
                self._statements.append(batch)
