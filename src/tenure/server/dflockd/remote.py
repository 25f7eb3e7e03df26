"""Claims of other listeners on the node: of live ones by their tokens, of ended ones by takeover.

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

**Takeover** (`Orphans`) of sessions that a listener has left in the store. A dflockd service is
identified by its node in the store. Any listener on the node, at any address, takes over the
sessions that a former listener left there. A copy of a store is a separate store: its listeners
take over the sessions in the copy.

Rules:

* A session of a live listener is not taken over. Its store shows it as attached, or its last
  contact is at most half its window ago. In a store that does not report attached sessions, the
  session must be silent in two checks, some time apart: a live listener has contact in between,
  also after an outage.
* If a session is taken over by mistake, its listener loses the locks, but no client loses its
  lease: the leases are in the requests' data, and are kept until they end.
* The lists are scheduled with the costly reads of clients (`tenure.server.reads`), because a client
  can cause a search.
* If two listeners take over the same session, the later one gets it, and it ends for the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from tenure.engines.contract import Attach, EngineSession, Place, Withdrawn
from tenure.errors import (
    AuthenticationFailed,
    NodeNotFound,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.model import Recovered, RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.dflockd.claims import (
    HELD,
    Claim,
    ClaimRecord,
    Holder,
    key_of,
    sealed,
    stored_name,
)
from tenure.server.dflockd.locks import Locks, Work
from tenure.server.reads import Reader, pages_of_semaphores, pages_of_sessions
from tenure.wire.lines import ERROR, OK, fence_of, is_key

_BETWEEN = 10.0  # seconds between two checks that show a session silent
_OURS = re.compile(r"dflockd \S+ for ")


def session_text(place: str, peer: str) -> str:
    """Return the description by which listeners recognise the session of a connection.

    Args:
        place: the address of its listener, for people.
        peer: the address of the client.
    """
    return f"dflockd {place} for {peer}"


class Orphans:
    """The search for sessions without a listener, on the node of one listener.

    Args:
        locks: the tables that receive their locks.
        start: runs something in the background.
    """

    def __init__(self, locks: Locks, start: Work) -> None:
        self._locks = locks
        self._start = start
        self._reader = Reader(locks.context.reads, "the search for orphans")
        self._suspects: dict[int, tuple[float, float]] = {}  # by ids: silent for, seen at
        self._task: asyncio.Task[None] | None = None
        self._began_at = float("-inf")

    async def take_over(self) -> None:
        """Search for sessions whose listener has ended, and take them over.

        Callers share a search that begins after their calls. A cancelled caller does not stop it,
        because a session that is only partly taken over would keep its locks for ever.

        Raises:
            TenureError: the store cannot be read. Sessions that cannot be taken over are only
                logged.
        """
        called_at = self._locks.now()
        while self._task is None or self._began_at < called_at:
            if self._task is not None and not self._task.done():
                await asyncio.wait([self._task])
                continue
            self._began_at = self._locks.now()
            self._task = self._start(self._find())
        await asyncio.shield(self._task)

    def cancel(self) -> None:
        """End a search in progress, with its listener."""
        if self._task is not None:
            self._task.cancel()

    async def _find(self) -> None:
        locks = self._locks
        engine, node = locks.context.engine, locks.options.node
        found: list[SessionDescription] = []
        try:
            async with aclosing(pages_of_sessions(engine, node, self._reader)) as pages:
                async for page in pages:
                    found += [each for each in page if _OURS.match(each.description)]
        except NodeNotFound:
            return
        mine = {holder.session.id for holder in locks.holders}
        others = [each for each in found if each.id not in mine]
        orphans = [each for each in others if self._is_orphan(each)]
        known = {each.id for each in others}
        self._suspects = {id_: seen for id_, seen in self._suspects.items() if id_ in known}
        if not orphans:
            return
        described: dict[str, SemaphoreDescription] = {}
        async with aclosing(
            pages_of_semaphores(engine, node, self._reader, owners=True)
        ) as semaphores:
            async for listed in semaphores:
                described.update((each.name, each) for each in listed)
        for each in orphans:
            self._suspects.pop(each.id, None)
            try:
                await _take_over(locks, each, described)
            except SessionExpired:
                continue  # meanwhile
            except TenureError as error:
                locks.context.log(logging.ERROR, "a session could not be taken over", why=error)

    def _is_orphan(self, session: SessionDescription) -> bool:
        if session.attached is False:
            return True
        silent = session.silent_for
        if silent is None or silent <= session.recovery_window / 2:
            self._suspects.pop(session.id, None)
            return False
        now = self._locks.now()
        before, seen_at = self._suspects.setdefault(session.id, (silent, now))
        if silent < before:  # it had contact in between
            self._suspects[session.id] = silent, now
        return silent > before and now - seen_at >= _BETWEEN


async def _take_over(
    locks: Locks, session: SessionDescription, semaphores: dict[str, SemaphoreDescription]
) -> None:
    holder = Holder(locks, session.recovery_window, None)
    counts = locks.context.counts
    counts.sessions.take_anyway()
    try:
        attached = await _attach_again(locks, session, holder)
    except BaseException:
        counts.sessions.release()
        raise
    if attached is None or holder.over:
        counts.sessions.release()
        return
    holder.session = attached
    locks.holders.add(holder)
    waiters = []
    for request in holder.found:
        holder.last_id = max(holder.last_id, request.request_id)
        name = key_of(request.name)
        record = None if name is None else ClaimRecord.of(request.data, name)
        if request.granted and name and record is not None:
            described = semaphores.get(request.name)
            if described is None:  # it is newer than the list
                described = await holder.session.describe_semaphore(
                    request.name, owners=True, waiters=False
                )
            claim = _keep(locks, holder, name, request, record, described)
            if session.attached is not False:  # a client may have received the lease a moment ago
                claim.deadline = locks.now() + record.lease
        else:
            waiters.append(request.request_id)
    for request_id in waiters:  # no client waits any more
        with contextlib.suppress(TenureError):  # then they leave with their session
            answer = holder.session.withdraw(request_id)
            if isinstance(answer, asyncio.Future):
                await answer
    locks.context.log(logging.INFO, "took locks over", locks=len(holder.claims))
    if not holder.claims and not holder.over:
        locks.end(holder)


async def _attach_again(
    locks: Locks, session: SessionDescription, holder: Holder
) -> EngineSession | None:
    """Attach a session of a listener, which had no key before 0.2.

    Returns:
        ``None`` if it is not a listener's session, although its description looks like one.
    """
    for key in (locks.context.session_keys.of_dflockd(), b""):
        how = Attach(
            locks.options.node,
            session.recovery_window,
            session.description,
            "window",
            key,
            session.id,
            assume_dead=True,
        )
        with contextlib.suppress(AuthenticationFailed):
            return await locks.context.engine.attach(how, holder)
    return None


def _keep(
    locks: Locks,
    holder: Holder,
    name: str,
    request: Recovered,
    record: ClaimRecord,
    semaphore: SemaphoreDescription,
) -> Claim:
    """Keep a claim that was taken over: its token stays valid for the rest of its lease."""
    now = locks.now()
    limit = 1 if request.ephemeral else semaphore.limit
    key = locks.keys.get(name)
    if key is None:
        key = locks.keys.found(name, limit, now)
    claim = Claim(key, holder, request.request_id, record.lease, record.seal)
    left = record.until / 1000 - locks.context.clock.wall()
    since = next((o.since for o in semaphore.owners if o.order_id == request.order_id), None)
    waited = record.lease if since is None else record.lease - since
    holder.claims[request.request_id] = claim
    key.claims.add(claim)
    locks.inherit(claim, request.order_id)
    claim.deadline = now + min(max(left, waited), record.lease)
    return claim


LETTERS = "dflockd renewals"
"""The semaphore of the letters. No key has this name, since it has a space."""

_LETTER = re.compile(rb"dflockd renew ([0-9]{1,19}) ([0-9]{1,10})")
_MOST = 100  # letters that are answered in one look
_TIMEOUT = 4.0  # seconds for an answer


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

    async def release(self, reader: Reader, name: str, token: str) -> bytes:
        """Release a claim, and return the reply. Raises errors of the store."""
        owner = await self._find(reader, name, token)
        if owner is None:
            return ERROR
        evicted = await self._engine.evict(self._node, stored_name(name), owner.order_id)
        return OK if evicted else ERROR

    async def renew(
        self,
        reader: Reader,
        name: str,
        token: str,
        lease: int,
        attached: Callable[[int], Awaitable[Holder | None]],
    ) -> bytes:
        """Renew a claim.

        Args:
            reader: the schedule of the client's costly reads.
            name: the key.
            token: of the claim.
            lease: seconds.
            attached: returns the client's holder, with a session for a claim of so many seconds.

        Returns:
            The reply; empty if this listener now has the claim, so that the request must be
            repeated.

        Raises:
            TenureError: an error of the store.
            LimitReached: the connection needs a session, and there are too many.
        """
        owner = await self._find(reader, name, token)
        if owner is None:
            return ERROR
        holder = await attached(lease)
        if holder is not None and await _answered(holder, owner.order_id, lease):
            owner = await self._find(reader, name, token)
            record = None if owner is None else ClaimRecord.of(owner.data, name)
            return ERROR if record is None or record.lease < lease else b"ok %d\n" % lease
        await self._orphans.take_over()
        return ERROR if self._locks.find(name, token) is None else b""

    async def _find(self, reader: Reader, name: str, token: str) -> RequestDescription | None:
        """Return the request of a valid token that another listener granted, or ``None``."""
        fence = fence_of(token)
        if fence is None or not is_key(name):
            return None
        try:
            described = await reader.describe(
                lambda: self._engine.describe_semaphore(
                    self._node, stored_name(name), owners=True, waiters=False
                )
            )
        except (NodeNotFound, SemaphoreNotFound):
            return None
        owner = next((each for each in described.owners if each.order_id == fence), None)
        record = None if owner is None else ClaimRecord.of(owner.data, name)
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
        if placed.place is not Place.GRANTED and not answer.done():
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
