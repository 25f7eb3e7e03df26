"""Future that calls its listeners immediately when its result is set.

A callback of `add_done_callback` is called in a later iteration of the loop, and a task woken by it
runs in yet another iteration. A `Prompt` saves the first of these.

Rules:

* Listeners are called within `set_result`. After a failure or a cancellation they are called in a
  later iteration of the loop, like callbacks of any future, and not within an operation of an
  engine.
* A listener must not raise, block or await, and is called once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

# called often, therefore without super()
_init, _set_result = asyncio.Future.__init__, asyncio.Future.set_result

_Listener: TypeAlias = "Callable[[asyncio.Future[Any]], object]"


class Prompt(asyncio.Future[T]):
    """A future of an answer, for `when_answered`.

    Attributes:
        listeners: called with it, once, when it is done.
    """

    __slots__ = ("listeners",)  # a dictionary would take as long to create as the rest

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start pending, on `loop`, with no listeners."""
        _init(self, loop=loop)
        self.listeners: tuple[_Listener, ...] = ()

    def set_result(self, result: T) -> None:
        """Set the result and call the listeners immediately."""
        _set_result(self, result)
        for each in self.listeners:
            each(self)

    def set_exception(self, error: type | BaseException) -> None:
        """Set the error; the loop calls the listeners in its next iteration."""
        super().set_exception(error)
        self._call_later()

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future; the loop calls the listeners in its next iteration."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._call_later()
        return cancelled

    def _call_later(self) -> None:
        for each in self.listeners:
            self.get_loop().call_soon(each, self)


def when_answered(
    answer: asyncio.Future[T], listener: Callable[[asyncio.Future[T]], object]
) -> None:
    """Call `listener` when the future is done; immediately, for a `Prompt`."""
    if isinstance(answer, Prompt) and not answer.done():
        answer.listeners += (listener,)
    else:
        answer.add_done_callback(listener)
