"""Keeping leases alive: in rounds on the loop, and in a thread while the loop is stuck.

Rules:

* A round is a call of its own, through one member, for all sessions that are due: what one member
  does not answer holds up nothing else. Who has no proof after a sixth of its window is renewed
  again, in another round, through another member; the first answer counts, from when it was asked.
* A lease can be kept alive by whoever knows its number. Where a session may have been taken over
  (liveness ``window``), it is proven only if its key shows, after the lease was renewed, that it
  has not been.
* The thread has channels of its own, and is started by the first renewal that does not come from
  the loop's thread. It blocks nobody: who asks leaves the session in a list.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tenure.clock import Clock
from tenure.engines.etcd import wire
from tenure.engines.etcd.members import (
    Lost,
    Members,
    Refused,
    credentials_of,
    cut,
    options_of,
    read_files,
    trouble_of,
)
from tenure.engines.etcd.url import Address
from tenure.errors import TenureError

if TYPE_CHECKING:
    from tenure.engines.etcd.session import EtcdSession

__all__ = ["Renewer", "Rounds"]

_log = logging.getLogger("tenure")

_LEAST_PATIENCE = 0.2
"""Seconds that a member is given at the least."""


def _patience(session: EtcdSession) -> float:
    return max(session.window / 6, _LEAST_PATIENCE)


class Rounds:
    """Renewals on the loop."""

    def __init__(
        self, members: Members, clock: Clock, spawn: Callable[[Any], asyncio.Task[Any]]
    ) -> None:
        self._members = members
        self._clock = clock
        self._spawn = spawn
        self._due: dict[EtcdSession, int] = {}

    def renew(self, session: EtcdSession, attempt: int = 0) -> None:
        """Have a session renewed in the next round. At once."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._begin)
        self._due[session] = attempt

    def _begin(self) -> None:
        due, self._due = self._due, {}
        turn, now = self._members.turn, self._clock.now()
        sessions = [session for session in due if not session.over]
        if not sessions or not len(self._members):
            return
        for session in sessions:
            asyncio.get_running_loop().call_later(
                _patience(session), self._check, session, now, turn, due[session]
            )
        self._spawn(self._round(turn, sessions))

    def _check(self, session: EtcdSession, asked: float, turn: int, attempt: int) -> None:
        """Renew again, elsewhere, what has not been proven since."""
        if session.over or session.proven_at >= asked or not len(self._members):
            return
        self._members.leave(turn, "a lease was not renewed in time")
        if attempt < len(self._members):
            self.renew(session, attempt + 1)

    async def _round(self, turn: int, sessions: list[EtcdSession]) -> None:
        # No longer than the sessions live, if nobody answers.
        within = max(session.window for session in sessions)
        try:
            async with asyncio.timeout(within):
                await self.keep_alive(turn, sessions)
        except (Lost, Refused, TimeoutError, TenureError) as error:
            _log.debug("renewing through member %d failed: %s", turn, error)

    async def keep_alive(self, turn: int, sessions: Iterable[EtcdSession]) -> None:
        """Renew sessions through one member, and tell them what comes of it.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        asked: dict[int, tuple[EtcdSession, float]] = {}
        metadata = await self._members.metadata(turn)
        call = self._members.member(turn).keep_alive(metadata=metadata)
        try:
            for session in sessions:
                asked[session.id] = (session, self._clock.now())
                await call.write(wire.lease(session.id))
            await call.done_writing()
            while asked:
                data = await call.read()
                if data is grpc.aio.EOF:
                    raise Lost("the member ended the renewal")
                lease = wire.read_lease(data)
                session, at = asked.pop(lease.number)
                if lease.left <= 0:
                    session.end("its lease has run out, or was revoked")
                elif session.resumable:
                    await self._check_attached(turn, session, at)
                else:
                    session.prove(at)
            await call.read()  # to its end, so that nothing is cut off
        except grpc.aio.AioRpcError as error:
            trouble = trouble_of(error)
            raise trouble if isinstance(trouble, Lost | Refused) else Lost(str(trouble)) from error
        except asyncio.InvalidStateError as error:
            raise Lost("the member ended the renewal") from error
        finally:
            await cut(call)

    async def _check_attached(self, turn: int, session: EtcdSession, at: float) -> None:
        request = wire.range_(session.key)
        answer = await self._members.call_member(turn, wire.RANGE, request, _patience(session))
        if session.judge(wire.read_range(answer).first):
            session.prove(at)


class Renewer:
    """Renewals in a thread."""

    def __init__(self, address: Address, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._address = address
        self._clock = clock
        self._loop = loop
        self._wanted: dict[EtcdSession, None] = {}
        self._look = threading.Condition()
        self._thread: threading.Thread | None = None
        self._channels: dict[str, Any] = {}
        self._first = 0
        self._token = ""
        self._closing = False

    def renew(self, session: EtcdSession) -> None:
        """Have a session renewed. From any thread; at once."""
        with self._look:
            if self._closing:
                return
            self._wanted[session] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tenure-etcd-renewer", daemon=True
                )
                self._thread.start()
            self._look.notify()

    async def aclose(self) -> None:
        """End the thread. Safe to call twice."""
        with self._look:
            self._closing = True
            self._look.notify()
            for channel in self._channels.values():
                channel.close()  # it may be waiting for an answer
            thread, self._thread = self._thread, None
        if thread is not None:
            await self._loop.run_in_executor(None, thread.join)

    # In the thread

    def _run(self) -> None:
        while True:
            with self._look:
                while not self._wanted and not self._closing:
                    self._look.wait()
                if self._closing:
                    return
                sessions = [each for each in self._wanted if not each.over]
                self._wanted.clear()
            self._renew(sessions)

    def _renew(self, sessions: Sequence[EtcdSession]) -> None:
        endpoints = self._address.endpoints
        for number in range(len(endpoints)):
            if not sessions or self._closing:
                return
            endpoint = endpoints[(self._first + number) % len(endpoints)]
            patience = min(map(_patience, sessions))
            try:
                proven = self._renew_through(endpoint, sessions, patience)
            except (grpc.RpcError, ValueError, TenureError) as error:  # ValueError: it is closed
                _log.debug("renewing beside the loop through %s failed: %s", endpoint, error)
                self._token = ""
                continue
            self._first = (self._first + number) % len(endpoints)
            sessions = [each for each in sessions if each not in proven]

    def _renew_through(
        self, endpoint: str, sessions: Sequence[EtcdSession], patience: float
    ) -> set[EtcdSession]:
        channel = self._channel(endpoint)
        metadata = self._metadata(channel, patience)
        asked = {session.id: session for session in sessions}
        at = self._clock.now()
        answers = channel.stream_stream(wire.KEEP_ALIVE)(
            iter([wire.lease(number) for number in asked]), timeout=patience, metadata=metadata
        )
        proven = set()
        for data in answers:
            lease = wire.read_lease(data)
            session = asked.get(lease.number)
            if session is None or lease.left <= 0 or session.over:
                continue
            if session.resumable:
                request = wire.range_(session.key)
                found = channel.unary_unary(wire.RANGE)(
                    request, timeout=patience, metadata=metadata
                )
                if not session.is_mine(wire.read_range(found).first):
                    continue  # the loop will hear of it
            session.prove(at)
            proven.add(session)
        return proven

    def _metadata(self, channel: Any, patience: float) -> Any:
        if not self._address.user:
            return None
        if not self._token:
            request = wire.authenticate(self._address.user, self._address.password)
            answer = channel.unary_unary(wire.AUTHENTICATE)(request, timeout=patience)
            self._token = wire.read_string(answer, 2)
        return (("token", self._token),)

    def _channel(self, endpoint: str) -> Any:
        with self._look:
            if self._closing:
                raise ValueError("the engine is being closed")
            channel = self._channels.get(endpoint)
            if channel is None:
                options = options_of(self._address)
                if self._address.secure:
                    credentials = credentials_of(read_files(self._address))
                    channel = grpc.secure_channel(endpoint, credentials, options)
                else:
                    channel = grpc.insecure_channel(endpoint, options)
                self._channels[endpoint] = channel
            return channel
