"""A question to the store shortly before a timeout, so that silence is not taken for contention.

A waiting request does not show whether the store still works: a stopped store and a busy mutex
look alike. A `Probe` therefore reads the semaphore a moment before the timeout. When that read is
unanswered at the timeout, the store is the reason. Requests of one session that time out together
share the read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tenure._client.request_states import WAITING
from tenure.errors import TenureError

if TYPE_CHECKING:
    from tenure._client.contact import Obstacle
    from tenure._client.request import Request
    from tenure._client.session_core import SessionCore

__all__ = ["Probe"]

_log = logging.getLogger("tenure")

LONGEST_LEAD, SHORTEST_LEAD = 1.0, 0.2
"""Seconds from the probe to the timeout. Where less is left, no probe is sent."""


class Probe:
    """Probe of the store for one waiting request.

    Args:
        request: the request.
        timeout: seconds from now to the timeout.
    """

    __slots__ = ("_asked_at", "_asking", "_request", "_timer")

    def __init__(self, request: Request, timeout: float) -> None:
        self._request = request
        self._asked_at = 0.0
        self._asking: asyncio.Task[bool] | None = None
        lead = min(timeout / 2, LONGEST_LEAD)
        self._timer = (
            None
            if lead < SHORTEST_LEAD
            else request.session.loop.call_later(timeout - lead, self._ask)
        )

    def obstacle(self) -> Obstacle | None:
        """Return the reason of the timeout if it is not contention."""
        request, asking = self._request, self._asking
        contact = request.session.contact
        if asking is None or (asking.done() and not asking.cancelled() and asking.result()):
            return contact.obstacle(request.name)
        return contact.silence(request.name, request.session.now() - self._asked_at)

    def stop(self) -> None:
        """Send no probe any more. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        request = self._request
        session, name = request.session, request.name
        if request.state is not WAITING or session.state != "attached":
            return
        self._asked_at = session.now()
        asking = session.probes.get(name)
        if asking is None:
            asking = session.client.tasks.begin(_read(session, name))
            session.probes[name] = asking
            asking.add_done_callback(lambda _: session.probes.pop(name))
        self._asking = asking


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
