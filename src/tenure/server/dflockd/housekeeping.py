"""Removal of unused keys, and of the semaphores that were created for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from tenure.engines.contract import Attach, Removal
from tenure.errors import SemaphoreBusy, SemaphoreNotFound, SessionExpired
from tenure.model import Recovered
from tenure.server.dflockd.claims import MARK
from tenure.server.dflockd.locks import Locks
from tenure.server.dflockd.names import key_of
from tenure.server.reads import Reader, pages_of_semaphores

_WINDOW = 30.0


class Deaf:
    """Events of a session without requests (`SessionEvents`), all ignored."""

    def proven(self, at: float) -> None:
        """Ignore the proof."""

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Ignore the requests."""

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Ignore the grant."""

    def removed(self, request_id: int, why: Removal) -> None:
        """Ignore the removal."""

    def detached(self, cause: BaseException | None = None) -> None:
        """Ignore the loss of contact."""

    def attached(self) -> None:
        """Ignore the return of contact."""

    def ended(self, error: SessionExpired) -> None:
        """Ignore the end."""


async def collect(locks: Locks, description: str) -> None:
    """Forget keys that have been unused for long, and delete their semaphores."""
    deadline = locks.now() - locks.options.gc_max_idle
    idle = [key for key in locks.keys.values() if not key.claims and key.used_at <= deadline]
    for key in idle:
        if key.limit == 1 or not key.made:
            locks.keys.forget(key)
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
                    found = await session.describe_semaphore(
                        key.stored, owners=False, waiters=False
                    )
                    if found.data == MARK:
                        await session.delete_semaphore(key.stored, force=False)
                        locks.context.counts.semaphores.deleted(node, key.stored)
                        locks.context.guard.stored.deleted(node, key.stored)
                except SemaphoreBusy:
                    key.used_at = locks.now()  # another client uses it
                    continue
                except SemaphoreNotFound:
                    locks.context.counts.semaphores.deleted(node, key.stored)
                key.made = False
                locks.keys.forget(key)
        finally:
            await session.close()


async def know_leftovers(locks: Locks) -> None:
    """Find the semaphores of keys without clients; each is deleted when its time has come."""
    now = locks.now()
    context, node = locks.context, locks.options.node
    reader = Reader(context.reads, "the search for unused keys")
    async with aclosing(pages_of_semaphores(context.engine, node, reader)) as pages:
        async for page in pages:
            for each in page:
                if not each.ephemeral and each.data == MARK:
                    key = key_of(each.name)
                    if key is not None and key not in locks.keys:
                        locks.keys.found(key, each.limit, now)
