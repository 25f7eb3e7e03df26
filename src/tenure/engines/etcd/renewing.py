"""Keeping leases alive: in rounds on the loop, and in a thread while the loop is stuck.

Rules:

* A round is a call of its own, through one member, for all sessions that are due: what one member
  does not answer holds up nothing else. A session without proof after a sixth of its window is
  renewed again, in rounds through every member at once: one may be cut off, and one that was asked
  while there was no leader answers late, but answers a new call. The first answer counts, from
  when it was asked.
* The member that has not answered is left by then. What the program itself did not run of that time
  is not counted against it (see `allowance`).
* A lease can be kept alive by any client that knows its number. Where a session may have been taken
  over (liveness ``window``), it is proven only if its key shows, after the lease was renewed, that
  it has not been.
* The thread has a loop and channels of its own, and is started by the first renewal that does not
  come from the engine's thread. It blocks no caller: a caller leaves the session in a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from tenure.background import BackgroundThread, Failures
from tenure.clock import Clock
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.allowance import give_time
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.calls import CallFailed
from tenure.engines.etcd.members import Lost, Members, Refused, trouble_of
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import TenureError

__all__ = ["Renewable", "Renewer", "Rounds"]

_log = logging.getLogger("tenure")

_LEAST_PATIENCE = 0.2
"""Seconds that a member is given at the least."""

_ATTEMPTS = 2
"""So often a renewal is repeated: until the next one begins, a third of a window later."""

_SILENT = "a lease was not renewed in time"


class Renewable(Protocol):
    """A session, as it is renewed."""

    id: int
    key: bytes
    window: float
    resumable: bool
    patience: float
    proven_at: float
    over: bool

    def prove(self, at: float) -> None:
        """Note that the lease was extended, in answer to what was sent then. From any thread."""

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as it was read, names this attachment."""

    def judge(self, kv: KeyValue | None) -> bool:
        """Act on the session's key as it was read; true if the session goes on."""

    def end(self, why: str) -> None:
        """End by the store's word."""


def _patience(session: Renewable) -> float:
    return max(session.window / 6, _LEAST_PATIENCE)


class Rounds:
    """Renewals on the loop."""

    def __init__(
        self, members: Members, clock: Clock, spawn: Callable[[Any], asyncio.Task[Any]]
    ) -> None:
        """Start with nothing to renew."""
        self._members = members
        self._clock = clock
        self._spawn = spawn
        self._due: dict[Renewable, tuple[int, float]] = {}

    def renew(self, session: Renewable) -> None:
        """Have a session renewed in the next round. At once."""
        self._put(session, 0, self._clock.now())

    def _put(self, session: Renewable, attempt: int, asked: float) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._begin)
        self._due[session] = attempt, asked

    def _begin(self) -> None:
        due, self._due = self._due, {}
        turn, loop = self._members.turn, asyncio.get_running_loop()
        sessions = [session for session in due if not session.over]
        if not sessions or not len(self._members):
            return
        for session in sessions:
            attempt, asked = due[session]
            patience, settled = _patience(session), partial(self._settled, session, asked)
            give_time(patience, settled, partial(self._members.leave, turn, _SILENT))
            if attempt < _ATTEMPTS:
                loop.call_later(patience, self._again, session, attempt + 1, asked)
        self._spawn(self._round(turn, sessions))
        late = [session for session in sessions if due[session][0]]
        if late:
            for other in range(1, len(self._members)):
                self._spawn(self._round(turn + other, late))

    def _settled(self, session: Renewable, asked: float) -> bool:
        """Return true if a session has been proven since, or needs no proof."""
        return session.over or session.proven_at >= asked or not len(self._members)

    def _again(self, session: Renewable, attempt: int, asked: float) -> None:
        if not self._settled(session, asked):
            self._put(session, attempt, asked)

    async def _round(self, turn: int, sessions: list[Renewable]) -> None:
        # No longer than the sessions live, without an answer.
        within = max(session.window for session in sessions)
        try:
            async with asyncio.timeout(within):
                await self.keep_alive(turn, sessions)
        except (Lost, Refused, TimeoutError, TenureError) as error:
            _log.debug("renewal failed: member=%d error=%s", turn, error)

    async def keep_alive(self, turn: int, sessions: Iterable[Renewable]) -> None:
        """Renew sessions through one member, and tell them what comes of it.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        asked: dict[int, tuple[Renewable, float]] = {}
        call = await self._members.converse(turn, wire.KEEP_ALIVE)
        try:
            for session in sessions:
                asked[session.id] = (session, self._clock.now())
                call.write(wire.lease(session.id))
            call.done_writing()
            while asked:
                data = await call.read()
                if data is None:
                    raise Lost("the member ended the renewal")
                lease = answers.read_lease(data)
                session, at = asked.pop(lease.number)
                if lease.left <= 0:
                    session.end("its lease has run out, or was revoked")
                elif session.resumable:
                    await self._check_attached(turn, session, at)
                else:
                    session.prove(at)
            await call.read()  # to its end, so that nothing is cut off
        except CallFailed as failed:
            trouble = trouble_of(failed)
            raise trouble if isinstance(trouble, Lost | Refused) else Lost(str(trouble)) from failed
        finally:
            call.cancel()

    async def _check_attached(self, turn: int, session: Renewable, at: float) -> None:
        request = wire.range_(session.key)
        answer = await self._members.call_member(turn, wire.RANGE, request, _patience(session))
        if session.judge(answers.read_range(answer).first):
            session.prove(at)


class Renewer:
    """Renewals in a thread."""

    def __init__(self, address: EtcdUrl, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        """Start with nothing to renew, and without a thread."""
        self._address = address
        self._clock = clock
        self._loop = loop
        self._lock = threading.Lock()  # of what both threads use, down to `_stop`
        self._wanted: dict[Renewable, None] = {}
        self._failures = Failures(f"renewing beside the loop on {address.url}", _log)
        self._thread = BackgroundThread("tenure-etcd-renewer", self._run)
        self._closing = False
        self._wake: Callable[[], object] | None = None
        self._stop: Callable[[], object] | None = None
        self._first = 0

    def renew(self, session: Renewable) -> None:
        """Have a session renewed. From any thread; at once."""
        with self._lock:
            if self._closing:
                return
            self._wanted[session] = None
            if not self._thread.alive:
                self._wake = None
                with self._failures.contained():  # the next renewal tries again
                    self._thread.start()
            elif self._wake is not None:  # or else it is only just beginning
                with self._failures.contained():
                    self._wake()

    async def aclose(self) -> None:
        """End the thread. Safe to call twice."""
        with self._lock:
            self._closing = True
            stop, self._stop = self._stop, None
            if stop is not None:
                stop()
        if self._thread.alive:
            await self._loop.run_in_executor(None, self._thread.join)

    # In the thread

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, more, me = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
        assert me is not None
        with self._lock:
            if self._closing:
                return
            self._wake = partial(loop.call_soon_threadsafe, more.set)
            self._stop = partial(loop.call_soon_threadsafe, me.cancel)
        members = Members(self._address)
        try:
            while True:
                more.clear()
                with self._lock:
                    sessions = [each for each in self._wanted if not each.over]
                    self._wanted.clear()
                with self._failures.contained():
                    await self._renew(members, sessions)
                await more.wait()
        finally:
            await members.aclose()

    async def _renew(self, members: Members, sessions: Sequence[Renewable]) -> None:
        turn, last = self._first, self._first + len(self._address.endpoints)
        while sessions and turn < last:
            proven: set[Renewable] = set()
            try:
                if not len(members):
                    members.open()
                async with asyncio.timeout(min(map(_patience, sessions))):
                    await self._renew_through(members, turn, sessions, proven)
                self._first = turn
            except (Lost, Refused, TimeoutError, TenureError) as error:
                _log.debug(
                    "renewal by the heartbeat thread failed: member=%d error=%s", turn, error
                )
                members.expire()
            turn += 1
            sessions = [each for each in sessions if each not in proven]

    async def _renew_through(
        self,
        members: Members,
        turn: int,
        sessions: Sequence[Renewable],
        proven: set[Renewable],
    ) -> None:
        asked = {session.id: session for session in sessions}
        call = await members.converse(turn, wire.KEEP_ALIVE)
        at = self._clock.now()
        try:
            for number in asked:
                call.write(wire.lease(number))
            call.done_writing()
            while (data := await call.read()) is not None:
                lease = answers.read_lease(data)
                session = asked.get(lease.number)
                if session is None or lease.left <= 0 or session.over:
                    continue
                if session.resumable:
                    request = wire.range_(session.key)
                    found = await members.call_member(turn, wire.RANGE, request, _patience(session))
                    if not session.is_mine(answers.read_range(found).first):
                        continue  # the loop will hear of it
                session.prove(at)
                proven.add(session)
        except CallFailed as failed:
            raise Lost(str(failed)) from failed
        finally:
            call.cancel()
