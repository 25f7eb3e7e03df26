"""Session of the store that the server keeps for a remote holder, with its events.

States (`ServerSession.state`)::

    ATTACHING ──► ATTACHED ◄──► DISCONNECTED      its holder's connection comes and goes
        │            │              │
        │            ├── Detach, Close ──► LEAVING ──► ENDED
        └────────────┴──────────────┴── the store, or another program ──► ENDED

Ownership and rules:

* The `ServerSession` owns the store's session, and the registry owns the `ServerSession`. The
  connection (`HolderConnection`) owns nothing of it.
* **Disconnect.** Only the session's watches end (an attachment starts without watches). It is not
  renewed, so the store's window runs from the holder's last renewal.
* **Proof.** The store's session is renewed only when its holder sends `Renew`.
* **Once only.** A changing operation is carried out once, and its answer is kept (`Answers`).
* **Order.** If the engine's method is a coroutine, it runs in a task. Later messages wait until
  that task has begun, so that the store gets the operations in order, except that a costly read may
  have to wait for its turn (`tenure.server.reads`).
* **Cancel.** Neither the holder nor a lost connection cancels operations.
* **Deadline.** Only the store has deadlines: a session ends when the store reports it.
* **Close of the server.** The store's session is detached, and survives for its window.

Everything runs on the server's loop, except `proven`, which may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from tenure.clock import Clock
from tenure.engines.contract import EngineSession, Enqueued, Place, Removal
from tenure.errors import SessionExpired, TenureError
from tenure.model import Recovered
from tenure.server.auth.accounts import Account
from tenure.server.limits import Count, LimitReached
from tenure.server.semaphores import SemaphoreCounts
from tenure.wire.errors import to_wire
from tenure.wire.messages import (
    GRANTED,
    REFUSED,
    WAITING,
    Contact,
    Done,
    Ended,
    Failed,
    Granted,
    Placed,
    Proven,
    RemovalWord,
    Removed,
    Unproven,
)
from tenure.wire.values import Found

if TYPE_CHECKING:
    from tenure.server.auth.guarded import GuardedEngine
    from tenure.server.auth.identity import Identity
    from tenure.server.context import Context
    from tenure.server.reads import Reader
    from tenure.wire.messages import Attach


class HolderConnection(Protocol):
    """Connection to the holders of sessions. Only `wait_for_room` awaits or raises.

    Attributes:
        program: the client's program (`Hello.program`).
        identity: the client's identity.
        peer: the client's address.
        engine: the store as the client's identity may use it.
        reader: the schedule of its costly reads.
    """

    program: bytes
    identity: Identity
    peer: str
    engine: GuardedEngine
    reader: Reader

    def send(self, message: Struct) -> None:
        """Send a message; does nothing when the connection is lost."""

    def send_changed(self, channel: int, number: int) -> None:
        """Send `Changed`, at most once until the holder has read it."""

    def connect_channel(self, channel: int, session: ServerSession) -> None:
        """Deliver the messages of a channel to a session."""

    def forget_channel(self, channel: int) -> None:
        """Forget a channel: it has no session any more."""

    async def wait_for_room(self, size: int) -> None:
        """Return when an answer of so many bytes may be sent.

        Raises:
            LimitReached: too many bytes of answers are already waiting.
        """

    def count_pending(self, price: int = 1) -> None:
        """Count an operation that was not answered at once as `price` operations."""

    def uncount_pending(self, price: int = 1) -> None:
        """Stop counting an operation: it is answered, or never will be."""


NEVER = float("-inf")

_MOST_RENEWALS = 16  # maximum unanswered renewals of one session; older ones get no proof


class _Renewal(NamedTuple):
    connection: HolderConnection
    channel: int
    number: int
    requested_at: float


class Renewals:
    """Renewals of one session that wait for an answer, and the latest proof from its store.

    The answer waits for the store's proof while it is useful: for a third of the window. Its age is
    that at the arrival of the renewal: 0 if the server sent its own renewal later.

    Args:
        unproven: contains this object while renewals wait.

    Attributes:
        proof: the latest time at which the store's session is proven to have lived.
    """

    __slots__ = ("_now", "_unproven", "_waiting", "_worth", "proof")

    def __init__(self, clock: Clock, window: float, unproven: set[Renewals]) -> None:
        self.proof = NEVER
        self._now = clock.now
        self._worth = window / 3
        self._unproven = unproven
        self._waiting: deque[_Renewal] = deque()

    def age(self, requested_at: float) -> float | None:
        """Return the age of the server's own proof at the renewal; ``None`` if it is too old."""
        if self._now() - self.proof > self._worth:
            return None
        return max(0.0, requested_at - self.proof)

    def renew(
        self, store: EngineSession, connection: HolderConnection, channel: int, number: int
    ) -> None:
        """Renew the session, and answer on that connection with the proof."""
        requested_at = self._now()
        store.renew()
        if self.proof >= requested_at:
            connection.send(Proven(channel, number, 0.0))
            return
        if len(self._waiting) >= _MOST_RENEWALS:
            self._drop_first()
        self._waiting.append(_Renewal(connection, channel, number, requested_at))
        self._unproven.add(self)

    def prove(self, at: float) -> None:
        """Record a proof that the store's session lived at that time; answer waiting renewals."""
        self.proof = max(self.proof, at)
        if self._waiting and self.age(self.proof) is not None:
            for each in self._waiting:
                age = max(0.0, each.requested_at - self.proof)
                each.connection.send(Proven(each.channel, each.number, age))
            self.forget()

    def drop_old(self, now: float) -> None:
        """Answer renewals that have waited too long with `Unproven`."""
        while self._waiting and now - self._waiting[0].requested_at > self._worth:
            self._drop_first()
        if not self._waiting:
            self._unproven.discard(self)

    def drop_all(self) -> None:
        """Answer all renewals with `Unproven`: the session has ended."""
        while self._waiting:
            self._drop_first()
        self._unproven.discard(self)

    def forget(self) -> None:
        """Drop the waiting renewals, without answering them."""
        self._waiting.clear()
        self._unproven.discard(self)

    def _drop_first(self) -> None:
        oldest = self._waiting.popleft()
        oldest.connection.send(Unproven(oldest.channel, oldest.number))


class Answers:
    """Kept answers of one session on the node `node`; at most `most`.

    The answer to a changing operation is kept, by its rid, until the holder acknowledges it; a
    repeated operation gets the same answer.

    Attributes:
        kept: the answers by rid.
        unanswered: the rids of pending operations.
    """

    __slots__ = ("_acknowledged", "_last_rid", "_most", "_node", "kept", "unanswered")

    def __init__(self, node: str, most: int) -> None:
        self.kept: dict[int, Struct] = {}
        self.unanswered: set[int] = set()
        self._node = node
        self._most = most
        self._acknowledged = 0
        self._last_rid = 0

    def is_new(self, rid: int, send: Callable[[Struct], None]) -> bool:
        """Return true if an operation is new. Otherwise send its kept answer again."""
        if rid > self._last_rid:
            self._last_rid = rid
        else:
            answer = self.kept.get(rid)
            if answer is not None:
                send(answer)
                return False
            if rid in self.unanswered or rid <= self._acknowledged:
                return False
        if len(self.kept) + len(self.unanswered) >= self._most:
            refusal = Count("kept_answers", self._most, "this session")
            send(Failed(rid, to_wire(refusal.reached(node=self._node))))
            return False
        return True

    def acknowledge(self, upto: int) -> None:
        """Forget the answers up to that rid."""
        if upto > self._acknowledged:
            self._acknowledged = upto
            if self.kept:
                self.kept = {rid: answer for rid, answer in self.kept.items() if rid > upto}

    def clear(self) -> None:
        """Forget all answers: the session has ended."""
        self.kept.clear()
        self.unanswered.clear()


_GONE = 128  # number of requests of one session whose reason for leaving is remembered

_REMOVAL_WORDS: dict[Removal, RemovalWord] = {
    Removal.TIMED_OUT: "timed out",
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
    # Engines whose sessions end with a connection are not served.
    Removal.CUT_OFF: "evicted",
    Removal.LAPSED: "evicted",
}


def removal_word(why: Removal) -> RemovalWord:
    """Return the reason for the wire, beside which there may be the new limit."""
    return "evicted" if why.limit is not None else _REMOVAL_WORDS[why]


class ServerRequest:
    """A request of the session in a queue.

    Attributes:
        data: the data of a recovered request, until the holder is notified of it.
        placed: whether the store has it in its queue, as far as known.
    """

    __slots__ = ("count", "data", "ephemeral", "granted", "name", "order_id", "placed")

    def __init__(self, name: str, count: int, ephemeral: bool) -> None:
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.data = b""
        self.order_id: int | None = None
        self.granted = False
        self.placed = False

    def grant(self, order_id: int | None) -> None:
        """Record that it is an owner. The order id may follow in a second call."""
        self.placed = self.granted = True
        if order_id is not None:
            self.order_id = order_id


class SessionRequests:
    """The requests of one session.

    Attributes:
        queued: its requests in queues, by id.
        removals: the reasons why requests have left their queues, as far as remembered.
    """

    __slots__ = ("_account", "_node", "_recovered", "_semaphores", "queued", "removals")

    def __init__(self, node: str, semaphores: SemaphoreCounts, account: Account) -> None:
        self.queued: dict[int, ServerRequest] = {}
        self.removals: OrderedDict[int, Removal] = OrderedDict()
        self._node = node
        self._semaphores = semaphores
        self._account = account
        self._recovered = False

    def found(self) -> list[Found]:
        """Return the requests in queues, in the order of the order ids."""
        placed = [
            Found(
                request_id,
                each.name,
                each.order_id or 0,
                each.count,
                each.data,
                each.ephemeral,
                each.granted,
            )
            for request_id, each in self.queued.items()
            if each.placed
        ]
        placed.sort(key=lambda each: each.order_id)
        return placed

    def gone(self) -> list[tuple[int, RemovalWord]]:
        """Return the requests that were removed from their queues, and the reasons."""
        return [(request_id, removal_word(why)) for request_id, why in self.removals.items()]

    def resized(self) -> list[tuple[int, int]]:
        """Return those of them that were too large for a new limit, and that limit."""
        limits = ((request_id, why.limit) for request_id, why in self.removals.items())
        return [(request_id, limit) for request_id, limit in limits if limit is not None]

    def recover(self, requests: Sequence[Recovered]) -> None:
        """Register the requests of a session that was taken over."""
        for each in requests:
            self._semaphores.add_existing_request(
                self._node, each.name, ephemeral=each.ephemeral, account=self._account
            )
            request = ServerRequest(each.name, each.count, each.ephemeral)
            self.queued[each.request_id] = request
            request.data = each.data
            request.order_id = each.order_id
            request.granted = each.granted
            request.placed = True
        self._recovered = True

    def forget_recovered_data(self) -> None:
        """Drop the data of recovered requests: the holder has been notified of them."""
        if self._recovered:
            self._recovered = False
            for request in self.queued.values():
                request.data = b""

    def place(self, rid: int, request_id: int, request: ServerRequest, answer: Enqueued) -> Placed:
        """Process the store's answer to an `Enqueue`, and return the answer for the holder."""
        place, order_id = answer
        if place is Place.REFUSED:
            self.drop(request_id, request)
            return Placed(rid, REFUSED, None)
        if place is Place.WAITING:
            request.placed = True
            request.order_id = order_id
            return Placed(rid, WAITING, order_id)
        request.grant(order_id)
        return Placed(rid, GRANTED, order_id)

    def drop(self, request_id: int, request: ServerRequest) -> None:
        """Drop a request that has left its queue, or will be in none."""
        if self.queued.get(request_id) is request:
            del self.queued[request_id]
            self._semaphores.remove_request(self._node, request.name)

    def remove(self, request_id: int, request: ServerRequest, why: Removal) -> None:
        """Drop a request that was removed from its queue, and remember the reason."""
        self.drop(request_id, request)
        self.removals[request_id] = why
        if len(self.removals) > _GONE:
            self.removals.popitem(last=False)

    def clear(self) -> None:
        """Forget all requests: the session has ended."""
        for request_id, request in list(self.queued.items()):
            self.drop(request_id, request)
        self.removals.clear()


def error_of(answer: asyncio.Future[Any]) -> BaseException | None:
    """Return the error of an engine's future, a cancellation included."""
    if answer.cancelled():
        return asyncio.CancelledError()
    return answer.exception()


UNKNOWN = float("inf")
"""Value of `ServerSession.remote_until` while the session's former holder is unknown."""

_Handler: TypeAlias = "Callable[[ServerSession, Any], None]"


class ServerSessionState(Enum):
    """State of a server session."""

    ATTACHING = "the store is attaching it"
    ATTACHED = "its holder is connected"
    DISCONNECTED = "its holder's connection is lost"
    LEAVING = "its holder has detached or closed it"
    ENDED = "the store, or another program, has ended it"


class SessionHost(Protocol):
    """The registry, as seen by its sessions.

    Attributes:
        context: the server's context.
        unproven: renewals of sessions that wait for the store's answer.
        loop, thread: those of the server.
    """

    context: Context
    unproven: set[Renewals]
    loop: asyncio.AbstractEventLoop
    thread: int

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background."""
        ...

    def forget(self, session: ServerSession) -> None:
        """Forget a session that has ended here, or has another attachment."""

    def recheck_former(self) -> None:
        """Let the takeovers that wait for former programs check again."""


class ServerSession:
    """One attachment of a session, for one program.

    Args:
        host: the registry.
        message: the `Attach` of its program.
        window: its recovery window in seconds.

    Attributes:
        host, context: the registry, and the server's context.
        program: its program (`Hello.program`).
        account: the account of the identity that attached it.
        born: the rid of the `Attach` that opened it, if it is new.
        node, key, resumable: as given by the program.
        shown_key: the key that other programs need; empty if its client generated it.
        store: the store's session, once attached.
        connection, channel: the holder's connection and channel.
        error: the reason of its end.
        renewals: its holder's renewals, and the latest proof.
        came_at: arrival time of its program from another server, or from before a restart.
        former: earlier attachments whose programs may still consider the session theirs.
        requests: its requests in queues.
        answers: its kept answers, and its pending operations.
        watches: the function that ends each watch, by number.
        starting: whether a requested operation has not been passed to the engine yet.
        remote_until: time until which programs of other servers may consider the session theirs.
    """

    __slots__ = (
        "_backlog",
        "_knows_end",
        "_store_there",
        "account",
        "answers",
        "born",
        "came_at",
        "channel",
        "connection",
        "context",
        "error",
        "former",
        "host",
        "key",
        "node",
        "program",
        "remote_until",
        "renewals",
        "requests",
        "resumable",
        "shown_key",
        "starting",
        "state",
        "store",
        "watches",
        "window",
    )

    store: EngineSession

    def __init__(
        self, host: SessionHost, program: bytes, account: Account, message: Attach, window: float
    ) -> None:
        context = self.context = host.context
        self.host = host
        self.program = program
        self.account = account
        self.born = message.rid if message.kind == "new" else 0
        self.node = message.node
        self.window = window
        self.key = message.key
        self.shown_key = b"" if message.drawn else message.key
        self.resumable = message.resumable or message.kind == "resume"
        self.state = ServerSessionState.ATTACHING
        self.connection: HolderConnection | None = None
        self.channel = 0
        self.error: SessionExpired | None = None
        self.former: list[ServerSession] = []
        self.remote_until = NEVER if message.kind == "new" else UNKNOWN
        self.came_at = NEVER
        self.requests = SessionRequests(self.node, context.counts.semaphores, account)
        self.answers = Answers(self.node, context.limits.kept_answers)
        self.watches: dict[int, Callable[[], None]] = {}
        self.renewals = Renewals(context.clock, window, host.unproven)
        self.starting = False
        self._backlog: deque[tuple[HolderConnection, Struct, _Handler]] = deque()
        self._knows_end = True  # until its program gets the answer that it is attached
        self._store_there = True

    # Connection of the holder

    def attach(self, connection: HolderConnection, channel: int) -> None:
        """Connect it with its holder's connection; the caller sends the answer first."""
        self.disconnect()
        self.connection = connection
        self.channel = channel
        self.state = ServerSessionState.ATTACHED
        self._knows_end = False

    def disconnect(self) -> None:
        """Disconnect it from its holder's connection, if it has one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.forget_channel(self.channel)
            if self.state is ServerSessionState.ATTACHED:
                self.state = ServerSessionState.DISCONNECTED
        self._stop_watches()
        self.renewals.forget()

    def report_contact(self) -> None:
        """Inform the holder, after its attachment, if the store cannot be reached."""
        if not self._store_there:
            self.send(Contact(self.channel, False))

    def send(self, message: Struct) -> None:
        """Push a message to the holder, if it is connected."""
        if self.connection is not None:
            self.connection.send(message)

    # Takeover

    def may_hold_until(self) -> float:
        """Return the time until which its program may consider the session its own.

        Its latest proof from this server is `Renewals.proof`; its latest proof from another server
        is older than its arrival here.
        """
        if self._knows_end:
            return NEVER
        return max(self.renewals.proof, self.came_at) + self.window

    def note_end_known(self) -> None:
        """Record that its program knows that it has lost the session."""
        self._knows_end = True
        self.host.recheck_former()

    # Operations of the holder

    def defer(self, connection: HolderConnection, message: Struct, handler: _Handler) -> None:
        """Queue a message behind the operation that is `starting`."""
        self._backlog.append((connection, message, handler))
        connection.count_pending()

    def run_deferred(self) -> None:
        """Handle the messages that were queued behind the operation that has started."""
        self.starting = False
        while self._backlog and not self.starting:
            connection, message, handler = self._backlog.popleft()
            connection.uncount_pending()
            if connection is self.connection and self.error is None:
                handler(self, message)

    def answer(self, rid: int, answer: Struct) -> None:
        """Answer a changing operation; keep the answer until it is acknowledged."""
        self.answers.kept[rid] = answer
        if self.connection is not None:
            self.connection.send(answer)

    def fail(self, rid: int, error: BaseException) -> None:
        """Answer that an operation has failed."""
        self.answer(rid, self.failed(rid, error))

    def failed(self, rid: int, error: BaseException) -> Failed:
        """Return the answer for a failed operation, and log unexpected errors."""
        context = self.context
        if not isinstance(error, TenureError):
            context.log(logging.ERROR, "the store failed", node=self.node, error=repr(error))
        elif isinstance(error, LimitReached):
            context.refused("operation refused", error.limit, node=self.node)
        return Failed(rid, to_wire(error if isinstance(error, Exception) else Exception()))

    def _stop_watches(self) -> None:
        watches, self.watches = self.watches, {}
        for stop in watches.values():
            stop()

    # End

    def leave(self, rid: int, *, closing: bool) -> None:
        """Close or detach it for its holder, which no longer considers anything held."""
        connection = self.connection
        assert connection is not None
        self.state = ServerSessionState.LEAVING
        self.disconnect()
        self.note_end_known()
        connection.count_pending()
        work = self.store.close if closing else self.store.detach
        self.host.start(self._leave_store(connection, rid, work))

    async def _leave_store(
        self, connection: HolderConnection, rid: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        answer: Struct
        try:
            await work()
            answer = Done(rid)
        except Exception as error:
            answer = self.failed(rid, error)
        finally:
            connection.uncount_pending()
            self.end(None)
        connection.send(answer)

    def end(self, error: SessionExpired | None) -> None:
        """End it here; `error` is the reason for its holder. Safe to call twice."""
        if self.state is ServerSessionState.ENDED:
            return
        self.state = ServerSessionState.ENDED
        self.error = error or SessionExpired(
            f"the session on {self.node} was closed or detached", node=self.node
        )
        self._stop_watches()
        self.requests.clear()
        self.answers.clear()
        self.renewals.drop_all()
        self.host.forget(self)
        if error is not None and self.connection is not None:
            self.connection.send(Ended(self.channel, to_wire(error)))

    # Events of the store (`SessionEvents`)

    def proven(self, at: float) -> None:
        """Record a proof that the store's session lives. From any thread."""
        if threading.get_ident() == self.host.thread:
            self.renewals.prove(at)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no renewal waits
                self.host.loop.call_soon_threadsafe(self.renewals.prove, at)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Register the session's requests in queues after a takeover."""
        self.requests.recover(requests)

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Notify the holder that a waiting request is now an owner."""
        request = self.requests.queued.get(request_id)
        if request is None:
            return  # it is being withdrawn
        request.grant(order_id)
        self.send(Granted(self.channel, request_id, order_id))

    def removed(self, request_id: int, why: Removal) -> None:
        """Notify the holder that a request was removed from its queue."""
        request = self.requests.queued.get(request_id)
        if request is None:
            return
        self.requests.remove(request_id, request, why)
        self.send(Removed(self.channel, request_id, removal_word(why), why.limit))

    def detached(self, cause: BaseException | None = None) -> None:  # noqa: ARG002
        """Record the lost contact to the store."""
        self._store_there = False
        self.send(Contact(self.channel, False))

    def attached(self) -> None:
        """Record the re-established contact to the store."""
        self._store_there = True
        self.send(Contact(self.channel, True))

    def ended(self, error: SessionExpired) -> None:
        """Record that the store has ended the session."""
        self.end(error)
