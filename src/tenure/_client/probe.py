"""Read of the store shortly before a timeout, to distinguish an outage from contention.

A waiting request does not show whether the store still works: a stopped store and a busy mutex look
alike. A `Probe` therefore reads the semaphore a moment before the timeout. If that read is
unanswered at the timeout, the store is reported as the reason. Requests of one session that time
out together share the read.
"""

from __future__ import annotations

import asyncio
import logging

from tenure._client.contact import Obstacle
from tenure._client.request import Request
from tenure._client.request_states import WAITING
from tenure._client.session_core import SessionCore, session_of
from tenure.errors import TenureError

_log = logging.getLogger("tenure")

LONGEST_LEAD, SHORTEST_LEAD = 1.0, 0.2
"""Seconds from the probe to the timeout. If less is left, no probe is sent."""


class Probe:
    """Probe of the store for one waiting request.

    Args:
        request: the request.
        timeout: seconds from now to the timeout.
    """

    __slots__ = ("_reading", "_request", "_sent_at", "_timer")

    def __init__(self, request: Request, timeout: float) -> None:
        self._request = request
        self._sent_at = 0.0
        self._reading: asyncio.Task[bool] | None = None
        lead = min(timeout / 2, LONGEST_LEAD)
        self._timer = (
            None
            if lead < SHORTEST_LEAD
            else request.session.loop.call_later(timeout - lead, self._read_soon)
        )

    def obstacle(self) -> Obstacle | None:
        """Return the reason of the timeout if it is not contention."""
        request, reading = self._request, self._reading
        contact = request.session.contact
        if reading is None or (reading.done() and not reading.cancelled() and reading.result()):
            return contact.obstacle(request.name)
        return contact.silence(request.name, request.session.now() - self._sent_at)

    def stop(self) -> None:
        """Stop probing. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def _read_soon(self) -> None:
        request = self._request
        session, name = session_of(request), request.name
        if request.state is not WAITING or session.state != "attached":
            return
        self._sent_at = session.now()
        reading = session.probes.get(name)
        if reading is None:
            reading = session.client.tasks.begin(_read(session, name))
            session.probes[name] = reading
            reading.add_done_callback(lambda _: session.probes.pop(name))
        self._reading = reading


async def _read(session: SessionCore, name: str) -> bool:
    """Return true if the store answers, with an error or without."""
    try:
        async with asyncio.timeout(2 * LONGEST_LEAD):
            await session.engine.describe_semaphore(name, owners=False, waiters=False)
    except TenureError:
        return True
    except TimeoutError:
        return False
    except Exception:
        _log.exception("could not read the semaphore: node=%s name=%r", session.node, name)
    return True
