"""All watches of an engine, on one stream to the current member.

Rules:

* One task owns the stream: it opens the stream, begins all watches on it, reads it, and opens
  another one to the current member when it ends.
* A watch continues after the last revision that it has received. If that was compacted, it
  continues at the oldest available revision, and its owner is notified of the gap.
* A watch of a key that was deleted for good is not cancelled individually. When there are many, a
  new stream without them replaces the old one.
* Silence does not prove that nothing has changed. A stream is up only after the member has answered
  on it. The member ends it when it has no leader, and the stream is moved if the member does not
  answer pings.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenure.background import Failures
from tenure.engines._kit.reconnect import backoff
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import Lost, WatchAnswer, WatchEvent, trouble_of
from tenure.engines.etcd.grpc import CallFailed, Code, StreamCall
from tenure.engines.etcd.members import Members
from tenure.errors import TenureError

_log = logging.getLogger("tenure")

_SENTINEL = 1
"""Number of the watch whose start shows that the stream is up."""
_LONGEST_PAUSE = 1.0
_MOST_SPENT = 512
"""Largest number of watches of deleted keys on a stream, until another one replaces it."""


@dataclass(slots=True, eq=False)
class EtcdWatch:
    """One watch.

    Attributes:
        following: the first revision that it has not received; 0 until it has begun.
        known: the revision at which the state was read, if it starts at the current revision.
        once: whether the key is never created again after its deletion.
        spent: whether its key was deleted for good.
    """

    number: int
    key: bytes
    end: bytes
    following: int
    known: int
    puts: bool
    once: bool
    happened: Callable[[Sequence[WatchEvent]], None]
    missed: Callable[[], None]
    spent: bool = False

    def request(self) -> bytes:
        """Return the message that begins or continues the watch."""
        return wire.watch(self.number, self.key, self.end, self.following, puts=self.puts)


class Watching:
    """The stream of watches.

    Args:
        up: called when it works, initially and after each interruption.
        down: called with the reason when it is interrupted.
    """

    def __init__(
        self,
        members: Members,
        sentinel: bytes,
        timeout: float,
        up: Callable[[], None],
        down: Callable[[str], None],
    ) -> None:
        """Start without a stream; `open` starts it."""
        self._members = members
        self._timeout = timeout
        self._up = up
        self._down = down
        self._sentinel = wire.watch(_SENTINEL, sentinel, b"", 0, puts=True)
        self._numbers = itertools.count(_SENTINEL + 1)
        self._watches: dict[int, EtcdWatch] = {}
        self._call: StreamCall | None = None
        self._member_turn = -1
        self._spent = 0
        self._task: asyncio.Task[None] | None = None
        self._failures = Failures("reading the stream of watches", _log)
        self.is_up = False

    def open(self) -> None:
        """Start the task that keeps a stream open."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="tenure-etcd-watch")

    async def aclose(self) -> None:
        """End the stream. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._watches.clear()

    # Watches

    def add(
        self,
        key: bytes,
        end: bytes,
        following: int,
        happened: Callable[[Sequence[WatchEvent]], None],
        missed: Callable[[], None],
        *,
        puts: bool = True,
        at_once: bool = False,
        once: bool = False,
    ) -> EtcdWatch:
        """Watch a key, or a range, from the revision `following`.

        A watch that begins in the past is up to 0.1 s late until it has caught up. With `at_once`
        it begins at the current revision, and `missed` is called if a change may have been missed.
        """
        number = next(self._numbers)
        known, following = (following - 1, 0) if at_once else (0, following)
        watch = EtcdWatch(number, key, end, following, known, puts, once, happened, missed)
        self._watches[watch.number] = watch
        self._send(watch.request())
        return watch

    def remove(self, watch: EtcdWatch) -> None:
        """End a watch. Safe to call twice."""
        if self._watches.pop(watch.number, None) is None:
            return
        if watch.spent:
            self._spent += 1  # cheaper than two messages
        else:
            self._send(wire.unwatch(watch.number))

    def _send(self, request: bytes) -> None:
        if self._call is not None:  # otherwise when there is a stream
            self._call.write(request)

    def moved(self) -> None:
        """Leave the stream when another member has become the current one."""
        if self._call is not None and self._member_turn != self._members.turn:
            self._call.cancel("the member was left")

    # The stream

    async def _keep(self) -> None:
        failures = 0  # in a row
        while True:
            turn = self._members.turn
            try:
                await self._converse(turn)
                continue
            except (Lost, TimeoutError, TenureError) as error:
                why = str(error) or "the stream of watches does not begin"
            except Exception as error:  # another stream begins where this one ended
                self._failures.report(error)
                why = repr(error)
            if self.is_up:
                self.is_up = False
                failures = 0
                self._down(why)
            self._members.leave(turn, why)
            await asyncio.sleep(backoff(failures, _LONGEST_PAUSE))
            failures += 1

    async def _converse(self, turn: int) -> None:
        call = await self._members.converse(turn, wire.WATCH, ("hasleader", "true"))
        self._spent = 0
        self._member_turn = turn
        self._call = call
        try:
            call.write(self._sentinel)
            for watch in self._watches.values():
                call.write(watch.request())
            async with asyncio.timeout(self._timeout):
                while not self._process(await self._read(call)):
                    pass
            if not self.is_up:
                self.is_up = True
                self._up()
            while self._spent < max(_MOST_SPENT, 4 * len(self._watches)):
                self._process(await self._read(call))
        finally:
            self._call = None
            call.cancel()

    async def _read(self, call: StreamCall) -> WatchAnswer:
        try:
            data = await call.read()
        except CallFailed as failed:
            if failed.code is not Code.CANCELLED:
                self._members.expire()
            trouble = trouble_of(failed)
            raise trouble if isinstance(trouble, Lost) else Lost(str(trouble)) from failed
        if data is None:
            raise Lost("the member ended the stream of watches")
        return answers.read_watch(data)

    def _process(self, answer: WatchAnswer) -> bool:
        """Pass on a message; return true if it shows that the stream is up."""
        if answer.number == _SENTINEL and answer.created and not answer.canceled:
            return True
        watch = self._watches.get(answer.number)
        if answer.canceled and (watch is not None or answer.number in {_SENTINEL, -1}):
            self._end_of(watch, answer)
        elif watch is not None and answer.created and not watch.following:
            if answer.revision > watch.known:
                watch.missed()
            watch.following = answer.revision + 1
        elif watch is not None and answer.events:
            watch.spent = watch.once and answer.events[-1].deleted
            watch.happened(answer.events)
            watch.following = answer.events[-1].kv.modified + 1  # after `happened`, which may fail
        return False

    def _end_of(self, watch: EtcdWatch | None, answer: WatchAnswer) -> None:
        """Continue a watch that the member has ended, after a gap."""
        if watch is None or not answer.compacted:
            self._members.expire()
            raise Lost(answer.reason or "the member ended a watch")
        # etcd does not free the number of a watch that it has ended: it continues under another.
        self._send(wire.unwatch(watch.number))
        del self._watches[watch.number]
        watch.number = next(self._numbers)
        self._watches[watch.number] = watch
        watch.following = answer.compacted
        self._send(watch.request())
        watch.missed()
