"""What the store tells, as clients are told it: this process is nobody's.

To the store the sessions of a server's clients are the server's own; whoever read its pid among the
owners would look for a client there, or end the server.
"""

from __future__ import annotations

import os
from dataclasses import replace

from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.wire.values import RequestInfo, SemaphoreInfo, SessionInfo

__all__ = ["request_info", "semaphore_info", "session_info"]


def session_info(session: SessionDescription) -> SessionInfo:
    """A session."""
    ours = session.pid == os.getpid()
    return SessionInfo.of(replace(session, pid=None, host=None) if ours else session)


def semaphore_info(semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """A semaphore, with its requests as far as they were asked for."""
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
    """A request in a queue."""
    ours = request.pid == os.getpid()
    return RequestInfo.of(replace(request, pid=None, host=None) if ours else request)
