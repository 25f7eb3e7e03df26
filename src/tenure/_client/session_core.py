"""State of one session and its requests, and its interface to the engine.

`tenure.Session` is the public wrapper. The core registers the session's requests. The engine
reports to it (`SessionEvents`), the keeper renews it (`Kept`), and the primitives send their
requests through it.

Waits that last: their log lines, and the detection of a program that waits for itself.

Each session has one `Waits`. While there are waits, it looks at them once a second:

* A wait of a second or more for what this program holds is reported once for each holding request.
  If the program has no other task or thread that could release it, and the store confirms that it
  prevents the grant, a wait without a timeout raises `SelfDeadlock` instead.
* A wait of ten seconds is logged with the holder and the place in the queue, and again at its end.
  A client reads at most `MOST_READINGS` queues a second for that; of others they are unknown.

Whether another task will release a lease cannot be known in general: a lease may be passed on. So a
program is alone only if its event loop has no other task of the program, and the lease is of the
same loop. The loop of
`tenure.blocking` has no tasks of the program; then the program must have no other thread.

A timeout around the call, such as `asyncio.timeout`, does not prevent the error: it would end the
wait, but the error names the line that acquired the lease, which a `TimeoutError` does not. A
release by a callback alone, such as one of `loop.call_later`, is not foreseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from tenure import fork, greenlets
from tenure._client import session_life as states
from tenure._client.client_core import ClientCore, living_clients
from tenure._client.handles import UNKNOWN, CallSite
from tenure._client.loss import OnLoss
from tenure._client.request import HELD, LOST, WAITING, Request, RequestOptions
from tenure._client.session_life import SessionLife
from tenure._client.tasks import ReleaseRetries
from tenure.engines.contract import (
    Answer,
    Attach,
    EngineSession,
    Enqueued,
    Orphan,
    Place,
    Removal,
    Withdrawn,
)
from tenure.errors import InvalidArgument, SessionExpired, TenureError
from tenure.identity import holder_name, semaphore_with_identities
from tenure.model import Recovered, SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.source import SessionAnchor


LOOK = 1.0
"""Seconds between two looks, and length of a wait that is looked at."""

LONG = 10.0
"""Seconds after which a wait is logged with its holder."""

MOST_READINGS = 10

_READ_TIMEOUT = 1.0

_log = logging.getLogger("tenure")

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_SERVICES = (os.path.join(_PACKAGE, "engines", ""), os.path.join(_PACKAGE, "background.py"))
_GRPC_CALLS = "/aio/call.pyx.pxi"
"""End of the path of the file of grpcio whose tasks serve a client's calls, not the program."""
_PRIMITIVES = tuple(os.path.join(_PACKAGE, name, "") for name in ("_client", "blocking"))


class Wait:
    """One wait for a request.

    Attributes:
        request: the request.
        since: when it began, on the client's clock.
        for_ever: whether it has no timeout.
        looked: whether it has been looked at.
        long: whether the line about a long wait has been begun.
        logged: whether that line has been logged.
        suspects: what this program holds that may prevent the grant; the waiting task takes it.
    """

    __slots__ = ("for_ever", "logged", "long", "looked", "request", "since", "suspects")

    def __init__(self, request: Request, since: float, for_ever: bool) -> None:
        self.request = request
        self.since = since
        self.for_ever = for_ever
        self.looked = self.long = self.logged = False
        self.suspects: Sequence[Request] = ()


class Waits:
    """The waits of one session, on its loop."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._now = session.now
        self._waits: dict[Wait, None] = {}  # in the order of their beginnings
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: Request, *, for_ever: bool) -> Wait:
        """Record that a task begins to wait; `end` must follow."""
        wait = Wait(request, self._now(), for_ever)
        self._waits[wait] = None
        if self._timer is None:
            self._timer = self._session.loop.call_later(LOOK, self._look)
        return wait

    def end(self, wait: Wait) -> None:
        """Record that the task no longer waits."""
        del self._waits[wait]
        if wait.logged:
            request = wait.request
            _log.info(
                "wait ended: node=%s name=%r state=%s seconds=%.1f",
                request.node,
                request.name,
                request.state.value,
                self._now() - wait.since,
            )

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
        place = None if described is None else place_of(request, described)
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


def _held_by_program(session: SessionCore, names: set[str]) -> dict[str, list[Request]]:
    """Return the requests of those names, on the node of the session, that this program holds."""
    held: dict[str, list[Request]] = {}
    for request in _requests_beside(session):
        if request.state is HELD and request.name in names:
            held.setdefault(request.name, []).append(request)
    return held


def _requests_beside(session: SessionCore) -> Iterator[Request]:
    for client in living_clients():
        if client.url == session.client.url:
            for other in list(client.sessions):
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


def place_of(request: Request, described: SemaphoreDescription) -> int | None:
    """Return the place of a request in its queue.

    Returns:
        1 for the next to be granted, and so on; 0 for a granted request, of which the notification
        may not have arrived yet; ``None`` if it has left the queue, or the store does not name it.
    """
    order_id = request.order_id
    if order_id is None:
        return None
    if any(owner.order_id == order_id for owner in described.owners):
        return 0
    orders = [waiter.order_id for waiter in described.waiters]
    return orders.index(order_id) + 1 if order_id in orders else None


def _holder(described: SemaphoreDescription | None, session_id: int) -> str:
    if described is None or not described.owners:
        return "unknown"
    owner = described.owners[0]
    return "this session" if owner.session_id == session_id else repr(holder_name(owner))


_LEFT = Withdrawn.LEFT


class SessionCore(SessionLife):
    """State of one session, with its requests.

    Attributes:
        anchor: refers weakly to what keeps the session for the program (`source`).
        how: the options of its attaching.
        on_loss: the default policy of its leases.
        requests: the requests that may be in a queue, by id.
        recovered: the unclaimed requests of a resumed session, by id.
        waits: the tasks that wait for a grant.
        release_retries: the withdrawals that are sent again.
        watchers: the callbacks of watches, in order; called at the end.
        readings, probes: reads of a semaphore's queue that several tasks share.
        debug: whether its loop is in debug mode, and call sites include the lines around them.
        creations: the pending creations of elections, by name, that several tasks share.
    """

    __slots__ = (  # too many attributes for an efficient instance dictionary
        "_last_request_id",
        "anchor",
        "creations",
        "debug",
        "how",
        "on_loss",
        "probes",
        "readings",
        "recovered",
        "release_retries",
        "requests",
        "waits",
        "watchers",
    )

    anchor: Callable[[], SessionAnchor | None]

    def __init__(self, client: ClientCore, how: Attach, on_loss: OnLoss, max_stall: float) -> None:
        super().__init__(client, how, max_stall)
        self.how = how
        self.on_loss = on_loss
        self.requests: dict[int, Request] = {}
        self.recovered: dict[int, Recovered] = {}
        self.release_retries = ReleaseRetries(self._withdraw_again, client.tasks.complete)
        self.waits = Waits(self)
        self.watchers: dict[Callable[[], None], None] = {}
        self.readings: dict[str, asyncio.Task[str]] = {}
        self.probes: dict[str, asyncio.Task[bool]] = {}
        self.creations: dict[str, asyncio.Task[None]] = {}
        self.debug = self.loop.get_debug()
        self._last_request_id = 0

    # Requests

    def request(self, options: RequestOptions[object], site: CallSite | None = None) -> Request:
        """Create a request and register it, before anything is sent.

        Args:
            options: its options.
            site: the program's call.
        """
        if self.why is not None:  # since it was obtained: the end would not reach the request
            raise self.error()
        if options.stop_time:
            self._check_stop_time(options)
        self._last_request_id = request_id = self._last_request_id + 1
        self.requests[request_id] = request = Request(self, request_id, options, site)
        return request

    def held_requests(self) -> list[Request]:
        """Return the requests that may be held. From any thread."""
        return list(self.requests.values())

    def claim(self, options: RequestOptions[object], site: CallSite | None) -> Request | None:
        """Take the first recovered request of that name and kind, if there is one."""
        for found in self.recovered.values():
            if (found.name, found.ephemeral) == (options.name, options.ephemeral):
                break
        else:
            return None
        self._check_stop_time(options)
        del self.recovered[found.request_id]
        self.requests[found.request_id] = request = Request(self, found.request_id, options, site)
        request.count = found.count
        request.sent_at = self.now()
        request.place(Enqueued(Place.GRANTED if found.granted else Place.WAITING, found.order_id))
        return request

    def _check_stop_time(self, options: RequestOptions[object]) -> None:
        if options.stop_time >= self.recovery_window / 2:
            raise InvalidArgument(
                f"a stop time is under half the recovery window ({self.recovery_window:g} s), "
                f"not {options.stop_time:g} s: choose a longer window",
                node=self.node,
                name=options.name,
            )

    def add_stop_time(self, request: Request) -> None:
        """Move the deadline forward by the lease's stop time, and renew more often."""
        self.proof.add_stop_time(request.id, request.options.stop_time)
        self.measure()
        self.renew()
        self.client.keeper.reschedule()

    def drop_stop_time(self, request: Request) -> None:
        """Forget the stop time of a lease that has ended. Safe for one that was never held."""
        self.proof.drop_stop_time(request.id)
        self.measure()

    def forget(self, request: Request) -> None:
        """Forget a request that has left its queue."""
        self.requests.pop(request.id, None)
        if request.options.stop_time:
            self.drop_stop_time(request)

    def withdraw(self, request: Request) -> asyncio.Future[Withdrawn] | None:
        """Take a request out of its queue: withdraw a waiter, or release an owner.

        Returns:
            the answer to wait for, or ``None`` when there is nothing to wait for.

        Raises:
            EngineError: the store failed. The withdrawal is sent again until the session ends, also
                when the answer is an error.
        """
        if fork.generation != self._born:
            self.check_process()
        if request.options.stop_time:
            self.drop_stop_time(request)
        if self.why is not None:
            return None  # the end releases everything
        try:
            answer = self.engine.withdraw(request.id)
        except SessionExpired as error:
            request.withdrawal_failed(error)
            return None
        except Exception:
            self.retry_withdrawal(request)
            raise
        if answer is _LEFT:
            self.requests.pop(request.id, None)
            return None
        if isinstance(answer, Withdrawn):
            request.left(answer)
            return None
        request.await_withdrawal(answer)
        return answer

    def withdraw_dropped(self, request: Request) -> None:
        """Withdraw a request whose handle the program has dropped.

        Not if the session was dropped with it: it ends in one step, or is detached.
        """
        if self.anchor() is not None:
            # After an error the release is sent again.
            with contextlib.suppress(Exception):
                request.withdraw()

    def end_dropped(self) -> None:
        """End the session in the background: the program has dropped it."""
        self.close_soon(detach=self.how.liveness == "window")

    def retry_withdrawal(self, request: Request) -> None:
        """Send a withdrawal again until the store confirms it, or the session ends."""
        self.requests.pop(request.id, None)  # no task waits for it any longer
        self.release_retries.add(request)

    def _withdraw_again(self, request_id: int) -> Answer[Withdrawn]:
        return self.engine.withdraw(request_id)

    # Reports of the engine (`SessionEvents`); `proven` and `ended` are in the base class

    def start(self, engine: EngineSession) -> None:
        """Start with the session that the engine has attached."""
        self.engine = engine
        # The ids of two attachments never overlap.
        self._last_request_id = (engine.attach_number - 1) << 32
        self._started = True
        if self.step(states.ATTACHED):
            self.register()
            self.emit("SessionAttached")
        else:
            self.finish_end()

    @property
    def is_registered(self) -> bool:
        """True if the reaper ends the session after the death of the program."""
        there = self.client.registrations is not None and self.how.liveness == "process"
        return there and self.engine.credential is not None

    def register(self) -> None:
        """Register the session with the reaper, unless it survives its program."""
        registrations, credential = self.client.registrations, self.engine.credential
        if registrations is not None and credential is not None and self.how.liveness == "process":
            orphan = Orphan(self.node, self.id, self.recovery_window, credential)
            registrations.put(orphan, self.engine.last_words)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Register the requests that the session had in queues when it was taken over."""
        self.recovered = {found.request_id: found for found in requests}

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Process the grant of a waiting request."""
        request = self.requests.get(request_id)
        if request is not None:
            request.grant(order_id)
        elif request_id in self.recovered:
            self.recovered[request_id] = replace(self.recovered[request_id], granted=True)

    def removed(self, request_id: int, why: Removal) -> None:
        """Process the removal of a request that this session did not withdraw."""
        request = self.requests.get(request_id)
        if request is not None:
            request.remove(why)
        self.recovered.pop(request_id, None)

    def detached(self, cause: BaseException | None = None) -> None:
        """Record that contact is lost."""
        if self.step(states.CONTACT_LOST):
            self.contact.detached(self, cause)
            self.emit("SessionDetached")

    def attached(self) -> None:
        """Record that contact is re-established, and renew the session."""
        restored = self.step(states.CONTACT_RESTORED)
        if restored:
            self.contact.attached(self)
        if self.phase is states.SessionPhase.ATTACHED:
            self.register()
        if restored:
            self.emit("SessionAttached")
            self.renew()

    # End of the requests

    def lose_requests(self) -> None:
        """Mark every held lease as lost. From any thread."""
        for request in list(self.requests.values()):
            self.lose(request)

    def lose(self, request: Request) -> None:
        """Mark a held lease as lost: the session has ended. From any thread."""
        assert self.why is not None
        request.lose(str(self.why), self.why)

    def end_requests(self, closing: asyncio.Task[object] | None) -> None:
        """Wake everything that waits for a request, and forget the requests."""
        for request in list(self.requests.values()):
            request.fail(None)
            self.lose(request)  # if it was granted since the end began
            if request.state is LOST:
                request.announce_loss(but_not=closing)
            else:
                request.wake()  # tasks that wait for the withdrawal
        self.requests.clear()
        self.recovered.clear()

    def stop_watches(self) -> None:
        """Wake the watches, and stop the release retries."""
        self.release_retries.stop()
        self.waits.stop()
        for changed in list(self.watchers):
            changed()


def session_of(request: Request) -> SessionCore:
    """Return the session that sent a request."""
    return cast(SessionCore, request.session)
