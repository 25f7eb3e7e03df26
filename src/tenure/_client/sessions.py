"""Sessions that come again: the client's implicit one, and the retry loop of `Client.sessions`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from tenure._client.ending import ORIGIN
from tenure._client.handles import AsyncHandle
from tenure._client.session import Session
from tenure.errors import InvalidArgument, LeaseLost, SessionExpired
from tenure.model import DEFAULT_NODE

if TYPE_CHECKING:
    from tenure._client.client import Client
    from tenure._client.once import Once

__all__ = ["Attempt", "Attempts", "ImplicitSession", "is_loss", "path_and_work"]

W = TypeVar("W", bound=Callable[..., object])


class ImplicitSession:
    """The session behind `Client.mutex` and its like: attached on first use, anew once over.

    Whoever needs it first has it attached, in a task that the client owns: if that caller is
    cancelled the others still get it, and if it fails all of them are told.
    """

    def __init__(self, client: Client, recovery_window: float) -> None:
        self.node = DEFAULT_NODE
        self.recovery_window = recovery_window
        self._client = client
        self._client_contact = client._contact
        self._session: Session | None = None
        self._attaching: asyncio.Task[Session] | None = None

    def _ready(self) -> Session | None:
        session = self._session
        if session is not None and session._proven():
            return session._alive()
        self._client._check_owner()
        return None

    def _current(self) -> Session | None:
        return self._session

    async def _obtain(self) -> Session:
        await self._client._opened()
        session = self._ready()
        if session is not None:
            return session
        if self._attaching is None or self._attaching.done():
            self._attaching = self._client._tasks.begin(self._attach())
        return await self._client._outcome(self._attaching)

    async def _attach(self) -> Session:
        self._session = session = await self._client.session(recovery_window=self.recovery_window)
        return session


class Attempts:
    """The loop of `Client.sessions`."""

    def __init__(self, attach: Callable[[], Once[Session]]) -> None:
        self._attach = attach
        self._attempt: Attempt | None = None

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._attempt is not None and not self._attempt._again:
            raise StopAsyncIteration
        self._attempt = Attempt(self._attach)
        return self._attempt


class Attempt(AsyncHandle):
    """One attempt of `Client.sessions`: a session's block that may be repeated."""

    def __init__(self, attach: Callable[[], Once[Session]]) -> None:
        self._attach = attach
        self._session: Session
        self._again = False

    async def __aenter__(self) -> Session:
        self._session = await self._attach()
        self._session._enter()
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
        self._again = error is not None and _is_expiry_of(self._session, error)
        return self._again


def path_and_work(path: str | W, work: W | None) -> tuple[str, W]:
    """Return the arguments of `Client.run`, with the default node where the path is left out.

    Raises:
        InvalidArgument: the work is missing, or the path is not a string.
    """
    if work is None and not isinstance(path, str):
        return DEFAULT_NODE, path
    if work is None or not isinstance(path, str):
        raise InvalidArgument("client.run takes the work, or a path and the work")
    return path, work


def is_loss(error: BaseException) -> bool:
    """Whether the error is the loss of a lease or session and nothing else; of a group, all."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(each) for each in error.exceptions)
    return isinstance(error, LeaseLost | SessionExpired)


def _is_expiry_of(session: Session, error: BaseException) -> bool:
    """Whether the error is the expiry of that session and nothing else; of a group, every leaf."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expiry_of(session, each) for each in error.exceptions)
    origin = error.__cause__ if isinstance(error, LeaseLost) else error.__dict__.get(ORIGIN)
    return origin is session._ending.why and isinstance(origin, SessionExpired)
