"""One session on the server: its protocol, and its streams, one after another.

A member owns a reading task, which owns a writing task for each stream. Rules:

* After a loss the member opens another stream, with growing random pauses, until the session or the
  member ends. It does not do so while the program is inactive, because attaching would keep the
  session alive. Once the window has passed, it checks whether the session has expired.
* If a server does not answer an attachment or a proof for a sixth of the window, the connection is
  dropped with its streams. If the connection has received anything else, the server is only slow:
  the timeout is three times as long, and then only the stream is dropped, because new connections
  would make the server even slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from tenure.background import BackgroundTimer, Failures
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines.ydb.database import Database, Stream
from tenure.engines.ydb.protocol import YdbProtocol
from tenure.errors import AuthenticationFailed, EngineUnavailable
from tenure.wire.ydb import Message

_log = logging.getLogger("tenure")

LEAST_TIMEOUT, MOST_TIMEOUT = 0.5, 5.0
"""Bounds of the answer timeout in seconds, for any window."""

MOST_EXCUSED = 2
"""Number of further timeouts that a server gets while its connection is active."""

LINGER = 0.2
"""Delay after the recovery window before checking whether a silent session expired."""


class MemberEvents(Protocol):
    """Events of a member."""

    def member_started(self, member: Member) -> None:
        """Report that the session is attached, for the first time or again."""

    def member_detached(self) -> None:
        """Report that the stream of an attached session has ended; the session may live."""

    def member_proven(self) -> None:
        """Report that the session has a new proof."""

    def member_refused(self, member: Member, failure: Message) -> None:
        """Report that the server has ended the stream, for a transient reason."""

    def member_failed(self, member: Member, error: Exception) -> None:
        """Report that an attempt to reach the server has failed."""

    def member_ended(self, member: Member, failure: Message | None) -> None:
        """Report the end of the session: by `stop` (``None``), or by the store."""


class Member:
    """A session on the server.

    Attributes:
        protocol: its state, and the messages to send.
        names: the semaphores for which it has a request.
        detached: whether its contact was lost, and is not re-established.
        stopping: whether it is ending, and accepts no more requests.
        over: done when the session on the server has ended, or is abandoned.
        idle_since: time at which its last request left, on the clock.
    """

    def __init__(
        self,
        database: Database,
        path: str,
        window: float,
        description: str,
        key: bytes,
        now: Callable[[], float],
        events: MemberEvents,
    ) -> None:
        self.protocol = YdbProtocol(path, window, description, key, now, self)
        self.names: set[str] = set()
        self.detached = False
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.idle_since = now()
        self._database = database
        self._now = now
        self._events = events
        self._stream: Stream | None = None
        self._beginning: asyncio.Timeout | None = None
        self._writing: asyncio.Task[None] | None = None
        self._to_write = asyncio.Event()
        self._activity = asyncio.Event()
        self._was_attached = False  # through the current stream
        self._abandoned = False
        self._failures = Failures("keeping a session stream", _log)
        self._silence = BackgroundTimer(
            self._loop, self._loop.time, self._check_silence, self._failures
        )
        self._silence_due = 0.0
        self._excused = 0
        self._proven_then = 0.0
        self._silent = False
        self._task = self._begin()

    def _begin(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(), name="tenure-ydb-session")
        task.add_done_callback(self._ran)
        return task

    def _ran(self, _: asyncio.Task[None]) -> None:
        """Go on in another task if `asyncio.run` has cancelled this one during a stop."""
        if self.stopping and not self._abandoned and self._task.done():
            self._task = self._begin()

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self.protocol.id

    @property
    def known(self) -> bool:
        """True if the server may know of the session."""
        return bool(self.id) or self._stream is not None

    @property
    def answer_timeout(self) -> float:
        """Timeout of the server's answers in seconds."""
        return min(max(self.protocol.window / 6, LEAST_TIMEOUT), MOST_TIMEOUT)

    def drop(self, name: str) -> None:
        """Record that its request for that semaphore has left the queue."""
        self.names.discard(name)
        self.idle_since = self._now()

    def renew(self) -> None:
        """Record that the program is active, and request a proof."""
        self.protocol.renew()
        self._activity.set()

    # Ending

    def stop(self) -> None:
        """End the session on the server. Safe to call twice."""
        self.stopping = True
        self.protocol.stop()
        self._activity.set()
        if self._task.done():
            self._ran(self._task)

    def abandon(self) -> None:
        """Open no further stream; the current one may end normally."""
        self._end()
        if not self.over.done():
            self.over.set_result(None)

    async def finish(self) -> None:
        """Wait until the stream has ended normally, or cut it off after a time."""
        self._end()
        if self._stream is not None:
            await asyncio.wait([self._task], timeout=self.answer_timeout)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def leave(self) -> None:
        """Detach, so that the session survives for its window; return when all output is sent."""
        self.protocol.renew()  # so that its window begins now
        self._end()
        if self._writing is not None and self._stream is not None:
            await asyncio.wait([self._writing], timeout=self.answer_timeout)
            stream = self._stream
            if stream is not None and self._writing is not None and self._writing.done():
                with contextlib.suppress(EngineUnavailable, TimeoutError):
                    async with asyncio.timeout(self.answer_timeout):
                        await stream.half_close()
        await self.finish()

    def _end(self) -> None:
        self._abandoned = True
        self._activity.set()
        self._to_write.set()
        self._silence.cancel()

    # YdbProtocolEvents

    def outgoing(self) -> None:
        """Write the messages of the protocol."""
        self._to_write.set()
        self._watch_silence()

    def started(self) -> None:
        """Report that the session is attached."""
        self.detached = False
        self._events.member_started(self)

    def proven(self, at: float) -> None:  # noqa: ARG002  the protocol knows
        """Report a proof."""
        self._events.member_proven()

    def refused(self, failure: Message) -> None:
        """Report that the server refused to attach."""
        self._events.member_refused(self, failure)

    def ended(self, failure: Message | None) -> None:
        """Stop, and report the end of the session."""
        self.abandon()
        self._events.member_ended(self, failure)

    # The task

    async def _run(self) -> None:
        failures = 0
        while not self._abandoned:
            self._was_attached = self._silent = False
            try:
                await self._connected()
            except (EngineUnavailable, AuthenticationFailed, TimeoutError) as error:
                self._events.member_failed(self, error)
            except Exception as error:  # the next stream may succeed
                self._failures.report(error)
            finally:
                self.protocol.lost()
            if self._was_attached:
                failures = 0
                if not self._abandoned:
                    self.detached = True
                    self._events.member_detached()
            await self._rest(backoff(failures, min(self.protocol.window / 10, LONGEST_PAUSE)))
            failures += 1

    async def _rest(self, pause: float) -> None:
        """Wait before the next attempt, and for a call of the program if it is inactive."""
        protocol = self.protocol
        until = self._loop.time() + pause
        while not self._abandoned:
            left = until - self._loop.time()
            if left <= 0:
                if protocol.may_attach or protocol.silent_for >= protocol.window + LINGER:
                    return
                left = protocol.window + LINGER - protocol.silent_for
            self._activity.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._activity.wait()

    async def _connected(self) -> None:
        """Run one stream from its first message to its end."""
        protocol = self.protocol
        async with asyncio.timeout(2 * self.answer_timeout):
            stream = await self._database.stream(self.answer_timeout)
        if self._abandoned:
            stream.cut()
            return
        self._stream = stream
        self._watch_silence()
        ended = False
        try:
            # Cutting off a stream that has not begun does not wake its waiter.
            async with asyncio.timeout(None) as self._beginning:
                with contextlib.suppress(EngineUnavailable):  # the server's answer has the reason
                    await stream.write(protocol.begin())
                message = await stream.read()
            self._beginning = None
            self._writing = asyncio.create_task(self._write(stream), name="tenure-ydb-write")
            while message is not None:
                protocol.receive(message)
                self._was_attached = self._was_attached or protocol.attached
                self._watch_silence()
                message = await stream.read()
            ended = True
        except (EngineUnavailable, TimeoutError):
            if self._silent:
                stream.condemn(EngineUnavailable(f"no answer within {self.answer_timeout:g} s"))
            raise
        finally:
            self._stream = self._beginning = None
            self._watch_silence()
            if not ended:
                stream.cut()
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.wait([self._writing])
                self._writing = None

    async def _write(self, stream: Stream) -> None:
        """Write all messages, until the stream fails; its reader is notified of that."""
        protocol = self.protocol
        with contextlib.suppress(EngineUnavailable):
            while True:
                self._to_write.clear()
                outgoing, protocol.outgoing = protocol.outgoing, []
                for message in outgoing:
                    await stream.write(message)
                if protocol.outgoing:
                    continue
                if self._abandoned:
                    return
                await self._to_write.wait()

    # Silence

    @property
    def _waits(self) -> bool:
        """True if an answer of the server is due."""
        if self._stream is None or self._abandoned:
            return False
        return self.protocol.awaits_proof or not self._was_attached

    def _watch_silence(self) -> None:
        """Start or stop the timer that drops a server which does not answer."""
        if not self._waits:
            self._excused = 0
            self._silence.cancel()
        elif not self._silence.armed:
            self._proven_then = self.protocol.last_proof
            self._silence_due = self._loop.time() + self.answer_timeout
            self._silence.by(self._silence_due)

    def _check_silence(self) -> None:
        assert self._stream is not None  # otherwise the timer is stopped
        if self._loop.time() - self._silence_due > self.answer_timeout / 2:
            self._watch_silence()  # the loop was stuck, and not the server
            return
        if self.protocol.last_proof > self._proven_then:
            self._excused = 0
            self._watch_silence()  # only later answers are due
            return
        active = self._stream.connection_active_since(self._silence_due - self.answer_timeout)
        if active and self._excused < MOST_EXCUSED:
            self._excused += 1
            self._watch_silence()
            return
        self._silent = not active
        if self._beginning is not None:
            self._beginning.reschedule(self._loop.time())
        else:
            self._stream.cut()
