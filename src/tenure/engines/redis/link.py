"""The way to the server: connected, or connecting again; nothing that was asked gets lost.

Rules:

* One task owns the connections. It connects, prepares what is there (see `Client`), and waits
  until they are gone.
* What is asked while there is no connection waits for the next one, behind what was asked before
  and has not been answered. It is sent, in that order, when every session is attached anew.
* Attempts are repeated after a pause that grows, with some jitter.
* Where pushes do not come on the connection of the commands (RESP2) a second one hears them; the
  end of either is the end of both. Commands then wait until subscriptions are confirmed. It is
  made to say something now and then, since nobody would notice its end otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from functools import partial
from typing import Any, Protocol

from tenure.background import Failures, supervise
from tenure.engines.redis.commands import Batch, Operation, Pending, Refusal
from tenure.engines.redis.connecting import (
    Loading,
    Server,
    connect,
    connect_once,
    greet,
    translated,
)
from tenure.engines.redis.url import RedisUrl
from tenure.engines.redis.wire import Wire
from tenure.errors import EngineUnavailable, TenureError

__all__ = ["Client", "Link"]

_log = logging.getLogger("tenure")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
_LONGEST_LOADING_PAUSE = 0.5


class Client(Protocol):
    """Whose link it is."""

    def pushed(self, channel: bytes, message: bytes) -> None:
        """Something was published."""

    def lost(self, why: str) -> None:
        """The connection is gone; another one is being made."""

    async def prepare(self, wire: Wire, server: Server) -> None:
        """A connection is there: what must be so before anything else is asked."""

    def resumed(self) -> None:
        """What was asked is asked again; what may have been missed can be looked up."""


class Link:
    """The connections of one engine."""

    def __init__(self, address: RedisUrl, meta: str, client: Client) -> None:
        self._address = address
        self._meta = meta
        self._client = client
        self._wire: Wire | None = None
        self._ears: Wire | None = None  # the wire that hears pushes; often the same
        self._waiting: deque[Pending] = deque()
        self._gates = 0
        self._channels: dict[str, None] = {}
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._why = ""
        self._error: Exception | None = None
        self._progress = (0, 0)

    @property
    def trouble(self) -> str:
        """Why there is no connection, or was none the last time."""
        return self._why

    @property
    def failure(self) -> EngineUnavailable | None:
        """Why there is no connection at this moment; ``None`` while there is one."""
        if self._wire is not None:
            return None
        failure = EngineUnavailable(self._why)
        failure.__cause__ = self._error
        return failure

    @property
    def is_up(self) -> bool:
        return self._wire is not None

    async def open(self) -> None:
        """Connect for the first time. A server that loads its data is waited for.

        Raises:
            EngineUnavailable, AuthenticationFailed, Unsupported, EngineError, InvalidArgument
        """
        pause = _FIRST_PAUSE
        warned = False
        while True:
            try:
                await self._connect()
                break
            except Loading as error:
                level = logging.DEBUG if warned else logging.WARNING
                _log.log(level, "%s; waiting until it has", error)
                warned, self._why = True, str(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_LOADING_PAUSE)
        failures = Failures(f"{self._address.url}: keeping a connection", _log)
        self._task = asyncio.get_running_loop().create_task(supervise(self._keep, failures))

    async def aclose(self) -> None:
        """Disconnect. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        wire, self._wire = self._wire, None
        ears, self._ears = self._ears, None
        if wire is not None and ears is not None:
            wire.give_up("closed")
            ears.give_up("closed")
        self._waiting.clear()

    # What is asked

    def send(self, call: Pending) -> None:
        """Have something asked, now or when there is a connection."""
        if self._wire is None or self._gates:
            self._waiting.append(call)
        else:
            self._wire.send(call)

    def operate(self, operation: Operation[Any]) -> None:
        """Have an operation done, now or when there is a connection."""
        if self._wire is None or self._gates:
            self._waiting.append(Batch(operation.session, operation))
        else:
            self._wire.operate(operation)

    def subscribe(self, channel: str) -> None:
        """Hear of what is published there; what is sent from now on comes later than that."""
        self._channels[channel] = None
        ears = self._ears
        if ears is None:
            return
        if ears is not self._wire:
            self._gates += 1
        ears.subscribe(channel).add_done_callback(partial(self._confirmed, ears))

    def unsubscribe(self, channel: str) -> None:
        self._channels.pop(channel, None)
        if self._ears is not None:
            self._ears.unsubscribe(channel)

    def _confirmed(self, ears: Wire, told: asyncio.Future[Any]) -> None:
        error = told.exception()
        if ears is not self._ears:
            return  # a gate goes with its connection
        if error is not None:
            self._drop(str(error))
        elif ears is not self._wire:
            self._gates -= 1
            self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._wire is not None and not self._gates:
            self._wire.send(self._waiting.popleft())

    def check(self) -> bool:
        """Whether something has arrived since the last call, if anything was to arrive."""
        if self._wire is None or self._ears is None:
            return True
        before, self._progress = self._progress, (self._wire.progress, self._ears.progress)
        one, other = (now > then for now, then in zip(self._progress, before, strict=True))
        alive = (one or not self._wire.waits) and (other or not self._ears.waits)
        if self._ears is not self._wire and not self._ears.waits:
            self._ears.subscribe(next(iter(self._channels))).add_done_callback(_heard)
        return alive

    def give_up(self, why: str) -> None:
        """Take the connection for dead, and make another one."""
        self._drop(why)

    # The connections

    async def _keep(self) -> None:
        """See to it that there is a connection, until cancelled."""
        while True:
            if self._wire is not None:
                await self._gone.wait()
            pause = _FIRST_PAUSE
            while True:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                try:
                    await self._connect()
                    break
                except Exception as error:  # whatever it is, somebody may mend it
                    why = str(error)
                    passes = isinstance(error, EngineUnavailable) or (
                        isinstance(error, OSError) and not isinstance(error, TenureError)
                    )
                    level = logging.DEBUG if passes or why == self._why else logging.ERROR
                    _log.log(level, "%s: connecting again: %r", self._address.url, error)
                    self._why, self._error = why, error
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _connect(self) -> None:
        self._gone.clear()
        made: list[Wire] = []

        def lost(why: str, unanswered: list[Pending]) -> None:
            self._waiting.extendleft(reversed(unanswered))
            if self._wire in made:
                self._drop(why)
            for each in made:
                each.give_up(why)

        try:
            wire, server = await connect(self._address, self._meta, self._client.pushed, lost)
            made.append(wire)
            ears = wire
            if server.protocol == 2:
                ears = await connect_once(
                    self._address, server.place, self._meta, self._client.pushed, lost
                )
                made.append(ears)
            await self._prepare(wire, ears, server)
        except BaseException as error:
            for each in made:
                each.give_up("it could not be prepared")
            if isinstance(error, OSError) and not isinstance(error, TenureError):
                raise EngineUnavailable(f"{self._address.url}: {error}") from error
            raise
        self._wire, self._ears = wire, ears
        self._gates = 0
        self._progress = (0, 0)
        try:
            self._send_waiting()
            self._client.resumed()
        except Exception as error:
            self._drop(f"it could not be used: {error!r}")
            raise

    async def _prepare(self, wire: Wire, ears: Wire, server: Server) -> None:
        try:
            async with asyncio.timeout(self._address.connect_timeout):
                if ears is not wire:
                    await greet(ears, self._address, protocol=2)
                await self._client.prepare(wire, server)
                heard: set[str] = set()
                while missing := [each for each in self._channels if each not in heard]:
                    heard.update(missing)  # and others are asked for meanwhile
                    await ears.subscribe(*missing)
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._address.url} does not answer") from error
        except Refusal as refusal:
            raise translated(self._address, refusal) from refusal
        if wire.over or ears.over:
            raise EngineUnavailable(f"{self._address.url} closed the connection")

    def _drop(self, why: str) -> None:
        wire, ears = self._wire, self._ears
        if wire is None or ears is None:
            return
        self._wire = self._ears = None
        self._gates = 0
        self._why, self._error = why, None
        self._gone.set()
        wire.give_up(why)
        ears.give_up(why)
        self._client.lost(why)


def _heard(told: asyncio.Future[Any]) -> None:
    """It has been answered, or the connection is gone."""
    told.exception()
