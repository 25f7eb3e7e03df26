"""Operation queues of one session.

A request that is withdrawn during an outage, before it was sent, is dropped. Otherwise programs
that try again and again would fill the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from tenure.engines.etcd.errors import Refused
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.prompt import Prompt
from tenure.errors import TenureError

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
        """Answer nothing before a task is done."""
        self._awaited.add(task)
        task.add_done_callback(self._awaited.discard)

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
            if self._awaited:
                await asyncio.wait(list(self._awaited))
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
