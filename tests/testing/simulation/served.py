"""The native protocol in simulated histories: each process reaches the store through a server.

Both ends of the protocol are the real ones, tenure's engine here and the server's connections and
hosted sessions there. Only the bytes between them travel over a simulated way: late, in order, and
not at all while it is cut; when it is lost, both ends learn that the connection is reset.

There is no thread beside a process's loop, so that one that stalls beyond its window loses its
session.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from tenure.engines._kit.url import Endpoint
from tenure.engines.memory.engine import MemoryEngine
from tenure.engines.native import NativeEngine
from tenure.engines.native.url import parse
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.limits import Limits
from tenure.server.listener import Door, Greeting
from tenure.server.native import NativeListener
from tenure.server.native.connection import NativeServerConnection
from tenure.server.sessions.registry import SessionRegistry
from tenure.testing.simulation.plan import Plan
from tenure.testing.simulation.process import Incarnation
from tenure.testing.simulation.world import World

ADDRESS = "tenure://simulated:7070"


class ServedWorld(World):
    """A world in which the store has a server, and the processes are its clients."""

    listener: NativeListener

    def __init__(self, plan: Plan) -> None:
        random.seed(plan.seed)  # the engine's jitter
        super().__init__(plan)

    async def _prepare(self) -> None:
        engine = MemoryEngine(self.store, self.server.clock)
        await engine.open()
        log = logging.getLogger("tenure.simulated")
        context = Context(engine, Limits(), Authenticator(), log)
        self.listener = Doorless(context, ADDRESS)
        await self.listener.open()
        await super()._prepare()

    def connection(self, peer: str) -> asyncio.Protocol:
        """The server's part of a connection that is made."""
        return NativeServerConnection(self.listener, Greeting(self.listener.context, peer))

    def reach(self, life: Incarnation) -> SimulatedClient:
        return SimulatedClient(self, life)


class Doorless(NativeListener):
    """A listener that listens nowhere."""

    async def open(self) -> None:
        self.registry = SessionRegistry.share(self.context)
        self._door = Door(
            self.context, [], lambda each: NativeServerConnection(self, each), None, lambda _: b""
        )
        self._tick()


class End(asyncio.Transport):
    """One end of a connection: what its protocol writes to, and what hears for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol | None = None
        self.peer: End
        self.send: Any  # carries a message to the peer's loop
        self.over = False
        self.hung_up = False
        self._loop = loop
        self._reading = True
        self._kept: list[bytes] = []

    def write(self, data: Any) -> None:
        if not self.over:
            heard = bytes(data)
            self.send(lambda: self.peer.hear(heard))

    def hear(self, data: bytes) -> None:
        if self.hung_up:
            self.send(self.peer.lose)
        if self.over or self.protocol is None:
            return
        if self._reading:
            self.protocol.data_received(data)
        else:
            self._kept.append(data)

    def hear_the_end(self) -> None:
        """The peer says nothing more."""
        if not self.over and self.protocol is not None and not self.protocol.eof_received():
            self.close()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It keeps nothing that can be sent."""

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        kept, self._kept = self._kept, []
        for data in kept:
            self._loop.call_soon(self.hear, data)

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        if not self.over:
            self.send(self.peer.lose)
            self.lose()

    abort = close

    def hang_up(self) -> None:
        """Close it as a socket is: the peer sees an end, and is reset if it says anything more."""
        if not self.over:
            self.hung_up = True
            self.send(self.peer.hear_the_end)
            self.lose()

    def lose(self, error: Exception | None = None) -> None:
        """Its connection is lost."""
        if not self.over:
            self.over = True
            if self.protocol is not None:
                self._loop.call_soon(self.protocol.connection_lost, error)


class Line:
    """A process's connections, over its way."""

    def __init__(self, world: ServedWorld, life: Incarnation) -> None:
        self._world = world
        self._loop = life.loop
        self._label = life.label
        self._way = way = life.way
        way.there.loop, way.back.loop = world.server, life.loop
        way.changed = self._told
        self._dialling: set[asyncio.Future[None]] = set()
        self._ends: list[tuple[End, End]] = []

    async def dial(self, _: Endpoint | None, protocol: asyncio.Protocol) -> None:
        if self._way.lost:
            raise ConnectionRefusedError("the way is lost")
        here, there = End(self._loop), End(self._world.server)
        here.peer, there.peer = there, here
        here.send, there.send = self._way.there.send, self._way.back.send
        made: asyncio.Future[None] = self._loop.create_future()

        def accept() -> None:
            if not there.over:
                there.protocol = self._world.connection(self._label)
                there.protocol.connection_made(there)
                there.send(accepted)

        def accepted() -> None:
            if not made.done():
                made.set_result(None)

        self._ends = [each for each in self._ends if not (each[0].over and each[1].over)]
        self._ends.append((here, there))
        self._dialling.add(made)
        self._way.there.send(accept)
        try:
            await made
        except BaseException:
            here.close()
            raise
        finally:
            self._dialling.discard(made)
        if here.over:  # since the answer arrived
            raise ConnectionResetError("the way is lost")
        here.protocol = protocol
        protocol.connection_made(here)

    def _told(self, there: bool) -> None:
        if not there:
            self._reset()

    def _reset(self) -> None:
        """Every connection is lost, with all that was on its way; both sides learn it."""
        self._way.there.clear()
        self._way.back.clear()
        error = ConnectionResetError("the way is lost")
        for here, there in self._ends:
            here.lose(error)
            there.lose(error)
        for made in self._dialling:
            if not made.done():
                made.set_exception(error)

    def leave(self) -> None:
        """The process is dead, and its machine says so."""
        for _, there in self._ends:
            there.lose()


class SimulatedClient(NativeEngine):
    """The engine of one simulated process."""

    def __init__(self, world: ServedWorld, life: Incarnation) -> None:
        self._line = Line(world, life)
        super().__init__(parse(ADDRESS), life.clock, self._line.dial)

    def die(self, *, noticed: bool) -> None:
        if noticed:
            self._line.leave()
