"""Watch of a semaphore: its current state, then a newer one after every change.

A watch reads the semaphore each time the engine reports a change. Changes may be merged, but the
last state delivered is always the latest: a change that arrives during a read causes another read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from tenure._client.handles import AsyncHandle
from tenure.core import rules
from tenure.errors import (
    InvalidArgument,
    Misuse,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.identity import semaphore_with_identities
from tenure.model import EPHEMERAL_LIMIT, SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.session_core import SessionCore
    from tenure._client.source import SessionSource

T = TypeVar("T")


class Watch(AsyncHandle, Generic[T]):
    """A stream of states: an async iterator and an async context manager.

    It starts with the current state. Equal states are delivered once. It ends with
    `SemaphoreNotFound` when the semaphore is deleted (an ephemeral one is reported as empty while
    it has no requests), and with the session's error when the session ends. In a bare ``async for``
    it lives until it is garbage collected; in ``async with`` it ends with the block.

    Example::

        gpus = session.semaphore("gpu")
        await gpus.create(limit=4, exist_ok=True)
        async with gpus.watch(owners=True) as states:
            async for state in states:
                if state.held < state.limit:
                    break
    """

    def __init__(
        self,
        source: SessionSource,
        name: str,
        *,
        data: bool,
        owners: bool,
        view: Callable[[SessionCore, SemaphoreDescription], T],
        prepare: Callable[[SessionCore], Awaitable[None]] | None = None,
        ephemeral: bool = False,
    ) -> None:
        if not (data or owners):
            raise InvalidArgument("watch data, owners, or both", name=name)
        self._source = source
        self._name = name
        self._data = data
        self._owners = owners
        self._view = view
        self._prepare = prepare
        self._ephemeral = ephemeral
        self._session: SessionCore | None = None
        self._stop: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self._changed.set()
        self._latest: object = None
        self._closed = False

    async def __aenter__(self) -> Watch[T]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    async def aclose(self) -> None:
        """Stop watching. Safe to call twice; a waiting ``async for`` ends."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._changed.set()
        session, stop = self._session, self._stop
        if session is not None and stop is not None:
            self._stop = None
            session.watchers.pop(self._changed.set, None)
            session.client.soon(stop)  # from any thread; nothing in a forked child

    def __del__(self) -> None:
        # Dropped in the middle of a bare `async for`. The constructor may have raised.
        if getattr(self, "_stop", None) is not None:
            self._close()

    def __aiter__(self) -> Watch[T]:
        return self

    async def __anext__(self) -> T:
        try:
            if self._session is None and not self._closed:
                await self._subscribe()
            return await self._next_state()
        except Misuse:
            raise
        except TenureError:
            self._close()  # the stream has ended
            raise

    async def _next_state(self) -> T:
        while True:
            await self._changed.wait()
            session = self._session
            if self._closed or session is None:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                session.alive()
                described = await described_now(
                    session, self._name, ephemeral=self._ephemeral, owners=self._owners
                )
            except BaseException:
                self._changed.set()  # this change was not delivered: read again at the next call
                raise
            seen = self._watched_state(described)
            if seen != self._latest and not self._closed:
                self._latest = seen
                return self._view(session, described)

    def _put_back(self, _state: object) -> None:
        """Return a state to the stream, after its reader was interrupted."""
        self._latest = None
        self._changed.set()

    def _watched_state(self, described: SemaphoreDescription) -> object:
        owners = [(owner.order_id, owner.count, owner.data) for owner in described.owners]
        return ((described.data, described.limit) if self._data else None, owners)

    async def _subscribe(self) -> None:
        session = await self._source.obtain()
        if self._prepare is not None:
            await self._prepare(session)
        if self._closed or self._session is not None:
            return
        try:
            self._stop = session.engine.watch(
                self._name, data=self._data, owners=self._owners, changed=self._changed.set
            )
        except SessionExpired as error:
            raise session.expired(error) from None
        session.watchers[self._changed.set] = None
        self._session = session


async def described_now(
    session: SessionCore, name: str, *, ephemeral: bool, owners: bool, waiters: bool = False
) -> SemaphoreDescription:
    """Describe a semaphore; an ephemeral one without requests is empty.

    Raises:
        SemaphoreNotFound: no lasting semaphore has that name.
        InvalidArgument: `ephemeral` is true, but the semaphore is a lasting one.
    """
    try:
        described = await session.race(
            session.engine.describe_semaphore(name, owners=owners, waiters=waiters)
        )
    except SemaphoreNotFound:
        if not ephemeral:
            raise
        return SemaphoreDescription(name, b"", EPHEMERAL_LIMIT, 0, ephemeral=True, waiting=0)
    if ephemeral:
        rules.check_kind(True, described.ephemeral, session.node, name)
    return semaphore_with_identities(described)
