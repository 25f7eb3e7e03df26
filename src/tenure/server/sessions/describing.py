"""Descriptions for clients, without the server process.

In the store, the sessions of a server's clients have the server's pid and host. These would mislead
a reader, who might even kill the server as an owner.
"""

from __future__ import annotations

import os
from dataclasses import replace

from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.limits import LimitReached
from tenure.server.reads import SLICE, Reader, converted
from tenure.wire.values import RequestInfo, SemaphoreInfo, SessionInfo


def session_info(session: SessionDescription) -> SessionInfo:
    """Return the description of a session."""
    is_local = session.pid == os.getpid()
    return SessionInfo.of(replace(session, pid=None, host=None) if is_local else session)


def semaphore_info(semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """Return the description of a semaphore, with the requested lists."""
    return SemaphoreInfo(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        list(map(_request_info, semaphore.owners)),
        list(map(_request_info, semaphore.waiters)),
        semaphore.waiting,
    )


async def described(reader: Reader, semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """Return a semaphore's description for a message; a long queue takes several slices."""
    owners, waiters = semaphore.owners, semaphore.waiters
    if len(owners) + len(waiters) <= SLICE:
        return semaphore_info(semaphore)
    return SemaphoreInfo(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        await converted(reader, owners, _request_info),
        await converted(reader, waiters, _request_info),
        semaphore.waiting,
    )


def _request_info(request: RequestDescription) -> RequestInfo:
    """Return the description of a request in a queue."""
    is_local = request.pid == os.getpid()
    return RequestInfo.of(replace(request, pid=None, host=None) if is_local else request)


def bytes_of(semaphore: SemaphoreDescription) -> int:
    """Estimate the bytes of a semaphore's description in a message."""
    requests = (*semaphore.owners, *semaphore.waiters)
    return 1200 + len(semaphore.data) + sum(map(_bytes_of_request, requests))


def _bytes_of_request(request: RequestDescription) -> int:
    return 100 + len(request.data) + len(request.session_description or "")


def check_size(semaphore: SemaphoreDescription, node: str, most: int) -> int:
    """Estimate the bytes of a description.

    Raises:
        LimitReached: they exceed the limit of a message.
    """
    size = bytes_of(semaphore)
    if size > most:
        raise LimitReached(
            f"the description of {semaphore.name!r} on {node} has about {size} bytes, and this "
            f"server's limit output_bytes allows {most}; request its owners or its waiters alone, "
            "or for neither",
            "output_bytes",
            node=node,
            name=semaphore.name,
        )
    return size
