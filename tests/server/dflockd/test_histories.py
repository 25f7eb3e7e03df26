"""Random histories: clients of two servers on one store, servers that end, a store that is cut off.

A client believes that it holds from hearing so until it releases, its connection is closed, or its
lease is over. However it goes, no more believe than the limit says, the tokens of a lock rise in
the order of belief, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from tenure.engines.contract import Engine
from tenure.engines.memory import MemoryEngine
from tenure.server.dflockd.listener import DflockdListener
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tests.server.dflockd.talking import Client, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

LENGTH = 300.0
"""Seconds of one history."""

LIMITS = {"job": 1, "other": 1, "pool": 2}


class Server:
    """A server that may be ended and started anew, at the same address.

    Attributes:
        listener: ``None`` while there is none.
    """

    listener: DflockdListener | None = None

    def __init__(
        self, name: str, clock: VirtualClock, delay: Callable[[], float] | None = None
    ) -> None:
        self._name = name
        self._clock = clock
        self._delay = delay
        self._way: Way | None = None
        self._place = ""

    async def life(self, random: Random, until: float) -> None:
        while self._clock.now() < until:
            inner = MemoryEngine(self._name, self._clock)
            engine: Engine = inner
            if self._delay is not None:
                self._way = Way(delay=self._delay)
                engine = FaultyEngine(inner, self._way)
            more = {"url": self._place} if self._place else {}
            async with serving(self._clock, engine=engine, **more) as listener:  # type: ignore[arg-type]
                self._place = listener.address
                self.listener = listener
                try:
                    await asyncio.sleep(min(random.uniform(20, 200), until - self._clock.now() + 1))
                finally:
                    self.listener = None
                    if self._way is not None:
                        self._way.mend()
                await asyncio.sleep(1)
            await asyncio.sleep(random.uniform(0, 5))

    async def cuts(self, random: Random, until: float) -> None:
        while self._clock.now() < until:
            await asyncio.sleep(random.uniform(5, 60))
            if self.listener is not None and self._way is not None:
                way = self._way
                way.cut()
                await asyncio.sleep(random.uniform(0, 100))
                if way is self._way and self.listener is not None:
                    way.mend()


class Beliefs:
    """Who believes what, and until when."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._held: dict[str, dict[str, tuple[Client, float]]] = {key: {} for key in LIMITS}
        self._last = dict.fromkeys(LIMITS, 0)
        self.number = 0

    def add(self, key: str, token: str, client: Client, until: float) -> None:
        believers = self._held[key]
        now = self._clock.now()
        for other, (whose, end) in list(believers.items()):
            if whose.is_closed() or end <= now:
                del believers[other]
        believers[token] = client, until
        assert len(believers) <= LIMITS[key], f"{key} at {now}: {believers}"
        fence = int(token[:16], 16)
        if LIMITS[key] == 1:
            assert fence >= self._last[key]
            self._last[key] = fence
        self.number += 1

    def remove(self, key: str, token: str) -> None:
        self._held[key].pop(token, None)


async def heard(client: Client, clock: VirtualClock, patience: float = 150.0) -> str:
    """The next line; empty when the connection is closed, or nothing came."""
    end = clock.now() + patience
    while b"\n" not in client.heard and not client.is_closed() and clock.now() < end:  # noqa: ASYNC110  (virtual time)
        await asyncio.sleep(0.05)
    line, _, client.heard = client.heard.partition(b"\n")
    return line.decode()


async def live(
    servers: list[Server], beliefs: Beliefs, random: Random, clock: VirtualClock, until: float
) -> None:
    """A program that takes and gives, and dies, and comes again."""
    while clock.now() < until:
        await asyncio.sleep(random.uniform(0, 3))
        listener = random.choice(servers).listener
        if listener is None:
            continue
        client = Client(listener)
        for _ in range(random.randint(1, 6)):
            await act(client, beliefs, random, clock)
            if client.is_closed():
                break
        client.abort()


async def act(client: Client, beliefs: Beliefs, random: Random, clock: VirtualClock) -> None:
    """One lock, or one of so many, however it is got and given back."""
    key = random.choice(list(LIMITS))
    prefix, limit = ("s", f" {LIMITS[key]}") if LIMITS[key] > 1 else ("", "")
    lease, timeout = random.choice([3, 10, 33, 50]), random.choice([0, 2, 20])
    if random.random() < 0.3:
        client.ask(f"{prefix}e", key, f"{limit} {lease}".strip())
        if (await heard(client, clock)) == "":
            return
        await asyncio.sleep(random.uniform(0, 5))
        if client.is_closed():
            return
        client.ask(f"{prefix}w", key, str(timeout))
    else:
        client.ask(f"{prefix}l", key, f"{timeout}{limit} {lease}")
        if random.random() < 0.1:
            await asyncio.sleep(random.uniform(0, 1))
            client.abort()
            return
    reply = await heard(client, clock)
    if not reply.startswith("ok "):
        return
    token = reply.split()[1]
    beliefs.add(key, token, client, clock.now() + lease - 0.1)
    while random.random() < 0.6 and not client.is_closed():
        await asyncio.sleep(random.uniform(0, 12))
        if client.is_closed():
            return
        renewed = random.choice([5, 33])
        client.ask("n", key, f"{token} {renewed}")
        asked = clock.now()
        if await heard(client, clock) != f"ok {renewed}":
            break
        beliefs.remove(key, token)
        if client.is_closed() or clock.now() > asked + renewed - 0.1:
            return
        beliefs.add(key, token, client, asked + renewed - 0.1)
    beliefs.remove(key, token)
    if not client.is_closed():
        client.ask("r", key, token)
        await heard(client, clock)


@pytest.mark.no_debug
@pytest.mark.parametrize("seed", [1, 5, 7, 15, 106])
async def test_no_more_believe_than_may(seed: int, clock: VirtualClock) -> None:
    random = Random(seed)
    name = f"histories-{seed}"
    store = MemoryEngine(name, clock)
    await store.open()
    far = Server(name, clock, lambda: random.uniform(0.001, 0.05))
    near = Server(name, clock)
    beliefs = Beliefs(clock)
    until = clock.now() + LENGTH
    async with asyncio.TaskGroup() as group:
        group.create_task(far.life(Random(seed + 1), until))
        group.create_task(near.life(Random(seed + 2), until))
        group.create_task(far.cuts(Random(seed + 3), until - 120))
        for number in range(6):
            group.create_task(
                live([far, near], beliefs, Random(f"{seed}-{number}"), clock, until - 20)
            )
    assert beliefs.number > 20
    await asyncio.sleep(400)
    for each in await store.list_semaphores("/dflockd", owners=True, waiters=True):
        assert each.owners == each.waiters == ()
    assert await store.list_sessions("/dflockd") == []
    await store.aclose()
