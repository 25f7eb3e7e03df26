"""Services for all sessions of an engine: renewals, late waiters, members, watches and retries.

**Renewals** are sent in rounds on the loop, and by the heartbeat thread while the loop is stuck:

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

**Late waiters** (`LateWaiters`) have timed out, and their own program does not remove them. The
value of a waiting request contains its timeout. If its program has lost contact or was killed, the
request stays under its lease and delays the queue. Any program that waits behind it removes it.

* Clocks of different machines are not compared. The timeout counts from when *this* program first
  saw the request with its current value, so it is never removed early.
* Its own program removes a request `_OTHERS` seconds before other programs do.
* Only a waiter is removed: the transaction compares that neither it nor any request before it was
  put or deleted since the queue was read. If these are too many for one transaction, it stays until
  there are fewer, or its lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.session import ClosableSession
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import Answer, KeyValue, Lost, Refused, failure, pauses, trouble_of
from tenure.engines.etcd.grpc import CallFailed
from tenure.engines.etcd.keys import (
    TIMED_OUT,
    Entry,
    Keys,
    Limit,
    Name,
    entries,
    limit_of,
    number_owning,
    taking_out,
)
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watching import Watching
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    TenureError,
)

T = TypeVar("T")

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


class ClusterSession(ClosableSession, Protocol):
    """A session, as its cluster renews and closes it."""

    id: int
    key: bytes
    window: float
    resumable: bool
    timeout: float
    proven_at: float
    over: bool

    def contact(self, there: bool, cause: TenureError | None = None) -> None:
        """Report to the program that a member is reached, or why none is reached."""

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
    sessions: Iterable[ClusterSession],
    settle: Callable[[ClusterSession, float, bool, KeyValue | None], None],
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
    sent: dict[int, tuple[ClusterSession, float]] = {}
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


def _timeout(session: ClusterSession) -> float:
    return max(session.window / 6, _LEAST_TIMEOUT)


class Rounds:
    """Renewals on the loop."""

    def __init__(
        self, members: Members, clock: Clock, spawn: Callable[[Any], asyncio.Task[Any]]
    ) -> None:
        self._members = members
        self._clock = clock
        self._spawn = spawn
        self._due: dict[ClusterSession, tuple[int, float]] = {}

    def renew(self, session: ClusterSession) -> None:
        """Renew a session in the next round. Returns immediately."""
        self._put(session, 0, self._clock.now())

    def _put(self, session: ClusterSession, attempt: int, since: float) -> None:
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

    def _settled(self, session: ClusterSession, since: float) -> bool:
        """Return true if a session has been proven since, or needs no proof."""
        return session.over or session.proven_at >= since or not len(self._members)

    def _again(self, session: ClusterSession, attempt: int, since: float) -> None:
        if not self._settled(session, since):
            self._put(session, attempt, since)

    async def _round(self, turn: int, sessions: list[ClusterSession]) -> None:
        # Without an answer, its timeout is that of the sessions.
        within = max(session.window for session in sessions)
        try:
            async with asyncio.timeout(within):
                await self.keep_alive(turn, sessions)
        except (Lost, Refused, TimeoutError, TenureError) as error:
            _log.debug("renewal failed: member=%d error=%s", turn, error)

    async def keep_alive(self, turn: int, sessions: Iterable[ClusterSession]) -> None:
        """Renew sessions through one member. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        await keep_alive(self._members, self._clock, turn, sessions, _settle)


def _settle(session: ClusterSession, at: float, exists: bool, kv: KeyValue | None) -> None:
    if not exists:
        session.end("its lease has expired, or was revoked")
    elif not session.resumable or session.judge(kv):
        session.prove(at)


class EtcdHeartbeat(HeartbeatThread[ClusterSession]):
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

    def renew_now(self, requested: dict[ClusterSession, float]) -> None:
        """Renew sessions through the first member that answers."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._renew(requested))

    def disconnect(self) -> None:
        """Do nothing: each renewal closes its connections."""

    async def _renew(self, requested: dict[ClusterSession, float]) -> None:
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


def _settle_in_thread(
    session: ClusterSession, at: float, exists: bool, kv: KeyValue | None
) -> None:
    """Prove a session; its end is reported on the loop."""
    if exists and not session.over and (not session.resumable or session.is_mine(kv)):
        session.prove(at)


_OTHERS = 0.5
_MOST_SEEN = 4096
_MOST_COMPARED = 100  # etcd's default maximum is 128 comparisons


class LateWaiters:
    """Timeouts of other programs' requests, as seen by one engine.

    Args:
        local: the requests of this engine, by key.
        txn: sends a transaction, with its timeout in seconds.
    """

    def __init__(
        self,
        keys: Keys,
        clock: Clock,
        local: Mapping[bytes, object],
        txn: Callable[[bytes, float], Awaitable[Answer]],
        timeout: float,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._local = local
        self._txn = txn
        self._timeout = timeout
        self._seen: dict[bytes, tuple[int, float]] = {}  # key: (modified, first seen)

    def next_due(self, queue: Iterable[Entry]) -> float | None:
        """Return when the first of these requests becomes overdue, if one has a timeout."""
        dues = [
            self._due(entry, entry.timeout)
            for entry in queue
            if entry.timeout is not None and entry.key not in self._local
        ]
        return min(dues, default=None)

    def _due(self, entry: Entry, timeout: float) -> float:
        now = self._clock.now()
        modified, first = self._seen.get(entry.key, (0, now))
        if modified != entry.modified:
            if len(self._seen) >= _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            first = now
            self._seen[entry.key] = (entry.modified, first)
        return first + timeout + _OTHERS

    async def take_out(self, name: Name) -> bool:
        """Remove overdue waiters from a queue; return true if there were any.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        found = False
        while True:
            read = await self._txn(wire.txn((), (name.get_limit, name.queue)), self._timeout)
            limit, queue = read.parts[0].first, entries(read.parts[1].found)
            most = limit_of(limit)
            owning = number_owning(queue, most)
            waiting = range(owning, len(queue))
            place = next((each for each in waiting if self._is_late(queue[each])), None)
            if place is None or place > _MOST_COMPARED:
                return found
            if await self._take_out(name, most, queue[place], queue[:place]):
                found = True
                self._seen.pop(queue[place].key, None)

    async def take_out_or_later(self, name: Name) -> bool:
        """Do the same, and return false without an answer; the next read tries again."""
        try:
            return await self.take_out(name)
        except Lost:
            return False

    def _is_late(self, entry: Entry) -> bool:
        due = self.next_due([entry])
        return due is not None and due <= self._clock.now()

    async def _take_out(
        self, name: Name, limit: Limit, late: Entry, before: Sequence[Entry]
    ) -> bool:
        compares = (
            wire.modified_at(name.limit, limit.modified),
            *(wire.modified_at(each.key, each.modified) for each in (late, *before)),
        )
        session = self._keys.session(name.path, late.session)
        then = taking_out(name, late, session, TIMED_OUT)
        try:
            answer = await self._txn(wire.txn(compares, then), self._timeout)
        except Refused as refused:
            if refused.no_lease:
                return True  # its session has just ended
            raise
        return answer.ok


_NAMES = 4096
"""Maximum number of names with cached keys."""


class EtcdCluster:
    """Services for the sessions of one engine.

    Attributes:
        keys: the keys of the store.
        base: an order id is a create revision plus this number.
        sessions: the attached sessions.
        local: the requests of all sessions of this engine, by key.
        names: the keys of semaphores, by node and name.
        members: the members of the cluster.
        tasks: the tasks that `aclose` waits for.
        is_open: whether it can be used.
        timeout: longest time in seconds after which an unanswered call is sent to another member.
    """

    loop: asyncio.AbstractEventLoop
    watching: Watching

    def __init__(self, address: EtcdUrl, clock: Clock, members: Members | None = None) -> None:
        self.url = address.url
        self.clock = clock
        self.keys = Keys(address.prefix)
        self.base = 0
        self.timeout = address.timeout
        self.address = address
        self.is_open = False
        self.sessions: set[ClusterSession] = set()
        self.local: dict[bytes, EtcdRequest] = {}
        self.late = LateWaiters(self.keys, clock, self.local, self.txn, self.timeout)
        self.members = Members(address) if members is None else members
        self._thread = 0
        self.names: dict[tuple[str, str], Name] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if it is not open."""
        if not self.is_open:
            raise EngineUnavailable(f"{self.url} is not open. Open the client first")

    def _open_services(self) -> None:
        """Open the services on the running loop."""
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.members.open()
        self._rounds = Rounds(self.members, self.clock, self.spawn)
        self._heartbeat = EtcdHeartbeat(self.address, self.clock)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `aclose` waits for."""
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Calls

    async def txn(self, request: bytes, timeout: float) -> answers.Answer:
        """Send a transaction. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        return answers.read_answer(await self.members.call(wire.TXN, request, timeout))

    def reader(self, node: str | None) -> EtcdAttempts:
        """Return a reader that repeats its calls until a timeout."""
        return EtcdAttempts(self, node, self.address.connect_timeout + self.timeout)

    def failure(self, refused: Refused, node: str | None, name: str | None = None) -> TenureError:
        """Return the program's error for a rejection."""
        return failure(self.url, refused, node=node, name=name)

    async def eventually(self, request: bytes, within: float, what: str) -> None:
        """Repeat an idempotent write until it is answered; log a failure."""
        try:
            await self._repeat(lambda: self.txn(request, self.timeout), within)
        except (Refused, TenureError) as error:
            _log.debug("write failed: operation=%s url=%s error=%s", what, self.url, error)

    async def _repeat(self, call: Callable[[], Awaitable[object]], within: float) -> None:
        """Repeat a call until it is answered, or until the timeout."""
        until, pause = self.clock.now() + within, pauses()
        while self.clock.now() < until:
            try:
                await call()
            except Lost:
                await asyncio.sleep(next(pause))
            else:
                return

    # Leases

    def renew(self, session: ClusterSession) -> None:
        """Renew a session's lease. From any thread."""
        if threading.get_ident() == self._thread:
            self._rounds.renew(session)
            session.look_up_soon()
        else:
            self._heartbeat.renew(session)

    async def keep_alive(self, session: ClusterSession) -> None:
        """Renew a lease, for a detach or a takeover. Raises `Lost`."""
        turn = self.members.turn
        try:
            async with asyncio.timeout(session.timeout):
                await self._rounds.keep_alive(turn, [session])
        except (Lost, TimeoutError) as error:
            self.members.leave(turn, str(error) or "a lease was not renewed in time")
            raise Lost(str(error)) from error

    async def revoke(self, number: int, within: float) -> None:
        """Revoke a lease, with everything under it."""
        call = partial(self.members.call, wire.LEASE_REVOKE, wire.lease(number), self.timeout)
        try:
            await self._repeat(call, within)
        except Refused as refused:
            if not refused.no_lease:
                raise self.failure(refused, None) from refused

    async def silent_for(self, number: int) -> float | None:
        """Return the minimum number of seconds since a lease was renewed, if known."""
        try:
            answer = await self.members.call(wire.TIME_TO_LIVE, wire.lease(number), self.timeout)
        except (Lost, Refused):
            return None
        lease = answers.read_lease(answer)  # in whole seconds
        return max(0.0, lease.granted - lease.left - 1.0) if lease.left >= 0 else None

    def name(self, path: str, name: str) -> Name:
        """Return the keys of a semaphore, whose name has been checked."""
        found = self.names.get((path, name))
        if found is None:
            if len(self.names) >= _NAMES:
                del self.names[next(iter(self.names))]
            found = self.names[path, name] = self.keys.name(path, name)
        return found


class EtcdAttempts:
    """Calls that are repeated until they are answered or have timed out."""

    def __init__(self, cluster: EtcdCluster, node: str | None, within: float) -> None:
        """Allow attempts for `within` seconds from now."""
        self._cluster = cluster
        self._node = node
        self._within = within
        self._until = cluster.clock.now() + within
        self._pauses = pauses()

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority. Raises `Refused`, `EngineError`."""
        while True:
            answer = await self.txn(wire.txn((), parts))
            if answer is not None:
                return answer

    async def txn(self, request: bytes) -> answers.Answer | None:
        """Send a transaction; ``None``, after a pause, if it was not answered."""
        try:
            return await self._cluster.txn(request, self._cluster.timeout)
        except Lost as lost:
            await self.again(lost)
            return None

    async def again(self, lost: Lost) -> None:
        """Wait before the next attempt; raise `error` after the timeout."""
        pause = next(self._pauses)
        if self._cluster.clock.now() + pause >= self._until:
            raise self.error(lost) from lost
        await asyncio.sleep(pause)

    def error(self, lost: Lost) -> TenureError:
        """Return the error for calls that have timed out."""
        return EngineError(
            f"{self._cluster.url} did not answer within {self._within:g} s ({lost})",
            node=self._node,
        )
