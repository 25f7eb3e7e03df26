"""Recurring sessions: the client's implicit one, and the retry loop of `Client.sessions`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from tenure._client.attaching import SessionOptions, attach_anchored
from tenure._client.contact import Contact
from tenure._client.handles import AsyncHandle
from tenure._client.internals import session_core
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure._client.session_life import ORIGIN
from tenure._client.source import ClientAnchor
from tenure.errors import InvalidArgument, LeaseLost, SessionExpired
from tenure.model import DEFAULT_NODE

W = TypeVar("W", bound=Callable[..., object])


class ImplicitSession:
    """Session of `Client.mutex` and similar methods, attached when one is needed.

    A session that has ended is replaced by a new one. The first caller starts a task of the client
    that attaches it. If that caller is cancelled, the others still get the session. If attaching
    fails, all of them get the error.
    """

    def __init__(self, anchor: ClientAnchor, recovery_window: float) -> None:
        self.node = DEFAULT_NODE
        self.recovery_window = recovery_window
        self._anchor = anchor
        self._client = anchor.core
        self._handle: Session | None = None  # keeps the session
        self._session: SessionCore | None = None
        self._attaching: asyncio.Task[SessionCore] | None = None

    @property
    def contact(self) -> Contact:
        """The client's contact to the store."""
        return self._client.contact

    def ready(self) -> SessionCore | None:
        """Return the session if it can be used at once."""
        session = self._session
        if session is not None and session.is_proven():
            session.check_loop()
            return session
        self._client.check_owner()
        return None

    def current(self) -> SessionCore | None:
        """Return the session that was used last, ended or not."""
        return self._session

    async def obtain(self) -> SessionCore:
        """Return the session, attaching it if needed."""
        await self._client.opened()
        session = self.ready()
        if session is not None:
            return session
        if self._attaching is None or self._attaching.done():
            self._attaching = self._client.tasks.begin(self._attach())
        return await self._client.outcome(self._attaching)

    async def _attach(self) -> SessionCore:
        options = SessionOptions.of(DEFAULT_NODE, self.recovery_window, "", "cancel", None)
        self._handle = handle = await attach_anchored(self._anchor, options, None)
        self._session = core = session_core(handle)
        return core


class Attempts:
    """Loop of `Client.sessions`."""

    def __init__(self, attach: Callable[[], Awaitable[Session]]) -> None:
        self._attach = attach
        self._again = True

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if not self._again:
            raise StopAsyncIteration
        self._again = False
        return Attempt(self._attach, self._repeat)

    def _repeat(self) -> None:
        self._again = True


class Attempt(AsyncHandle):
    """One attempt of `Client.sessions`: a session's block that may be repeated."""

    def __init__(
        self, attach: Callable[[], Awaitable[Session]], repeat: Callable[[], None]
    ) -> None:
        self._attach = attach
        self._repeat = repeat
        self._core: SessionCore
        self._session: Session

    async def __aenter__(self) -> Session:
        self._session = await self._attach()
        self._core = session_core(self._session)
        self._core.enter()
        return self._session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            await self._session.__aexit__(kind, error, trace)
        except SessionExpired as expired:
            if error is None:
                return False  # the work is done
            error = expired
        again = error is not None and _is_expiry_of(self._core, error)
        if again:
            self._repeat()
        return again


def path_and_work(path: str | W, work: W | None) -> tuple[str, W]:
    """Return the arguments of `Client.run`, with the default node if the path is omitted.

    Raises:
        InvalidArgument: the work is missing, or the path is not a string.
    """
    if work is None and not isinstance(path, str):
        return DEFAULT_NODE, path
    if work is None or not isinstance(path, str):
        raise InvalidArgument("client.run takes the work, or a path and the work")
    return path, work


def is_loss(error: BaseException) -> bool:
    """Return true if the error, or every leaf of a group, reports a lost lease or session."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(each) for each in error.exceptions)
    return isinstance(error, LeaseLost | SessionExpired)


def _is_expiry_of(session: SessionCore, error: BaseException) -> bool:
    """Return true if the error, or every leaf of a group, reports that session's expiry."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expiry_of(session, each) for each in error.exceptions)
    origin = error.__cause__ if isinstance(error, LeaseLost) else error.__dict__.get(ORIGIN)
    return origin is session.why and isinstance(origin, SessionExpired)
