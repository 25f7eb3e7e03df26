"""All watches of an engine, on one stream to the current member.

Rules:

* One task owns the stream: it opens it, begins on it whatever is watched, reads, and opens another
  one, at the current member, when it ends.
* A watch goes on where it was: after the last revision that it has received. Where that has been
  compacted it begins at what there still is, and its owner is notified of the gap, so that the
  state is read again.
* A watch of a key that has been deleted for good is not ended by itself: when there are many, a new
  stream takes the place of the old one, without them.
* Silence does not show that nothing happens: a stream is only up when the member has
  answered on it, the member ends it when it has no leader, and keep-alives that are not answered
  make another member the current one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenure.background import Failures
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import WatchAnswer, WatchEvent
from tenure.engines.etcd.calls import CallFailed, Code, StreamCall
from tenure.engines.etcd.members import Lost, Members, trouble_of
from tenure.errors import TenureError

__all__ = ["EtcdWatch", "Watching"]

_log = logging.getLogger("tenure")

_SENTINEL = 1
"""The watch whose beginning tells that the stream is up."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
_MOST_SPENT = 512
"""How many watches of keys that are gone a stream may carry before another one takes its place."""


@dataclass(slots=True, eq=False)
class EtcdWatch:
    """One watch.

    Attributes:
        following: the revision from which on it is yet to hear; 0 until it has begun.
        known: the revision at which the state was read, if it is to begin at once.
        once: the key does not come back when it has been deleted.
        spent: nothing will happen any more.
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
        """Build the message that begins it, or continues it."""
        return wire.watch(self.number, self.key, self.end, self.following, puts=self.puts)


class Watching:
    """The stream of watches.

    Args:
        up: called when it works, at first and after each interruption.
        down: called when it does not work any more.
    """

    def __init__(
        self,
        members: Members,
        sentinel: bytes,
        patience: float,
        up: Callable[[], None],
        down: Callable[[str], None],
    ) -> None:
        """Start without a stream; `open` starts it."""
        self._members = members
        self._patience = patience
        self._up = up
        self._down = down
        self._sentinel = wire.watch(_SENTINEL, sentinel, b"", 0, puts=True)
        self._numbers = itertools.count(_SENTINEL + 1)
        self._watches: dict[int, EtcdWatch] = {}
        self._call: StreamCall | None = None
        self._turn = -1
        self._spent = 0
        self._task: asyncio.Task[None] | None = None
        self._failures = Failures("reading the stream of watches", _log)
        self.is_up = False

    def open(self) -> None:
        """Begin to keep a stream."""
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
        """EtcdWatch a key, or a range, from the revision `following` on.

        One that begins in the past is a tenth of a second late until it has caught up. With
        `at_once` it begins in the present instead, and `missed` is called if anything may have
        happened in between.
        """
        number = next(self._numbers)
        known, following = (following - 1, 0) if at_once else (0, following)
        watch = EtcdWatch(number, key, end, following, known, puts, once, happened, missed)
        self._watches[watch.number] = watch
        self._say(watch.request())
        return watch

    def remove(self, watch: EtcdWatch) -> None:
        """End a watch. Safe to call twice."""
        if self._watches.pop(watch.number, None) is None:
            return
        if watch.spent:
            self._spent += 1  # which is cheaper than two messages
        else:
            self._say(wire.unwatch(watch.number))

    def _say(self, request: bytes) -> None:
        if self._call is not None:  # or else it is said when there is a stream
            self._call.write(request)

    def moved(self) -> None:
        """Another member has become the current one."""
        if self._call is not None and self._turn != self._members.turn:
            self._call.cancel("the member was left")

    # The stream

    async def _keep(self) -> None:
        pause = 0.0
        while True:
            turn = self._members.turn
            try:
                await self._converse(turn)
                continue
            except (Lost, TimeoutError, TenureError) as error:
                why = str(error) or "the stream of watches does not begin"
            except Exception as error:  # another stream begins where this one was
                self._failures.report(error)
                why = repr(error)
            if self.is_up:
                self.is_up = False
                pause = _FIRST_PAUSE
                self._down(why)
            else:
                pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._members.leave(turn, why)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _converse(self, turn: int) -> None:
        call = await self._members.converse(turn, wire.WATCH, ("hasleader", "true"))
        self._spent = 0
        self._turn = turn
        self._call = call
        try:
            call.write(self._sentinel)
            for watch in self._watches.values():
                call.write(watch.request())
            async with asyncio.timeout(self._patience):
                while not self._hear(await self._read(call)):
                    pass
            if not self.is_up:
                self.is_up = True
                self._up()
            while self._spent < max(_MOST_SPENT, 4 * len(self._watches)):
                self._hear(await self._read(call))
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

    def _hear(self, answer: WatchAnswer) -> bool:
        """Pass on what the member says; whether it says that the stream is up."""
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
            watch.following = answer.events[-1].kv.modified + 1  # what failed comes again
        return False

    def _end_of(self, watch: EtcdWatch | None, answer: WatchAnswer) -> None:
        """The member has ended a watch."""
        if watch is None or not answer.compacted:
            self._members.expire()
            raise Lost(answer.reason or "the member ended a watch")
        # etcd keeps the number of a watch that it has ended: it goes on under another one.
        self._say(wire.unwatch(watch.number))
        del self._watches[watch.number]
        watch.number = next(self._numbers)
        self._watches[watch.number] = watch
        watch.following = answer.compacted
        self._say(watch.request())
        watch.missed()
