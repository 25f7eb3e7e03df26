"""Descriptions of the objects in the core, individually and in pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from heapq import nsmallest
from itertools import islice, takewhile

from tenure.core.node import StoredRequest, StoredSemaphore, StoredSession
from tenure.core.store import Store
from tenure.model import Recovered, RequestDescription, SemaphoreDescription, SessionDescription

ALL = sys.maxsize
"""Size of a page with the whole list."""


def recovered(request: StoredRequest) -> Recovered:
    """Return a request in the form for a resumed session."""
    semaphore = request.semaphore
    return Recovered(
        request.request_id,
        semaphore.name,
        request.order_id,
        request.count,
        request.data,
        semaphore.ephemeral,
        request.granted_at is not None,
    )


def session(found: StoredSession, node: str, now: float) -> SessionDescription:
    """Describe a session at `now`."""
    return SessionDescription(
        found.id, node, found.description, found.window, found.attached, now - found.last_contact
    )


def semaphore(
    found: StoredSemaphore, now: float, *, owners: bool, waiters: bool
) -> SemaphoreDescription:
    """Describe a semaphore at `now`."""
    owning: list[RequestDescription] = []
    waiting: list[RequestDescription] = []
    if owners or waiters:
        for request in found:
            owns = request.granted_at is not None
            if owns and owners:
                owning.append(_request(request, now))
            elif not owns:
                if not waiters:
                    break
                waiting.append(_request(request, now))
    return SemaphoreDescription(
        found.name,
        found.data,
        found.limit,
        found.held,
        found.ephemeral,
        tuple(owning),
        tuple(waiting),
        found.waiting,
    )


def _request(request: StoredRequest, now: float) -> RequestDescription:
    session = request.session
    since = request.joined_at if request.granted_at is None else request.granted_at
    waits = request.granted_at is None and request.deadline is not None
    return RequestDescription(
        session.id,
        request.order_id,
        request.count,
        request.data,
        since=now - since,
        timeout=max(0.0, (request.deadline or 0.0) - now) if waits else None,
        remaining=max(0.0, session.last_contact + session.window - now),
        session_description=session.description,
    )


class MemoryPages:
    """Pages of one engine.

    Args:
        command: context that locks and updates the store, and returns it with the time.
    """

    def __init__(self, command: Callable[[], AbstractContextManager[tuple[Store, float]]]) -> None:
        """Read through `command`, which locks the store."""
        self._command = command

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Describe the next sessions of a node, by id."""
        with self._command() as (store, now):
            node = store.node(path)
            ids = nsmallest(most, (each for each in node.sessions if each > after))
            return [session(node.sessions[each], path, now) for each in ids]

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted."""
        with self._command() as (store, _):
            names = store.node(path).semaphores
            return nsmallest(most, (each for each in names if each > after))

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Describe the next semaphores of a node, by name."""
        with self._command() as (store, now):
            node = store.node(path)
            page: list[SemaphoreDescription] = []
            size = 0
            for name in nsmallest(most, (each for each in node.semaphores if each > after)):
                found = node.semaphores[name]
                page.append(semaphore(found, now, owners=owners, waiters=waiters))
                size += 1 + len(page[-1].owners) + len(page[-1].waiters)
                if size >= most:
                    break
            return page

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Describe the next owners or waiters of a semaphore, by order id."""
        with self._command() as (store, now):
            found = store.node(path).semaphore(name)
            if waiters:
                queue = found.waiters()
            else:
                queue = takewhile(lambda each: each.granted_at is not None, found)
            following = (each for each in queue if each.order_id > after)
            return [_request(each, now) for each in islice(following, most)]
