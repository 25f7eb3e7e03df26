"""How a session ends: once, for good, and in two steps.

* `Ending.begin` fixes why it is over. It may run in any thread: whoever notices first begins, be
  it the keeper's thread, its timer, a call that reads the clock, the store, or the program. It
  makes every held lease lost and carries out their policies.
* `Ending.finish` runs on the session's loop. It cancels bodies, wakes whoever waits for anything
  of this session, and has the engine's session closed, in a task that the client sees through.

Rules:

* Why it is over, until when it is proven and whether a lease is held change under one lock: no
  proof revives a session that is over, and no lease is lost twice.
* Nothing of a session that is still being attached can be closed: what ended meanwhile is
  finished when the engine has attached it.
* What is raised is a copy of the error kept here, so that tracebacks of several tasks do not mix,
  and it leads back to that one (`ORIGIN`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from math import inf
from typing import TYPE_CHECKING, TypeVar

from tenure import fork
from tenure._client.requested import LOST, Requested
from tenure._client.scope import Scope
from tenure.errors import EngineError, SessionClosed, SessionExpired

if TYPE_CHECKING:
    from tenure._client.session import Session

__all__ = ["ORIGIN", "Ending"]

T = TypeVar("T")

ORIGIN = "_origin"
"""The attribute of a raised copy of a session's end that holds the original."""

_log = logging.getLogger("tenure")


class Ending:
    """The end of one session, before it has come and after.

    Attributes:
        why: the end's error, once it has begun.
        by_the_store: whether that is the store's word.
        lock: what `why`, the session's proof and the loss of a lease change under.
        finished: whether everyone concerned has been told.
        detached: whether the program left the session in the store instead of closing it.
    """

    __slots__ = (
        "_closers",
        "_leaving",
        "_racing",
        "_session",
        "by_the_store",
        "detached",
        "finished",
        "lock",
        "why",
    )

    def __init__(self, session: Session) -> None:
        self.why: SessionExpired | SessionClosed | None = None
        self.lock = threading.Lock()
        self.finished = False
        self.detached = self.by_the_store = False
        self._session = session
        self._racing: dict[Scope, None] = {}  # a set in order: who came first is told first
        self._leaving: asyncio.Task[None]  # set by `finish`
        self._closers = 0  # who waits for it

    # What others ask

    def error(self) -> SessionExpired | SessionClosed:
        """Why the session is over, to raise: a copy that leads back to it."""
        why = self.why
        assert why is not None
        error = type(why)(str(why), node=why.node)
        error.__dict__[ORIGIN] = why
        return error

    async def race(self, operation: Awaitable[T]) -> T:
        """What the store answers, or the session's end, whichever comes first."""
        scope = Scope(self._session)
        scope.enter(asyncio.current_task(self._session._loop))
        self._racing[scope] = None
        try:
            answer = await operation
        except BaseException as error:
            if scope.exit(error):
                raise self.error() from None
            if isinstance(error, SessionExpired):
                raise self.by_store(error) from None
            raise
        finally:
            self._racing.pop(scope, None)
        scope.exit(None)
        return answer

    # Who ends it

    def by_store(self, error: SessionExpired) -> SessionExpired | SessionClosed:
        """The store has said that the session is over; returns what to raise. On the loop."""
        self.begin(error)
        self.by_the_store = self.by_the_store or self.why is error
        self.finish()
        return self.error()

    def by_clock(self) -> None:
        """The deadline has passed. From any thread."""
        session = self._session
        self.begin(
            SessionExpired(
                f"the session on {session.node} could not be proven alive within its recovery "
                f"window of {session.recovery_window:g} s (the store was out of reach, or this "
                "program was stopped or stalled)",
                node=session.node,
            )
        )
        if threading.get_ident() == session._thread and session._loop.is_running():
            self.finish()
        else:
            session._client._soon(self.finish)

    def by_program(self, *, detach: bool = False) -> None:
        """The program closes it, or leaves it; the store is told in the background."""
        session = self._session
        fork.check(session._born, f"the session on {session.node}")
        session._check_loop()
        how = "detached" if detach else "closed"
        self.begin(SessionClosed(f"the session on {session.node} was {how}", node=session.node))
        self.finish(detach=detach)

    async def told(self) -> None:
        """Wait until the store has been told of it. Safe to cancel.

        Raises:
            EngineError: it could not be told.
        """
        self._closers += 1
        try:
            await asyncio.wait([self._leaving])
        finally:
            self._closers -= 1
        self._leaving.result()

    # The two steps

    def begin(self, why: SessionExpired | SessionClosed) -> None:
        """Fix why the session is over, and make its leases lost. From any thread; once."""
        session = self._session
        with self.lock:
            if self.why is not None:
                return
            self.why = why
            session._until = -inf
        for lease in list(session._leases.values()):
            self.lose(lease)

    def lose(self, lease: Requested) -> None:
        """The session is over, and so is the lease if it was held. From any thread."""
        assert self.why is not None
        lease._lose(str(self.why), self.why)

    def finish(self, *, detach: bool = False) -> None:
        """Tell everyone concerned, and have the engine's session closed. On the loop; once."""
        session = self._session
        if self.finished or session._contact == "connecting":
            return
        self.finished = True
        expired = isinstance(self.why, SessionExpired)
        session._client._forget_session(session)
        if expired:
            session._tell("Expired", str(self.why))
            me = None
        else:
            self.detached = detach
            session._tell("Closed")
            me = asyncio.current_task()  # who closes it knows, and is not cancelled
        for lease in list(session._leases.values()):
            lease._fail(None)
            self.lose(lease)  # if it was granted since the end began
            if lease._state is LOST:
                lease._announce_loss(but_not=me)
            else:
                lease._wake()  # whoever waits for its withdrawal
        session._leases.clear()
        session._recovered.clear()
        for scope in self._racing:
            scope.trigger()
        session._withdrawals.stop()
        for changed in list(session._watchers):
            changed()
        if expired and session._scope is not None:
            session._scope.trigger()
        self._leaving = session._client._tasks.see_through(self._leave())

    async def _leave(self) -> None:
        session = self._session
        try:
            # After its window it is over in the store, whatever that says; and no program is
            # held up for longer than an answer may take. The engine goes on until it is closed.
            limit = min(session.recovery_window, session._client_contact.answer_timeout)
            async with asyncio.timeout(limit):
                await (session._engine.detach() if self.detached else session._engine.close())
        except Exception as error:
            failure = EngineError(
                f"the store could not be told that the session on {session.node} is over "
                f"({str(error) or 'no answer'}); it will end when its window of "
                f"{session.recovery_window:g} s has passed",
                node=session.node,
            )
            expired = isinstance(self.why, SessionExpired)
            if (self._closers or session._client._closed) and not expired:
                raise failure from error
            # An outage that ends sessions is logged once, and not for each of them.
            known = expired and session._client_contact.obstacle() is not None
            _log.log(logging.DEBUG if known else logging.WARNING, "%s", failure)
