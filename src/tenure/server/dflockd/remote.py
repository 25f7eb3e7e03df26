"""Tokens of claims that another listener on the node has.

A client may send a token to any listener on the node. A listener that does not know the token finds
its claim in the store, and compares the token with the seal there.

* **Release.** The request is evicted. The store notifies the listener that has the claim.
* **Renewal.** Only the listener that has the claim can change its request. It gets a *letter*: a
  request in the queue of `LETTERS`, whose data names the claim and the lease. A listener with
  claims checks for letters every second. It renews the claim, and then evicts the letter as an
  answer. A client gets the reply to its renewal once the store shows it.
* **No answer.** The other listener may have ended. Then its sessions are taken over, and the claim
  is renewed here. If it is alive but cannot reach the store, the reply is an error.

A letter needs no secret: it can only prolong a lease, and a client that can write one may take any
lock on the node anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
from typing import Protocol

from tenure.engines.contract import Place, Withdrawn
from tenure.errors import NodeNotFound, SemaphoreNotFound, TenureError
from tenure.model import RequestDescription
from tenure.server.dflockd.claims import HELD, Claim, Holder, Record, sealed
from tenure.server.dflockd.locks import Locks
from tenure.server.dflockd.names import stored_name
from tenure.server.dflockd.orphans import Orphans
from tenure.server.reads import Reader
from tenure.wire.lines.replies import ERROR, OK, fence_of
from tenure.wire.lines.rules import is_key

LETTERS = "dflockd renewals"
"""The semaphore of the letters. No key has this name, since it has a space."""

_LETTER = re.compile(rb"dflockd renew ([0-9]{1,19}) ([0-9]{1,10})")
_MOST = 100  # letters that are answered in one look
_TIMEOUT = 4.0  # seconds for an answer


class TokenClient(Protocol):
    """Connection of a client that sent a token of another listener."""

    @property
    def reader(self) -> Reader:
        """The schedule of its costly reads."""

    @property
    def holder(self) -> Holder | None:
        """Its session, if it has one."""

    async def attach(self, lease: int) -> bytes:
        """Return a holder."""


class RemoteTokens:
    """Claims of the other listeners on the node.

    Args:
        locks: the tables of this listener.
        orphans: the takeover of sessions whose listeners have ended.
    """

    def __init__(self, locks: Locks, orphans: Orphans) -> None:
        """Search for claims on the node of `locks`."""
        self._locks = locks
        self._orphans = orphans
        self._engine = locks.context.engine
        self._node = locks.options.node

    async def release(self, conn: TokenClient, name: str, token: str) -> bytes:
        """Release a claim, and return the reply. Raises errors of the store."""
        owner = await self._find(conn, name, token)
        if owner is None:
            return ERROR
        evicted = await self._engine.evict(self._node, stored_name(name), owner.order_id)
        return OK if evicted else ERROR

    async def renew(self, conn: TokenClient, name: str, token: str, lease: int) -> bytes:
        """Renew a claim.

        Returns:
            The reply; empty if this listener now has the claim, so that the request must be
            repeated.

        Raises:
            TenureError: an error of the store.
            LimitReached: the connection needs a session, and there are too many.
        """
        owner = await self._find(conn, name, token)
        if owner is None:
            return ERROR
        if conn.holder is None:
            await conn.attach(lease)
        if conn.holder is not None and await _answered(conn.holder, owner.order_id, lease):
            owner = await self._find(conn, name, token)
            record = None if owner is None else Record.of(owner.data, name)
            return ERROR if record is None or record.lease < lease else b"ok %d\n" % lease
        await self._orphans.take_over()
        return ERROR if self._locks.find(name, token) is None else b""

    async def _find(self, conn: TokenClient, name: str, token: str) -> RequestDescription | None:
        """Return the request of a valid token that another listener granted, or ``None``."""
        fence = fence_of(token)
        if fence is None or not is_key(name):
            return None
        try:
            async with conn.reader.lock, conn.reader:
                described = await self._engine.describe_semaphore(
                    self._node, stored_name(name), owners=True, waiters=False
                )
        except (NodeNotFound, SemaphoreNotFound):
            return None
        owner = next((each for each in described.owners if each.order_id == fence), None)
        record = None if owner is None else Record.of(owner.data, name)
        if owner is None or record is None:
            return None
        if not hmac.compare_digest(record.seal, sealed(token[16:], name)):
            return None
        mine = any(each.session.id == owner.session_id for each in self._locks.holders)
        return None if mine else owner  # claims of this listener are known to have ended

    async def answer(self) -> None:
        """Carry out the renewals that other listeners request. Raises errors of the store."""
        try:
            described = await self._engine.describe_semaphore(
                self._node, LETTERS, owners=True, waiters=False
            )
        except (NodeNotFound, SemaphoreNotFound):
            return
        letters: dict[int, tuple[int, int]] = {}  # of the claims' order ids: own order id, lease
        for each in described.owners[:_MOST]:
            match = _LETTER.fullmatch(each.data)
            if match is not None:
                letters[int(match[1])] = each.order_id, int(match[2])
        if not letters:
            return
        mine = {
            claim.order_id or fence_of(claim.token): claim for claim in self._locks.held.values()
        }
        await asyncio.gather(
            *(
                self._comply(mine[order_id], *letter)
                for order_id, letter in letters.items()
                if order_id in mine
            )
        )

    async def _comply(self, claim: Claim, letter: int, lease: int) -> None:
        """Renew a claim, without shortening its lease, and answer the letter."""
        locks = self._locks
        now = locks.now()
        if claim.stage is not HELD or claim.deadline <= now:
            return
        lease = max(lease, math.ceil(claim.deadline - now))
        if not claim.holder.can_promise(lease, now):
            return
        try:
            answer = locks.renew(claim, lease, now)
            if isinstance(answer, asyncio.Future):
                await answer
        except TenureError:
            return  # it has ended, and there is nothing to answer
        if locks.confirm(claim, locks.now()):
            await self._engine.evict(self._node, LETTERS, letter)


async def _answered(holder: Holder, order_id: int, lease: int) -> bool:
    """Send a letter, and wait for the answer with a timeout."""
    holder.last_id = request_id = holder.last_id + 1
    letter = b"dflockd renew %d %d" % (order_id, lease)
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    holder.letters[request_id] = answer
    try:
        placed = holder.session.enqueue(request_id, LETTERS, 1, letter, timeout=0, ephemeral=True)
        if isinstance(placed, asyncio.Future):
            placed = await placed
        if placed.place is not Place.GRANTED:
            return False
        async with asyncio.timeout(_TIMEOUT):
            return await answer
    except TimeoutError:
        return False
    finally:
        if holder.letters.pop(request_id, None) is not None and not holder.over:
            with contextlib.suppress(TenureError):
                withdrawn = holder.session.withdraw(request_id)
                if isinstance(withdrawn, asyncio.Future):
                    withdrawn.add_done_callback(_seen)


def _seen(answer: asyncio.Future[Withdrawn]) -> None:
    if not answer.cancelled():
        answer.exception()  # the letter ends with its session at the latest
