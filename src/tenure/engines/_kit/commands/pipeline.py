"""Operations of sessions, and the statements of one connection that carry them. No I/O.

From the caller to the connection:

* An *operation* adds a request to a queue, or takes one out of it.
* A *statement* is one transaction of the store. A *batch* is a statement of several operations.
* Without a connection, `UnsentOperations` and `UnsentStatements` keep both.
* With one, `StatementPipeline` has the statements that wait, and those that are under way.

The server executes the statements of a connection one after the other. What is sent while it
executes another one begins at once, without waiting for the client. Rules:

* At most `MOST` statements are under way. Two of them may be batches: the server executes one
  while the client handles the reply to the other. Operations that are called for meanwhile are the
  next batch. If they are many it takes half of them, so that the two are of one size. Operations on
  one name are one batch at a time. Then it takes as many as will follow: the callers of those that
  were answered call for others, while the server executes these.
* A statement may be rolled back, and is sent again behind those that were sent meanwhile. So none
  is sent that depends on one under way: no operation on the same name, and nothing that changes a
  session while operations of the session are under way, or the other way round. The keys of a
  statement (`Statement.holds`, `Statement.shares`) say on what it depends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, TypeVar

from tenure.engines._kit.commands.replies import count_text, microseconds
from tenure.engines.contract import Enqueued, Place, Prompt, Removal, Withdrawn
from tenure.model import EPHEMERAL_LIMIT

T = TypeVar("T")

REFUSED = Enqueued(Place.REFUSED, None)
LEFT = Withdrawn.LEFT

# Requests

SENT, WAITING, HANDED, OWNS = range(4)
"""States of a request, as far as known here.

A request of which the session owns the mutex already, through the request ahead, is `HANDED`: it is
granted here, and waits in the store until the release ahead has arrived there.
"""

REMOVALS = {"t": Removal.TIMED_OUT, "x": Removal.DELETED, "e": Removal.EVICTED}
"""Reasons of the store for removing requests, by the kinds of the events."""


def is_removal(kind: str) -> bool:
    """Return true if an event of this kind is a removal that this release knows."""
    return kind in REMOVALS or kind[:1] == "r"


def removal(kind: str) -> Removal:
    """Return the reason of a removal: `kind` is a key of `REMOVALS`, or "r" and the new limit."""
    return Removal.resized(int(kind[1:])) if kind[0] == "r" else REMOVALS[kind]


class OrderIds:
    """Highest order id seen by this program. Later ones are higher, even after data loss."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
        self.highest = 0

    def saw(self, order_id: int) -> None:
        """Record an order id."""
        self.highest = max(self.highest, order_id)


# Operations

_init = asyncio.Future.__init__
"""Constructor of operations, called directly because it is on the hot path."""

_NOT_THERE = -1
"""Answer to the withdrawal of a request that was in no queue."""


class Operation(Prompt[T]):
    """A frequent operation of a session, part of a batch.

    Attributes:
        session: the session of the operation, in the type of its engine.
        request_id: the request that it adds, or takes out.
        name: the name of the semaphore; empty if unknown here.
        data: the data of the request that it adds.
        may_have_run: whether it was sent before, without an answer.
        words: the arguments of a script that executes it: kind, request id, and those of the kind.
    """

    __slots__ = ("may_have_run", "name", "request_id", "session", "words")

    session: Any
    request_id: int
    name: str
    data: bytes = b""
    may_have_run: bool
    words: tuple[Any, ...]

    def answered(self, reply: Any) -> None:
        """Handle its part of the reply."""
        raise NotImplementedError

    def settle(self, result: T) -> None:
        """Set the result, unless the caller has cancelled it."""
        if not self.done():
            self.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the error, unless the caller has cancelled it."""
        if not self.done():
            self.set_exception(error)

    def again(self) -> None:
        """Record that it was sent, may have been executed, and is sent again."""
        self.may_have_run = True


class EnqueueOperation(Operation[Enqueued]):
    """Operation that adds a request to a queue. The store looks up one that may have run.

    Attributes:
        exclusive: it takes all tokens of an ephemeral semaphore.
        timeout: the seconds that the request may wait; ``None`` for any time.
        deadline: the time of its timeout by the loop's clock, if it has one.
    """

    __slots__ = ("count", "data", "deadline", "ephemeral", "exclusive", "timeout")

    def __init__(
        self,
        session: Any,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.name = name
        self.count = count
        self.data = data
        self.timeout = timeout
        self.ephemeral = ephemeral
        self.exclusive = count == EPHEMERAL_LIMIT and ephemeral
        self.deadline = None if timeout is None else session.loop.time() + timeout
        self.may_have_run = False
        short = self.exclusive and timeout is None and not data
        self.words = ("m", request_id, name) if short else self._words("e")

    def _words(self, kind: str) -> tuple[Any, ...]:
        options = (microseconds(self.timeout), "1" if self.ephemeral else "0")
        return (kind, self.request_id, self.name, count_text(self.count), self.data, *options)

    def again(self) -> None:
        """Make the store look up an earlier sending first."""
        self.may_have_run = True
        self.words = self._words("E")

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.placed(self, reply)


class WithdrawOperation(Operation[Withdrawn]):
    """Operation that takes a request out of its queue. One that may have run may find none.

    Attributes:
        retried: whether the session retries it after a failure, because no caller waits for it.
    """

    __slots__ = ("retried",)

    def __init__(self, session: Any, request_id: int, name: str, *, retried: bool = False) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.name = name
        self.may_have_run = False
        self.retried = retried
        self.words = ("w", request_id)

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        if reply == 0:
            self.session.confirmed(self.request_id)
            self.settle(LEFT)
        elif reply == _NOT_THERE:
            self.session.confirmed(self.request_id)
            self.settle(LEFT if self.may_have_run else Withdrawn.MISSING)
        else:
            self.session.not_withdrawn(self, reply)

    def leave_unsent(self, request: EnqueueOperation) -> None:
        """Answer this and the request, of which neither is sent."""
        self.session.loop.call_soon(request.settle, REFUSED)
        self.answered(0)


# Statements


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


_MOST_OPERATIONS = 1000
_MOST_DATA = 1024 * 1024
"""Bytes of data in one batch, unless one operation has more."""


class OperationBatch(Statement):
    """Operations of sessions, in order.

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
        self._room = _MOST_DATA

    def add(self, operation: Operation[Any]) -> bool:
        """Add an operation; return false if there is no room for it."""
        operations, size = self.operations, len(operation.data)
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
            if each.request_id != request_id or each.session is not session:
                continue
            if isinstance(each, EnqueueOperation) and not each.may_have_run:
                del operations[at]
                self._room += len(each.data)
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
    return operation.session.path, operation.name


# Without a connection


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
        elif isinstance(operation, EnqueueOperation) and not operation.may_have_run:
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


# The statements of a connection

MOST = 16
"""Statements that may be under way."""
_BATCHES = 2
"""Batches that may be under way."""
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
