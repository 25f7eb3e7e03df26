"""Attachment of a session: its token, proof and end, and its changes of semaphores.

`RedisSession` adds the requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tenure.background import Failures
from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands import replies
from tenure.engines._kit.commands.replies import ignore, settle
from tenure.engines._kit.commands.values import included
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.redis import values
from tenure.engines.redis.commands import (
    SCRIPTS,
    LargeRead,
    OrderIds,
    Refusal,
    ScriptCall,
    Word,
)
from tenure.engines.redis.confirming import Confirmer
from tenure.engines.redis.heartbeat import RedisHeartbeat
from tenure.engines.redis.namespace import Quarantine
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.errors import EngineError, TenureError
from tenure.model import SemaphoreDescription

__all__ = ["RedisAttachment", "SessionEngine"]

_log = logging.getLogger("tenure")

_RENEW = SCRIPTS["renew"]


class SessionEngine(Protocol):
    """The engine, as its sessions use it.

    Attributes:
        confirmer: what has replicas confirm grants; ``None`` without ``min_replicas``.
        failures: of pushes and timers.
        channel: the channel of pushes to its sessions.
        epoch: of the namespace, as far as it is known.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    reconnector: RedisReconnector
    heartbeat: RedisHeartbeat
    confirmer: Confirmer | None
    quarantine: Quarantine
    order_ids: OrderIds
    failures: Failures
    channel: str
    epoch: str

    @property
    def url(self) -> str:
        """URL of the store without secrets."""
        ...

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        ...

    def handle_push(self, message: bytes) -> None:
        """Handle a push that came with a reply."""

    def expect(self, microseconds: int) -> None:
        """Look for expired sessions and requests in that time; never if it is negative."""

    def forget(self, session: RedisAttachment) -> None:
        """Remove a session that is over."""

    def watch(
        self, session: RedisAttachment, name: str, what: frozenset[int], changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        ...


class RedisAttachment(SessionBase):
    """Session state without the operations on requests.

    Attributes:
        requests: the states of its requests.
        waited: the names for which requests wait.
        token: names this attachment: "<attach number>.<secret>"; every command has it.
        tokens: those that it may have in the store, while it is reattached.
    """

    def __init__(
        self,
        engine: SessionEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        """Start attached, with the token that the store has."""
        super().__init__(how, events, number, window)
        self.requests: dict[int, int] = {}
        self.waited: dict[int, str] = {}
        self._ahead: dict[int, tuple[bytes, bytes]] = {}
        self._fresh: set[int] = set()  # began to wait in this turn, unknown to their callers yet
        self._unremoved: set[int] = set()  # the store refused to remove them; tried again later
        self.token = token
        self.tokens = [token]
        self.loop = engine.loop
        self.order_ids = engine.order_ids
        self.handle_push = engine.handle_push
        self._changes = 0
        self._seen_changes: list[int] = []
        self._engine = engine
        self._reconnector = engine.reconnector

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return int(self.token.partition(".")[0])

    # Proof

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if self.over:
            return
        engine = self._engine
        if not engine.is_in_loop():
            engine.heartbeat.renew(self)
        elif self._reconnector.is_up:  # otherwise reattaching is the proof
            renewed = partial(self._renewed, engine.clock.now())
            self._reconnector.send(ScriptCall(_RENEW, self, (), renewed))

    def _renewed(self, at: float, reply: Any) -> None:
        if reply == 0 and not self.over:
            self.events.proven(at)
        else:
            error = self._wrong(reply)
            if error is not None and not self.over:
                _log.warning("session could not be renewed: node=%s error=%s", self.path, error)

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        most = rules.SEMAPHORES_PER_NODE
        await self._change(name, 0, "create", name, f"{limit:d}", data, int(exist_ok), most)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self._change(name, 0, "update", name, data)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        await self._change(name, 0, "delete", name, int(force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        answer: asyncio.Future[Any] = self.loop.create_future()
        words = (included(owners=owners, waiters=waiters), name)
        self._reconnector.send(LargeRead(SCRIPTS["describe"], self, words, partial(settle, answer)))
        reply = await answer
        error = self._wrong(reply)
        if error is None and reply[0] != b"ok":
            error = self._error(reply, name)
        if error is not None:
            raise error
        return values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    def _change(self, name: str, count: int, *args: Word) -> asyncio.Future[None]:
        """Make a change that must not be made twice."""
        self._changes = number = self._changes + 1
        seen, self._seen_changes = self._seen_changes, []
        future: asyncio.Future[None] = self.loop.create_future()

        def answered(reply: Any) -> None:
            error = self._wrong(reply)
            if error is None:
                self._seen_changes.append(number)
                if reply[0] != b"ok":
                    error = self._error(reply, name, count)
                elif len(reply) > 1:
                    self._engine.expect(reply[1])
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        words = (number, " ".join(map(str, seen)), *args)
        self._reconnector.send(ScriptCall(SCRIPTS["change"], self, words, answered))
        return future

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; returns the function that ends the watch."""
        self.check()
        rules.check_name(name, self.path)
        what = frozenset(b"b" + b"d" * data + b"o" * owners)
        return self._engine.watch(self, name, what, changed)

    # The end

    async def close(self) -> None:
        """End the session."""
        await self._leave("close")

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._leave("detach")

    async def _leave(self, how: str) -> None:
        if self.over:
            return
        self._forget()
        left: asyncio.Future[Any] = self.loop.create_future()
        self._send_leave(how, partial(settle, left))
        reply = await left
        if isinstance(reply, Refusal):
            raise self._failure(reply)

    def _send_leave(self, how: str, answered: Callable[[Any], None]) -> None:
        self._reconnector.send(ScriptCall(SCRIPTS["leave"], self, (how, *self.tokens), answered))

    def abandon(self) -> None:
        """Undo an attach whose caller no longer waits for it."""
        if not self.over:
            self._forget()
            self._send_leave("detach" if self.taken_over else "close", ignore)

    def _acknowledge(self) -> None:
        words: tuple[Word, ...] = (self.id, *self.tokens)
        self._reconnector.send(ScriptCall(SCRIPTS["acknowledge"], None, words, ignore))

    def _forget(self) -> None:
        super()._forget()
        self._engine.forget(self)

    # Takeover

    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._reconnector.send(ScriptCall(SCRIPTS["remaining"], self, (), partial(settle, answer)))
        self._raise(reply := await answer)
        return float(reply / 1e6)

    # Replies that are errors

    def _raise(self, reply: Any) -> None:
        error = self._wrong(reply)
        if error is not None:
            raise error
        self.check()

    def _wrong(self, reply: Any) -> TenureError | None:
        """Return the error if a reply is one; the session ends if the reply says so."""
        if isinstance(reply, Refusal):
            return self._failure(reply)
        if isinstance(reply, list) and reply and isinstance(reply[0], bytes):
            if reply[0] == b"error":
                return self._failure(reply[1].decode())
            if reply[0] == b"gone":
                self.end("the store does not know it any more")
                return self.reason
            if reply[0] == b"taken":
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
