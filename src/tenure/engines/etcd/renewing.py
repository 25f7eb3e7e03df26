"""Lease renewals: in rounds on the loop, and by the heartbeat thread while the loop is stuck.

Rules:

* A round is one call to one member for all sessions that are due, so that a silent member delays
  nothing else. A session without proof after a sixth of its window is renewed again, through all
  members at once: one may be cut off, and one that had no leader answers only a new call. The first
  answer counts, with the time when its request was sent.
* By then, another member has become the current one. The timeout of a member excludes the time in
  which the loop was late (`give_time`).
* Any client that knows the number of a lease can keep it alive. So a session that may have been
  taken over (liveness ``window``) is proven only if its key, read after the renewal, is still its
  own.
* The heartbeat thread runs a separate loop with separate connections for each renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.errors import Lost, Refused, trouble_of
from tenure.engines.etcd.grpc import CallFailed
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import TenureError

_log = logging.getLogger("tenure")

_LEAST_TIMEOUT = 0.2
"""Minimum timeout of a member in seconds."""

_ATTEMPTS = 2
"""Attempts of one renewal before the next one is due, a third of a window later."""

_TICKS = 4
"""Number of ticks into which a timeout is divided."""

_EXCUSED = 4
"""Largest number of late ticks that are excluded, since the lease still expires."""

_LATE = 0.5
"""Fraction of a tick; a tick that is later than this is late."""


class Renewable(Protocol):
    """A session, as seen by its renewal."""

    id: int
    key: bytes
    window: float
    resumable: bool
    timeout: float
    proven_at: float
    over: bool

    def look_up_soon(self) -> None:
        """Find requests whose keys were deleted. Called on the loop."""

    def prove(self, at: float) -> None:
        """Record that the lease was extended by a request sent at that time. From any thread."""

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as read, identifies this attachment."""

    def judge(self, kv: KeyValue | None) -> bool:
        """Process the session's key as read; return true if the session continues."""

    def end(self, why: str) -> None:
        """End the session, as reported by the store."""


def give_time(seconds: float, settled: Callable[[], bool], expired: Callable[[], None]) -> None:
    """Call `expired` after a time, unless the answer has arrived by then.

    On a busy machine an answer may have arrived long ago without being read. So up to `_EXCUSED`
    ticks for which the loop was late are not counted.

    Args:
        seconds: the time, while the loop is not late.
        settled: returns true if no answer is expected any more.
        expired: called otherwise.
    """
    loop, tick = asyncio.get_running_loop(), seconds / _TICKS

    def wait(counted: int, excused: int) -> None:
        loop.call_at(due := loop.time() + tick, check, due, counted, excused)

    def check(due: float, counted: int, excused: int) -> None:
        if settled():
            return
        if loop.time() - due > _LATE * tick and excused < _EXCUSED:
            wait(counted, excused + 1)
        elif counted + 1 < _TICKS:
            wait(counted + 1, excused)
        else:
            expired()

    wait(0, 0)


async def keep_alive(
    members: Members,
    clock: Clock,
    turn: int,
    sessions: Iterable[Renewable],
    settle: Callable[[Renewable, float, bool, KeyValue | None], None],
) -> None:
    """Renew leases through one member.

    Args:
        members: the members of the cluster.
        clock: the clock of the proofs.
        turn: the turn of the member.
        sessions: the owners of the leases.
        settle: called for each session with the time at which its renewal was sent, whether its
            lease exists, and the session's key if it is resumable.

    Raises:
        Lost, Refused, AuthenticationFailed
    """
    sent: dict[int, tuple[Renewable, float]] = {}
    call = await members.converse(turn, wire.KEEP_ALIVE)
    try:
        for session in sessions:
            sent[session.id] = (session, clock.now())
            call.write(wire.lease(session.id))
        call.done_writing()
        while sent:
            data = await call.read()
            if data is None:
                raise Lost("the member ended the renewal")
            lease = answers.read_lease(data)
            session, at = sent.pop(lease.number)
            kv = None
            if lease.left > 0 and session.resumable:
                key = wire.range_(session.key)
                answer = await members.call_member(turn, wire.RANGE, key, _timeout(session))
                kv = answers.read_range(answer).first
            settle(session, at, lease.left > 0, kv)
        await call.read()  # to its end, so that nothing is cut off
    except CallFailed as failed:
        trouble = trouble_of(failed)
        raise trouble if isinstance(trouble, Lost | Refused) else Lost(str(trouble)) from failed
    finally:
        call.cancel()


def _timeout(session: Renewable) -> float:
    return max(session.window / 6, _LEAST_TIMEOUT)


class Rounds:
    """Renewals on the loop."""

    def __init__(
        self, members: Members, clock: Clock, spawn: Callable[[Any], asyncio.Task[Any]]
    ) -> None:
        self._members = members
        self._clock = clock
        self._spawn = spawn
        self._due: dict[Renewable, tuple[int, float]] = {}

    def renew(self, session: Renewable) -> None:
        """Renew a session in the next round. Returns immediately."""
        self._put(session, 0, self._clock.now())

    def _put(self, session: Renewable, attempt: int, since: float) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._begin)
        self._due[session] = attempt, since

    def _begin(self) -> None:
        due, self._due = self._due, {}
        turn, loop = self._members.turn, asyncio.get_running_loop()
        sessions = [session for session in due if not session.over]
        if not sessions or not len(self._members):
            return
        leave = partial(self._members.leave, turn, "a lease was not renewed in time")
        for session in sessions:
            attempt, since = due[session]
            timeout = _timeout(session)
            give_time(timeout, partial(self._settled, session, since), leave)
            if attempt < _ATTEMPTS:
                loop.call_later(timeout, self._again, session, attempt + 1, since)
        self._spawn(self._round(turn, sessions))
        late = [session for session in sessions if due[session][0]]
        if late:
            for other in range(1, len(self._members)):
                self._spawn(self._round(turn + other, late))

    def _settled(self, session: Renewable, since: float) -> bool:
        """Return true if a session has been proven since, or needs no proof."""
        return session.over or session.proven_at >= since or not len(self._members)

    def _again(self, session: Renewable, attempt: int, since: float) -> None:
        if not self._settled(session, since):
            self._put(session, attempt, since)

    async def _round(self, turn: int, sessions: list[Renewable]) -> None:
        # Without an answer, its timeout is that of the sessions.
        within = max(session.window for session in sessions)
        try:
            async with asyncio.timeout(within):
                await self.keep_alive(turn, sessions)
        except (Lost, Refused, TimeoutError, TenureError) as error:
            _log.debug("renewal failed: member=%d error=%s", turn, error)

    async def keep_alive(self, turn: int, sessions: Iterable[Renewable]) -> None:
        """Renew sessions through one member. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        await keep_alive(self._members, self._clock, turn, sessions, _settle)


def _settle(session: Renewable, at: float, exists: bool, kv: KeyValue | None) -> None:
    if not exists:
        session.end("its lease has expired, or was revoked")
    elif not session.resumable or session.judge(kv):
        session.prove(at)


class EtcdHeartbeat(HeartbeatThread[Renewable]):
    """Heartbeat thread of one engine."""

    expected = (OSError, TenureError)

    def __init__(self, address: EtcdUrl, clock: Clock) -> None:
        what = f"renewing in the heartbeat thread on {address.url}"
        super().__init__("tenure-etcd-heartbeat", clock.now, what)
        self._address = address
        self._clock = clock
        self._first = 0  # turn of the member that is tried first
        self._renewal: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def interrupt(self) -> None:
        """Cancel a renewal, because the engine is being closed."""
        if self._renewal is not None:
            loop, task = self._renewal
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)

    def renew_now(self, requested: dict[Renewable, float]) -> None:
        """Renew sessions through the first member that answers."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._renew(requested))

    def disconnect(self) -> None:
        """Do nothing: each renewal closes its connections."""

    async def _renew(self, requested: dict[Renewable, float]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._renewal = asyncio.get_running_loop(), task
        if self.wait_until_closing(0):
            return
        members = Members(self._address)
        members.open()
        try:
            for turn in range(self._first, self._first + len(members)):
                sessions = [
                    each
                    for each, since in requested.items()
                    if not each.over and each.proven_at < since
                ]
                if not sessions:
                    return
                try:
                    async with asyncio.timeout(min(map(_timeout, sessions))):
                        await keep_alive(members, self._clock, turn, sessions, _settle_in_thread)
                    self._first = turn
                except (Lost, Refused, TimeoutError, TenureError) as error:
                    _log.debug("heartbeat failed: member=%d error=%s", turn, error)
        finally:
            await members.aclose()


def _settle_in_thread(session: Renewable, at: float, exists: bool, kv: KeyValue | None) -> None:
    """Prove a session; its end is reported on the loop."""
    if exists and not session.over and (not session.resumable or session.is_mine(kv)):
        session.prove(at)
