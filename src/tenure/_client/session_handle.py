"""Session without its primitives, as leases return it: its state, its block and its end."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tenure._client.handles import AsyncHandle
from tenure._client.resume import ResumeToken
from tenure._client.scope import note_failure
from tenure._client.session_states import SessionState
from tenure._client.source import SessionAnchor
from tenure.errors import Misuse, SessionExpired, Unsupported
from tenure.model import Recovered


class SessionHandle(AsyncHandle):
    """A session without its primitives: its state, its block and its end.

    `Lease.session` has this type; the object is the `Session` of the lease.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
        max_stall: seconds that the event loop may be stuck before the session is no longer renewed.
    """

    def __init__(self, anchor: SessionAnchor) -> None:
        core = anchor.core
        self.node = core.node
        self.recovery_window = core.recovery_window
        self.max_stall = core.max_stall
        self._anchor = anchor  # keeps the session
        self._core = core
        anchor.handled_by(self)

    def __repr__(self) -> str:
        return f"<Session {self.id} on {self.node}{'' if self._core.why is None else ' (over)'}>"

    # State

    @property
    def id(self) -> int:
        """The session's id: positive, never reused in a store."""
        return self._core.id

    @property
    def state(self) -> SessionState:
        """One of ``connecting, attached, detached, expired, closed``. Reads the clock."""
        return self._core.state

    @property
    def deadline(self) -> float:
        """Time until which the session is proven: seconds on the client's clock."""
        return self._core.deadline

    @property
    def resume_token(self) -> str:
        """Token with which a restarted program takes over this session (`Client.session`).

        Keep it like a password, in a place that survives a restart. It never changes.

        Raises:
            Unsupported: the session was not opened with ``resumable=True``.
        """
        how = self._core.how
        if how.liveness != "window":
            raise Unsupported(
                f"the session on {self.node} ends with its program; open a resumable one with "
                "client.session(..., resumable=True)",
                node=self.node,
            )
        return str(ResumeToken(self.node, self.id, self.recovery_window, how.key))

    @property
    def recovered(self) -> tuple[Recovered, ...]:
        """Unclaimed requests of a resumed session, in order.

        `Mutex.recover`, `Semaphore.recover` and `Election.recover` claim them. An unclaimed
        request keeps its place, or its tokens, until the session ends.
        """
        return tuple(self._core.recovered.values()) if self._core.is_proven() else ()

    # Actions

    async def aclose(self) -> None:
        """End the session: everything held through it is released, in one step.

        Safe to call twice, and when cancelled. Leases that other tasks are inside are lost, and
        their bodies cancelled; a block that the calling task itself is inside raises at its end.

        Raises:
            EngineError: the store failed; it will end the session when its recovery window has
                passed.
        """
        await self._core.close()

    async def detach(self) -> None:
        """Detach: the session keeps its requests until its recovery window has passed.

        Until then a program with its `resume_token`, if it has one, can take it over. This object
        has ended: its leases count as lost, because they are no longer proven.
        """
        await self._core.close(detach=True)

    async def __aenter__(self) -> Self:
        self._core.alive()
        if self._core.scope is not None:
            raise Misuse(
                f"the session on {self.node} has been entered already; a session is entered once",
                node=self.node,
            )
        self._enter()
        return self

    def _enter(self) -> None:
        self._core.enter()

    def _close_soon(self) -> None:
        self._core.close_soon()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope = self._core.scope
        if scope is None:
            raise Misuse(
                f"the session on {self.node} is left without having been entered",
                node=self.node,
            )
        cancelled = scope.exit(error)
        if isinstance(error, GeneratorExit):  # nothing can be awaited, in any thread
            self._core.client.soon(self._close_soon)
            return
        try:
            if self.state == "expired":
                pass
            elif isinstance(error, asyncio.CancelledError):
                self._core.close_soon()  # a cancelled task does not wait for the store
            else:
                await self.aclose()
        except Exception as failure:
            note_failure(error, failure, f"closing the session on {self.node}")
        if isinstance(self._core.why, SessionExpired) and (error is None or cancelled):
            raise self._core.error()
