"""Result of a call that acquires something: to be awaited, or entered, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tenure._client.handles import AsyncHandle
from tenure.errors import Misuse

__all__ = ["Once"]


class _Block(Protocol):
    def _enter(self) -> None:
        """Enter the block of a lease that has just been acquired and was never entered before."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


B = TypeVar("B", bound=_Block | None)


class Once(AsyncHandle, Coroutine[Any, Any, B], Generic[B]):
    """A coroutine that is also a context manager; either way it runs once.

    ``x = await call()`` gives the object; ``async with call() as x`` gives it and enters it. Some
    calls may give ``None`` instead; then nothing is entered.
    It is a coroutine in full, so that ``task_group.create_task(call())`` works.
    Dropped unused, it warns, as a coroutine that was never awaited does.
    """

    __slots__ = ("_arguments", "_entered", "_function", "_running", "_what")

    def __init__(
        self, what: object, function: Callable[..., Coroutine[Any, Any, B]], *arguments: object
    ) -> None:
        self._what = what  # as a str it names the call in messages
        self._arguments = arguments
        self._running: Coroutine[Any, Any, B] | None = None
        self._entered: B | None = None
        self._function: Callable[..., Coroutine[Any, Any, B]] | None = function

    def __repr__(self) -> str:
        return f"<{self._what}{', to be awaited or entered' if self._function else ''}>"

    if not TYPE_CHECKING:  # pragma: no branch

        def __enter__(self):
            self._function = None  # the error says what was wrong with the call; no warning, too
            super().__enter__()

    def _start(self) -> Coroutine[Any, Any, B]:
        function, self._function = self._function, None
        if function is None:
            raise self._used()
        return function(*self._arguments)

    def _used(self) -> Misuse:
        return Misuse(f"{self._what} has been awaited or entered already; call it again")

    def __await__(self) -> Generator[Any, Any, B]:
        return self._start().__await__()

    async def __aenter__(self) -> B:
        function, self._function = self._function, None
        if function is None:
            raise self._used()
        self._entered = entered = await function(*self._arguments)
        if entered is not None:
            entered._enter()  # noqa: SLF001  what entering its block would do
        return entered

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Coroutine[Any, Any, None]:
        return _nothing() if self._entered is None else self._entered.__aexit__(kind, error, trace)

    # A coroutine's own protocol: what a task drives.

    def send(self, value: Any) -> Any:
        if self._running is None:
            self._running = self._start()
        return self._running.send(value)

    def throw(self, *error: Any) -> Any:
        if self._running is None:
            self._running = self._start()
        return self._running.throw(*error)

    def close(self) -> None:
        self._function = None
        if self._running is not None:
            self._running.close()

    def __del__(self) -> None:
        # getattr: a constructor that raised leaves no attribute behind.
        if getattr(self, "_function", None) is not None:
            warnings.warn(
                f"{self._what} was never awaited or entered",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


async def _nothing() -> None:
    """Leave a block that nothing was entered for."""
