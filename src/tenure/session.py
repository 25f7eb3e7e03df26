"""A session: what a program holds things through, and what proves that it is alive.

States, as `Session.state` tells them::

    connecting --> attached <--> detached (the contact is broken; the engine tries again)
                      |             |
                      +-------------+--> expired   the store's word, or the deadline has passed
                      +-------------+--> closed    close(), or the end of the block
                      `----------------> detached  detach(): for good, from this object's view

Rules:

* Deadline = proof + window - margin, where the proof counts from when the answered renewal was
  *sent*, and margin = max(5% of the window, 100 ms, the longest stop time of a lease).
* The end is final and happens once, whoever notices first: the keeper's thread, its timer, a
  call that reads the clock, or the store. `_begin_end` may run in any thread; it makes every
  held lease lost and carries out their policies. `_finish_end` runs on the loop; it cancels
  bodies, wakes waiters, and has the engine's session closed.
* The session's loop owns everything else here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from tenure import fork
from tenure.clock import Clock
from tenure.election import Election
from tenure.engines.contract import EngineSession, Removal
from tenure.errors import (
    EngineError,
    InvalidArgument,
    LeaseLost,
    Misuse,
    SessionClosed,
    SessionExpired,
    TenureError,
)
from tenure.events import (
    Event,
    Renewed,
    SessionAttached,
    SessionDetached,
)
from tenure.events import SessionClosed as SessionClosedEvent
from tenure.events import SessionExpired as SessionExpiredEvent
from tenure.lease import LOSS_EXIT_STATUS, Lease, OnLoss, lost_error
from tenure.mutex import Mutex
from tenure.scope import Scope
from tenure.semaphore import Semaphore

if TYPE_CHECKING:
    from tenure.client import Client
    from tenure.request import Wanted

__all__ = ["Session", "SessionState"]

SessionState = Literal["connecting", "attached", "detached", "expired", "closed"]

_log = logging.getLogger("tenure")


class Session:
    """A program's session on a node. `Client.session` makes one.

    ``async with client.session(...) as session`` closes it at the end of the block, and cancels
    the body when it expires; the block then raises `SessionExpired`. A session that was awaited
    is closed with `close`.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
    """

    def __init__(
        self,
        client: Client,
        node: str,
        recovery_window: float,
        on_loss: OnLoss,
        max_stall: float,
    ) -> None:
        self.node = node
        self.recovery_window = recovery_window
        self.max_stall = max_stall
        self._client = client
        self._clock: Clock = client.clock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_loss = on_loss
        self._engine: EngineSession  # set by _attached, before anyone else sees this object
        self._state: SessionState = "connecting"
        self._proof = 0.0
        self._asked = 0.0
        self._margin = self._base_margin = max(0.05 * recovery_window, 0.1)
        self._stop_times: dict[Lease, float] = {}
        self._ended: SessionExpired | SessionClosed | None = None
        self._end_lock = threading.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._leases: dict[int, Lease] = {}
        self._watchers: set[Callable[[], None]] = set()
        self._last_hold = 0
        self._scope: Scope | None = None

    def __repr__(self) -> str:
        return f"<Session {self.id if self._state != 'connecting' else ''} {self.node} {self.state}>"

    # What a program asks

    @property
    def id(self) -> int:
        """The session's id: positive, never reused in a store."""
        return self._engine.id

    @property
    def state(self) -> SessionState:
        """One of ``connecting, attached, detached, expired, closed``. Reads the clock."""
        if self._ended is None and self._state != "connecting":
            self._proven()
        return self._state

    @property
    def deadline(self) -> float:
        """Until when the session is proven, on the client's clock, in seconds."""
        return self._proof + self.recovery_window - self._margin

    # What a program does

    def mutex(self, name: str) -> Mutex:
        """The mutex of that name on the session's node."""
        return Mutex(self, name)

    def semaphore(self, name: str) -> Semaphore:
        """The semaphore of that name on the session's node."""
        return Semaphore(self, name)

    def election(self, name: str) -> Election:
        """The election of that name on the session's node."""
        return Election(self, name)

    async def close(self) -> None:
        """End the session: everything held through it is released, in one step.

        Safe to call twice. Leases that other tasks are inside are lost, and their bodies
        cancelled; a block that the calling task itself is inside raises at its end.

        Raises:
            EngineError: the store failed; it will end the session when its window is over.
        """
        fork.check(self._client._born, "this session")
        self._begin_end(SessionClosed(f"the session on {self.node} was closed", node=self.node))
        self._finish_end()
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def detach(self) -> None:
        """Leave without ending the session: it keeps its places until its window is over.

        From this object's view it is over: leases count as lost, because nobody proves them.
        """
        fork.check(self._client._born, "this session")
        self._begin_end(SessionClosed(f"the session on {self.node} was detached", node=self.node))
        self._finish_end(detach=True)
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def __aenter__(self) -> Session:
        if self._scope is not None:
            raise Misuse(
                f"the session on {self.node} has been entered already; a session is entered once",
                node=self.node,
            )
        self._alive()
        self._scope = Scope(self)
        self._scope.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        ours = self._scope.exit(error)
        if self.state == "expired":
            if error is None or ours:
                raise self._end_error()
            return
        try:
            await self.close()
        except EngineError as failure:
            if error is None:
                raise
            error.add_note(f"and closing the session on {self.node} failed: {failure}")

    # For the primitives

    def _alive(self) -> Session:
        """This session, if it can be used.

        Raises:
            SessionExpired, SessionClosed: it is over.
            Misuse: it is used in a forked child, or on another loop's thread.
        """
        if not self._proven():
            raise self._end_error()
        if asyncio.get_running_loop() is not self._loop:
            raise Misuse(
                f"the session on {self.node} belongs to another event loop; call "
                "tenure.connect() in this one",
                node=self.node,
            )
        return self

    async def _obtain(self) -> Session:
        return self._alive()

    def _proven(self) -> bool:
        """Whether the session is alive by the clock; if its deadline has passed, it ends here."""
        if fork._generation != self._client._born:
            fork.check(self._client._born, "this session")
        if self._ended is None:
            if self._clock.now() < self._proof + self.recovery_window - self._margin:
                return True
            self.lapse()
        return False

    def _end_error(self) -> SessionExpired | SessionClosed:
        """A copy of why the session is over, to raise."""
        ended = self._ended
        assert ended is not None
        copy = type(ended)(str(ended), node=ended.node)
        copy.__cause__ = ended
        return copy

    def _request(self, wanted: Wanted) -> Lease:
        """A new request of this session, numbered before anything is sent."""
        self._last_hold = hold = self._last_hold + 1
        lease = wanted.handle(self, hold, wanted, self._clock.now())
        self._leases[hold] = lease
        if wanted.stop_time > self._base_margin:
            self._set_stop_time(lease, wanted.stop_time)
        return lease

    def _set_stop_time(self, lease: Lease, stop_time: float) -> None:
        if stop_time >= self.recovery_window / 2:
            del self._leases[lease._hold]
            raise InvalidArgument(
                f"a stop time is under half the recovery window ({self.recovery_window:g} s), "
                f"not {stop_time:g} s: ask for a longer window",
                node=self.node,
                name=lease.name,
            )
        self._stop_times[lease] = stop_time
        self._margin = max(self._base_margin, *self._stop_times.values())
        self.renew()  # the deadline has come nearer: prove anew
        self._client._keeper.reschedule()

    def _forget(self, lease: Lease) -> None:
        """The request is not in any queue any more."""
        self._leases.pop(lease._hold, None)
        if self._stop_times and self._stop_times.pop(lease, None) is not None:
            self._margin = max([self._base_margin, *self._stop_times.values()])

    def _withdraw(self, lease: Lease) -> asyncio.Future[None] | None:
        """Take a request out of its queue, as often as it takes.

        Returns:
            what to wait for (shielded: its failure matters to the session), or ``None`` when
            it is done.

        Raises:
            EngineError: the store failed; it is tried again until the session ends.
        """
        self._forget(lease)
        if self._ended is not None:
            return None  # its end releases everything
        try:
            answer = self._engine.withdraw(lease._hold)
        except SessionExpired:
            return None  # likewise; the engine tells the session itself
        except EngineError:
            self._client._spawn(self._withdraw_again(lease._hold))
            raise
        if answer is None:
            return None
        answer.add_done_callback(partial(self._withdrawn, lease._hold))
        return answer

    def _withdrawn(self, hold: int, answer: asyncio.Future[None]) -> None:
        if not answer.cancelled() and isinstance(answer.exception(), EngineError):
            self._client._spawn(self._withdraw_again(hold))

    async def _withdraw_again(self, hold: int) -> None:
        """See a withdrawal through that the store has failed."""
        pause = 0.05
        while True:
            await asyncio.sleep(pause)
            if self._ended is not None:
                return
            try:
                answer = self._engine.withdraw(hold)
                if answer is not None:
                    await answer
            except SessionExpired:
                return
            except EngineError as error:
                _log.warning("a release on %s failed, and is tried again: %s", self.node, error)
                pause = min(2 * pause, 5.0)
            else:
                return

    def _tell(self, event: Event) -> None:
        for stream in self._client._streams:
            stream._put(event)

    # What the engine tells (`SessionEvents`); on the loop, except `proven`

    def proven(self, at: float) -> None:
        """The store has proven that the session lived at `at`. From any thread."""
        if at > self._proof:
            self._proof = at
            if self._client._streams and threading.get_ident() == self._thread:
                self._tell(Renewed(self.node, self.id, self.deadline))

    def granted(self, hold: int, order_id: int | None) -> None:
        """A waiting request is an owner now."""
        lease = self._leases.get(hold)
        if lease is not None:
            lease._grant(order_id)

    def removed(self, hold: int, why: Removal) -> None:
        """A request has left its queue by somebody else's doing."""
        lease = self._leases.get(hold)
        if lease is not None:
            self._forget(lease)
            lease._remove(why)

    def detached(self) -> None:
        """The contact is broken."""
        if self._ended is None:
            self._state = "detached"
            self._tell(SessionDetached(self.node, self.id))

    def attached(self) -> None:
        """The contact is there."""
        if self._ended is None:
            self._state = "attached"
            self._tell(SessionAttached(self.node, self.id))

    def ended(self, error: SessionExpired) -> None:
        """The session is over by the store's word."""
        self._begin_end(error)
        self._finish_end()

    # What the keeper asks (`Kept`); from any thread

    @property
    def renew_interval(self) -> float:
        """Seconds between renewals, at the most."""
        return (self.recovery_window - self._margin) / 3

    @property
    def renew_at(self) -> float:
        """When to renew next: before an unanswered renewal is repeated, it gets some time."""
        interval = self.renew_interval
        return max(self._proof + interval, self._asked + interval / 4)

    def renew(self) -> None:
        """Ask the store for proof."""
        self._asked = self._clock.now()
        self._engine.renew()

    def lapse(self) -> None:
        """The deadline has passed: end the session."""
        if self._ended is not None:
            return
        self._begin_end(
            SessionExpired(
                f"the session on {self.node} could not be proven alive within its recovery "
                f"window of {self.recovery_window:g} s (the store was out of reach, or this "
                "program was stopped or stalled)",
                node=self.node,
            )
        )
        if threading.get_ident() == self._thread and self._loop.is_running():
            self._finish_end()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._finish_end)

    # The beginning and the end

    def _start(self, engine: EngineSession) -> None:
        """The engine has attached the session."""
        self._engine = engine
        self.attached()

    def _begin_end(self, why: SessionExpired | SessionClosed) -> None:
        """Fix why the session is over, and make its leases lost. From any thread; once."""
        with self._end_lock:
            if self._ended is not None:
                return
            self._ended = why
        for lease in list(self._leases.values()):
            lease._lose(lost_error(lease, str(why), why))

    def _carry_out(self, policy: OnLoss, loss: LeaseLost) -> None:
        """What cancellation cannot stop, stops here. From any thread."""
        if policy == "exit":
            sys.stderr.write(f"tenure: {loss}; this process ends\n")
            sys.stderr.flush()
            os._exit(LOSS_EXIT_STATUS)
        if callable(policy):
            try:
                policy(loss)
            except Exception:
                _log.exception("the on_loss callback for %r failed", loss.name)

    def _finish_end(self, *, detach: bool = False) -> None:
        """Tell everyone concerned, and have the engine's session closed. On the loop; once."""
        if self._ending is not None:
            return
        why = self._ended
        assert why is not None
        expired = isinstance(why, SessionExpired)
        self._state = "expired" if expired else "detached" if detach else "closed"
        self._client._forget_session(self)
        self._ending = self._client._spawn(self._leave(detach))
        if expired:
            self._tell(SessionExpiredEvent(self.node, self.id, str(why)))
        else:
            self._tell(SessionClosedEvent(self.node, self.id))
        # A program that closes its session inside a lease's block knows: it is not cancelled.
        me = None if expired else asyncio.current_task()
        leases, self._leases = list(self._leases.values()), {}
        for lease in leases:
            lease._session_over()
            lease._lose(lost_error(lease, str(why), why))  # granted since the end began
            own = me is not None and lease._scope is not None and lease._scope.task is me
            lease._announce_loss(cancel=not own)
        for wake in list(self._watchers):
            wake()
        if expired and self._scope is not None:
            self._scope.trigger()

    async def _leave(self, detach: bool) -> None:
        try:
            if detach:
                await self._engine.detach()
            else:
                await self._engine.close()
        except TenureError as error:
            if self._state != "expired":
                raise
            _log.warning("an expired session on %s could not be closed: %s", self.node, error)

