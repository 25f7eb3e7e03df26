"""One attachment of a session: its lease and key, its operation queues and its transactions.

Rules:

* **The attach number** is the version of the session's key. Every attachment puts the key, and
  every transaction compares the version. So etcd rejects transactions of an older attachment.
* **Unknown outcomes.** A transaction without an answer may have been carried out, or may be carried
  out later. The session is first reattached under the next number, so that etcd rejects the old
  transaction. Then the operation sends it again; it may find its own results. Other transactions
  are not sent before that is done.

**The operation queues** (`EtcdOperations`) order the operations on each name. A request that is
withdrawn during an outage, before it was sent, is dropped. Otherwise programs that try again and
again would fill the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from tenure.core import rules
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue, Lost, Refused, pauses
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import Name, Record
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.prompt import Prompt
from tenure.errors import SessionExpired, TenureError

T = TypeVar("T")


class _Begun(Generator[Any, Any, T]):
    """Coroutine whose first step, up to its first wait, has run."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._first: Any = None
        self._ended: BaseException | None = None
        try:
            self._first = coroutine.send(None)
        except BaseException as ended:  # including its result
            self._ended = ended

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        if self._ended is not None:
            raise self._ended
        if self._first is None:
            return self._coroutine.send(value)
        first, self._first = self._first, None
        return first

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()


class _Turn:
    """Place of an operation in its queue.

    Attributes:
        task: carries the operation out.
        before: the operation to wait for.
        leaving: the request that the operation takes out of its queue.
        dropped: whether the next operation waits for `before` instead of this one.
    """

    __slots__ = ("before", "dropped", "leaving", "task")

    task: asyncio.Task[None]

    def __init__(self, before: _Turn | None, leaving: EtcdRequest | None) -> None:
        self.before = before
        self.leaving = leaving
        self.dropped = False


class EtcdOperations:
    """Operation queues of one session.

    The operations on a name are tasks, carried out one after the other. The first one begins within
    the call: it runs in the caller's task until its first wait. There it must not depend on the
    current task, as `asyncio.timeout` does: calls have their own timeouts. The caller awaits a
    future. If it stops waiting, the operation continues.

    An operation that takes a request out of its queue announces it (`leaving`), so that the
    previous operation can do both in one transaction.

    Args:
        tasks: the tasks of the engine, which waits for them.
        error_of: returns the caller's error for a rejection or a cancellation.
    """

    def __init__(
        self,
        tasks: set[asyncio.Task[Any]],
        error_of: Callable[[BaseException, str], TenureError],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        self._error_of = error_of
        self._queues: dict[str, dict[_Turn, None]] = {}
        self._awaited: set[asyncio.Task[None]] = set()

    def take(
        self,
        name: str,
        operation: Callable[[], Coroutine[Any, Any, T]],
        leaving: EtcdRequest | None = None,
        joining: EtcdRequest | None = None,
    ) -> asyncio.Future[T]:
        """Carry out an operation on a name after all earlier ones."""
        future: Prompt[T] = Prompt(self._loop)
        queue = self._queues.get(name)
        before = None if queue is None else next(reversed(queue))
        begun = _Begun(operation()) if before is None else None
        turn = _Turn(before, leaving)
        task = self._loop.create_task(self._carry_out(turn, name, begun, operation, future))
        turn.task = task
        self._queues.setdefault(name, {})[turn] = None
        self._tasks.add(task)
        task.add_done_callback(partial(self._carried_out, turn, name, begun, future))
        if joining is not None and not joining.sent:
            joining.drop = partial(self._drop, turn, future)
        return future

    def _drop(self, turn: _Turn, future: asyncio.Future[T], result: T) -> None:
        """Answer an operation that has sent nothing, and do not carry it out."""

        def settle() -> None:
            if not future.done():
                future.set_result(result)

        turn.dropped = True
        self._loop.call_soon(settle)  # before the end of the task
        turn.task.cancel()

    def leaves_next(self, name: str) -> EtcdRequest | None:
        """Return the request that the operation after the current one takes out, if it does."""
        following = next(islice(self._queues.get(name, ()), 1, None), None)
        return None if following is None else following.leaving

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """Answer nothing before a task is done, and read nothing (`ready`)."""
        self._awaited.add(task)
        task.add_done_callback(self._awaited.discard)

    async def ready(self) -> None:
        """Wait for the tasks of `wait_for`."""
        if self._awaited:
            await asyncio.wait(list(self._awaited))

    async def _carry_out(
        self,
        turn: _Turn,
        name: str,
        begun: _Begun[T] | None,
        operation: Callable[[], Coroutine[Any, Any, T]],
        future: asyncio.Future[T],
    ) -> None:
        try:
            while (before := turn.before) is not None:
                if not before.task.done():
                    await asyncio.wait([before.task])
                turn.before = before.before if before.dropped else None
            result = await (operation() if begun is None else begun)
            await self.ready()
        except asyncio.CancelledError:
            raise  # `_carried_out` propagates it, as for an operation that had not begun
        except BaseException as error:
            if not future.done():
                is_refused = isinstance(error, Refused)
                future.set_exception(self._error_of(error, name) if is_refused else error)
            if not isinstance(error, Refused | TenureError):
                raise
        else:
            if not future.done():
                future.set_result(result)

    def _carried_out(
        self,
        turn: _Turn,
        name: str,
        begun: _Begun[T] | None,
        future: asyncio.Future[T],
        task: asyncio.Task[None],
    ) -> None:
        self._tasks.discard(task)
        queue = self._queues[name]
        del queue[turn]
        if not queue:
            del self._queues[name]
        if task.cancelled():
            if begun is not None:
                begun.close()
            if not future.done():
                future.set_exception(self._error_of(asyncio.CancelledError(), name))

    async def finish(self, within: float) -> None:
        """Wait until all operations are done, or until that time."""
        tasks = [turn.task for queue in self._queues.values() for turn in queue]
        if tasks:
            await asyncio.wait(tasks, timeout=within)

    def cut_off(self, *, finish_leaving: bool = False) -> None:
        """Cancel all operations but the current one.

        Args:
            finish_leaving: continue operations that take requests out of their queues: only etcd's
                answer shows whether the requests were still there.
        """
        current = asyncio.current_task()
        for queue in list(self._queues.values()):
            for turn in list(queue):
                if turn.task is not current and not (finish_leaving and turn.leaving is not None):
                    turn.task.cancel()


_LEAST_TIMEOUT = 0.5


@dataclass(frozen=True, slots=True)
class WrittenAttachment:
    """An attachment that was written to the store.

    Attributes:
        how: the program's arguments.
        events: receives the events of the session.
        number: the session's number.
        record: the value of the session's key.
        version: the version of the key.
    """

    how: Attach
    events: SessionEvents
    number: int
    record: Record
    version: int


class EtcdAttachment(SessionBase):
    """One attachment, without its requests.

    Attributes:
        key: the session's key.
        record: the value of the key.
        version: the version of the key, which is the attach number.
        mine: the comparison in every transaction.
        get: reads the key.
        claim: the key that exists while this attachment may consider leases held.
        resumable: whether another program may take it over.
        proven_at: when the latest answered renewal was sent.
        operations: the program's operations.
    """

    def __init__(self, engine: EtcdCluster, attached: WrittenAttachment) -> None:
        record, number = attached.record, attached.number
        super().__init__(attached.how, attached.events, number, record.window)
        self.engine = engine
        self.key = engine.keys.session(self.path, number)
        self.record = record
        self.resumable = record.liveness == "window"
        self.timeout = min(engine.timeout, max(record.window / 6, _LEAST_TIMEOUT))
        self.get = wire.get(self.key)
        self.claim = record.claim(self.key)
        self.proven_at = float("-inf")
        self.operations = EtcdOperations(engine.tasks, self._error_of)
        self._attaching = asyncio.Lock()
        self._attaching_since = 0.0
        self.became(attached.version)

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self.version

    @property
    def credential(self) -> str:
        """The token of the attachment."""
        return self.record.token

    def became(self, version: int) -> None:
        """Set the attach number."""
        self.version = version
        self.mine = wire.version_is(self.key, version)

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as read, identifies this attachment."""
        return kv is not None and Record.read(kv.value).token == self.record.token

    def judge(self, kv: KeyValue | None) -> bool:
        """Process the session's key as read; return true if the session continues."""
        if kv is None:
            self.end("its window has passed in the store, or an administrator ended it")
        elif not self.is_mine(kv):
            self.superseded()
        elif kv.version > self.version:
            self.became(kv.version)
        return not self.over

    def prove(self, at: float) -> None:
        """Record that the lease was extended by a request sent at that time. From any thread."""
        if not self.over and not self.closing:
            self.proven_at = max(self.proven_at, at)
            self.events.proven(at)

    # Transactions

    async def transact(
        self,
        build: Callable[[], bytes],
        leaving: EtcdRequest | None = None,
        joining: EtcdRequest | None = None,
    ) -> tuple[answers.Answer, bool]:
        """Send a transaction, repeatedly if needed.

        It compares `mine`, and its first operation reads the session's key if a comparison fails.

        Args:
            build: makes the transaction; called for each attempt.
            leaving: the request that the transaction deletes.
            joining: the request that the transaction adds.

        Returns:
            The answer, and whether an earlier attempt may have been carried out.

        Raises:
            SessionExpired: the session has ended.
            Refused: it was rejected.
        """
        again = False
        while True:
            if self.over:
                raise self.reason
            version = self.version
            if self._attaching.locked():
                await self._reattach(version)
                continue
            if joining is not None:
                joining.sent, joining.drop = True, None
            try:
                data = await self.engine.members.call(wire.TXN, build(), self.timeout)
            except Lost:
                again = True
                if leaving is not None:
                    leaving.may_have_left = True
                await self._reattach(version)
                continue
            answer = answers.read_answer(data)
            if answer.ok:
                return answer, again
            kv = answer.parts[0].first
            if kv is not None and kv.version == version and self.is_mine(kv):
                return answer, again
            self.judge(kv)

    def _error_of(self, error: BaseException, name: str) -> TenureError:
        """Return the caller's error for a rejection or a cancellation."""
        if isinstance(error, Refused):
            if not error.no_lease:
                return self.engine.failure(error, self.path, name)
            self.end("its lease has expired, or was revoked")
        return self.reason

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority, repeating it until it is answered.

        Raises:
            SessionExpired: the session has ended.
            Refused: it was rejected.
        """
        pause = pauses()
        while True:
            self.check()
            try:
                return await self.engine.txn(wire.txn((), parts), self.timeout)
            except Lost:
                await asyncio.sleep(next(pause))

    @property
    def in_contact(self) -> bool:
        """False while etcd answers no watch, or has answered no transaction for the timeout."""
        attaching_for = self.engine.clock.now() - self._attaching_since
        answers = not self._attaching.locked() or attaching_for < self.timeout
        return answers and self.engine.watching.is_up

    async def _reattach(self, version: int) -> None:
        """Raise the attach number above `version`."""
        async with self._attaching:
            pause, self._attaching_since = pauses(), self.engine.clock.now()
            while self.version == version:
                self.check()
                put = wire.put(self.key, self.record.value(), self.id)
                try:
                    answer = await self.engine.txn(
                        wire.txn((self.mine,), (put,), (self.get,)), self.timeout
                    )
                except Lost:
                    await asyncio.sleep(next(pause))
                else:
                    if answer.ok:
                        self.became(version + 1)
                    else:
                        self.judge(answer.parts[0].first)

    def expired(self) -> SessionExpired:
        """Return the error for a session whose window has passed without an answer."""
        message = f"the session on {self.path} could not be renewed within its recovery window"
        return SessionExpired(message, node=self.path)

    def check_open(self) -> None:
        """Raise the reason if the session accepts no operations."""
        if self.over or self.closing:
            raise self.reason

    def name(self, name: str) -> Name:
        """Return the keys of a semaphore on its node. Raises `InvalidArgument`."""
        rules.check_name(name, self.path)
        return self.engine.name(self.path, name)

    def order_id(self, request: EtcdRequest) -> int:
        """Return the order id of a request, which is also the fencing token."""
        return self.engine.base + request.created
