"""Parts shared by the recipes: the source of their primitives, streams of states, and writes.

A recipe whose state is a semaphore's data changes it under a mutex, in one session (`write_under`).
A holder that was paused for too long has lost its session, and the store rejects its write. (The
session of an evicted holder is still alive.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

from tenure._client.client import Client
from tenure._client.internals import put_back, session_core
from tenure._client.lease import Lease
from tenure._client.session import Session
from tenure._client.watch import Watch
from tenure.errors import TenureError
from tenure.model import SemaphoreDescription

T = TypeVar("T")

Source: TypeAlias = "Client | Session"
"""Source of a recipe's primitives: a session, or a client for its implicit session."""


class States(Generic[T]):
    """A stream of a recipe's states: an async iterator and an async context manager.

    It starts with the current state; a newer one follows every change. Changes may be merged, but
    the last state delivered is the latest. It ends with the session's error when the session ends.
    In a bare ``async for`` it lives until it is garbage collected; in ``async with`` it ends with
    the block.
    """

    def __init__(
        self,
        watch: Watch[SemaphoreDescription],
        view: Callable[[SemaphoreDescription], T],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Show each state of `watch` through `view`, after `prepare` has run once."""
        self._watch = watch
        self._view = view
        self._prepare = prepare

    async def __aenter__(self) -> States[T]:
        """Enter the block that ends the watch at its end."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the watch."""
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching. Safe to call twice; a waiting ``async for`` ends."""
        self._prepare = None
        await self._watch.aclose()

    def __aiter__(self) -> States[T]:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> T:
        """Wait for the next state and return it."""
        if self._prepare is not None:
            try:
                await self._prepare()
            except TenureError:
                await self.aclose()
                raise
            self._prepare = None
        return self._view(await anext(self._watch))

    def _put_back(self, state: T) -> None:
        """Return a state to the stream, after its reader was interrupted."""
        put_back(self._watch, state)


async def write_under(lease: Lease, name: str, data: bytes) -> None:
    """Replace the data of a semaphore, in the session that holds the lease of its mutex.

    Raises:
        LeaseLost, SessionExpired, SessionClosed: the session has ended; the store may have the
            data.
    """
    session = session_core(lease.session)  # a client may have a new one by then
    await _to_its_end(session.race(session.engine.update_semaphore(name, data)))


async def _to_its_end(write: Coroutine[Any, Any, None]) -> None:
    """Wait for a write, also when cancelled.

    Otherwise the mutex could be released, and the next value written, before this one: some stores
    keep the order of operations for each name only.
    """
    writing = asyncio.ensure_future(write)
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not writing.cancelled():
        writing.exception()  # retrieves it
        raise cancelled
    writing.result()
