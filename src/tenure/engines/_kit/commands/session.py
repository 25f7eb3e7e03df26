"""Session of an engine that sends commands: its proof, semaphores, requests, end and takeover.

Rules:

* Every command of a session has the token of its attachment. The store rejects an older one.
* Changes are numbered, so that the store recognises a repeated one.
* Only `renew` extends a session. A reattach extends it if a renewal has no answer yet: a server's
  engine has sessions of other programs, which may have died.
* An event of a request may arrive before the answer to the request. Then the event counts.
* A request that the store has removed is withdrawn as well, so that the store can forget the
  reason.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from tenure.background import Failures
from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands import replies
from tenure.engines._kit.commands.pipeline import (
    HANDED,
    LEFT,
    OWNS,
    REFUSED,
    SENT,
    WAITING,
    EnqueueOperation,
    Operation,
    OrderIds,
    WithdrawOperation,
    is_removal,
    removal,
)
from tenure.engines._kit.commands.replies import (
    Values,
    count_text,
    first_word,
    included,
    microseconds,
    settle,
)
from tenure.engines._kit.heartbeat import HeartbeatThread
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
from tenure.errors import EngineError, SessionExpired, TenureError
from tenure.model import UNCHANGED, Recovered, SemaphoreDescription, Unchanged


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


_GRANTED = Place.GRANTED
_SOON = 4.5
"""Longest time that a request with timeout 0 waits for the end of a quarantine, in seconds."""


class CommandSession(SessionBase):
    """An attached session, as defined by the contract.

    Attributes:
        enqueuing: the class of its operations that add requests.
        withdrawing: the class of its operations that withdraw requests.
        time_unit: unit of times in the store's replies, as a fraction of a second.
        requests: the states of its requests.
        names: their semaphores, until the store has confirmed a withdrawal.
        token: identifies this attachment in every command: "<attach number>.<secret>".
        tokens: its possible tokens in the store, while it is reattached.
        renewed_at: the time of the latest call of `renew`.
        proven_at: the time of its latest proof.
    """

    enqueuing: ClassVar[type[EnqueueOperation]] = EnqueueOperation
    withdrawing: ClassVar[type[WithdrawOperation]] = WithdrawOperation
    time_unit: ClassVar[float] = 1.0

    def __init__(
        self, engine: CommandSessionEngine, sender: CommandSender, given: SessionParameters
    ) -> None:
        super().__init__(given.how, given.events, given.number, given.window)
        self.token = given.token
        self.tokens = [given.token]
        self.loop = engine.loop
        self.order_ids = engine.order_ids
        self._engine = engine
        self._changes = 0
        self._left: asyncio.Future[Any] | None = None
        self.proven_at = self.renewed_at = engine.clock.now()
        self.requests: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._sender = sender
        self._unremoved: dict[int, str] = {}  # the store refused to; tried again later

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

    @abstractmethod
    def _note_waiter(self, reply: Any) -> None:
        """Check for expired sessions soon, because this reply shows that a request waits."""

    @abstractmethod
    def _look(self, requests: dict[int, int], standings: Collection[int]) -> None:
        """Look up some requests, given with their states."""

    @abstractmethod
    def _send_begin(self, description: str, answered: Callable[[Any], None]) -> None:
        """Complete a takeover; the reply begins with "ok" and a list for `Values.recovered`."""

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

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        rules.check_new_limit(limit, self.path, name)
        await self._change("resize", name, 0, f"{limit:d}")

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
        * ``resize``: limit as a text
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
        operation = self.enqueuing(self, request_id, name, count, data, timeout, ephemeral)
        rules.check_name(name, self.path)
        self.requests[request_id] = SENT
        self.names[request_id] = name
        self._sender.operate(operation)
        return operation

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        request_id = operation.request_id
        if type(reply) is int:
            if reply == 0:
                self._refuse(operation, 0.0)
                return
            self.order_ids.highest = max(self.order_ids.highest, reply)
            if request_id in self.requests:  # otherwise it has been withdrawn meanwhile
                self.requests[request_id] = OWNS
            if not operation.done():
                operation.set_result(Enqueued(_GRANTED, reply))
        elif type(reply) is list and type(reply[0]) is int:
            self.order_ids.saw(reply[0])
            self._note_waiter(reply)
            if self.requests.get(request_id) == SENT:  # otherwise an event has come before
                self.requests[request_id] = WAITING
            operation.settle(Enqueued(Place.WAITING, reply[0]))
        elif first_word(reply) == "quarantined":
            self._retry_after_quarantine(operation, reply[1] * self.time_unit)
        else:
            self._drop(request_id)
            if not isinstance(reply, Exception):  # else it is withdrawn: it may be queued
                self.names.pop(request_id, None)
            error = self._wrong(reply)
            operation.fail(error or self._error(reply, operation.name, operation.count))

    def _refuse(self, operation: EnqueueOperation, left: float) -> None:
        self._engine.quarantined(left)
        self._drop(operation.request_id)
        self.names.pop(operation.request_id, None)
        operation.settle(REFUSED)  # in a quarantine, `Engine.trouble` has the reason

    def _retry_after_quarantine(self, operation: EnqueueOperation, left: float) -> None:
        """Retry a request with timeout 0 at the end of the quarantine, if that is soon."""
        if left <= _SOON and not self.over:
            self._engine.quarantined(left)
            self.loop.call_later(left + 0.001, self._try_again, operation)
        else:
            self._refuse(operation, left)

    def _try_again(self, operation: EnqueueOperation) -> None:
        if self.over:
            operation.fail(self.reason)
        elif operation.request_id in self.requests:
            self._sender.operate(operation)
        else:
            operation.settle(REFUSED)  # it was withdrawn meanwhile

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
        return self._change(
            "alter",
            self.names.get(request_id, ""),
            0 if count is None else count,
            request_id,
            None if count is None else count_text(count),
            data,
            "-" if timeout is UNCHANGED else microseconds(timeout),
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        operation = self.withdrawing(self, request_id, self._drop(request_id))
        self._sender.operate(operation)
        return operation

    def confirmed(self, request_id: int) -> None:
        """Forget a request whose withdrawal the store has confirmed."""
        self.names.pop(request_id, None)

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal."""
        error = self._wrong(reply)
        if operation.retried:
            if not self.over:
                self._unremoved[operation.request_id] = operation.name
        elif operation.may_have_run and isinstance(error, SessionExpired):
            operation.settle(LEFT)
        else:
            operation.fail(error or self._failure(f"unexpected reply {reply!r}"))

    def _withdraw(self, request_id: int, name: str) -> None:
        """Take a request out of its queue, without a caller."""
        if not self.over:
            self._sender.operate(self.withdrawing(self, request_id, name, retried=True))

    def _drop(self, request_id: int) -> str:
        """Forget a request; return its name, which its withdrawals need."""
        self.requests.pop(request_id, None)
        return self.names.get(request_id, "")

    def held(self) -> list[int]:
        """Return the requests that this program owns. On any thread.

        One that was handed on is a negative number: the store may have it as waiting.
        """
        return [
            each if standing == OWNS else -each
            for each, standing in list(self.requests.items())
            if standing >= HANDED
        ]

    def waiting_names(self) -> set[str]:
        """Return the names for which requests wait."""
        return {self.names[each] for each, state in self.requests.items() if state == WAITING}

    # Events

    def push(self, kind: str, rest: str) -> None:
        """Handle an event of the session, or of one of its requests.

        Args:
            kind: "T" taken over, "E" ended, "A" a former attachment has acknowledged a takeover,
                "g" granted, or the kind of a `removal`. Any other is of a newer release, and
                ignored.
            rest: the reason of the end, or the request id and order id of a request.
        """
        if self.over:
            return
        if kind == "T":
            self.superseded()
        elif kind == "E":
            self.end(rest)
        elif kind == "A":
            self.recheck.set()
        elif kind != "g" and not is_removal(kind):
            return
        elif self.early is not None:
            self.early.append(partial(self.push, kind, rest))
        else:
            request_id, *order_id = map(int, rest.split())
            if request_id in self.requests:
                if kind != "g":
                    self._removed(request_id, removal(kind))
                elif self.requests[request_id] != OWNS:
                    self._granted(request_id, order_id[0])

    def _granted(self, request_id: int, order_id: int) -> None:
        self.order_ids.saw(order_id)
        self.requests[request_id] = OWNS
        self.events.granted(request_id, order_id)

    def _removed(self, request_id: int, why: Removal) -> None:
        name = self._drop(request_id)
        with self._engine.failures.contained():
            self._withdraw(request_id, name)  # the store need not keep the reason
        self.events.removed(request_id, why)

    def look_up(self, standings: Collection[int]) -> None:
        """Look up requests in these states, in case an event was missed."""
        if self.early is not None or self.over:
            return
        while self._unremoved:
            self._withdraw(*self._unremoved.popitem())
        found = {number: each for number, each in self.requests.items() if each in standings}
        self._look(found, standings)

    # Takeover

    async def begin(self, description: str) -> None:
        """Set the description of a session that was taken over, and resume its requests."""

        def send(answered: Callable[[Any], None]) -> None:
            self._send_begin(description, partial(begun, answered))

        def begun(answered: Callable[[Any], None], reply: Any) -> None:
            if self._wrong(reply) is None and not self.over:
                found = self._engine.values.recovered(reply[1])
                for each in found:
                    self._recovered(each)
                self._note_waiter(reply)
                self.resume(found)
            answered(reply)

        await self._answer(send)

    def _recovered(self, request: Recovered) -> None:
        """Resume a request of a session that was taken over."""
        self.order_ids.saw(request.order_id)
        self.requests[request.request_id] = OWNS if request.granted else WAITING
        self.names[request.request_id] = request.name
