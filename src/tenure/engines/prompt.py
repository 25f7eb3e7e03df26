"""A future whose result is heard of in the instant in which it comes.

What is added to a future with `add_done_callback` is called at a later turn of the loop, and a task
that is woken by that runs another turn later. An engine that gives a `Prompt` saves the first.

Rules:

* A result is heard of within `set_result`. A failure and a cancellation are heard of at a later
  turn, as of any future: much may follow from them, and not amid what an engine is doing.
* Who hears does not raise, block or await, and hears once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

__all__ = ["Prompt", "when_answered"]

T = TypeVar("T")

# Often called, and without the detour of super():
_init, _set_result = asyncio.Future.__init__, asyncio.Future.set_result

_Hearer: TypeAlias = "Callable[[asyncio.Future[Any]], object]"


class Prompt(asyncio.Future[T]):
    """A future of an answer, for `when_answered`.

    Attributes:
        hearers: called with it, once, when the answer is there.
    """

    __slots__ = ("hearers",)  # a dictionary would take as long to make as the rest

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start pending, on `loop`, with no hearers."""
        _init(self, loop=loop)
        self.hearers: tuple[_Hearer, ...] = ()

    def set_result(self, result: T) -> None:
        """Set the result and call the hearers immediately."""
        _set_result(self, result)
        for each in self.hearers:
            each(self)

    def set_exception(self, error: type | BaseException) -> None:
        """Set the error; the loop calls the hearers in its next iteration."""
        super().set_exception(error)
        self._tell_later()

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future; the loop calls the hearers in its next iteration."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._tell_later()
        return cancelled

    def _tell_later(self) -> None:
        for each in self.hearers:
            self.get_loop().call_soon(each, self)


def when_answered(answer: asyncio.Future[T], hearer: Callable[[asyncio.Future[T]], object]) -> None:
    """Have `hearer` called when an answer is there: at once, where the engine can do that."""
    if isinstance(answer, Prompt) and not answer.done():
        answer.hearers += (hearer,)
    else:
        answer.add_done_callback(hearer)
