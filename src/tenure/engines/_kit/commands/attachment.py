"""Attachment of a session: its token and end, its changes of semaphores, and its errors.

`CommandSession` adds the requests. Rules:

* Every command of a session has the token of its attachment. The store rejects an older one.
* Changes are numbered, so that the store recognises a repeated one.
* Only `renew` extends a session. A reattach extends it if a renewal has no answer yet: a server's
  engine has sessions of other programs, which may have died.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from tenure.background import Failures
from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands import replies
from tenure.engines._kit.commands.operations import Operation, OrderIds
from tenure.engines._kit.commands.replies import first_word, settle
from tenure.engines._kit.commands.values import Values, included
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.errors import EngineError, TenureError
from tenure.model import SemaphoreDescription


class CommandSender(Protocol):
    """Sender of a session's operations."""

    def operate(self, operation: Operation[Any], /) -> None:
        """Send an operation, together with others, now or when there is a connection."""


class CommandSessionEngine(Protocol):
    """The engine, as seen by its sessions.

    Attributes:
        failures: failures of events and timers.
        values: decodes the store's replies.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    order_ids: OrderIds
    failures: Failures
    values: Values

    @property
    def url(self) -> str:
        """URL of the store without secrets."""
        ...

    @property
    def heartbeat(self) -> HeartbeatThread[Any]:
        """The thread that renews sessions while the loop is stuck."""
        ...

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        ...

    def trouble(self) -> TenureError | None:
        """Return the reason why the store currently grants nothing, if known."""
        ...

    def quarantined(self, left: float) -> None:
        """Record the remaining seconds of a quarantine; 0 outside of one."""

    def forget(self, session: Any) -> None:
        """Remove a session that has ended."""

    def close_after(self, ending: asyncio.Future[Any]) -> None:
        """Have the engine's closing wait for the end of an abandoned session."""

    def watch(
        self, session: Any, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; return a function that ends the watch.

        Args:
            session: the watching session.
            name: the name of the semaphore.
            kinds: "d" for data, "o" for owners, and always "b" for a change of both.
            changed: called after each change.
        """
        ...


class SessionParameters(NamedTuple):
    """Parameters of a session that the store has attached.

    Attributes:
        how: the caller's options.
        events: receives its events.
        number: its id in the store.
        token: the token of the attachment.
        window: the recovery window in seconds.
    """

    how: Attach
    events: SessionEvents
    number: int
    token: str
    window: float


class CommandAttachment(SessionBase):
    """Session state without the operations on requests.

    Attributes:
        token: identifies this attachment in every command: "<attach number>.<secret>".
        tokens: its possible tokens in the store, while it is reattached.
        renewed_at: the time of the latest call of `renew`.
        proven_at: the time of its latest proof.
    """

    def __init__(self, engine: CommandSessionEngine, given: SessionParameters) -> None:
        super().__init__(given.how, given.events, given.number, given.window)
        self.token = given.token
        self.tokens = [given.token]
        self.loop = engine.loop
        self.order_ids = engine.order_ids
        self._engine = engine
        self._changes = 0
        self._left: asyncio.Future[Any] | None = None
        self.proven_at = self.renewed_at = engine.clock.now()

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return int(self.token.partition(".")[0])

    @property
    def credential(self) -> str:
        """The tokens that the session may have in the store."""
        return ",".join(self.tokens)

    # Defined by each engine

    @abstractmethod
    def _renew(self) -> None:
        """Renew the session over the engine's connection. Called on the loop."""

    @abstractmethod
    def _send_change(
        self,
        number: int,
        kind: str,
        name: str,
        args: tuple[Any, ...],
        answered: Callable[[Any], None],
    ) -> None:
        """Send a numbered change; the arguments are those of `_change`."""

    @abstractmethod
    def _change_made(self, number: int, reply: Any) -> None:
        """Handle the reply to a change, which begins with "ok" or with the error's word."""

    @abstractmethod
    def _send_describe(self, name: str, kinds: str, answered: Callable[[Any], None]) -> None:
        """Read a semaphore with the requests of these kinds, a value of `included`."""

    @abstractmethod
    def _send_leave(self, *, detach: bool, answered: Callable[[Any], None]) -> None:
        """Detach or end the session, for any of its `tokens`."""

    @abstractmethod
    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""

    # Proof

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if self.over:
            return
        self.renewed_at = self._engine.clock.now()
        if self._engine.is_in_loop():
            self._renew()
        else:
            self._engine.heartbeat.renew(self)

    @property
    def awaits_proof(self) -> bool:
        """True if there is no proof since the latest renewal was requested."""
        return self.renewed_at > self.proven_at

    def prove(self, at: float) -> None:
        """Report a proof of that time. From any thread."""
        self.proven_at = max(self.proven_at, at)
        self.events.proven(at)

    def reattached(self, reply: Any) -> bool:
        """Handle the reply to a reattach under the last of `tokens`; return whether it succeeded.

        The reply begins with "ok", "gone" or "taken".
        """
        if self.over or self._wrong(reply) is not None:
            return False
        self.token = self.tokens[-1]
        return True

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        most = rules.SEMAPHORES_PER_NODE
        await self._change("create", name, 0, f"{limit:d}", data, exist_ok, most)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self._change("update", name, 0, data)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        await self._change("delete", name, 0, force)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        kinds = included(owners=owners, waiters=waiters)
        reply = await self._answer(partial(self._send_describe, name, kinds))
        if first_word(reply) != "ok" or not reply[1]:
            raise self._error(["missing"], name)
        return self._engine.values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    def _change(self, kind: str, name: str, count: int, *args: Any) -> asyncio.Future[None]:
        """Make a change that must not be made twice.

        Kinds and their arguments:

        * ``create``: limit as a text, data, whether it may exist, maximum semaphores of a node
        * ``update``: data
        * ``delete``: by force
        * ``alter``: request id, count as a text, data, timeout as a text; ``None`` and "-" for
          unchanged values
        """
        self._changes = number = self._changes + 1
        future: asyncio.Future[None] = self.loop.create_future()

        def answered(reply: Any) -> None:
            error = self._wrong(reply)
            if error is None:
                self._change_made(number, reply)
                if first_word(reply) != "ok":
                    error = self._error(reply, name, count)
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._send_change(number, kind, name, args, answered)
        return future

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
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
        if self._left is None:
            if self.over:
                return
            self._forget()
            self._left = self.loop.create_future()
            self._send_leave(detach=detach, answered=partial(settle, self._left))
        await asyncio.wait([self._left])
        reply = self._left.result()
        if isinstance(reply, Exception):
            raise self._failure(reply)

    def abandon(self) -> None:
        """Undo an attach whose caller no longer waits for it."""
        if not self.over:
            self._forget()
            left: asyncio.Future[Any] = self.loop.create_future()
            self._engine.close_after(left)
            self._send_leave(detach=self.taken_over, answered=partial(settle, left))

    def _forget(self) -> None:
        super()._forget()
        self._engine.forget(self)

    # Errors in replies

    async def _answer(self, send: Callable[..., None]) -> Any:
        """Send something, and return its reply.

        Args:
            send: sends it; `answered` receives the reply.

        Raises:
            SessionExpired: the session has ended.
            EngineError: the store rejected it.
        """
        answer: asyncio.Future[Any] = self.loop.create_future()
        send(answered=partial(settle, answer))
        reply = await answer
        error = self._wrong(reply)
        if error is not None:
            raise error
        self.check()
        return reply

    def _wrong(self, reply: Any) -> TenureError | None:
        """Return the error if a reply is one; end the session if the reply says so."""
        if isinstance(reply, Exception):
            return self._failure(reply)
        word = first_word(reply)
        if word == "error":
            return self._failure(replies.text(reply[1]))
        if word == "gone":
            self.end("the store does not know it any more")
            return self.reason
        if word == "taken":
            self.superseded()
            return self.reason
        return None

    def _failure(self, refusal: Exception | str) -> EngineError:
        return EngineError(
            f"a command on {self.path} failed: {self._engine.url} refused it: {refusal}",
            node=self.path,
        )

    def _error(self, reply: Any, name: str, count: int = 0) -> TenureError:
        return replies.error(self._engine.url, self.path, name, count, reply)
