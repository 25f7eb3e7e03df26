"""Waits that last: their log lines, and the detection of a program that waits for itself.

Each session has one `Waits`. While there are waits, it looks at them once a second:

* A wait of a second or more for what this program holds is reported once for each holding request.
  If the program has no other task or thread that could release it, and the store confirms that it
  prevents the grant, a wait without a timeout raises `SelfDeadlock` instead.
* A wait of ten seconds is logged with the holder and the place in the queue, and again at its end.
  A client reads at most `MOST_READINGS` queues a second for that; of others they are unknown.

Whether another task will release a lease cannot be known in general: a lease may be passed on. So a
program is alone only if its event loop has no other task of the program, and the lease is of the
same loop. The loop of `tenure.blocking` has no tasks of the program; then the program must have no
other thread.

A timeout around the call, such as `asyncio.timeout`, does not prevent the error: it would end the
wait, but the error names the line that acquired the lease, which a `TimeoutError` does not. A
release by a callback alone, such as one of `loop.call_later`, is not foreseen.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, cast

from tenure import greenlets
from tenure._client.blocked import Blocked, Wait
from tenure._client.client_core import living_clients
from tenure._client.handles import UNKNOWN
from tenure._client.request import HELD, WAITING, Request
from tenure._client.session_life import SessionLife
from tenure.engines.contract import position_in
from tenure.errors import TenureError
from tenure.identity import holder_name, semaphore_with_identities
from tenure.model import SemaphoreDescription

LOOK = 1.0
"""Seconds between two looks, and length of a wait that is looked at."""

LONG = 10.0
"""Seconds after which a wait is logged with its holder."""

MOST_READINGS = 10
"""Queues that a client reads within `LOOK` to describe long waits."""

_READ_TIMEOUT = 1.0

_log = logging.getLogger("tenure")

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_SERVICES = (os.path.join(_PACKAGE, "engines", ""), os.path.join(_PACKAGE, "background.py"))
_GRPC_CALLS = "/aio/call.pyx.pxi"
"""End of the path of the file of grpcio whose tasks serve a client's calls, not the program."""
_PRIMITIVES = tuple(
    os.path.join(_PACKAGE, name, "") for name in ("_client", "blocking", "telemetry")
)


class Waits:
    """The waits of one session, on its loop.

    Args:
        session: the session.
        blocked: those of tasks inside leases.
    """

    def __init__(self, session: SessionLife[Request], blocked: Blocked) -> None:
        self._session = session
        self._blocked = blocked
        self._now = session.now
        self._waits: dict[Wait, None] = {}  # in the order of their beginnings
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: Request, task: asyncio.Task[object] | None, *, for_ever: bool) -> Wait:
        """Record that a task begins to wait for a request in its queue; `end` must follow."""
        wait = Wait(request, task, self._now(), for_ever)
        self._waits[wait] = None
        if self._timer is None:
            self._timer = self._session.loop.call_later(LOOK, self._look)
        if wait.may_deadlock:
            self._blocked.begin(wait)
        return wait

    def end(self, wait: Wait) -> None:
        """Record that the task no longer waits."""
        del self._waits[wait]
        if wait.may_deadlock:
            self._blocked.end(wait)
        if wait.logged:
            request = wait.request
            _log.info(
                "wait ended: node=%s name=%r state=%s seconds=%.1f",
                request.node,
                request.name,
                request.state.value,
                self._now() - wait.since,
            )

    def may_read_queue(self) -> bool:
        """Return true if the client may read one more whole queue in this second."""
        client = self._session.client
        capable = client.capabilities.owners and client.capabilities.waiter_order
        if not capable or client.whole_readings >= MOST_READINGS:
            return False
        client.whole_readings += 1
        self._session.loop.call_later(LOOK, client.end_whole_reading)
        return True

    def stop(self) -> None:
        """Look no more: the session has ended, and its waits end."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = self._now()
        new: list[Wait] = []
        for wait in self._waits:
            # The timer of the loop and the client's clock may differ a little.
            if now - wait.since < LOOK - 0.01:
                break
            if not wait.looked:
                wait.looked = True
                new.append(wait)
            if now - wait.since >= LONG - 0.01 and not wait.long:
                wait.long = True
                self._session.client.tasks.begin(self._log_long(wait))
        if new:
            self._look_for_self(new)
        if self._waits:
            self._timer = self._session.loop.call_later(LOOK, self._look)

    # Leases of this program

    def _look_for_self(self, waits: list[Wait]) -> None:
        held = _held_by_program(self._session, {wait.request.name for wait in waits})
        alone: bool | None = None
        for wait in waits:
            request = wait.request
            owners = [owner for owner in held.get(request.name, ()) if owner is not request]
            if not owners or request.state is not WAITING:
                continue
            if alone is None:
                alone = _is_alone(self._session.loop)
            # A lease of another loop is released by the thread of that loop.
            here = all(owner.session.loop is self._session.loop for owner in owners)
            if alone and here and wait.for_ever:
                wait.suspects = owners
                request.wake()
            else:
                _report(owners)

    # Long waits

    async def _log_long(self, wait: Wait) -> None:
        request = wait.request
        reading = self._reading(request.name)
        described = None if reading is None else await asyncio.shield(reading)
        if wait not in self._waits or request.state is not WAITING:
            return
        wait.logged = True
        place = None
        if described is not None and request.order_id is not None:
            place = position_in(described, request.order_id)
        _log.info(
            "still waiting: node=%s name=%r position=%s holder=%s seconds=%.0f",
            request.node,
            request.name,
            "unknown" if place is None else place,
            _holder(described, self._session.id),
            self._now() - wait.since,
        )

    def _reading(self, name: str) -> asyncio.Task[SemaphoreDescription | None] | None:
        """Begin or share a description, for a second: there may be thousands of waiters."""
        client, key = self._session.client, (self._session.node, name)
        reading = client.readings.get(key)
        if reading is None and len(client.readings) < MOST_READINGS:
            reading = client.readings[key] = client.tasks.begin(self._describe(name))
            self._session.loop.call_later(LOOK, client.readings.pop, key)
        return reading

    async def _describe(self, name: str) -> SemaphoreDescription | None:
        session = self._session
        if session.state != "attached" or not session.client.capabilities.owners:
            return None
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                return semaphore_with_identities(
                    await session.engine.describe_semaphore(name, owners=True, waiters=True)
                )
        except (TenureError, TimeoutError):
            return None


def _held_by_program(session: SessionLife[Request], names: set[str]) -> dict[str, list[Request]]:
    """Return the requests of those names, on the node of the session, that this program holds."""
    held: dict[str, list[Request]] = {}
    for request in _requests_beside(session):
        if request.state is HELD and request.name in names:
            held.setdefault(request.name, []).append(request)
    return held


def _requests_beside(session: SessionLife[Request]) -> Iterator[Request]:
    for client in living_clients():
        if client.url == session.client.url:
            for other in cast("list[SessionLife[Request]]", list(client.sessions)):
                if other.node == session.node:
                    yield from other.held_requests()


def _report(owners: Iterable[Request]) -> None:
    """Log that this program waits for its own leases, once for each."""
    for owner in owners:
        if owner.contended:
            continue
        owner.contended = True
        task = None if owner.scope is None else owner.scope.task
        _log.info(
            "waiting for a lease that this program holds: node=%s name=%r task=%s acquired=%s",
            owner.node,
            owner.name,
            "none" if task is None else task.get_name(),
            owner.site or UNKNOWN,
        )


def _is_alone(loop: asyncio.AbstractEventLoop) -> bool:
    """Return true if the program has no task or thread but the one that waits."""
    if greenlets.are_used():
        return False  # any of them may release it
    tasks = [task for task in asyncio.all_tasks(loop) if not _is_internal(task)]
    if tasks:
        return len(tasks) == 1
    threads = [each for each in threading.enumerate() if not each.name.startswith("tenure")]
    return len(threads) == 1


def _is_internal(task: asyncio.Task[Any]) -> bool:
    """Return true for a task of tenure, which releases nothing. In doubt it is the program's."""
    code: CodeType | None = getattr(task.get_coro(), "cr_code", None)
    if code is None:
        return False
    if code.co_filename.startswith(_SERVICES) or code.co_filename.endswith(_GRPC_CALLS):
        return True
    # A public coroutine function, such as `Client.run`, calls the program.
    return code.co_filename.startswith(_PRIMITIVES) and code.co_name.startswith("_")


def _holder(described: SemaphoreDescription | None, session_id: int) -> str:
    if described is None or not described.owners:
        return "unknown"
    owner = described.owners[0]
    return "this session" if owner.session_id == session_id else repr(holder_name(owner))
