"""State and services of one client, and the renewal of its sessions.

States::

    new --opened()--> open --aclose()--> closed

* The first caller opens the engine; concurrent callers share the result. After a failure the next
  caller tries again.
* The core belongs to one process, and to the event loop on which it was first opened.
* Closing ends every session, waits until the store has been informed, and closes the engine last.

**The keeper** renews the sessions, even while the event loop is busy. A keeper belongs to one
client. It renews each session when due, from a timer on the client's event loop and, if that is
late, from a thread. Both are needed. A loop that is stuck in one long call runs no timer, so the
thread renews. A loop that is busy in slices of a millisecond can keep the thread waiting for the
GIL for seconds, but still runs its timer.

Rules:

* The thread acts only when a renewal is overdue by a quarter of its interval, or when a deadline
  has passed. It never waits for the loop.
* It stops renewing a session when the loop has not iterated for the session's `max_stall`, or is
  closed: a hung program must not hold its leases for ever.
* A session whose deadline has passed is not renewed; its `lapse` is called.
* Both read the clock at least once a second, to detect that the machine was suspended.
* A thread without sessions ends after a few seconds; the next session starts another.

On a virtual clock there is no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from tenure import fork
from tenure._client.contact import ANSWER_TIMEOUT, Contact, running_loop, shortened
from tenure._client.listeners import EventKind, Listeners
from tenure._client.tasks import Tasks, failure_of
from tenure.background import BackgroundThread, BackgroundTimer, Ending, Failures
from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import Misuse, SessionClosed, TenureError
from tenure.greenlets import new_event
from tenure.identity import ANONYMOUS, Identity, this_program
from tenure.model import Capabilities, SemaphoreDescription
from tenure.reaper.program import Registrations

TICK = 1.0
"""Longest time between two readings of the clock, in seconds."""

SHORTEST = 0.01
"""Shortest time between two readings of the clock, in seconds."""

IDLE = 10.0
"""Seconds after which a thread without sessions ends."""

_log = logging.getLogger("tenure")


class Kept(Protocol):
    """A session, as seen by its keeper. All of this may be used from any thread."""

    @property
    def renew_at(self) -> float: ...

    @property
    def renew_interval(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def max_stall(self) -> float: ...

    def renew(self) -> None: ...

    def lapse(self) -> None: ...


class Keeper:
    """Renews the sessions of one client, on `loop` and from a thread.

    Args:
        stalled: called on the loop after a stall during which the thread renewed, with the stall's
            length in seconds.
    """

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, stalled: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._stalled = stalled
        self._sessions: dict[Kept, None] = {}
        self._last_iteration = clock.now()
        self._failures = Failures("renewing sessions", _log)
        self._timer = BackgroundTimer(loop, clock.now, self._tick, self._failures)
        self._wake = 0.0  # when it fires
        self._thread: BackgroundThread | None = None
        self._starting = threading.Lock()
        self._woken = new_event()
        self._thread_ended = asyncio.Event()
        self._closing = False
        self._renewed_in_stall = False

    def add(self, session: Kept) -> None:
        """Keep a session alive from now on. On the loop."""
        with self._starting:
            self._sessions[session] = None
            self._start_thread()
        self._woken.set()
        if not self._timer.armed or min(session.renew_at, session.deadline) < self._wake:
            self._timer.run()

    def _start_thread(self) -> None:
        """Start the thread unless it runs; if that fails, the next iteration tries again."""
        lives = self._thread is not None and self._thread.alive
        if not lives and not self._clock.virtual:
            with self._failures.contained():
                over = asyncio.Event()  # its own event: the end of another thread does not set it
                thread = BackgroundThread("tenure-keeper", partial(self._run_thread, over))
                thread.start()
                self._thread, self._thread_ended = thread, over

    def reschedule(self) -> None:
        """Recompute the times of the next renewals. On the loop."""
        self._woken.set()
        self._timer.run()

    def discard(self, session: Kept) -> None:
        """Stop renewing a session. Safe to call twice, and from any thread."""
        self._sessions.pop(session, None)

    async def aclose(self) -> None:
        """Stop, and wait for the end of the thread. Safe to call twice."""
        self._closing = True
        self._woken.set()
        self._timer.cancel()
        thread = self._thread
        if thread is not None:
            await self._thread_ended.wait()
            thread.join()

    # On the loop

    def _tick(self) -> None:
        """Record an iteration of the loop, renew what is due, and set the timer again."""
        if self._closing:
            return
        now = self._clock.now()
        if self._renewed_in_stall:
            self._renewed_in_stall = False
            self._stalled(now - self._last_iteration)
        self._last_iteration = now
        self._wake = now + TICK
        for session in list(self._sessions):
            with self._failures.contained():  # one failure must not affect the other sessions
                self._renew_or_lapse(session, now)
        if self._sessions:
            self._timer.at(self._wake)
            with self._starting:
                self._start_thread()

    def _renew_or_lapse(self, session: Kept, now: float) -> None:
        if now >= session.deadline:
            session.lapse()
            return
        if now >= session.renew_at:
            with self._failures.contained():  # its deadline must still be kept
                session.renew()
        self._wake = min(self._wake, session.deadline, max(session.renew_at, now + SHORTEST))

    # In the thread

    def _run_thread(self, over: asyncio.Event) -> None:
        try:
            self._run_watch()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(over.set)

    def _run_watch(self) -> None:
        while not self._closing:
            idle = not self._sessions
            woken = self._woken.wait(self.watch_over())
            self._woken.clear()
            if idle and not woken and self._may_end():
                return

    def _may_end(self) -> bool:
        with self._starting:
            if self._sessions or self._closing:
                return False
            self._thread = None
            return True

    def watch_over(self) -> float:
        """Do what the loop should have done by now, and return the seconds until the next check."""
        sessions = list(self._sessions)
        return self._watch_sessions(sessions) if sessions else IDLE

    def _watch_sessions(self, sessions: list[Kept]) -> float:
        now = self._clock.now()
        closed = self._loop.is_closed()
        stalled = now - self._last_iteration
        pause = TICK
        for session in sessions:
            with self._failures.contained():  # one failure must not affect the other sessions
                pause = min(pause, self._watch_session(session, now, stalled, closed))
        return max(pause, SHORTEST)

    def _watch_session(self, session: Kept, now: float, stalled: float, closed: bool) -> float:
        if now >= session.deadline:
            session.lapse()
            if closed:
                self.discard(session)  # its own loop will not
            return TICK
        head_start = session.renew_interval / 4
        overdue = session.renew_at + head_start
        if now >= overdue:
            if stalled <= session.max_stall and not closed:
                with self._failures.contained():  # its deadline must still be kept
                    session.renew()
                    self._note_stall(stalled)
            overdue = now + head_start
        return min(overdue - now, session.deadline - now)

    def _note_stall(self, stalled: float) -> None:
        if stalled > 2 * TICK and not self._renewed_in_stall:
            self._renewed_in_stall = True
            _log.warning(
                "the event loop has not turned for %.1f s; its leases are renewed by a thread "
                "until it does, or until max_stall",
                stalled,
            )


T = TypeVar("T")


_living: weakref.WeakSet[ClientCore] = weakref.WeakSet()


def living_clients() -> list[ClientCore]:
    """Return the clients of this program that have not been closed. From any thread."""
    return [client for client in list(_living) if not client.closed]


class OwnedSession(Kept, Protocol):
    """A session, as seen by its client."""

    node: str

    @property
    def is_registered(self) -> bool:
        """True if the reaper ends the session after the death of the program."""
        ...

    def close_soon(self, *, detach: bool = False) -> None:
        """Close the session; the store is informed in the background."""

    def emit(self, kind: EventKind, *facts: object) -> None:
        """Report an event of this session."""


class ClientCore:
    """State and services of one client.

    Attributes:
        engine: the store.
        clock: the source of all its deadlines.
        contact: the contact to the store, and its outages.
        listeners: the streams and sinks of events.
        registrations: the sessions that the reaper ends after the death of the program; ``None``
            without one.
        sessions: the sessions that have not ended, in the order of their attaching.
        tasks: the tasks that finish operations of cancelled callers; set by `opened`.
        keeper: the renewal of the sessions; set by `opened`.
        loop: the event loop; ``None`` until `opened`.
        readings: descriptions by node and name, which waits share (`session_core`).
        whole_readings: the number of whole queues that probes have read in the last second.
        closed: whether `aclose` was called.
    """

    tasks: Tasks
    keeper: Keeper

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        identify: bool,
        answer_timeout: float | None,
        registrations: Registrations | None = None,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.contact = Contact(engine, clock, answer_timeout or ANSWER_TIMEOUT)
        self.listeners = Listeners(clock.now, self.soon)
        self.registrations = registrations
        self.sessions: dict[OwnedSession, None] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.readings: dict[tuple[str, str], asyncio.Task[SemaphoreDescription | None]] = {}
        self.whole_readings = 0
        self.closed = False
        self._identify = identify
        self._born = fork.generation
        self._opening: asyncio.Task[None] | None = None
        self._closing: Ending | None = None
        _living.add(self)

    @property
    def url(self) -> str:
        """The store's URL, without secrets."""
        return self.engine.url

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities."""
        return self.engine.capabilities

    @property
    def identity(self) -> Identity:
        """Host, process id and program, unless the client omits them."""
        return this_program() if self._identify else ANONYMOUS

    async def opened(self) -> Engine:
        """Return the engine, after opening it if needed.

        Raises:
            SessionClosed: the client is closed.
            EngineUnavailable, AuthenticationFailed, EngineError, Unsupported: from the engine.
        """
        self.check_owner()
        if self.closed:
            raise self.closed_error()
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self.keeper = Keeper(self.clock, self.loop, self._stalled)
            self.tasks = Tasks(self.loop)
        opening = self._opening
        if opening is None or (opening.done() and failure_of(opening) is not None):
            opening = self._opening = self.tasks.begin(self.engine.open())
        try:
            await self.outcome(opening)
        except TenureError as error:
            raise shortened(error)  # noqa: B904  the same error
        if self.closed:  # meanwhile: nothing would end what begins now
            raise self.closed_error()
        return self.engine

    async def outcome(self, beginning: asyncio.Task[T]) -> T:
        """Wait for the result of a task. A cancelled caller does not stop the task.

        Raises:
            SessionClosed: the client was closed meanwhile.
        """
        if not beginning.done():
            await asyncio.wait([beginning])
        if beginning.cancelled():
            raise self.closed_error()
        return beginning.result()

    def check_process(self) -> None:
        """Raise `Misuse` in a forked child."""
        fork.check(self._born, f"the client of {self.url}")

    def check_owner(self) -> None:
        """Raise `Misuse` in a forked child, or on another event loop."""
        self.check_process()
        running = running_loop(self.url)
        if self.loop is not None and self.loop is not running:
            raise Misuse(
                f"the client of {self.url} belongs to another event loop; call "
                "tenure.connect() in this one"
            )

    def closed_error(self) -> SessionClosed:
        """Return the error for calls on a closed client."""
        return SessionClosed(f"the client of {self.url} is closed")

    def is_running(self) -> bool:
        """Return false in a forked child, in the interpreter's exit, and on a closed event loop."""
        ours = fork.generation == self._born and not sys.is_finalizing()
        return ours and not (self.loop is not None and self.loop.is_closed())

    def soon(self, call: Callable[[], object]) -> None:
        """Schedule a call on the event loop, unless it is closed. From any thread or process."""
        if self.loop is not None and fork.generation == self._born:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(call)

    def end_whole_reading(self) -> None:
        """Count one reading of a whole queue less: a second has passed."""
        self.whole_readings -= 1

    def keep_session(self, session: OwnedSession) -> None:
        """Renew the session from now on."""
        self.sessions[session] = None
        self.contact.attached(session)
        self.keeper.add(session)

    def forget_session(self, session: OwnedSession) -> None:
        """Forget a session that has ended."""
        self.sessions.pop(session, None)
        self.contact.ended(session)
        self.keeper.discard(session)

    def _stalled(self, length: float) -> None:
        for session in self.sessions:
            session.emit("LoopStalled", length)

    async def aclose(self) -> None:
        """Close all sessions, then the engine. Safe to call twice, and when cancelled.

        Raises:
            EngineError: the store failed.
        """
        self.check_owner()
        await self._begin_closing().wait()

    def close_dropped(self) -> None:
        """Close the client in the background: the program has dropped it."""
        self._begin_closing().task.add_done_callback(_log_failure)

    def _begin_closing(self) -> Ending:
        if self._closing is None:
            self.closed = True
            self._end_sessions()
            self._closing = Ending(self._close)
        return self._closing

    @property
    def closing(self) -> asyncio.Task[None] | None:
        """The task that closes the client; ``None`` until `aclose`."""
        return None if self._closing is None else self._closing.task

    def _end_sessions(self) -> None:
        for session in list(self.sessions):
            session.close_soon()

    async def _close(self) -> None:
        failures: list[Exception] = []
        try:
            if self.loop is not None:
                await self.tasks.cancel_beginnings()
                self._end_sessions()  # attached during the wait
                failures += await self.tasks.wait_for_endings()
        finally:
            self.listeners.close()
            if self.loop is not None:
                await self.keeper.aclose()
        try:
            await self.engine.aclose()
        except Exception as failure:
            failures.append(failure)
        finally:
            if self.registrations is not None:
                self.registrations.close()
        for other in failures[1:]:
            failures[0].add_note(f"and: {other}")
        if failures:
            raise failures[0]


def _log_failure(closing: asyncio.Task[None]) -> None:
    failure = failure_of(closing)
    if isinstance(failure, Exception):  # not the end of the loop
        _log.warning("could not close a client: error=%s", failure)
