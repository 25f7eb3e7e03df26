"""What is done now and then.

Keys that nobody uses are forgotten, and sessions whose server has died are taken over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tenure.engines.contract import Attach, Removal
from tenure.errors import (
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.model import Recovered, SemaphoreDescription, SessionDescription
from tenure.server.dflockd.claims import MARK, Claim, Record
from tenure.server.dflockd.holder import Holder
from tenure.server.dflockd.locks import Locks

__all__ = ["Deaf", "collect", "know_leftovers", "take_over_orphans"]

_WINDOW = 30.0


class Deaf:
    """What the store says of a session that holds nothing (`SessionEvents`)."""

    def proven(self, at: float) -> None: ...

    def resumed(self, requests: Sequence[Recovered]) -> None: ...

    def granted(self, hold: int, order_id: int | None) -> None: ...

    def removed(self, hold: int, why: Removal) -> None: ...

    def detached(self, cause: BaseException | None = None) -> None: ...

    def attached(self) -> None: ...

    def ended(self, error: SessionExpired) -> None: ...


async def collect(locks: Locks, description: str) -> None:
    """Forget the keys that nobody has used for long, and delete what was made for them."""
    deadline = locks.now() - locks.options.gc_max_idle
    idle = [key for key in locks.keys.values() if not key.claims and key.used_at <= deadline]
    for key in idle:
        if key.limit == 1 or not key.made:
            locks.forget(key)
    made = [key for key in idle if key.made]
    if made:
        node = locks.options.node
        how = Attach(node, _WINDOW, description)
        session = await locks.context.engine.attach(how, Deaf())
        try:
            for key in made:
                if key.claims:
                    continue
                try:
                    found = await session.describe_semaphore(key.name, owners=False, waiters=False)
                    if found.data == MARK:
                        await session.delete_semaphore(key.name, force=False)
                        locks.context.counts.semaphores.deleted(node, key.name)
                except SemaphoreBusy:
                    key.used_at = locks.now()  # somebody else uses it
                    continue
                except SemaphoreNotFound:
                    pass
                key.made = False
                locks.forget(key)
        finally:
            await session.close()


async def know_leftovers(locks: Locks) -> None:
    """What was made for keys that nobody uses now is deleted in its time."""
    now = locks.now()
    node = locks.options.node
    for each in await locks.context.engine.list_semaphores(node, owners=False, waiters=False):
        if not each.ephemeral and each.data == MARK and each.name not in locks.keys:
            locks.found(each.name, each.limit, now)


async def take_over_orphans(locks: Locks, prefix: str) -> None:
    """Take over the sessions of a listener of this name that does not live any more."""
    engine, node = locks.context.engine, locks.options.node
    try:
        sessions = await engine.list_sessions(node)
    except NodeNotFound:
        return
    mine = {holder.session.id for holder in locks.holders}
    orphans = [
        each
        for each in sessions
        if each.description.startswith(prefix) and each.id not in mine and _is_orphan(each)
    ]
    if not orphans:
        return
    semaphores = await engine.list_semaphores(node, owners=True, waiters=False)
    limits = {each.name: each for each in semaphores}
    for each in orphans:
        try:
            await _take_over(locks, each, limits)
        except SessionExpired:
            continue  # meanwhile
        except TenureError as error:
            locks.context.log(logging.ERROR, "a session could not be taken over", why=error)


def _is_orphan(session: SessionDescription) -> bool:
    """Whether nobody renews it. Not every store sees that at once; who lives renews it often.

    Should a server live and not reach its store, it has promised nothing beyond the leases that the
    requests tell of, and these are kept.
    """
    if session.attached is False:
        return True
    return session.silent_for is not None and session.silent_for > session.recovery_window / 2


async def _take_over(
    locks: Locks, session: SessionDescription, semaphores: dict[str, SemaphoreDescription]
) -> None:
    holder = Holder(locks, session.recovery_window, None)
    counts = locks.context.counts
    counts.sessions.take_anyway()
    how = Attach(
        locks.options.node,
        session.recovery_window,
        session.description,
        liveness="window",
        session_id=session.id,
        assume_dead=True,
    )
    try:
        holder.session = await locks.context.engine.attach(how, holder)
    except BaseException:
        counts.sessions.give_back()
        raise
    locks.holders.add(holder)
    for request in holder.found:
        holder.hold = max(holder.hold, request.hold)
        record = Record.of(request.data, request.name)
        described = semaphores.get(request.name)
        if request.granted and record is not None and described is not None:
            _keep(locks, holder, request, record, described)
        else:
            answer = holder.session.withdraw(request.hold)  # nobody waits for it any more
            if isinstance(answer, asyncio.Future):
                await answer
    locks.context.log(logging.INFO, "took locks over", locks=len(holder.claims))
    if not holder.claims and not holder.over:
        locks.end(holder)


def _keep(
    locks: Locks,
    holder: Holder,
    request: Recovered,
    record: Record,
    semaphore: SemaphoreDescription,
) -> None:
    """Its token goes on being right, for as long as its lease has left."""
    now = locks.now()
    limit = 1 if request.ephemeral else semaphore.limit
    key = locks.keys.get(request.name)
    if key is None:
        key = locks.found(request.name, limit, now)
    claim = Claim(key, holder, request.hold, record.lease, record.seal)
    left = record.until / 1000 - locks.context.clock.wall()
    since = next((o.since for o in semaphore.owners if o.order_id == request.order_id), None)
    waited = record.lease if since is None else record.lease - since
    holder.claims[request.hold] = claim
    key.claims.add(claim)
    locks.inherit(claim, request.order_id)
    claim.deadline = now + min(max(left, waited), record.lease)
