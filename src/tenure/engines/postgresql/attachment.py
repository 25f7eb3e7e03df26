"""Attachment of a session: its token, proof and end, and its changes of semaphores.

`PostgresSession` adds the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands import replies
from tenure.engines._kit.commands.replies import ignore, settle
from tenure.engines._kit.commands.values import included
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.postgresql import values
from tenure.engines.postgresql.guarded import GuardedRelease
from tenure.engines.postgresql.heartbeat import PostgresHeartbeat
from tenure.engines.postgresql.statements import (
    DROPPED,
    Call,
    Operation,
    OrderIds,
    Refusal,
    SessionCall,
    Statement,
)
from tenure.errors import EngineError, TenureError
from tenure.model import SemaphoreDescription

__all__ = ["PostgresAttachment", "PostgresSessionEngine"]


class PostgresSessionEngine(Protocol):
    """The engine, as its sessions use it."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    heartbeat: PostgresHeartbeat
    order_ids: OrderIds
    channel: str

    @property
    def url(self) -> str:
        """URL of the store without secrets."""
        ...

    @property
    def relaxed(self) -> bool:
        """True if commits do not wait for the disk."""
        ...

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        ...

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, with others."""

    def renew(self, session: PostgresAttachment) -> None:
        """Renew a session, with others."""

    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle events, later in this iteration of the loop."""

    def note_waiter(self) -> None:
        """Look soon for an expired session that holds a request up."""

    def note_ahead(self, ahead: int) -> None:
        """Note how many requests are ahead of one that waits."""

    def quarantined(self, left: float) -> None:
        """Note the rest of a quarantine."""

    def forget(self, session: PostgresAttachment) -> None:
        """Remove a session that is over."""

    def watch(
        self, session: PostgresAttachment, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        ...


class PostgresAttachment(SessionBase):
    """Session state without the operations on requests.

    Attributes:
        token: names this attachment: "<attach number>.<secret>"; every statement has it.
        tokens: those that it may have in the store, while it is reattached.
        proven_at: the time of its latest proof.
    """

    def __init__(
        self,
        engine: PostgresSessionEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        """Start attached, with the token that the store has."""
        super().__init__(how, events, number, window)
        self.token = token
        self.tokens = [token]
        self.loop = engine.loop
        self.proven_at = engine.clock.now()
        self._changes = 0
        self._engine = engine

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return int(self.token.partition(".")[0])

    # Proof

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if self.over:
            return
        if self._engine.is_in_loop():
            self._engine.renew(self)
        else:
            self._engine.heartbeat.renew(self)

    def prove(self, at: float) -> None:
        """Report a proof of that time."""
        self.proven_at = max(self.proven_at, at)
        self.events.proven(at)

    def probe(self) -> None:
        """Find out what has become of the session, which could not be renewed."""
        self._engine.send(SessionCall("look", self, ([],), self._probed))

    def _probed(self, reply: Any) -> None:
        self._wrong(reply)

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        most = rules.SEMAPHORES_PER_NODE
        await self.change("create", name, 0, str(limit), values.base64(data), exist_ok, most)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self.change("update", name, 0, values.base64(data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        await self.change("delete", name, 0, force)

    def change(self, kind: str, name: str, count: int, *args: Any) -> asyncio.Future[None]:
        """Make a change that must not be made twice."""
        self._changes += 1
        future: asyncio.Future[None] = self.loop.create_future()

        def answered(reply: Any) -> None:
            error = self._wrong(reply)
            if error is None and reply[0] != "ok":
                error = self._error(reply, name, count)
            elif error is None:
                self._engine.push_all(reply[1])
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        words = (
            self._changes,
            kind,
            [values.to_text(name), *args],
            self._engine.channel,
            self._engine.relaxed,
        )
        self._engine.send(SessionCall("change", self, words, answered))
        return future

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        kinds = included(owners=owners, waiters=waiters)
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._engine.send(
            Call("describe", (self.path, values.to_text(name), kinds), partial(settle, answer))
        )
        reply = await answer
        error = self._wrong(reply)
        self.check()
        if error is None and (reply[0] != "ok" or not reply[1]):
            error = self._error(["missing"], name)
        if error is not None:
            raise error
        return values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; returns the function that ends the watch."""
        self.check()
        rules.check_name(name, self.path)
        return self._engine.watch(self, name, "b" + "d" * data + "o" * owners, changed)

    # The end

    async def close(self) -> None:
        """End the session."""
        await self._leave(detach=False)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._leave(detach=True)

    async def _leave(self, *, detach: bool) -> None:
        if self.over:
            return
        self._forget()
        left: asyncio.Future[Any] = self.loop.create_future()
        self._send_leave(detach=detach, answered=partial(settle, left))
        reply = await left
        if isinstance(reply, Refusal) and reply.code != DROPPED:
            raise self._failure(reply)

    def _send_leave(self, *, detach: bool, answered: Callable[[Any], None]) -> None:
        engine = self._engine
        guarded: GuardedRelease | None = None

        def left(reply: Any) -> None:
            nonlocal guarded
            if isinstance(reply, list):
                engine.push_all(reply[1:])
                if reply[:1] == ["guarded"]:
                    guarded = guarded or GuardedRelease(self.loop, self.path, "", self.id)
                    guarded.again(partial(engine.send, leaving))
                    return
            answered(reply)

        words = (self.id, list(self.tokens), detach, engine.channel, engine.relaxed)
        leaving = Call("leave", words, left)
        engine.send(leaving)

    def abandon(self) -> None:
        """Undo an attach whose caller no longer waits for it."""
        if not self.over:
            self._forget()
            self._send_leave(detach=self.taken_over, answered=ignore)

    def _acknowledge(self) -> None:
        words = (self.id, list(self.tokens), self._engine.channel)
        self._engine.send(Call("acknowledge", words, self._engine.push_all))

    def _forget(self) -> None:
        super()._forget()
        self._engine.forget(self)

    # Takeover

    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""
        _, seconds = await self.call("remaining")
        return float(seconds)

    async def call(self, function: str, *args: Any) -> Any:
        """Call a function for this session, and return its reply."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._engine.send(SessionCall(function, self, args, partial(settle, answer)))
        reply = await answer
        error = self._wrong(reply)
        if error is not None:
            raise error
        self.check()
        return reply

    # Replies that are errors

    def _wrong(self, reply: Any) -> TenureError | None:
        """Return the error if a reply is one; the session ends if the reply says so."""
        if isinstance(reply, Refusal):
            return self._failure(reply)
        if isinstance(reply, list) and reply:
            if reply[0] == "gone":
                self.end("the store does not know it any more")
                return self.reason
            if reply[0] == "taken":
                self.superseded()
                return self.reason
        return None

    def _failure(self, refusal: Refusal | str) -> EngineError:
        return EngineError(
            f"a command on {self.path} failed: {self._engine.url} refused it: {refusal}",
            node=self.path,
        )

    def _error(self, reply: list[Any], name: str, count: int = 0) -> TenureError:
        return replies.error(self._engine.url, self.path, name, count, reply)
