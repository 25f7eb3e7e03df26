"""One connection of a dflockd client.

States: *greeting* (a token is required and was not sent), *open*, *leaving* (a last reply, then
closed), *gone*; and while open, *busy* with one request or not. Requests are carried out in order;
a busy connection queues its input, without delaying other connections.

`DflockdServerStream` reads, keeps the order and writes. This module handles waiting requests and
the end of the connection.

* **Deadlines** are checked by `tick`: of the greeting, of the client's silence (counted from the
  end of a line, and not while busy), and of unread replies.
* **Disconnect** (also some ends of input, see `DflockdServerStream`): waiting requests are
  withdrawn, and held locks are released at once, or kept for their leases, according to
  `DflockdOptions.auto_release`. The connection's background task, if there is one, is cancelled.
* **Close.** `cut_off` closes at once; `leave` after a last reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, cast

from tenure.engines.contract import Answer, Attach, Withdrawn
from tenure.errors import AuthenticationFailed, NodeNotFound, TenureError
from tenure.model import NodeConfig
from tenure.server.auth import ANONYMOUS, REFUSAL_DELAY, Identity, Verdict, peer_of
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Access
from tenure.server.dflockd.claims import HELD, OVER, REQUESTED, WAITING, Claim, Holder
from tenure.server.dflockd.locks import Locks
from tenure.server.dflockd.remote import RemoteTokens
from tenure.server.dflockd.stream import DflockdServerStream, is_gone, is_read
from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting
from tenure.server.reads import Reader, reader_of
from tenure.wire.lines import ERROR, ERROR_AUTH, ERROR_DRAINING, OK, QUEUED, RawRequest, grant

_DELIVERY = 0.02  # seconds between two checks whether a last reply has arrived
_SHORTEST, _LONGEST = 60.0, 30 * 60.0  # windows of sessions, in seconds


class ConnectionHome(Protocol):
    """Listener of a connection."""

    @property
    def connections(self) -> Collection[DflockdServerConnection]:
        """Its open connections."""

    @property
    def remote(self) -> RemoteTokens:
        """Claims of the other listeners on the node."""

    def describe(self, peer: str) -> str:
        """Return the description of the session of a connection."""

    def joined(self, connection: DflockdServerConnection) -> None:
        """Add a connection."""

    def left(self, connection: DflockdServerConnection) -> None:
        """Remove a connection."""


class DflockdServerConnection(DflockdServerStream):
    """Server end of a connection.

    Attributes:
        home: the listener.
        number: its number among the listener's connections.
        identity: the client's identity, after the greeting.
        reader: the schedule of its costly reads, after the greeting.
        engine: the store as the client's identity may use it, after the greeting.
        holder: has the client's claims; ``None`` before the client's first request.
        enqueued: claims after the first of two phases, by key.
        most_claims: maximum number of claims.
        gone: done when the connection is lost.
    """

    __slots__ = (
        "_enqueues",
        "_greeted",
        "_last_grant",
        "_options",
        "_peer",
        "_revoked",
        "_task",
        "engine",
        "enqueued",
        "gone",
        "holder",
        "home",
        "identity",
        "locks",
        "most_claims",
        "number",
        "reader",
    )

    def __init__(
        self,
        home: ConnectionHome,
        locks: Locks,
        greeting: Greeting,
        number: int,
        commands: Mapping[str, Callable[[Any, str, str, float], bytes | None]],
    ) -> None:
        super().__init__(locks.context, greeting, commands)
        self.home = home
        self.number = number
        self.identity = ANONYMOUS
        self.reader: Reader
        self.engine: GuardedEngine
        self.locks = locks
        self.holder: Holder | None = None
        self.enqueued: dict[str, Claim] = {}
        self.most_claims = locks.context.limits.requests_per_session
        self._peer = UNKNOWN_PEER
        self._revoked = False
        self._options = locks.options
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._greeted = False
        # The request that it is busy with
        self._enqueues = False  # whether it awaits a place in the queue
        self._last_grant: Claim | None = None  # of its last wait
        self._task: asyncio.Task[None] | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Authenticate the peer, as far as possible without a token."""
        self._transport = cast("asyncio.Transport", transport)
        self._greeting.displaced = lambda _: self.leave(ERROR)  # it has sent no token yet
        self._received_at = self._now()
        self.home.joined(self)
        self._peer = peer_of(transport)
        with contextlib.suppress(AuthenticationFailed):  # then a token must come first
            self._let_in(self._context.authenticator.authenticate("", self._peer))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the claims of the client, or keep them for their leases."""
        self._transport = None
        self._share.close()
        self._requests.clear()
        self._unread.clear()
        self._greeting.over()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._task is not None:
            self._task.cancel()
        self._awaited = None
        self.enqueued.clear()
        holder, self.holder = self.holder, None
        if holder is not None:
            self.locks.leave(holder, keep=self._revoked)
        self.home.left(self)
        self.gone.set_result(None)
        self._context.log(logging.DEBUG, "connection lost", peer=self.peer, why=exc)

    # Busy state

    def outcome(self, claim: Claim, *, enqueued: bool) -> bytes | None:
        """Return the reply for a claim, or ``None`` if it is not decided yet."""
        stage = claim.stage
        if stage is HELD:
            if enqueued:
                self.enqueued[claim.key.name] = claim
                return grant("acquired", claim.token, claim.lease)
            return grant("ok", claim.token, claim.lease)
        if stage is OVER:
            if claim.verdict or self.holder is None:
                return claim.verdict or ERROR
            again = self.locks.keys.make(claim.key, self.holder.session, self.engine.account)
            return self.put_off(again)
        if stage is WAITING and enqueued:
            self.enqueued[claim.key.name] = claim
            return QUEUED
        self._awaited = claim
        self._enqueues = enqueued
        return None

    def wait_for(self, claim: Claim) -> None:
        """Keep the connection busy until this claim changes."""
        self._awaited = claim
        self._enqueues = False

    def update(self, claim: Claim) -> None:
        """Reply to the client if its awaited claim is decided."""
        if self._awaited is not claim or claim.stage is REQUESTED:
            return
        self._awaited = None
        reply = self.outcome(claim, enqueued=self._enqueues)
        if reply is not None:
            self._last_grant = claim if claim.stage is HELD else None
            self._reply(reply)
        elif self._waits_in_vain() and self._transport is not None:
            self._transport.close()

    def settle(
        self, answer: Answer[Withdrawn] | Answer[None], reply: bytes, renewed: Claim | None = None
    ) -> bytes | None:
        """Send this reply when the store has answered.

        The reply is `error` if there was nothing to release, or a renewal took too long.
        """
        if not isinstance(answer, asyncio.Future):
            return ERROR if answer is Withdrawn.MISSING else reply
        answer.add_done_callback(partial(self._settled, reply, renewed))
        return None

    def _settled(self, reply: bytes, renewed: Claim | None, answer: asyncio.Future[Any]) -> None:
        done = not answer.cancelled() and answer.exception() is None
        done = done and answer.result() is not Withdrawn.MISSING
        if done and renewed is not None:
            done = self.locks.confirm(renewed, self._now())
        self._reply(reply if done else ERROR)

    def put_off(self, work: Coroutine[Any, Any, bytes]) -> bytes | None:
        """Run this first and then the pending request, unless there is already a reply.

        Returns ``None``, like a command without a reply yet.
        """
        self._task = task = self.locks.start(self._do_first(work))
        task.add_done_callback(lambda _: work.close())  # cancelled before it began
        return None

    async def _do_first(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            reply = await work
        except LimitReached as error:
            self._context.refused("refused", error.limit, peer=self.peer)
            reply = ERROR
        except TenureError as error:
            self._context.log(logging.ERROR, "the store failed", peer=self.peer, why=error)
            reply = ERROR
        except Exception as error:
            self._context.log(logging.ERROR, "a defect", peer=self.peer, error=repr(error))
            reply = ERROR
        finally:
            self._task = None
        if reply:
            self._reply(reply)
        elif self._transport is not None:
            self._requests.appendleft(self._request)
            self._busy = False
            self._go_on()

    async def attach(self, lease: int) -> bytes:
        """Return a holder for a claim of `lease` seconds. Raises errors of the store and limits."""
        context, node = self._context, self._options.node
        longest = min(_LONGEST, context.engine.capabilities.longest_window)
        holder = Holder(self.locks, min(max(2.0 * lease, _SHORTEST), longest), self)
        key = context.session_keys.of_dflockd()
        how = Attach(node, holder.window, self.home.describe(self.peer), "window", key)
        async with self.reader.opening_session():
            try:
                holder.session = await self.engine.attach(how, holder)
            except NodeNotFound:  # it was dropped
                await context.engine.create_node(node, NodeConfig(), exist_ok=True)
                holder.session = await self.engine.attach(how, holder)
        if not holder.over:  # otherwise its session has ended, and the request attaches again
            context.counts.sessions.take_anyway()
            self.locks.holders.add(holder)
            self.holder = holder
        return b""

    async def attached(self, lease: int) -> Holder | None:
        """Return the holder, attached if there is none; ``None`` if its session has just ended."""
        if self.holder is None:
            await self.attach(lease)
        return self.holder

    def lost_holder(self, claims: list[Claim]) -> None:
        """Drop the holder: its session has ended. Close the connection if it had claims."""
        self.holder = None
        if claims:
            self.leave(ERROR if self._busy else b"")

    # Greeting

    def _let_in(self, identity: Identity) -> bool:
        """Serve the client from now on; false if it is rejected."""
        self._greeted = True
        try:
            self._greeting.let_in(identity)
        except LimitReached as error:
            self._context.refused("connection refused", error.limit, peer=self.peer)
            self.leave(b"")  # like dflockd, which closes it without a byte
            return False
        self.identity = identity
        self.reader = reader_of(self._context.reads, identity, self._greeting.source)
        self.engine = GuardedEngine(self._context.guard, identity)
        self._special = False
        self._context.log(logging.DEBUG, "connection greeted", peer=self.peer, identity=identity)
        return True

    def greet(self, requests: list[RawRequest]) -> list[RawRequest]:
        """Check the first request, for which further rules apply; return the requests after it."""
        if self._greeted or self._leaving is not None or not requests:
            return []
        command, _, token = requests[0]
        if command == "auth":
            try:
                identity = self._context.authenticator.authenticate(token.strip(), self._peer)
                GuardedEngine(self._context.guard, identity).check(self._options.node, Access.HOLD)
            except (AuthenticationFailed, NodeNotFound):
                pass
            else:
                if not self._let_in(identity):
                    return []
                self._replies.append(OK)
                return requests[1:]
        self._context.log(logging.WARNING, "access denied", peer=self.peer)
        why = "the token is not valid" if command == "auth" else "the server requires a token"
        self._context.refused_login(self.peer, why, listener="dflockd")
        self._replies.append(ERROR_AUTH)
        self._flush()
        self._leaving = self._loop.call_later(REFUSAL_DELAY, self._close)
        self._stop_reading()
        return []

    # End

    def end(self) -> None:
        """Close the connection; a last grant may have to be delivered first."""
        claim = self._last_grant
        if claim is None or self._options.auto_release:
            self._close()
        elif self._leaving is None:
            self._see_to_delivery(claim, self._now() + self._options.write_timeout)

    def _see_to_delivery(self, claim: Claim, until: float) -> None:
        """Close it when the grant has arrived; release the grant if the client had disconnected.

        Otherwise a claim that outlives its connection would be held without a client. A client that
        may have read the grant keeps it.
        """
        transport, now = self._transport, self._now()
        if transport is None:
            return
        if is_gone(transport):
            if claim.stage is HELD:
                self.locks.abandon(claim, ERROR, now)
            self.cut_off()
        elif is_read(transport) or now >= until:
            self._close()
        else:
            self._leaving = self._loop.call_later(_DELIVERY, self._see_to_delivery, claim, until)

    def drain(self) -> None:
        """Reject the waiting request, because the server ends."""
        claim = self._awaited
        if claim is not None:
            self._awaited = None
            self.locks.abandon(claim, ERROR_DRAINING, self._now())
            self._reply(ERROR_DRAINING)

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End the connection if its identity may not continue.

        Its client may not notice at once, so its locks are kept for their leases.
        """
        if self._transport is None or self._leaving is not None:
            return False
        why = verdict(self.identity if self._greeted else None, self._peer)
        if why is None:
            return False
        self._context.log(
            logging.WARNING, "connection ended", peer=self.peer, identity=self.identity, why=why
        )
        self._context.audit.record("connection ended", self.identity, self.peer, why=why)
        self._revoked = True
        self._requests.clear()
        self._unread.clear()
        self.leave(ERROR_AUTH)
        return True

    def tick(self, now: float) -> None:
        """Check the deadlines, and whether a client that has ended its input has disconnected."""
        if self._over and self._busy and self._transport is not None and is_gone(self._transport):
            self.cut_off()
            return
        if self._leaving is not None:
            return
        if self._blocked_at is not None:
            if now - self._blocked_at > self._options.write_timeout:
                self._context.log(logging.WARNING, "does not read", peer=self.peer)
                self.cut_off()
            return
        late = not self._greeted and now > self._greeting.deadline
        silent = not self._busy and now - self._received_at > self._options.read_timeout
        if late or silent:
            self.leave(ERROR)
