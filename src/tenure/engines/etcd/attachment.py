"""One attachment of a session: its lease, its key, its operations, and the commands in its name.

Rules:

* **The attach number** is the version of the session's key. Every attachment puts the key, and
  every command compares the version, so that etcd refuses whatever an older attachment still
  sends.
* **Unknown outcomes.** A command without an answer may have been done, or may be done yet. The
  session is attached anew first, under the next number: from then on what is still under way is
  refused. Then the command is sent again, by an operation that may find its own traces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from tenure.core import rules
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import Name, Record
from tenure.engines.etcd.members import Lost, Refused, failure, pauses
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.prompt import Prompt
from tenure.errors import SessionExpired, TenureError

__all__ = ["Attachment", "EtcdOperations"]

T = TypeVar("T")

_LEAST_PATIENCE = 0.5


class _Begun(Generator[Any, Any, T]):
    """A coroutine of which the first step, up to where it waits, has been made already."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._first: Any = None
        self._ended: BaseException | None = None
        try:
            self._first = coroutine.send(None)
        except BaseException as ended:  # its result, too
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


class EtcdOperations:
    """The operations of one session that are under way.

    On each name one is carried out after the other, in the order of the calls. Each is a task. It
    begins when the one before it is done, however that ended; if there is no other, at once, inside
    the call. The caller awaits a future. If it stops waiting, the operation goes on.

    Until it waits for the first time, an operation runs in the caller's task. There it must not
    depend on the current task, as `asyncio.timeout` does: its calls have their own timeouts.

    An operation that takes a request out of its queue announces it (`leaving`), so that the
    operation before it may do that on its way.

    Args:
        tasks: of the engine, which waits for them.
        told: makes the program's error of a refusal, or of being cut off.
    """

    def __init__(
        self,
        tasks: set[asyncio.Task[Any]],
        told: Callable[[Refused | asyncio.CancelledError, str], TenureError],
    ) -> None:
        """Start without operations; their tasks are added to `tasks`."""
        self._loop = asyncio.get_running_loop()
        self._of_engine = tasks
        self._told = told
        self._lines: dict[str, deque[tuple[asyncio.Task[None], EtcdRequest | None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: set[asyncio.Task[None]] = set()

    def take(
        self,
        name: str,
        operation: Callable[[], Coroutine[Any, Any, T]],
        leaving: EtcdRequest | None = None,
    ) -> asyncio.Future[T]:
        """Carry out an operation on a name after those that were called before it."""
        future: Prompt[T] = Prompt(self._loop)
        line = self._lines.get(name)
        before = None if line is None else line[-1][0]
        begun = _Begun(operation()) if before is None else None
        carrying_out = self._carry_out(before, name, begun, operation, future)
        task = self._loop.create_task(carrying_out)
        self._lines.setdefault(name, deque()).append((task, leaving))
        self._tasks.add(task)
        self._of_engine.add(task)
        task.add_done_callback(partial(self._carried_out, name, begun, future))
        return future

    def leaves_next(self, name: str) -> EtcdRequest | None:
        """The request that the operation after the one under way takes out, if it is such a one."""
        line = self._lines.get(name)
        return line[1][1] if line is not None and len(line) > 1 else None

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """Answer nothing before this is done."""
        self._awaited.add(task)
        task.add_done_callback(self._awaited.discard)

    async def _carry_out(
        self,
        before: asyncio.Task[None] | None,
        name: str,
        begun: _Begun[T] | None,
        operation: Callable[[], Coroutine[Any, Any, T]],
        future: asyncio.Future[T],
    ) -> None:
        try:
            if before is not None and not before.done():
                await asyncio.wait([before])
            result = await (operation() if begun is None else begun)
            if self._awaited:
                await asyncio.wait(list(self._awaited))
        except TenureError as error:
            if not future.done():
                future.set_exception(error)
        except Refused as refused:
            if not future.done():
                future.set_exception(self._told(refused, name))
        except asyncio.CancelledError:
            raise  # and passed to the future below, as for one that had not begun
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
            raise
        else:
            if not future.done():
                future.set_result(result)

    def _carried_out(
        self,
        name: str,
        begun: _Begun[T] | None,
        future: asyncio.Future[T],
        task: asyncio.Task[None],
    ) -> None:
        self._tasks.discard(task)
        self._of_engine.discard(task)
        line = self._lines[name]
        line.remove(next(each for each in line if each[0] is task))  # mostly the first
        if not line:
            del self._lines[name]
        if task.cancelled():
            if begun is not None:
                begun.close()
            if not future.done():
                future.set_exception(self._told(asyncio.CancelledError(), name))

    async def finish(self, within: float) -> None:
        """Return when nothing is under way any more, or that time is over."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within)

    def cut_off(self, *, finish_leaving: bool = False) -> None:
        """Give up what is under way, but the operation that calls this.

        Args:
            finish_leaving: go on with what takes requests out of their queues: only the answer
                of etcd tells whether they were there.
        """
        current = asyncio.current_task()
        for line in list(self._lines.values()):
            for task, leaving in list(line):
                if task is not current and not (finish_leaving and leaving is not None):
                    task.cancel()


class Attachment(SessionBase):
    """One attachment, without its requests.

    Attributes:
        key: the session's key.
        record: what stands there.
        version: of the key; the attach number.
        mine: what every command compares.
        resumable: whether another program may take it over.
        proven_at: when the latest renewal that was answered was sent.
        operations: those of the program that are under way.
    """

    def __init__(
        self,
        engine: EtcdCluster,
        how: Attach,
        number: int,
        record: Record,
        version: int,
        events: SessionEvents,
    ) -> None:
        """Start attached, with the record that the session's key has."""
        super().__init__(how, events, number, record.window)
        self.engine = engine
        self.key = engine.keys.session(self.path, number)
        self.record = record
        self.resumable = record.liveness == "window"
        self.patience = min(engine.patience, max(record.window / 6, _LEAST_PATIENCE))
        self.get = wire.get(wire.range_(self.key))
        self.believes = self.key + b"/b/" + record.token.encode()
        self.proven_at = float("-inf")
        self.operations = EtcdOperations(engine.tasks, self._told)
        self._attaching = asyncio.Lock()
        self.became(version)

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self.version

    def became(self, version: int) -> None:
        """The number of the attachment is another one."""
        self.version = version
        self.mine = wire.version_is(self.key, version)

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as it was read, names this attachment."""
        return kv is not None and Record.read(kv.value).token == self.record.token

    def judge(self, kv: KeyValue | None) -> bool:
        """Act on the session's key as it was read; whether the session goes on."""
        if kv is None:
            self.end("its window has passed in the store, or an administrator ended it")
        elif not self.is_mine(kv):
            self.superseded()
        elif kv.version > self.version:
            self.became(kv.version)
        return not self.over

    def prove(self, at: float) -> None:
        """The lease was extended, in answer to what was sent then. From any thread."""
        if not self.over and not self.closing:
            self.proven_at = max(self.proven_at, at)
            self.events.proven(at)

    # Asking

    async def ask(
        self, build: Callable[[], bytes], leaving: EtcdRequest | None = None
    ) -> tuple[answers.Answer, bool]:
        """Send a transaction; returns its answer, and whether it may have been carried out before.

        It compares `mine`, and reads the session's key first where something does not hold.

        Args:
            build: makes the transaction; called again for each attempt.
            leaving: the request that the transaction deletes.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        again = False
        while True:
            self.check()
            version = self.version
            try:
                data = await self.engine.members.call(wire.TXN, build(), self.patience)
            except Lost:
                again = True
                if leaving is not None:
                    leaving.perhaps_left = True
                await self.attach_anew(version)
                continue
            answer = answers.read_answer(data)
            if answer.ok:
                return answer, again
            kv = answer.parts[0].first
            if kv is not None and kv.version == version and self.is_mine(kv):
                return answer, again
            self.judge(kv)

    def _told(self, error: Refused | asyncio.CancelledError, name: str) -> TenureError:
        """Make the caller's error of a refusal or a cancellation."""
        if isinstance(error, Refused):
            if not error.no_lease:
                return failure(self.engine.url, error, node=self.path, name=name)
            self.end("its lease has run out, or was revoked")
        return self.reason

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority; repeated until it is answered.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        pause = pauses()
        while True:
            self.check()
            try:
                return await self.engine.txn(wire.txn((), parts), self.patience)
            except Lost:
                await asyncio.sleep(next(pause))

    async def attach_anew(self, version: int) -> None:
        """See to it that the number of the attachment is above that one."""
        async with self._attaching:
            pause = pauses()
            while self.version == version:
                self.check()
                put = wire.put(self.key, self.record.value(), self.id)
                try:
                    answer = await self.engine.txn(
                        wire.txn((self.mine,), (put,), (self.get,)), self.patience
                    )
                except Lost:
                    await asyncio.sleep(next(pause))
                else:
                    if answer.ok:
                        self.became(version + 1)
                    else:
                        self.judge(answer.parts[0].first)

    def expired(self) -> SessionExpired:
        """The error for a session whose window has passed without an answer."""
        path = self.path
        return SessionExpired(f"the session on {path} could not be renewed in time", node=path)

    def check_open(self) -> None:
        """Raise why it takes no operations, if it takes none."""
        if self.over or self.closing:
            raise self.reason

    def name(self, name: str) -> Name:
        """The keys of a semaphore on its node. Raises `InvalidArgument`."""
        rules.check_name(name, self.path)
        return self.engine.name(self.path, name)

    def order_id(self, request: EtcdRequest) -> int:
        """Return the order id of a request, which is also the fencing token."""
        return self.engine.base + request.created
