"""One connection of a dflockd client.

States: *greeting* (a token is required and was not shown), *open*, *leaving* (a last word, then
closed), *gone*; and while it is open, *busy* with one request or not. Requests are carried out one
after the other; a busy connection keeps what arrives, and others are not held up.

`DflockdServerStream` reads, keeps order and writes. Here is what requests have to wait for, and how
it all ends.

* **Deadlines** are looked at by `tick`: of the greeting, of the client's silence (counted from a
  line's end, and not while it is busy), of its not reading.
* **Disconnect** (the end of what the client sends may be one, see `DflockdServerStream`): its
  waiting is over, and what it holds is released at once, or kept for its lease, as
  `DflockdOptions.auto_release` says. A background task of its own, if it has one, is cancelled.
* **Close.** `cut_off` closes at once; `leave` after a last word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import AuthenticationFailed, NodeNotFound, TenureError
from tenure.server.accept import Greeting
from tenure.server.auth import ANONYMOUS, REFUSAL_DELAY, Identity, Verdict, peer_of
from tenure.server.auth.guard import GuardedEngine
from tenure.server.auth.peer import UNKNOWN_PEER
from tenure.server.auth.permissions import Access
from tenure.server.dflockd.claims import ASKED, HELD, MARK, OVER, WAITING, Claim
from tenure.server.dflockd.commands import COMMANDS
from tenure.server.dflockd.ends import is_gone, is_read, probe
from tenure.server.dflockd.holder import Holder, attached
from tenure.server.dflockd.stream import DflockdServerStream
from tenure.server.limits import LimitReached
from tenure.server.reads import Reader, reader_of
from tenure.wire.lines.replies import ERROR, ERROR_AUTH, ERROR_DRAINING, OK, QUEUED, fence_of, grant
from tenure.wire.lines.requests import RawRequest

if TYPE_CHECKING:
    from tenure.server.dflockd.listener import DflockdListener

__all__ = ["DflockdServerConnection"]

_FAREWELL = 5.0  # seconds for a client to read its last word
_TOGETHER = 1.0  # seconds between a request and the end of input of a client that half-closes
_DELIVERY = 0.02  # seconds between two looks whether a last reply has arrived


class DflockdServerConnection(DflockdServerStream):
    """The server's end.

    Attributes:
        number: which of the listener's it is.
        identity: of its client, once the greeting is over.
        reader: turns of its costly reads, from then on.
        holder: has the claims of its client; ``None`` while the client has asked for nothing.
        enqueued: claims of the first of two phases, by their keys.
        most_claims: that it may have at a time.
        gone: done when the connection is lost.
    """

    __slots__ = (
        "_engine",
        "_enqueues",
        "_greeted",
        "_greeting",
        "_inside_tls",
        "_last_grant",
        "_leaving",
        "_listener",
        "_options",
        "_peer",
        "_revoked",
        "_task",
        "enqueued",
        "gone",
        "holder",
        "identity",
        "locks",
        "most_claims",
        "number",
        "reader",
    )

    def __init__(self, listener: DflockdListener, greeting: Greeting, number: int) -> None:
        super().__init__(listener.context, greeting, COMMANDS)
        self.number = number
        self.identity = ANONYMOUS
        self.reader: Reader
        self._engine: GuardedEngine | None = None
        self.locks = listener.locks
        self.holder: Holder | None = None
        self.enqueued: dict[str, Claim] = {}
        self.most_claims = listener.context.limits.requests_per_session
        self._peer = UNKNOWN_PEER
        self._revoked = False
        self._listener = listener
        self._options = listener.options
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._greeting = greeting
        self._greeted = False
        self._inside_tls = False
        self._leaving: asyncio.TimerHandle | None = None
        # What it is busy with
        self._enqueues = False  # what is awaited is a place in the queue
        self._last_grant: Claim | None = None  # of its last wait
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> GuardedEngine:
        """The store as the client's identity may use it."""
        assert self._engine is not None, "the client was not let in"
        return self._engine

    @property
    def connections(self) -> int:
        """Number of the listener's connections."""
        return self._listener.connections

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._greeting.displaced = self._yield_slot
        self._inside_tls = transport.get_extra_info("sslcontext") is not None
        self._heard_at = self._now()
        self._listener.joined(self)
        self._peer = peer_of(transport)
        with contextlib.suppress(AuthenticationFailed):  # then a token is to come first
            self._let_in(self._context.authenticator.authenticate("", self._peer))

    def connection_lost(self, exc: Exception | None) -> None:
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
        self._listener.left(self)
        self.gone.set_result(None)
        self._context.log(logging.DEBUG, "connection lost", peer=self.peer, why=exc)

    def eof_received(self) -> bool:
        self._over = True
        if self._inside_tls:
            return False  # TLS has no half-closed connections here
        late = self._now() - self._heard_at > _TOGETHER
        if self._awaited is not None and (late or self._is_cut_short()):
            return False
        stays = self._busy or bool(self._requests or self._unread)  # then it closes after that
        if stays and self._transport is not None:
            probe(self._transport)
        return stays

    # Being busy

    def outcome(self, claim: Claim, *, enqueued: bool) -> bytes | None:
        """Return the reply about a claim; ``None`` if it is not known yet."""
        stage = claim.stage
        if stage is HELD:
            if enqueued:
                self.enqueued[claim.key.name] = claim
                return grant("acquired", claim.token, claim.lease)
            return grant("ok", claim.token, claim.lease)
        if stage is OVER:
            if claim.verdict or self.holder is None:
                return claim.verdict or ERROR
            self.put_off(
                self.locks.keys.make(claim.key, self.holder.session, MARK, self.engine.account)
            )  # once more
            return None
        if stage is WAITING and enqueued:
            self.enqueued[claim.key.name] = claim
            return QUEUED
        self._awaited = claim
        self._enqueues = enqueued
        return None

    def wait_for(self, claim: Claim) -> None:
        """Keep the connection busy until there is news of this claim."""
        self._awaited = claim
        self._enqueues = False

    def news(self, claim: Claim) -> None:
        """Reply to the client if the claim that it waits for is decided."""
        if self._awaited is not claim or claim.stage is ASKED:
            return
        self._awaited = None
        reply = self.outcome(claim, enqueued=self._enqueues)
        if reply is not None:
            self._last_grant = claim if claim.stage is HELD else None
            self._reply(reply)
        elif self._waits_for_nobody() and self._transport is not None:
            self._transport.close()

    def settle(
        self, answer: Answer[Withdrawn] | Answer[None], reply: bytes, renewed: Claim | None = None
    ) -> bytes | None:
        """Reply this when the store has answered.

        It is `error` if there was nothing to release, or that took too long for a renewal.
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

    def put_off(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Do this first, and then what it is busy with, unless there is something to reply."""
        self._task = self._listener.start(self._do_first(work))

    async def _do_first(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            reply = await work
        except LimitReached as error:
            self._context.log(logging.WARNING, "refused", peer=self.peer, limit=error.limit)
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

    def _reply(self, reply: bytes) -> None:
        """Send a reply, and go on with the next request."""
        self._awaited = None
        if self._transport is None or self._leaving is not None:
            return
        self._busy = False
        self._heard_at = self._now()
        self._replies.append(reply)
        self._flush()
        if self._requests or self._unread or self._over or self._reader.failed:
            self._go_on_soon()
        self._settle_reading()

    async def attach(self, lease: int) -> bytes:
        """Get a holder."""
        self.holder = await attached(self, lease, self._listener.describe(self.peer))
        return b""

    def release_elsewhere(self, name: str, token: str) -> bytes | None:
        """Release what another listener may have granted; the reply, unless that takes a while."""
        if fence_of(token) is None:
            return ERROR
        self.put_off(self._listener.elsewhere.release(self, name, token))
        return None

    def renew_elsewhere(self, name: str, token: str, lease: int) -> bytes | None:
        """Renew what another listener may have granted; the reply, unless that takes a while."""
        if fence_of(token) is None:
            return ERROR
        self.put_off(self._listener.elsewhere.renew(self, name, token, lease))
        return None

    def lost_holder(self, claims: list[Claim]) -> None:
        """Drop the holder: its session is over. Close the connection if it had claims."""
        self.holder = None
        if claims:
            self.leave(ERROR if self._busy else b"")

    # Coming in

    def _let_in(self, identity: Identity) -> bool:
        """Serve the client from now on; false if it is refused."""
        self._greeted = True
        try:
            self._greeting.let_in(identity)
        except LimitReached as error:
            self._context.log(
                logging.WARNING, "connection refused", peer=self.peer, limit=error.limit
            )
            self.leave(ERROR)
            return False
        self.identity = identity
        self.reader = reader_of(self._context.reads, identity, self._greeting.source)
        self._share.greeted()
        self._engine = self._context.guard.engine(identity)
        self._special = False
        self._context.log(logging.DEBUG, "connection greeted", peer=self.peer, identity=identity)
        return True

    def _yield_slot(self, _: LimitReached) -> None:
        """Close a connection that has shown no token, because its slot is needed."""
        self.leave(ERROR)

    def greet(self, requests: list[RawRequest]) -> list[RawRequest]:
        """Check the first request, on which further rules apply; return those behind it."""
        if self._greeted or self._leaving is not None or not requests:
            return []
        command, _, token = requests[0]
        if command == "auth":
            try:
                identity = self._context.authenticator.authenticate(token.strip(), self._peer)
                self._context.guard.engine(identity).check(self._options.node, Access.HOLD)
            except (AuthenticationFailed, NodeNotFound):
                pass
            else:
                if not self._let_in(identity):
                    return []
                self._replies.append(OK)
                return requests[1:]
        self._context.log(logging.WARNING, "access denied", peer=self.peer)
        why = "the token is not valid" if command == "auth" else "the server requires a token"
        self._context.audit.refused_login(self.peer, why, listener="dflockd")
        self._replies.append(ERROR_AUTH)
        self._flush()
        self._leaving = self._loop.call_later(REFUSAL_DELAY, self._close)
        return []

    # Leaving

    def end(self) -> None:
        claim = self._last_grant
        if claim is None or self._options.auto_release:
            self._close()
        elif self._leaving is None:
            self._see_to_delivery(claim, self._now() + self._options.write_timeout)

    def _see_to_delivery(self, claim: Claim, until: float) -> None:
        """Close it when the grant has arrived; release it if the client was gone before.

        That is for what outlives its connection: no client would know of the grant. A client that
        may have read it keeps it.
        """
        transport, now = self._transport, self._now()
        if transport is None:
            return
        if is_gone(transport):
            if claim.stage is HELD:
                self.locks.give_up(claim, ERROR, now)
            self.cut_off()
        elif is_read(transport) or now >= until:
            self._close()
        else:
            self._leaving = self._loop.call_later(_DELIVERY, self._see_to_delivery, claim, until)

    def drain(self) -> None:
        """Reject the request that waits, because the server ends."""
        claim = self._awaited
        if claim is not None:
            self._awaited = None
            self.locks.give_up(claim, ERROR_DRAINING, self._now())
            self._reply(ERROR_DRAINING)

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End the connection if its identity may not go on.

        Its client may not notice at once: what it holds is kept for its lease.
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

    def leave(self, word: bytes) -> None:
        """Send a last reply, and then close the connection, however slowly the client reads."""
        if self._transport is None or self._leaving is not None:
            return
        self._special = True
        if word:
            self._replies.append(word)
        self._flush()
        self._close()

    def _close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = self._loop.call_later(_FAREWELL, self.cut_off)
        if self._transport is not None:
            self._transport.close()

    def tick(self, now: float) -> None:
        """Look at the deadlines, and whether a client that has ended its input is gone."""
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
        silent = not self._busy and now - self._heard_at > self._options.read_timeout
        if late or silent:
            self.leave(ERROR)
