"""Operations of one session: on each name one after the other, in the order of the calls.

Each is a task. It begins when the one before it on the same name is done, however that ended; if
there is no other, at once, inside the call. The caller awaits a future. If it stops waiting, the
operation goes on. Operations on different names do not wait for each other.

Until it waits for the first time, an operation runs in the caller's task. There it must not depend
on the current task, as `asyncio.timeout` does: an operation bounds its calls by their own timeouts.

An operation that takes a request out of its queue announces it (`leaving`), so that the operation
before it may do that on its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from tenure.engines.etcd.members import Refused
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.prompt import Prompt
from tenure.errors import TenureError

__all__ = ["Turns"]

T = TypeVar("T")


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


class Turns:
    """The operations of one session that are under way.

    Args:
        spawn: begins a task that its owner waits for.
        told: makes the program's error of a refusal, or of being cut off.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        told: Callable[[Refused | asyncio.CancelledError, str], TenureError],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._spawn = spawn
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
        task = self._spawn(self._carry_out(before, name, begun, operation, future))
        self._lines.setdefault(name, deque()).append((task, leaving))
        self._tasks.add(task)
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
