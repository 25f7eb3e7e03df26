"""State of one session and its requests, and its interface to the engine.

`tenure.Session` is the public wrapper. The core registers the session's requests. The engine
reports to it (`SessionEvents`), the keeper renews it (`Kept`), and the primitives send their
requests through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from tenure import fork
from tenure._client import session_life as states
from tenure._client.blocked import Blocked, OnDeadlock, Publication
from tenure._client.client_core import ClientCore
from tenure._client.handles import CallSite
from tenure._client.loss import OnLoss
from tenure._client.request import LOST, Request, RequestOptions
from tenure._client.session_life import SessionLife
from tenure._client.tasks import ReleaseRetries
from tenure._client.waits import Waits
from tenure.core.deadlocks import WAITS
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
from tenure.errors import InvalidArgument, SessionExpired
from tenure.model import Recovered, RequestDescription, SemaphoreDescription

_LEFT = Withdrawn.LEFT


class ProbeAnswer(NamedTuple):
    """Answer to a probe.

    Attributes:
        there: whether the store has answered, with an error or without.
        queue: the semaphore with its whole queue, if that was read.
    """

    there: bool
    queue: SemaphoreDescription | None = None


class Contention(NamedTuple):
    """Holders of a semaphore.

    Attributes:
        text: a description of them, or advice on how to find them.
        holders: the requests; empty if unknown.
    """

    text: str
    holders: Sequence[RequestDescription] = ()


class SessionCore(SessionLife[Request]):
    """State of one session, with its requests.

    Attributes:
        how: the options of its attaching.
        recovered: the unclaimed requests of a resumed session, by id.
        waits: the tasks that wait for a grant.
        blocked: those of them that are inside leases.
        release_retries: the withdrawals that are sent again.
        watchers: the callbacks of watches, in order; called at the end.
        readings, probes: reads of a semaphore's queue that several tasks share.
        creations: the pending creations of elections, by name, that several tasks share.
    """

    __slots__ = (  # too many attributes for an efficient instance dictionary
        "_last_request_id",
        "_stale",
        "blocked",
        "creations",
        "how",
        "probes",
        "readings",
        "recovered",
        "release_retries",
        "waits",
        "watchers",
    )

    def __init__(
        self,
        client: ClientCore,
        how: Attach,
        on_loss: OnLoss,
        max_stall: float,
        on_deadlock: OnDeadlock = "wait",
    ) -> None:
        super().__init__(client, how, on_loss, max_stall)
        self.how = how
        self.recovered: dict[int, Recovered] = {}
        self.release_retries = ReleaseRetries(self._withdraw_again, client.tasks.complete)
        self.blocked = Blocked(
            self, self.new_request_id, self.release_retries.add, raises=on_deadlock == "raise"
        )
        self.waits = Waits(self, self.blocked)
        self.watchers: dict[Callable[[], None], None] = {}
        self.readings: dict[str, asyncio.Task[Contention]] = {}
        self.probes: dict[str, asyncio.Task[ProbeAnswer]] = {}
        self.creations: dict[str, asyncio.Task[None]] = {}
        self._last_request_id = 0
        self._stale: Sequence[Publication] = ()  # of the program that had the session before

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
        request_id = self.new_request_id()
        self.requests[request_id] = request = Request(self, request_id, options, site)
        return request

    def new_request_id(self) -> int:
        """Return the next number of a request."""
        self._last_request_id += 1
        return self._last_request_id

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
        self.emit("Requested", request.name, request=request)
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
            request.abandon()

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
            for publication in self._stale:
                publication.withdraw()
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
        self.recovered = {found.request_id: found for found in requests if found.name != WAITS}
        self._stale = [
            Publication(self, found.request_id, self.release_retries.add)
            for found in requests
            if found.name == WAITS
        ]

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
        self.blocked.stop()
        for changed in list(self.watchers):
            changed()


def session_of(request: Request) -> SessionCore:
    """Return the session that sent a request."""
    return cast(SessionCore, request.session)
