"""The mirrors of `tenure._client.session` and `tenure._client.sessions`."""

from __future__ import annotations

from types import TracebackType

from tenure._client import session as twins
from tenure._client import sessions as sessions_twins
from tenure._client.session import SessionState
from tenure.blocking.election import Election
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.mutex import Mutex
from tenure.blocking.runs import Jobs
from tenure.blocking.semaphore import Semaphore
from tenure.model import Recovered

__all__ = ["Attempt", "Attempts", "Session", "abandon"]


def abandon(session: twins.Session, *, detach: bool = False) -> None:
    """What undoes the attaching of a session, or its entering."""
    if session._scope is not None:
        session._scope.exit(None)
    session._ending.by_program(detach=detach)


@mirrors(twins.Session)
class Session(Jobs[twins.Session]):
    """`tenure.Session`, for threads.

    A thread cannot be cancelled. Inside the block of an expired session the next call of this
    library raises `SessionExpired`, and so does every other but those that give something back.
    """

    __slots__ = ()

    @property
    def node(self) -> str:
        """The path of its node."""
        return self._twin.node

    @property
    def recovery_window(self) -> float:
        """Seconds it survives without contact to the store."""
        return self._twin.recovery_window

    @property
    def max_stall(self) -> float:
        """Seconds that the event loop may be stuck before it is no longer renewed."""
        return self._twin.max_stall

    @property
    def id(self) -> int:
        return self._twin.id

    @property
    def state(self) -> SessionState:
        return self._twin.state

    @property
    def deadline(self) -> float:
        return self._twin.deadline

    @property
    def resume_token(self) -> str:
        return self._twin.resume_token

    @property
    def recovered(self) -> tuple[Recovered, ...]:
        return self._twin.recovered

    def mutex(self, name: str) -> Mutex:
        return Mutex(self._portal, self._twin.mutex(name))

    def semaphore(self, name: str, *, ephemeral: bool = False) -> Semaphore:
        return Semaphore(self._portal, self._twin.semaphore(name, ephemeral=ephemeral))

    def election(self, name: str) -> Election:
        return Election(self._portal, self._twin.election(name))

    def close(self) -> None:
        self._portal.give_back(self._twin.aclose)

    def detach(self) -> None:
        self._portal.give_back(self._twin.detach)

    def __enter__(self) -> Session:
        return self._portal.obtain(lambda *_: self, abandon, self._twin.__aenter__)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)


@mirrors(sessions_twins.Attempts)
class Attempts(Mirror[sessions_twins.Attempts]):
    """`tenure._client.sessions.Attempts`, for threads."""

    __slots__ = ()

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> Attempt:
        try:
            return Attempt(self._portal, self._portal.call(self._twin.__anext__))
        except StopAsyncIteration:
            raise StopIteration from None


@mirrors(sessions_twins.Attempt)
class Attempt(Mirror[sessions_twins.Attempt]):
    """`tenure.Attempt`, for threads."""

    __slots__ = ()

    def __enter__(self) -> Session:
        return self._portal.obtain(Session, abandon, self._twin.__aenter__)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return bool(self._portal.leave(self._twin.__aexit__, kind, error, trace))
