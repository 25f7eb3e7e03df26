"""Descriptions from the store, as they are sent to clients: without this process.

In the store, the sessions of a server's clients have the server's pid and host. A reader who found
this pid among the owners would look for a client there, or end the server.
"""

from __future__ import annotations

import os
from dataclasses import replace

from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.wire.values import RequestInfo, SemaphoreInfo, SessionInfo

__all__ = ["request_info", "semaphore_info", "session_info"]


def session_info(session: SessionDescription) -> SessionInfo:
    """Return the description of a session."""
    ours = session.pid == os.getpid()
    return SessionInfo.of(replace(session, pid=None, host=None) if ours else session)


def semaphore_info(semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """Return the description of a semaphore, with its requests as far as they were asked for."""
    return SemaphoreInfo(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        list(map(request_info, semaphore.owners)),
        list(map(request_info, semaphore.waiters)),
        semaphore.waiting,
    )


def request_info(request: RequestDescription) -> RequestInfo:
    """Return the description of a request in a queue."""
    ours = request.pid == os.getpid()
    return RequestInfo.of(replace(request, pid=None, host=None) if ours else request)
