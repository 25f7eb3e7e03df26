"""The retry loop of `Client.sessions`, for threads."""

from __future__ import annotations

from types import TracebackType

from tenure._client import sessions as async_sessions
from tenure.blocking.blocks import abandon_session
from tenure.blocking.session import Session
from tenure.blocking.wrapper import SyncWrapper, obtaining, releasing


class Attempts(SyncWrapper[async_sessions.Attempts]):
    """The loop of `Client.sessions`."""

    __slots__ = ()

    def __iter__(self) -> Attempts:
        """Return the loop itself."""
        return self

    def __next__(self) -> Attempt:
        """Return the next attempt, after the pause that follows a failed one."""
        try:
            return Attempt(self._portal, self._portal.call(self._wrapped.__anext__))
        except StopAsyncIteration:
            raise StopIteration from None


class Attempt(SyncWrapper[async_sessions.Attempt]):
    """One attempt of `Client.sessions`: a session's block that may be repeated."""

    __slots__ = ()

    @obtaining
    def __enter__(self) -> Session:
        """Attach a session and return it."""
        return self._portal.obtain(Session, abandon_session, self._wrapped.__aenter__)

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Close the session; suppress the errors after which the loop retries."""
        return bool(self._portal.leave(self._wrapped.__aexit__, kind, error, trace))
