"""Futures for answers, and the coroutines that compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["Rest", "at_once", "settle"]

T = TypeVar("T")


class Rest:
    """Remainder of a coroutine that has been run until it had to wait."""

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
