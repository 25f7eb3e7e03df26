"""The engines that the corpus is checked on, and what a check gets to act on: a `Scene`.

`memory` lives on virtual time: what would wait for ever fails at once. The others live in real
time, where a check is given a patience: long for a sound tenure, so that a busy machine fails
nobody, and short with a defect planted, where most checks wait in vain.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from tenure._client.client import Client
from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.testing.clock import VirtualClock, VirtualLoop
from tenure.testing.conformance import Stores
from tests.engines.stores import VARIANTS
from tests.primitives.helpers import World
from tests.server.network import Network

T = TypeVar("T")

PATIENCE = 30.0
"""Real seconds after which what a check waits for is taken not to come."""
SHORT_PATIENCE = 1.0
"""The same, with a defect planted."""


class SystemClockThatSteps(SystemClock):
    """The machine's clocks, as if it had been suspended, and with a wall clock that can be set."""

    suspended = 0.0
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.suspended

    def wall(self) -> float:
        return super().wall() + self.ahead

    def set_wall(self, wall: float) -> None:
        self.ahead = wall - super().wall()

    def advance(self, seconds: float) -> None:
        """The machine has been suspended for so long; no timer of a loop knows of it."""
        self.suspended += seconds


SUBJECTS = tuple(each for each in VARIANTS if each.title)


class Scene(World):
    """A store, the clients that a check connects to it, and how long it waits."""

    def __init__(self, url: str, clock: Clock, patience: float, stores: Stores) -> None:
        super().__init__(clock, url, stores.connector)
        self._networks: list[Network] = []
        self.patience = 120.0 if clock.virtual else patience
        self.window = 10.0 if clock.virtual else 2.0

    def afar(self) -> tuple[Client, Network]:
        """A program's way to the server of the store, over a network that a test can make bad."""
        place = urlsplit(self.url)
        assert place.port is not None, "it has no server"
        port: int = place.port
        network = Network(lambda: port)
        network.start()
        self._networks.append(network)
        url = place._replace(netloc=f"127.0.0.1:{network.port}").geturl()
        return Client(connect_engine(url, self.clock), self.clock), network

    async def close(self) -> None:
        for network in self._networks:
            network.stop()
        await super().close()

    async def soon(self, operation: Awaitable[T]) -> T:
        """The result of what must not take for ever."""
        async with asyncio.timeout(self.patience):
            return await operation

    async def eventually(self, so: Callable[[], Awaitable[bool]], what: str) -> None:
        """Ask until it is so."""
        try:
            async with asyncio.timeout(self.patience):
                while not await so():  # noqa: ASYNC110  nothing tells when to look again
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not within {self.patience:g} s: {what}") from None

    async def queued(self, name: str, number: int) -> None:
        """Wait until so many requests stand in a queue, owners included."""

        async def so() -> bool:
            return len(await self.queue(name)) == number

        await self.eventually(so, f"{number} in the queue for {name!r}")

    async def in_vain(self) -> None:
        """Stay for longer than what is about to happen takes."""
        await asyncio.sleep(self.patience)

    async def reopen(self) -> None:
        """Have nobody use the store for a moment; clients are closed already."""
        await self._eye.aclose()
        self._eye = self.client()
        await self.open()

    def suspend(self, seconds: float) -> None:
        """The machine was suspended just now, for so long."""
        assert isinstance(self.clock, VirtualClock | SystemClockThatSteps)
        self.clock.advance(seconds)

    def set_wall(self, wall: float) -> None:
        assert isinstance(self.clock, VirtualClock | SystemClockThatSteps)
        self.clock.set_wall(wall)


Check: TypeAlias = Callable[[Scene], Coroutine[Any, Any, None]]


def run(check: Check, stores: Stores, *, planted: bool) -> None:
    """One check on a store and an event loop of its own.

    Args:
        planted: a defect was planted: what is left behind, and errors that nobody is told of,
            are the defect's; without one they fail the check.
    """
    clock: Clock = VirtualClock() if stores.virtual else SystemClockThatSteps()
    unheard: list[str] = []

    def new_loop() -> asyncio.AbstractEventLoop:
        if isinstance(clock, VirtualClock):
            return VirtualLoop(clock, horizon=3600)
        return asyncio.new_event_loop()

    def hear(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        unheard.append(f"{context['message']}: {context.get('exception')!r}")

    async def on_a_scene(url: str) -> None:
        asyncio.get_running_loop().set_exception_handler(hear)
        scene = Scene(url, clock, SHORT_PATIENCE if planted else PATIENCE, stores)
        await scene.open()
        try:
            async with asyncio.timeout(None if clock.virtual else 2 * scene.patience + 10):
                await check(scene)
        finally:
            await scene.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"

    with stores.empty() as url, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(on_a_scene(url))
    gc.collect()  # a task in a cycle tells of its error only when it is collected
    assert planted or not unheard, f"errors that nobody was told of: {unheard}"
