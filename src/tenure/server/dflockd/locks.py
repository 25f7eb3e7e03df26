"""Keys of a dflockd server, and the claims on them.

A key is a semaphore of tenure on one node: with limit 1 a mutex, with a higher limit a lasting
semaphore, which is deleted when it is unused. Its queue is in the store, which alone decides which
request is next. Leases, limits and tokens are managed here.

Rules:

* Each operation is one step on the loop, unless it has to wait for the store; then a callback, or
  a task of the listener, waits for the answer. An event that comes before it counts.
* A claim leaves the tables here (`drop`) before or when it leaves the store's queue. Events of a
  claim that has left are ignored.
* A dropped claim leaves the store as well: it is withdrawn, with retries, or its session has ended.

**The table of keys** (`KeyTable`) counts them against the server's limits. A key of limit 1 is an
ephemeral semaphore, counted from its first claim. A key of another limit is a lasting one, counted
when it is created in the store (`KeyTable.make`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tenure.engines.contract import Answer, EngineSession, Enqueued, Place, Withdrawn
from tenure.errors import InvalidArgument, SemaphoreNotFound, SessionExpired, TenureError
from tenure.model import EPHEMERAL_LIMIT
from tenure.server.auth.accounts import Account
from tenure.server.auth.guard import REFUSALS
from tenure.server.context import Context
from tenure.server.dflockd.claims import (
    HELD,
    LAPSED,
    MARK,
    OVER,
    REQUESTED,
    WAITING,
    Claim,
    ClaimRecord,
    Holder,
    Key,
    sealed,
)
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import LimitReached
from tenure.wire.lines import (
    ERROR,
    ERROR_LEASE_EXPIRED,
    ERROR_LIMIT_MISMATCH,
    ERROR_MAX_LOCKS,
    TIMEOUT,
    fence_of,
    make_token,
)


class KeyTable(dict[str, Key]):
    """Keys by name.

    Args:
        context: the server's context.
        options: the listener's options.
    """

    def __init__(self, context: Context, options: DflockdOptions) -> None:
        super().__init__()
        self._context = context
        self._node = options.node
        self._limited = options.max_locks is not None
        self._most = options.max_locks or context.limits.semaphores
        self._semaphores = context.counts.semaphores

    def add(self, name: str, limit: int, now: float, account: Account) -> Key | None:
        """Add an unknown key; return ``None`` if the limit is reached."""
        if len(self) >= self._most and (self._limited or account.semaphores.alone):
            return None
        key = Key(name, limit, now)
        if limit == 1:
            try:
                self._semaphores.add_request(
                    self._node, key.stored, ephemeral=True, account=account
                )
            except LimitReached as error:
                self._context.refused("lock refused", error.limit)
                return None
        self[name] = key
        return key

    def found(self, name: str, limit: int, now: float) -> Key:
        """Add a key that is already in use, regardless of the limit."""
        self[name] = key = Key(name, limit, now)
        if limit == 1:
            self._semaphores.add_existing_request(self._node, key.stored, ephemeral=True)
        else:
            key.made = True
        return key

    def forget(self, key: Key) -> None:
        """Remove a key without claims that is not in the store, or whose semaphore is unknown."""
        if self.get(key.name) is key and not key.claims:
            del self[key.name]
            if key.limit == 1:
                self._semaphores.remove_request(self._node, key.stored)

    async def make(self, key: Key, session: EngineSession, account: Account) -> bytes:
        """Create a key's lasting semaphore, unless it exists.

        Returns:
            The reply if it cannot be created, else an empty one.
        """
        name = key.stored
        try:
            async with self._semaphores.creating(self._node, name, account):
                await session.create_semaphore(name, key.limit, MARK, exist_ok=True)
        except LimitReached as error:
            self._context.refused("lock refused", error.limit)
            self.forget(key)
            return ERROR_MAX_LOCKS
        except InvalidArgument:
            self.forget(key)  # it exists as a mutex, or with another limit
            return ERROR_LIMIT_MISMATCH
        except REFUSALS:
            raise
        except BaseException:
            key.made = True  # if it exists: it is deleted later, otherwise a request notices
            raise
        key.made = True
        return b""


_GRANTED = Place.GRANTED
_SALTS = 512  # salts made at a time

Work = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Locks:
    """Tables of one listener.

    Args:
        context: the server's context.
        options: the listener's options.
        start: runs something in the background.

    Attributes:
        keys: the keys by name.
        held: the held claims. `find` finds a claim granted by this server by its token, and one
            granted by another server by its fencing token and its seal.
        holders: the holders, with and without connections.
        draining: whether clients may no longer wait.
        leaving: whether sessions survive their connections.
    """

    def __init__(self, context: Context, options: DflockdOptions, start: Work) -> None:
        self.context = context
        self.options = options
        self.now = context.clock.now
        self.keys = KeyTable(context, options)
        self.held: dict[str | tuple[int, str], Claim] = {}
        self.holders: set[Holder] = set()
        self.draining = False
        self.leaving = False
        self.max_waiters = (
            context.limits.queue_length if options.max_waiters is None else options.max_waiters
        )
        self._wall = context.clock.wall
        self.start = start
        self._salts: list[str] = []
        self._abandoned: list[Claim] = []  # dropped, but still in the store's queues

    # Claims

    def claim(
        self, key: Key, holder: Holder, lease: int, timeout: float | None, now: float
    ) -> Claim:
        """Send the claim's request."""
        salts = self._salts or self._make_salts()
        salt = salts.pop()
        seal = sealed(salt, key.name)
        holder.last_id = request_id = holder.last_id + 1
        claim = Claim(key, holder, request_id, lease, seal, salt)
        wall = self._wall
        until = int((wall() + lease) * 1000)
        record = f"dflockd2 {seal} {lease} {until}".encode()  # a `ClaimRecord`, faster
        mutex = key.limit == 1
        try:
            answer = holder.session.enqueue(
                request_id,
                key.stored,
                EPHEMERAL_LIMIT if mutex else 1,
                record,
                timeout=timeout,
                ephemeral=mutex,
            )
        except TenureError as error:
            self._refused(claim, error)
            return claim
        holder.claims[request_id] = claim
        key.claims.add(claim)
        if type(answer) is Enqueued:
            place, order_id = answer
            if place is _GRANTED and order_id is not None:  # as `_placed` would do
                claim.stage = HELD
                claim.deadline = now + lease
                claim.token = token = make_token(order_id, salt)
                self.held[token] = claim
            else:
                self._placed(claim, answer, now)
        else:
            assert isinstance(answer, asyncio.Future)
            answer.add_done_callback(partial(self._late_answer, claim))
        return claim

    def _make_salts(self) -> list[str]:
        noise = os.urandom(8 * _SALTS).hex()
        self._salts = [noise[at : at + 16] for at in range(0, len(noise), 16)]
        return self._salts

    def _late_answer(self, claim: Claim, answer: asyncio.Future[Enqueued]) -> None:
        if claim.stage is not REQUESTED:
            if not answer.cancelled():
                answer.exception()  # an event has come before, or no client needs it any more
            return
        self._answered(claim, answer)
        if claim.holder.connection is not None:
            claim.holder.connection.update(claim)

    def _answered(self, claim: Claim, answer: asyncio.Future[Enqueued]) -> None:
        now = self.now()
        if answer.cancelled():
            self.drop(claim, ERROR, now)
            return
        error = answer.exception()
        if claim.holder.lapsed(now):
            self.lose(claim.holder, LAPSED)  # it may have ended long before
        elif error is not None:
            self._refused(claim, error)
        else:
            place, order_id = answer.result()
            doubtful = claim.holder.doubts(now) and place is _GRANTED
            if doubtful and order_id is not None:
                self._placed(claim, Enqueued(Place.WAITING, None), now)
                claim.holder.doubt(claim.request_id, order_id)
            else:
                self._placed(claim, answer.result(), now)

    def _refused(self, claim: Claim, error: BaseException) -> None:
        key = claim.key
        verdict = ERROR
        if isinstance(error, SemaphoreNotFound):
            key.made = False
            verdict = b""
        elif isinstance(error, LimitReached):
            self.context.refused("lock refused", error.limit)
            verdict = ERROR_MAX_LOCKS
        elif isinstance(error, InvalidArgument):
            verdict = ERROR_LIMIT_MISMATCH  # the name is in use for something else
        elif not isinstance(error, TenureError):
            self.context.log(logging.ERROR, "the store failed", error=repr(error))
        self.drop(claim, verdict, self.now())
        if verdict == ERROR_LIMIT_MISMATCH:
            self.keys.forget(key)

    def _placed(self, claim: Claim, answer: Enqueued, now: float) -> None:
        place, order_id = answer
        if place is _GRANTED and order_id is not None:
            self.give(claim, order_id, now)
        elif place is Place.REFUSED:
            self.drop(claim, TIMEOUT, now)
        else:
            claim.stage = WAITING
            claim.key.waiting += 1

    def give(self, claim: Claim, order_id: int, now: float) -> None:
        """Mark a claim as held after its grant."""
        if claim.stage is WAITING:
            claim.key.waiting -= 1
        claim.stage = HELD
        claim.deadline = now + claim.lease
        claim.token = token = make_token(order_id, claim.salt)
        self.held[token] = claim

    def inherit(self, claim: Claim, order_id: int) -> None:
        """Mark a claim as held that another server granted, and whose client has the token."""
        claim.stage = HELD
        claim.order_id = order_id
        self.held[order_id, claim.seal] = claim

    def find(self, name: str, token: str) -> Claim | None:
        """Return the claim for the key `name` that is held with this token."""
        claim = self.held.get(token)
        if claim is None:
            token = token.strip()
            claim = self.held.get(token) or self._claim_inherited(name, token)
        return claim if claim is not None and claim.key.name == name else None

    def _claim_inherited(self, name: str, token: str) -> Claim | None:
        """Return a claim that another server granted; from now on it is found like all others."""
        fence = fence_of(token)
        if fence is None:
            return None
        claim = self.held.pop((fence, sealed(token[16:], name)), None)
        if claim is not None:
            claim.salt = token[16:]
            claim.token = token
            self.held[token] = claim
        return claim

    def drop(self, claim: Claim, verdict: bytes, now: float) -> None:
        """Remove a claim that has ended. Safe to call twice."""
        stage, key = claim.stage, claim.key
        if stage is OVER:
            return
        claim.stage = OVER
        claim.verdict = verdict
        if stage is HELD:
            del self.held[claim.token or (claim.order_id, claim.seal)]
        elif stage is WAITING:
            key.waiting -= 1
        key.claims.discard(claim)
        key.used_at = now
        holder = claim.holder
        holder.claims.pop(claim.request_id, None)
        if holder.connection is None and not holder.claims and not holder.over:
            self.end(holder)

    def withdraw(self, claim: Claim) -> Answer[Withdrawn]:
        """Withdraw or release it in the store; if the store fails, `sweep` retries."""
        try:
            answer = claim.holder.session.withdraw(claim.request_id)
        except TenureError as error:
            self._left_in(claim, error)
            raise
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(self._withdrawn, claim))
        return answer

    def _withdrawn(self, claim: Claim, answer: asyncio.Future[Withdrawn]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self._left_in(claim, error)

    def _left_in(self, claim: Claim, error: BaseException) -> None:
        if not isinstance(error, SessionExpired) and not claim.holder.over:
            if not self._abandoned:  # the first one stands for all
                name = claim.key.stored
                self.context.log(logging.WARNING, "not released yet", name=name, why=error)
            self._abandoned.append(claim)

    def abandon(self, claim: Claim, verdict: bytes, now: float) -> None:
        """Take a claim out of its queue, without waiting for the store."""
        with contextlib.suppress(TenureError):
            self.withdraw(claim)
        self.drop(claim, verdict, now)

    def renew(self, claim: Claim, lease: int, now: float) -> Answer[None]:
        """Extend a claim to `lease` seconds from now.

        Raises:
            SessionExpired, LeaseReleased: the store has ended it.
        """
        until = int((self._wall() + lease) * 1000)
        data = ClaimRecord(claim.seal, lease, until).to_bytes()
        answer = claim.holder.session.alter(claim.request_id, count=None, data=data)
        claim.lease = lease
        # Until its client gets the reply, a lease may be prolonged, but not shortened.
        claim.deadline = now + lease if answer is None else max(claim.deadline, now + lease)
        return answer

    def confirm(self, claim: Claim, now: float) -> bool:
        """Start the lease of a renewal that the store has confirmed.

        Return false if it can no longer be promised: then the client gets no confirmation.
        """
        if claim.stage is not HELD or not claim.holder.can_promise(claim.lease, now):
            return False
        claim.deadline = now + claim.lease
        return True

    # Time

    def evict(self, key: Key, now: float) -> None:
        """End the key's claims whose leases have expired."""
        over = [each for each in key.claims if each.stage is HELD and each.deadline <= now]
        for claim in over:
            self.expire(claim, now)

    def sweep(self, now: float) -> None:
        """End all claims whose leases have expired, and retry failed withdrawals."""
        abandoned, self._abandoned = self._abandoned, []
        for claim in abandoned:
            if not claim.holder.over:
                with contextlib.suppress(TenureError):
                    self.withdraw(claim)
        over = [each for each in self.held.values() if each.deadline <= now]
        for claim in over:
            self.expire(claim, now)

    def expire(self, claim: Claim, now: float) -> None:
        """End a claim whose lease has expired."""
        self.context.log(logging.WARNING, "lease expired", name=claim.key.stored, lease=claim.lease)
        self.abandon(claim, ERROR_LEASE_EXPIRED, now)

    # Holders

    def leave(self, holder: Holder, *, keep: bool = False) -> None:
        """Release or keep the claims of a holder whose client has disconnected.

        Args:
            holder: the holder without a client.
            keep: keep its claims for their leases, regardless of `DflockdOptions.auto_release`.
        """
        holder.connection = None
        now = self.now()
        kept = keep or self.leaving or not self.options.auto_release
        for claim in list(holder.claims.values()):
            if not kept:
                self.drop(claim, ERROR, now)
            elif claim.stage is not HELD:
                self.abandon(claim, ERROR, now)
        if not holder.claims and not holder.over:
            self.end(holder)

    def end(self, holder: Holder) -> None:
        """End a holder's session, with all its requests."""
        self._over(holder)
        self.start(self._close(holder))

    async def _close(self, holder: Holder) -> None:
        try:
            await holder.session.close()
        except TenureError as error:
            self.context.log(logging.ERROR, "a session could not be closed", why=error)

    async def detach(self, holder: Holder) -> None:
        """Leave a holder's session in the store, with its requests. Raises errors of the store."""
        try:
            await holder.session.detach()
        finally:
            self._over(holder)

    def lose(self, holder: Holder, why: str) -> None:
        """Drop all claims of a holder whose session has ended, or may have."""
        if holder.over:
            return
        self._over(holder)
        claims = list(holder.claims.values())
        if claims:
            self.context.log(logging.WARNING, "locks lost", locks=len(claims), why=why)
        now = self.now()
        for claim in claims:
            self.drop(claim, ERROR, now)
        if holder.connection is not None:
            holder.connection.lost_holder(claims)

    def _over(self, holder: Holder) -> None:
        if not holder.over:
            holder.over = True
            if holder in self.holders:  # otherwise it is not attached yet, nor counted
                self.holders.remove(holder)
                self.context.counts.sessions.release()
