"""Takeover of sessions that a dflockd listener has left in the store.

A dflockd service is identified by its node in the store. Any listener on the node, at any address,
takes over the sessions that a former listener left there. A copy of a store is a separate store:
its listeners take over the sessions in the copy.

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
import logging
import re
from contextlib import aclosing

from tenure.engines.contract import Attach, EngineSession
from tenure.errors import AuthenticationFailed, NodeNotFound, SessionExpired, TenureError
from tenure.model import Recovered, SemaphoreDescription, SessionDescription
from tenure.server.dflockd.claims import Claim, Holder, Record
from tenure.server.dflockd.locks import Locks, Work
from tenure.server.dflockd.names import key_of
from tenure.server.reads import Reader, pages_of_semaphores, pages_of_sessions

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
        record = None if name is None else Record.of(request.data, name)
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
    record: Record,
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
