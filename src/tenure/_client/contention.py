"""Name of the holder, for the message of an `AcquireTimeout`.

After the timeout the client reads the queue once, and waits at most 0.25 s for the answer. Tasks of
one session that time out together share the read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tenure._client.handles import UNKNOWN
from tenure._client.watch import described_now
from tenure.core.rules import EXACT
from tenure.errors import SemaphoreNotFound, TenureError
from tenure.identity import holder_name
from tenure.model import RequestDescription, SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.session_core import SessionCore

_log = logging.getLogger("tenure")

_TIMEOUT = 0.25
_ADVICE = "'tenure describe' shows its holder and its waiters"


async def contention(session: SessionCore | None, name: str) -> str:
    """Return a description of a semaphore's holders, or advice on how to find them."""
    if session is None or session.state != "attached":
        return _ADVICE
    if not session.client.capabilities.owners:
        return "this store does not list holders"
    reading = session.readings.get(name)
    if reading is None:
        reading = session.client.tasks.begin(_read(session, name))
        session.readings[name] = reading
        reading.add_done_callback(lambda _: session.readings.pop(name))
    await asyncio.wait([reading], timeout=_TIMEOUT)
    return _ADVICE if not reading.done() or reading.cancelled() else reading.result()


async def _read(session: SessionCore, name: str) -> str:
    try:
        async with asyncio.timeout(2 * _TIMEOUT):
            described = await described_now(session, name, ephemeral=False, owners=True)
    except SemaphoreNotFound:
        return "it is free now"
    except (TenureError, TimeoutError):
        return _ADVICE
    except Exception:
        _log.exception("could not read the holder: node=%s name=%r", session.node, name)
        return _ADVICE
    return _sentence(session, described)


def _sentence(session: SessionCore, described: SemaphoreDescription) -> str:
    """Return a text such as ``held by backup.py, pid 4242 on db-1, for 3 s; 2 wait``."""
    waiting = described.waiting or 0
    behind = f"; {waiting} wait{'s' if waiting == 1 else ''}" if waiting else ""
    if not described.owners:
        return f"it is free now{behind}"
    owner, *others = described.owners
    holder = _this_session(session, owner) if owner.session_id == session.id else holder_name(owner)
    since = "" if owner.since is None else f", for {_duration(owner.since)}"
    more = f", and {len(others)} more" if others else ""
    level = f" ({described.held} of {described.limit})" if 1 < described.limit <= EXACT else ""
    return f"held by {holder}{since}{more}{level}{behind}"


def _this_session(session: SessionCore, owner: RequestDescription) -> str:
    requests = session.held_requests()
    sites = [each.site or UNKNOWN for each in requests if each.order_id == owner.order_id]
    return f"this session, acquired at {sites[0]}" if sites else "this session"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
