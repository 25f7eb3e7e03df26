"""Result of an acquiring call, to be awaited or entered once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tenure._client.handles import AsyncHandle
from tenure.errors import Misuse


class _Block(Protocol):
    def _enter(self) -> None:
        """Enter the block of a newly acquired lease."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


B = TypeVar("B", bound=_Block | None)

_OF_A_LEASE = frozenset({"check", "fencing_token", "held", "release", "slot", "slots", "update"})
"""Attributes of a lease that programs read from a call that they have not awaited."""


class Once(AsyncHandle, Coroutine[Any, Any, B], Generic[B]):
    """A coroutine that is also a context manager; either way it runs once.

    ``x = await call()`` returns the object; ``async with call() as x`` also enters it. If a call
    returns ``None``, nothing is entered. It is a full coroutine, so
    ``task_group.create_task(call())`` works. Like a coroutine, it warns when it was never awaited.
    """

    __slots__ = ("_arguments", "_entered", "_function", "_running", "_what")

    def __init__(
        self, what: object, function: Callable[..., Coroutine[Any, Any, B]], *arguments: object
    ) -> None:
        self._what = what  # may be a str that names the call in messages
        self._arguments = arguments
        self._running: Coroutine[Any, Any, B] | None = None
        self._entered: B | None = None
        self._function: Callable[..., Coroutine[Any, Any, B]] | None = function

    def __repr__(self) -> str:
        return f"<{self._what}{', to be awaited or entered' if self._function else ''}>"

    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name):
            if name.startswith("_") or name not in _OF_A_LEASE:
                raise AttributeError(name, name=name, obj=self)
            raise AttributeError(
                f"{self._what} has not been awaited: write 'await' before the call",
                name=name,
                obj=self,
            )

        def __enter__(self):
            # The error says what was wrong with the call; a warning would repeat it.
            self._function = None
            super().__enter__()

    def arguments_for(self, function: Callable[..., Any]) -> tuple[Any, ...] | None:
        """Return the arguments if it calls `function`; then it is used, for a call of another kind.

        Raises:
            Misuse: it has been awaited or entered already.
        """
        if self._function is None:
            raise self._used()
        if self._function is not function:
            return None
        self._function = None
        return self._arguments

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

    # Coroutine protocol, used by tasks

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
    """Leave a block for which nothing was entered."""
