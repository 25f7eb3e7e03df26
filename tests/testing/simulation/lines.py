"""dflockd's protocol in simulated histories: each process is a client of tenure's listener.

Both ends are the real ones, the engine of ``dflockd://`` and the listener's connections and locks.
Only sockets are simulated: bytes travel over the way of `served`, late and in order.

* The plan is one that this engine can carry out: mutexes and one token at a time, no data.
* A hold dies with its connection, and its holder believes until it is told. So whatever a process
  has may be lost from when its way is lost, and the history says so.
* Of a machine that dies unnoticed the server learns a while later, as from TCP's keepalive.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tenure.engines.contract import Engine
from tenure.engines.dflockd import DflockdEngine
from tenure.engines.dflockd.url import parse
from tenure.engines.memory.engine import MemoryEngine
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.dflockd.listener import DflockdListener
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import Limits
from tenure.server.listener import Door, Greeting
from tenure.testing.faults import FaultyEngine, Way
from tenure.testing.history import Revokes
from tenure.testing.simulation.plan import Plan, PlanStep
from tenure.testing.simulation.process import Incarnation
from tenure.testing.simulation.world import World
from tests.testing.simulation.served import End, Line, ServedWorld

ADDRESS = "dflockd://simulated:6388"

STORE_DELAY = 0.003
"""Seconds that the store takes to hear and to be heard, in every second history; else none."""

KEEPALIVE = 3.0
"""Seconds after which the server learns that a machine is dead."""


class LinesWorld(ServedWorld):
    """A world in which the store has a listener for dflockd's clients."""

    lines: DflockdListener

    def __init__(self, plan: Plan) -> None:
        super().__init__(plain(plan))

    async def _prepare(self) -> None:
        engine: Engine = MemoryEngine(self.store, self.server.clock)
        if self.plan.seed % 2:
            engine = FaultyEngine(engine, Way(lambda: STORE_DELAY))
        await engine.open()
        context = Context(engine, Limits(), Authenticator(), logging.getLogger("tenure.simulated"))
        self.lines = Doorless(context, ADDRESS, options=DflockdOptions(node=DEFAULT_NODE))
        await self.lines.open()
        await World._prepare(self)

    def connection(self, peer: str) -> asyncio.Protocol:
        return self.lines._connection(Greeting(self.lines.context, peer))

    def reach(self, life: Incarnation) -> SimulatedProgram:  # type: ignore[override]
        return SimulatedProgram(self, life)


class Doorless(DflockdListener):
    """A listener that listens nowhere, and whose sessions are called as their processes are."""

    async def open(self) -> None:
        await self.context.counts.semaphores.count_once()
        await self.context.engine.create_node(self.options.node, NodeConfig(), exist_ok=True)
        self._door = Door(self.context, [], self._connection, None, lambda _: b"")
        self._start_timers()

    def describe(self, peer: str) -> str:
        return peer or "of nobody"


class SimulatedProgram(DflockdEngine):
    """The engine of one simulated process."""

    def __init__(self, world: LinesWorld, life: Incarnation) -> None:
        self._world = world
        self._line = Sockets(world, life)
        super().__init__(parse(ADDRESS), life.clock)

    def die(self, *, noticed: bool) -> None:
        scheduler = self._world.scheduler
        later = 0.0 if noticed else KEEPALIVE
        scheduler.call_at(scheduler.now + later, self._line.leave)


class Sockets(Line):
    """A process's connections, as sockets; its loop knows of them."""

    def __init__(self, world: LinesWorld, life: Incarnation) -> None:
        super().__init__(world, life)
        self._numbers = itertools.count(1000)
        self._open: dict[int, Socket] = {}
        loop: Any = life.loop
        loop.sockets = self
        loop.add_reader = self._add_reader
        loop.remove_reader = self._remove_reader
        loop.remove_writer = lambda _: False  # a socket here has always room

    async def connect(self) -> Socket:
        """One more."""
        made = Socket(next(self._numbers), self._open)
        await self.dial(None, made)
        return made

    def _add_reader(self, number: int, callback: Callable[[], None]) -> None:
        self._open[number].read_by(callback)

    def _remove_reader(self, number: int) -> bool:
        known = self._open.get(number)
        if known is not None:
            known.read_by(None)
        return known is not None

    def _reset(self) -> None:
        self._world.records.append(Revokes(self._world.scheduler.now, None, self._label))
        super()._reset()


class Socket(asyncio.Protocol):
    """What the engine takes for a socket that does not block."""

    def __init__(self, number: int, open_ones: dict[int, Socket]) -> None:
        self._number = number
        self._open = open_ones
        self._open[number] = self
        self._end: End
        self._arrived = bytearray()
        self._lost = False
        self._error: Exception | None = None
        self._reader: Callable[[], None] | None = None

    # What the engine does with it

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes) -> int:
        if self._lost:
            raise self._error or BrokenPipeError("the other side has closed it")
        self._end.write(data)
        return len(data)

    def recv(self, most: int) -> bytes:
        if self._arrived:
            data = bytes(self._arrived[:most])
            del self._arrived[:most]
            return data
        if not self._lost:
            raise BlockingIOError
        if self._error is not None:
            raise self._error
        return b""

    def shutdown(self, _: int) -> None:
        if self._lost:
            raise OSError("it is not connected")
        self._end.send(self._end.peer.hear_the_end)

    def close(self) -> None:
        self._open.pop(self._number, None)
        self._reader = None
        self._end.hang_up()

    # What happens to it

    def read_by(self, callback: Callable[[], None] | None) -> None:
        self._reader = callback
        self._notify()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, End)
        self._end = transport

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._error = exc
        self._notify()

    def _notify(self) -> None:
        if self._reader is not None and (self._arrived or self._lost):
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        if self._reader is not None and (self._arrived or self._lost):
            self._reader()


async def connected(*_: object) -> Socket:
    """In the place of what makes the engine's sockets: one of the process that asks."""
    loop: Any = asyncio.get_running_loop()
    sockets: Sockets = loop.sockets
    return await sockets.connect()


def plain(plan: Plan) -> Plan:
    """The same plan, as far as this engine can carry it out."""
    return replace(
        plan,
        processes=tuple(
            replace(
                process,
                resumable=False,
                tasks=tuple(tuple(map(_plain, task)) for task in process.tasks),
            )
            for process in plan.processes
        ),
        faults=tuple(each for each in plan.faults if each.kind != "resize"),
    )


def _plain(step: PlanStep) -> PlanStep:
    kind = step.kind
    if kind in {"lock", "try", "close"}:
        return step
    if kind in {"acquire", "ticket"}:
        return replace(step, count=1)
    if kind == "campaign":
        return replace(step, kind="lock")
    return replace(step, kind="lock", name="b" if step.name == "config" else "c", hold=0.01)
