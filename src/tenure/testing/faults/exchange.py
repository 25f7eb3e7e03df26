"""Operations that are carried out at the other end of a way, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from tenure.engines.contract import Answer
from tenure.errors import EngineUnavailable
from tenure.testing.faults.way import Message, Way

T = TypeVar("T")


class Exchange:
    """Exchange of operations and answers between a program and a store, over a `Way`.

    Attributes:
        loop: the program's loop, once it is open.

    Args:
        url: the store's URL, for errors.
        way: the simulated network between the two.
        io_loop: the loop on which messages arrive, if it differs from the program's.
    """

    def __init__(self, url: str, way: Way, io_loop: asyncio.AbstractEventLoop | None) -> None:
        """Start without a loop; `open` sets it."""
        self.way = way
        self.loop: asyncio.AbstractEventLoop | None = None
        self._url = url
        self._io_loop = io_loop
        self._work: set[asyncio.Task[Any]] = set()

    def open(self, store_loop: asyncio.AbstractEventLoop | None) -> None:
        """Begin on the running loop; the store is on `store_loop`, if that is another one."""
        self.loop = asyncio.get_running_loop()
        self.way.there.loop = store_loop or self.loop
        self.way.back.loop = self._io_loop or self.loop

    def operate(
        self, operation: Callable[[], Any], pending: dict[asyncio.Future[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Send an operation to the store, and return the future of its answer.

        Args:
            operation: the operation to carry out there.
            pending: holds the answer until it is set.
        """
        assert self.loop is not None, "not opened"
        answer = self.loop.create_future()
        if pending is not None:
            pending[answer] = None
            answer.add_done_callback(pending.pop)
        self.way.there.send(partial(self._carry_out, operation, answer))
        return answer

    def _carry_out(self, operation: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        try:
            result = operation()
            if isinstance(result, Coroutine):
                result = self.begin(result)
        except Exception as error:
            self._reply(answer, None, error)
            return
        if isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._done, answer))
        else:
            self._reply(answer, result, None)

    def begin(self, operation: Coroutine[Any, Any, T]) -> Answer[T]:
        """Start an operation now, in the order of arrival; a task finishes its waits."""
        try:
            waits_for = operation.send(None)
        except StopIteration as stop:
            value: T = stop.value
            return value
        return self.at_store(_Rest(operation, waits_for).finish())

    def at_store(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the store's loop."""
        assert self.way.there.loop is not None
        task = self.way.there.loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _done(self, answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._reply(answer, None, EngineUnavailable(f"{self._url} was closed meanwhile"))
        else:
            error = done.exception()
            self._reply(answer, None if error else done.result(), error)

    def _reply(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.deliver(partial(settle, answer, result, error))

    def deliver(self, message: Message) -> None:
        """Send a message back; it is called on the program's loop when it arrives."""
        if self._io_loop is None:
            self.way.back.send(message)
        else:
            self.way.back.send(partial(self._pass_on, message))

    def _pass_on(self, message: Message) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(message)


class _Rest:
    """Remainder of a coroutine that has run until it had to wait."""

    def __init__(self, work: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    async def finish(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        work, waits_for = self._work, self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = work.throw(error)
                else:
                    waits_for = work.send(sent)
        except StopIteration as stop:
            return stop.value


def settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the answer, unless it was cancelled or already set by the end of the session."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
        answer.exception()  # no warning if the program never retrieves it
    else:
        answer.set_result(result)


def at_once(operation: Coroutine[Any, Any, T]) -> T:
    """Run an operation that does not wait, and return its result.

    Raises:
        RuntimeError: the operation would have to wait.
    """
    try:
        operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    operation.close()
    raise RuntimeError("the engine does not answer at once")
