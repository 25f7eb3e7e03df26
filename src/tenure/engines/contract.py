"""Contract between the primitives and an engine.

Rules that hold for every engine:

* **Order.** Operations of one session take effect in the order of their calls, awaited or not.
* **Answers.** An operation of type `Answer[T]` returns the value itself if it is known at once,
  else a future of it, preferably a `Prompt`. Cancelling that future only discards the answer; the
  operation continues.
* **Errors** are those of `tenure.errors`. An operation raises at once or through its future. An
  operation that an engine has accepted is carried out, even across reconnects, or fails with
  `SessionExpired` when the session has ended. Only `open`, `attach` and the operations on nodes
  raise `EngineUnavailable`. The client limits the duration of reads.
* **Outages.** A session reports when contact is lost (`detached`) and re-established (`attached`),
  and `Engine.trouble` has the reason. The client logs both, once for all its sessions; an engine
  logs them only at level DEBUG.
* **Identity.** The caller numbers its requests (`request_id`: never reused within the session)
  before it sends them, so that a request without an answer can still be withdrawn.
* **Pushes** arrive through `SessionEvents`, on the loop that called `attach`; an engine that
  receives nothing from its store polls. A push for a request may precede the answer to its
  `enqueue`. Then the push counts, and the answer is no error. A push may be repeated; after an
  interruption the newest state is pushed again.
* **Hand-off.** If the next request in a queue belongs to the session that releases, an engine may
  grant it when the release is sent: the session owns the semaphore throughout.
* **Proof.** `renew` extends the session's expiry in the store. After a success the engine calls
  `proven(at)`, where `at` is the clock's reading just before the request was sent (less the age
  that an intermediate server reported). Nothing else is proof.
* **Arguments** are checked by `tenure.core.rules`, so that a mistake has the same error everywhere.

An engine registers a *connector*, ``connector(url, clock) -> Engine``, under its URL scheme in the
entry-point group ``tenure.engines``. The connector checks the URL and does no I/O.
`tenure.testing.conformance` checks all of this. Rare features are members with defaults: an engine
derives from `EngineDefaults`, its sessions from `SessionDefaults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from tenure.clock import Clock
from tenure.core.rates import RateAnswer, RateCall, RateRule
from tenure.engines.optional import (
    EngineDefaults,
    Finding,
    GuardStatement,
    Level,
    Pages,
    RateReply,
    SessionDefaults,
    position_in,
    rate_answered,
)
from tenure.engines.prompt import Prompt, when_answered
from tenure.engines.values import (
    Answer,
    Attach,
    Enqueued,
    LastWords,
    Orphan,
    Place,
    Removal,
    Withdrawn,
)
from tenure.errors import SessionExpired, TenureError
from tenure.model import (
    UNCHANGED,
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    SemaphoreDescription,
    SessionDescription,
    Unchanged,
)

__all__ = [
    "Answer",
    "Attach",
    "Connector",
    "Engine",
    "EngineDefaults",
    "EngineSession",
    "Enqueued",
    "Finding",
    "GuardStatement",
    "LastWords",
    "Level",
    "Orphan",
    "Pages",
    "Place",
    "Prompt",
    "RateAnswer",
    "RateCall",
    "RateReply",
    "RateRule",
    "Removal",
    "SessionDefaults",
    "SessionEvents",
    "Withdrawn",
    "position_in",
    "rate_answered",
    "when_answered",
]


class SessionEvents(Protocol):
    """Callbacks from an engine to the session above it.

    Called on the loop that called `attach`, except `proven`, which may be called from any thread.
    None of them raises, blocks or awaits. No call follows `ended`.
    """

    def proven(self, at: float) -> None:
        """Record that the store has extended the session's expiry after a renewal sent at `at`."""

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Report the requests of a session that was taken over, by order id.

        Called once, before `attach` returns and before any push for one of them.
        """

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Record that a waiting request is now an owner.

        If the order id was not known, it may follow in a second call.
        """

    def removed(self, request_id: int, why: Removal) -> None:
        """Record that a request, waiting or owning, has left its queue."""

    def detached(self, cause: BaseException | None = None) -> None:
        """Record that contact to the store is lost; the engine tries to attach again.

        Args:
            cause: the failure of the connection, if known.
        """

    def attached(self) -> None:
        """Record that contact is re-established, with every request in its place.

        It may also be called while there is contact, when the session's credential has changed.
        """

    def ended(self, error: SessionExpired) -> None:
        """Record that the store has ended the session."""


class EngineSession(Protocol):
    """One attached session."""

    def token_of(self, request_id: int) -> str | None:
        """See `SessionDefaults`."""

    @property
    def refusal(self) -> str:
        """See `SessionDefaults`."""

    @property
    def credential(self) -> str | None:
        """See `SessionDefaults`."""

    @property
    def last_words(self) -> LastWords | None:
        """See `SessionDefaults`."""

    @property
    def id(self) -> int:
        """Id of the session: positive, never reused in the store."""

    @property
    def attach_number(self) -> int:
        """Number of the attachment, which rises with every attachment of this session."""

    def renew(self) -> None:
        """Extend the session's expiry in the store; the proof comes through `proven`.

        From any thread, even if the loop is stuck. It returns at once, and raises nothing.
        """

    async def close(self) -> None:
        """End the session; all its requests leave their queues in one step.

        Safe to call twice, and after any other end. A cancelled caller does not stop it.
        """

    async def detach(self) -> None:
        """Detach without ending the session, which then survives for its recovery window.

        No lease is considered held here any more, so another process can take over at once.
        """

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore.

        Raises:
            SemaphoreExists: it exists (with `exist_ok`: with another limit).
            InvalidArgument: an ephemeral semaphore of that name is in use.
        """

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace a semaphore's data. Equal bytes notify no watch.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
        """

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a lasting semaphore, from 1 to 2^53-1.

        A higher limit grants at once, in the order of the queue. A lower one takes nothing from the
        owners: nothing is granted until their sum and the count of the first waiter fit. In the
        same step, waiters with a count above it leave the queue (`Removal.resized`). A changed
        limit is a change of the data for watches; an equal one changes nothing.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            InvalidArgument: the limit is out of range, or the semaphore is ephemeral, or its limit
                is above 2^53-1.
            Unsupported: `Capabilities.resize` is false.
        """

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore; by force with everything in its queue.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            SemaphoreBusy: it has requests, and `force` is false.
        """

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore of the session's node. Raises `SemaphoreNotFound`."""

    async def position(self, name: str, order_id: int) -> int | None:
        """See `SessionDefaults`."""

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
        """Add a request at the end of the queue.

        Args:
            request_id: the request's number within the session, never used before.
            name: the semaphore.
            count: the requested number of tokens.
            data: the bytes that other clients see of this request.
            timeout: seconds to wait; 0: granted at once or not at all; ``None``: no limit.
            ephemeral: create a missing semaphore, with limit 2^64-1, for as long as it is in use.

        Raises:
            SemaphoreNotFound: the semaphore does not exist, and `ephemeral` is false.
            InvalidArgument: the count is not between 1 and the limit, or `ephemeral` does not match
                the existing semaphore.
        """

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Shrink a request, change its data, or its timeout, in place: all of them, or none.

        Args:
            request_id: the request's number within the session.
            count: the new count; ``None``: unchanged.
            data: the new data; ``None``: unchanged.
            timeout: new timeout of a waiter, in seconds from now; ``None``: no limit; 0: unless
                this change grants it, it is removed (`Removal.TIMED_OUT`), and notified after the
                answer. Ignored for an owner, also one that becomes an owner by this change.

        Raises:
            InvalidArgument: the count would grow, or is not positive, or the timeout is negative.
            LeaseReleased: the request is not in the queue.
        """

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue: a waiter withdraws, an owner releases.

        Idempotent: a missing request is not an error.

        Returns:
            `Withdrawn.MISSING` if the store reports that the request had left its queue before
            (timed out, deleted, evicted, lapsed, or withdrawn by an answered call). If this
            withdrawal was sent more than once, because the connection broke before an answer, the
            result is `Withdrawn.LEFT`. A pending withdrawal may provide the answer for later calls.

        Raises:
            SessionExpired: the session had ended before, with its requests. If an earlier sending
                may have removed the request, the answer is `LEFT` instead.
        """

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed`, on the session's loop, after every change of the watched state.

        Changes may be merged but none is missed, including deletion (also the disappearance of an
        ephemeral semaphore), re-creation and another limit; the caller reads the state by
        describing the semaphore. The watch is active before the session's next operation is carried
        out: a change of the state that it reads is reported. The name need not exist (yet). Changes
        of owners are: a grant, a release, an expiry, an owner's count or data. Waiters are not
        watched: one that joins or leaves changes nothing here.

        Returns:
            A synchronous function that ends the watch; safe to call twice.
        """


class Engine(Protocol):
    """A store, as used by one program. It belongs to the loop on which it was opened."""

    @property
    def guarantees(self) -> str:
        """See `EngineDefaults`, as for the next six."""

    def liveness_fd(self) -> int | None:
        """Return a descriptor that closes with this process, if the engine has one."""

    def diagnose(self) -> Iterable[Finding]:
        """Find problems of the store."""

    def pages(self) -> Pages | None:
        """Return paged lists, if the engine has them."""

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Return the statement that guards a lease, or raise `Unsupported`."""

    def rate(self, path: str, name: str, call: RateCall) -> RateReply:
        """Carry out an operation on a rate, or raise `Unsupported`.

        A take whose answer is lost may be carried out again. A refund is carried out once at most:
        a second one would refund tokens of other takes.
        """

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead."""

    @property
    def url(self) -> str:
        """URL of the store without secrets, for messages and descriptions."""

    @property
    def clock(self) -> Clock:
        """Local clock of deadlines and proofs."""

    @property
    def capabilities(self) -> Capabilities:
        """Features and limits of the engine."""

    async def open(self) -> None:
        """Connect.

        Raises:
            EngineUnavailable, AuthenticationFailed, EngineError, Unsupported
        """

    async def aclose(self) -> None:
        """Close the attached sessions, then the connection. Safe to call twice."""

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the reason why the store currently grants nothing, if known.

        It does no I/O, and returns ``None`` while the store works.

        Args:
            name: a semaphore, for stores with several servers.

        Returns:
            `EngineUnavailable`, with the latest cause, while the store cannot be reached or does
            not answer; an `EngineError` while it answers but grants nothing to any client. The
            message is a clause without a full stop, such as "process 7 has kept the turn for 3 s".
        """

    async def attach(self, how: Attach, events: SessionEvents) -> EngineSession:
        """Attach a session. `events.proven` is called before it returns.

        A cancelled attach leaves no new session behind.

        A takeover first checks the key, then raises the attach number, so that the store rejects
        all later messages of the former attachment, which receives ``ended``. It returns, with its
        own proof and all requests in place, once the former attachment considers no lease held: it
        has detached or received ``ended``, it is known to be dead, or the window has passed since
        its last contact to the store. `Attach.assume_dead` skips this wait. The session is kept
        alive meanwhile. Of several takeovers the last one wins. A cancelled takeover leaves the
        session detached.

        Raises:
            NodeNotFound: there is no such node.
            SessionExpired: the session to take over ended, or another program has taken it over.
            AuthenticationFailed: the session to take over has another key.
            InvalidArgument: the session to take over is of liveness ``"process"``.
            Unsupported: the engine has no sessions of liveness ``"window"``.
            EngineUnavailable: the store cannot be reached.
        """

    async def store_time(self) -> float:
        """Read the store's wall clock, in seconds since the Unix epoch.

        It may jump. If it cannot be read, the caller's clock is used, and `Capabilities.store_time`
        is false.

        Raises:
            EngineUnavailable, EngineError: the store cannot be reached.
        """

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node. Raises `NodeExists` unless `exist_ok`; an existing node is not changed."""

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the fields that are set in `config`. Raises `NodeNotFound`."""

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node with its semaphores and detached sessions.

        Raises:
            NodeNotFound: the node does not exist.
            NodeBusy: sessions are attached, and `force` is false. Forced, they expire.
            InvalidArgument: the path is ``/default``.
        """

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node. Raises `NodeNotFound`."""

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe all semaphores of a node, sorted by name. Raises `NodeNotFound`."""

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe one semaphore, at a cost independent of the others.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist.
        """

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe all sessions of a node, sorted by id. Raises `NodeNotFound`."""

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session like an expiry; return false if it did not exist."""

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Take one request out of its queue (`Removal.EVICTED`); false if it did not exist."""


Connector: TypeAlias = Callable[[str, Clock], Engine]
