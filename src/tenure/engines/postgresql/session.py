"""Session of the PostgreSQL engine: its token and proof, its requests and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Place,
    Removal,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.postgresql import values
from tenure.engines.postgresql.heartbeat import PostgresHeartbeat
from tenure.engines.postgresql.statements import (
    Call,
    Operation,
    OrderIds,
    Refusal,
    SessionCall,
    Statement,
    enqueue_words,
    settle,
)
from tenure.errors import EngineError, SessionExpired, TenureError
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

__all__ = ["OWNS", "WAITING", "PostgresSession", "SessionEngine"]

_log = logging.getLogger("tenure")

SENT, WAITING, OWNS = range(3)
"""States of a request, as far as they are known here."""

_REMOVALS = {"t": Removal.TIMED_OUT, "x": Removal.DELETED, "e": Removal.EVICTED}
_REFUSED = Enqueued(Place.REFUSED, None)
_GUARDED_PAUSE = 0.05
_SOON = 4.5
"""Seconds that a request which does not wait spends in a quarantine, at the most."""


class SessionEngine(Protocol):
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

    @property
    def is_up(self) -> bool:
        """True while there is a connection."""
        ...

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        ...

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, with others."""

    def renew(self, session: PostgresSession) -> None:
        """Renew a session, with others."""

    def push_all(self, events: Iterable[str]) -> None:
        """Handle events, later in this iteration of the loop."""

    def note_waiter(self) -> None:
        """Look soon for an expired session that holds a request up."""

    def quarantined(self, left: float) -> None:
        """Note the rest of a quarantine."""

    def forget(self, session: PostgresSession) -> None:
        """Remove a session that is over."""

    def watch(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        ...


class EnqueueOperation(Operation[Enqueued]):
    """Operation that adds a request to a queue."""

    __slots__ = ("count", "name", "request_id")

    session: PostgresSession

    def __init__(
        self,
        session: PostgresSession,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        *,
        ephemeral: bool,
    ) -> None:
        """Describe the request."""
        super().__init__(session, session.loop)
        self.request_id = request_id
        self.name = name
        self.count = count
        self.words = enqueue_words(request_id, name, count, data, timeout, ephemeral=ephemeral)

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.placed(self, reply)

    def repeat(self) -> None:
        """Have an earlier sending looked up first."""
        if self.words[0] == "m":
            self.words = [*self.words, None, "", "", "1"]
        self.words[0] = "E"


class WithdrawOperation(Operation[Withdrawn]):
    """Operation that takes a request out of its queue.

    Attributes:
        may_have_run: it was sent before, without an answer.
    """

    __slots__ = ("may_have_run", "request_id")

    session: PostgresSession

    def __init__(self, session: PostgresSession, request_id: int, name: str) -> None:
        """Describe the withdrawal."""
        super().__init__(session, session.loop)
        self.request_id = request_id
        self.words = ["w", request_id, values.to_text(name)]
        self.may_have_run = False

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.withdrawn(self, reply)

    def repeat(self) -> None:
        """Note that a request which is not there may have been there before."""
        self.may_have_run = True


class PostgresSession(SessionBase):
    """An attached session, as the contract defines it.

    Attributes:
        requests: the states of its requests.
        names: their semaphores.
        token: names this attachment: "<attach number>.<secret>"; every statement has it.
        tokens: those that it may have in the store, while it is reattached.
        proven_at: the time of its latest proof.
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
        self.names: dict[int, str] = {}
        self.token = token
        self.tokens = [token]
        self.loop = engine.loop
        self.proven_at = engine.clock.now()
        self._ahead: dict[int, str] = {}  # events that came before the answers to their requests
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
        if not self._engine.is_in_loop():
            self._engine.heartbeat.renew(self)
        elif self._engine.is_up:  # otherwise reattaching is the proof
            self._engine.renew(self)

    def prove(self, at: float) -> None:
        """Report a proof of that time."""
        self.proven_at = max(self.proven_at, at)
        self.events.proven(at)

    def probe(self) -> None:
        """Find out what has become of the session, which could not be renewed."""
        self._engine.send(SessionCall("look", self, ([],), self._wrong))

    # Requests

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue."""
        if self.over:
            self.check()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        rules.check_name(name, self.path)
        operation = EnqueueOperation(
            self, request_id, name, count, data, timeout, ephemeral=ephemeral
        )
        self.requests[request_id] = SENT
        self.names[request_id] = name
        self._engine.operate(operation)
        return operation

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        request_id = operation.request_id
        if type(reply) is int and reply:
            self._engine.order_ids.saw(reply)
            if request_id in self.requests:  # otherwise it has been withdrawn meanwhile
                self.requests[request_id] = OWNS
            operation.settle(Enqueued(Place.GRANTED, reply))
        elif type(reply) is list and type(reply[0]) is int:
            self._engine.order_ids.saw(reply[0])
            if request_id in self.requests:
                self.requests[request_id] = WAITING
            self._engine.note_waiter()
            operation.settle(Enqueued(Place.WAITING, reply[0]))
        elif type(reply) is list and reply[0] == "quarantined":
            self._held_up(operation, reply[1])
            return
        else:
            self._drop(request_id)
            if reply == 0:
                self._engine.quarantined(0.0)
                operation.settle(_REFUSED)
            else:
                error = self._wrong(reply)
                operation.fail(error or self._error(reply, operation.name, operation.count))
        if early := self._ahead.pop(request_id, ""):
            self._engine.push_all([early])

    def _held_up(self, operation: EnqueueOperation, left: float) -> None:
        """Retry a request that does not wait at the end of the quarantine, if that is soon."""
        self._engine.quarantined(left)
        if left <= _SOON and not self.over:
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self._drop(operation.request_id)
            operation.settle(_REFUSED)  # and `Engine.trouble` says why

    def _try_again(self, operation: EnqueueOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.request_id in self.requests:
            self._engine.operate(operation)
        else:
            operation.settle(_REFUSED)  # it was withdrawn meanwhile

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self.check()
        if request_id in self.requests:
            if data is not None:
                rules.check_data(data, self.path)
            if timeout is not UNCHANGED:
                rules.check_timeout(timeout, self.path)
        name = self.names.get(request_id, "")
        return self._change(
            "alter",
            name,
            0 if count is None else count,
            request_id,
            None if count is None else values.count_text(count),
            None if data is None else values.base64(data),
            "-" if timeout is UNCHANGED else values.microseconds(timeout),
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        operation = WithdrawOperation(self, request_id, self._drop(request_id))
        self._engine.operate(operation)
        return operation

    def withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the answer to a withdrawal."""
        if reply == 0:
            operation.settle(Withdrawn.LEFT)
        elif reply == -1:
            operation.settle(Withdrawn.LEFT if operation.may_have_run else Withdrawn.MISSING)
        elif reply == -2:  # a transaction guards the lease until it ends
            self.loop.call_later(_GUARDED_PAUSE, self._withdraw_again, operation)
        else:
            error = self._wrong(reply)
            if operation.may_have_run and isinstance(error, SessionExpired):
                operation.settle(Withdrawn.LEFT)
            else:
                operation.fail(error or self._failure(f"unexpected reply {reply!r}"))

    def _withdraw_again(self, operation: WithdrawOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        else:
            self._engine.operate(operation)

    def _drop(self, request_id: int) -> str:
        """Forget a request; return its name."""
        self.requests.pop(request_id, None)
        self._ahead.pop(request_id, None)
        return self.names.pop(request_id, "")

    # Events

    def push(self, kind: str, rest: str) -> None:
        """Handle an event of the session, or of one of its requests."""
        if self.over:
            return
        if kind == "T":
            if rest in self.tokens:
                self.superseded()
        elif kind == "E":
            self.end(rest)
        elif kind == "A":
            self.recheck.set()
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            request_id, order_id = map(int, rest.split())
            standing = self.requests.get(request_id)
            if standing == SENT:
                self._ahead[request_id] = f"{kind} {self.id} {rest}"
            elif standing is not None and kind != "g":
                self._removed(request_id, _REMOVALS[kind])
            elif standing == WAITING:
                self._granted(request_id, order_id)

    def _granted(self, request_id: int, order_id: int) -> None:
        self._engine.order_ids.saw(order_id)
        self.requests[request_id] = OWNS
        self.events.granted(request_id, order_id)

    def _removed(self, request_id: int, why: Removal) -> None:
        operation = WithdrawOperation(self, request_id, self._drop(request_id))
        self._engine.operate(operation)  # the store need not keep the reason
        operation.add_done_callback(_retrieve)
        self.events.removed(request_id, why)

    def look_up(self, standings: tuple[int, ...]) -> None:
        """Look up requests in these states, in case an event was missed."""
        if self.early is not None or self.over:
            return
        found = [request_id for request_id, each in self.requests.items() if each in standings]
        if found:
            self._engine.send(
                SessionCall("look", self, (list(found),), partial(self._found, found))
            )

    def _found(self, request_ids: list[int], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        for request_id, place in zip(request_ids, reply, strict=True):
            standing = self.requests.get(request_id)
            if standing is None or standing == SENT:
                continue
            if isinstance(place, int):
                if place > 0 and standing == WAITING:
                    self._granted(request_id, place)
            else:
                self._removed(request_id, _REMOVALS.get(place, Removal.LAPSED))

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        most = rules.SEMAPHORES_PER_NODE
        await self._change("create", name, 0, str(limit), values.base64(data), exist_ok, most)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self._change("update", name, 0, values.base64(data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        await self._change("delete", name, 0, force)

    def _change(self, kind: str, name: str, count: int, *args: Any) -> asyncio.Future[None]:
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
        included = values.included(owners=owners, waiters=waiters)
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._engine.send(
            Call("describe", (self.path, values.to_text(name), included), partial(settle, answer))
        )
        reply = await answer
        error = self._wrong(reply)
        self.check()
        if error is None and (reply[0] != "ok" or not reply[1]):
            error = self._error(["missing"], name)
        if error is not None:
            raise error
        return values.semaphore(reply[1][0], owners=owners)

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
        if isinstance(reply, Refusal):
            raise self._failure(reply)

    def _send_leave(self, *, detach: bool, answered: Callable[[Any], None]) -> None:
        engine = self._engine

        def left(reply: Any) -> None:
            if isinstance(reply, list):
                engine.push_all(reply[1:])
                if reply[:1] == ["guarded"]:
                    self.loop.call_later(_GUARDED_PAUSE, engine.send, leaving)
                    return
            answered(reply)

        words = (self.id, list(self.tokens), detach, engine.channel, engine.relaxed)
        leaving = Call("leave", words, left)
        engine.send(leaving)

    def abandon(self) -> None:
        """Undo an attach whose caller no longer waits for it."""
        if not self.over:
            self._forget()
            self._send_leave(detach=self.taken_over, answered=_ignore)

    def _acknowledge(self) -> None:
        words = (self.id, list(self.tokens), self._engine.channel)
        self._engine.send(Call("acknowledge", words, self._acknowledged))

    def _acknowledged(self, reply: Any) -> None:
        if isinstance(reply, list):
            self._engine.push_all(reply)

    def _forget(self) -> None:
        super()._forget()
        self._engine.forget(self)

    # Takeover

    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""
        _, seconds = await self._ask("remaining")
        return float(seconds)

    async def begin(self, description: str) -> None:
        """Complete a takeover with the requests of the session."""
        _, found = await self._ask("begin_session", values.to_text(description))
        requests = values.recovered(found)
        for each in requests:
            self._engine.order_ids.saw(each.order_id)
            self.requests[each.request_id] = OWNS if each.granted else WAITING
            self.names[each.request_id] = each.name
        self.resume(requests)
        if WAITING in self.requests.values():
            self._engine.note_waiter()

    async def _ask(self, function: str, *args: Any) -> Any:
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
        return values.error(self._engine.url, self.path, name, count, reply)


def _ignore(reply: object) -> None:
    """Ignore a reply that has no receiver."""


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a withdrawal without a caller."""
    if not done.cancelled():
        done.exception()
