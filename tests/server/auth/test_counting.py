"""Counters against the store: after every step of a random history they say what the store has."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tenure.engines.contract import Attach as Attaching
from tenure.engines.contract import EngineSession, Removal, SessionEvents
from tenure.engines.memory import MemoryEngine
from tenure.errors import SessionExpired, TenureError
from tenure.model import EPHEMERAL_LIMIT, NodeConfig, Recovered
from tenure.server.auth.accounts import Account
from tenure.server.auth.guard import Guard
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Identity
from tenure.server.limits import Limits
from tenure.testing import VirtualClock

pytestmark = pytest.mark.usefixtures("loop_factory")

NODES = ("/default", "/a", "/b")
NAMES = ("m", "n", "o")
STEPS = 200
WINDOW = 20.0


class Quiet:
    """Says nothing more of a session that was detached; an engine need not."""

    def __init__(self, events: SessionEvents) -> None:
        self.events = events
        self.left = False
        self.session: Any = None

    def ended(self, error: SessionExpired) -> None:
        if not self.left:
            self.events.ended(error)

    async def detach(self) -> None:
        self.left = True
        await self.session.detach()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.events, name)


class QuietEngine(MemoryEngine):
    """A store that tells of sessions only while they are attached."""

    async def attach(self, how: Attaching, events: SessionEvents) -> Any:
        quiet = Quiet(events)
        quiet.session = await super().attach(how, quiet)
        return QuietSession(quiet)


class QuietSession:
    """A session of such a store."""

    def __init__(self, quiet: Quiet) -> None:
        self.detach = quiet.detach
        self._session = quiet.session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Program:
    """A program with one session: `SessionEvents`, and what it does next."""

    def __init__(self, engine: GuardedEngine, node: str) -> None:
        self.engine = engine
        self.node = node
        self.session: EngineSession | None = None
        self.over = False
        self.hold = 0
        self.holds: list[int] = []
        self.stops: list[Callable[[], None]] = []

    async def attach(self, number: int | None = None) -> None:
        how = Attaching(self.node, WINDOW, "", "window", b"k", number, assume_dead=True)
        self.session = await self.engine.attach(how, self)
        self.hold = self.session.attach_number * 1000

    def leave(self) -> None:
        """The session is over here; a client may end its watches then, or before, or not at all."""
        self.over = True

    def watching(self, keep: int) -> None:
        while len(self.stops) > keep:
            stop = self.stops.pop()
            stop()
            stop()

    # SessionEvents

    def proven(self, at: float) -> None: ...

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.holds = [each.request_id for each in requests]

    def granted(self, hold: int, order_id: int | None) -> None: ...

    def removed(self, hold: int, why: Removal) -> None: ...

    def detached(self, cause: BaseException | None = None) -> None: ...

    def attached(self) -> None: ...

    def ended(self, error: SessionExpired) -> None:
        self.leave()


class World:
    """Two identities on one server, and what they have by the store's word."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.random = random.Random(seed)
        self.raw = QuietEngine("", clock)
        self.guard = Guard(self.raw, Limits(requests=40, watches=12, sessions=12))
        self.engines = [
            GuardedEngine(self.guard, Identity(name, "token")) for name in ("one", "two")
        ]
        self.programs: list[Program] = []
        self.whose: dict[int, Account] = {}
        self.detached: list[tuple[str, int, GuardedEngine]] = []
        self.wrote: dict[tuple[str, str], Account] = {}
        self.made: dict[str, Account] = {}

    async def step(self) -> None:
        choices = [
            *[self.attach] * 6,
            *[self.enqueue] * 10,
            *[self.withdraw, self.alter, self.alter, self.watch, self.watch, self.unwatch],
            *[self.again, self.again, self.detach, self.detach, self.close, self.evict],
            *[self.write, self.write, self.delete, self.node, self.drop, self.end_session],
            self.wait,
        ]
        with contextlib.suppress(TenureError):
            await self.random.choice(choices)()

    def program(self) -> Program | None:
        alive = [each for each in self.programs if not each.over]
        return self.random.choice(alive) if alive else None

    async def attach(self) -> None:
        program = Program(self.random.choice(self.engines), self.random.choice(NODES))
        await program.attach()
        assert program.session is not None
        self.programs.append(program)
        self.whose[program.session.id] = program.engine.account

    async def again(self) -> None:
        if self.detached and self.random.random() < 0.7:
            node, number, engine = self.detached.pop()
        else:
            other = self.program()
            if other is None or other.session is None:
                return
            node, number, engine = other.node, other.session.id, other.engine
        if self.random.random() < 0.3:
            engine = self.random.choice(self.engines)
        program = Program(engine, node)
        await program.attach(number)
        self.programs.append(program)

    async def enqueue(self) -> None:
        program = self.program()
        if program is None or program.session is None:
            return
        program.hold += 1
        ephemeral = self.random.random() < 0.7
        answer = program.session.enqueue(
            program.hold,
            self.random.choice(NAMES) if ephemeral else "lasting",
            self.random.choice((1, EPHEMERAL_LIMIT)) if ephemeral else self.random.choice((1, 9)),
            b"x" * self.random.randrange(4),
            timeout=self.random.choice((0, None, 2.0)),
            ephemeral=ephemeral,
        )
        program.holds.append(program.hold)
        if isinstance(answer, asyncio.Future):
            await answer

    async def withdraw(self) -> None:
        program = self.program()
        if program is not None and program.session is not None and program.holds:
            answer: Any = program.session.withdraw(self.random.choice(program.holds))
            if isinstance(answer, asyncio.Future):
                await answer

    async def alter(self) -> None:
        program = self.program()
        if program is not None and program.session is not None and program.holds:
            hold, data = self.random.choice(program.holds), b"x" * self.random.randrange(6)
            answer = program.session.alter(hold, count=self.random.choice((None, 9)), data=data)
            if isinstance(answer, asyncio.Future):
                await answer

    async def close(self) -> None:
        program = self.program()
        if program is not None and program.session is not None:
            program.leave()
            await program.session.close()

    async def detach(self) -> None:
        program = self.program()
        if program is not None and program.session is not None:
            program.leave()
            await program.session.detach()
            program.watching(self.random.randrange(2))
            self.detached.append((program.node, program.session.id, program.engine))

    async def watch(self) -> None:
        program = self.program()
        if program is not None and program.session is not None:
            program.stops.append(
                program.session.watch("m", data=True, owners=True, changed=lambda: None)
            )

    async def unwatch(self) -> None:
        program = self.program()
        if program is not None:
            program.watching(self.random.randrange(2))

    async def evict(self) -> None:
        node = self.random.choice(NODES)
        for each in await self.raw.list_semaphores(node, owners=True, waiters=True):
            for request in (*each.owners, *each.waiters):
                await self.engines[0].evict(node, each.name, request.order_id)
                return

    async def end_session(self) -> None:
        node = self.random.choice(NODES)
        found = await self.raw.list_sessions(node)
        if found:
            ended = self.random.choice(found).id
            await self.random.choice(self.engines).end_session(node, ended)

    async def write(self) -> None:
        program = self.program()
        if program is None or program.session is None:
            return
        key, data = (program.node, "lasting"), b"y" * self.random.randrange(1, 5)
        if self.random.random() < 0.5:
            there = [each.name for each in await self.lasting(program.node)]
            await program.session.create_semaphore("lasting", 4, data, exist_ok=True)
            if "lasting" not in there:
                self.wrote[key] = program.engine.account
        else:
            await program.session.update_semaphore("lasting", data)
            self.wrote[key] = program.engine.account

    async def delete(self) -> None:
        program = self.program()
        if program is not None and program.session is not None:
            await program.session.delete_semaphore("lasting", force=self.random.random() < 0.5)

    async def node(self) -> None:
        node, engine = self.random.choice(NODES), self.random.choice(self.engines)
        there = await self.raw.list_nodes()
        await engine.create_node(node, NodeConfig(), exist_ok=self.random.random() < 0.5)
        if node not in there:
            self.made[node] = engine.account

    async def drop(self) -> None:
        node, force = self.random.choice(NODES[1:]), self.random.random() < 0.2
        await self.random.choice(self.engines).drop_node(node, force=force)

    async def wait(self) -> None:
        seconds = self.random.choice((0.5, 3.0, WINDOW * 0.4))
        for _ in range(int(seconds * 2)):
            for each in self.programs:
                if not each.over and each.session is not None:
                    each.session.renew()
            await asyncio.sleep(0.5)

    async def lasting(self, node: str) -> Sequence[Any]:
        found = await self.raw.list_semaphores(node, owners=True, waiters=True)
        return [each for each in found if not each.ephemeral]

    async def verify(self) -> None:
        """Compare the counters with the store."""
        self.guard.tallies.expire(self.guard.now())
        sessions: Counter[str] = Counter()
        requests: Counter[str] = Counter()
        stored: Counter[str] = Counter()
        nodes: Counter[str] = Counter()
        for node in await self.raw.list_nodes():
            if node in self.made:
                nodes[self.made[node].identity] += 1
            for session in await self.raw.list_sessions(node):
                sessions[self.whose[session.id].identity] += 1
            for each in await self.raw.list_semaphores(node, owners=True, waiters=True):
                if each.data:
                    stored[self.wrote[node, each.name].identity] += len(each.data)
                for request in (*each.owners, *each.waiters):
                    whose = self.whose[request.session_id].identity
                    requests[whose] += 1
                    stored[whose] += len(request.data)
        watches = Counter(
            each.engine.account.identity
            for each in self.programs
            for _ in each.stops
            if not each.over
        )
        for engine in self.engines:
            account = engine.account
            who = account.identity
            counted = {name: share.used for name, share in account.shares.items()}
            assert counted == {
                "sessions": sessions[who],
                "requests": requests[who],
                "semaphores": 0,  # listeners count these
                "watches": watches[who],
                "nodes": nodes[who],
                "stored_bytes": stored[who],
            }, who
        for pool in self.guard.accounts.pools.values():
            used = [engine.account.shares[pool.limit].used for engine in self.engines]
            assert pool.beyond == sum(max(0, each - pool.reserved) for each in used), pool.limit


async def test_a_session_that_comes_and_goes_is_kept_once(clock: VirtualClock) -> None:
    world = World(clock, 0)
    await world.raw.open()
    stays = Program(world.engines[0], "/default")
    await stays.attach()
    assert stays.session is not None
    await stays.session.detach()
    program = Program(world.engines[0], "/default")
    await program.attach()
    for _ in range(1000):
        assert program.session is not None
        await program.session.detach()
        await program.session.detach()
        await program.attach(program.session.id)
    assert len(world.guard.tallies) < 100
    assert world.engines[0].account.sessions.used == 2
    await world.raw.aclose()


@pytest.mark.parametrize("seed", range(12))
async def test_counters_agree_with_the_store_after_every_step(
    seed: int, clock: VirtualClock
) -> None:
    world = World(clock, seed)
    await world.raw.open()
    for node in NODES[1:]:
        await world.engines[0].create_node(node, NodeConfig(), exist_ok=True)
        world.made[node] = world.engines[0].account
    try:
        for _ in range(STEPS):
            await world.step()
            await asyncio.sleep(0)
            await world.verify()
        for program in world.programs:
            if not program.over and program.session is not None:
                program.leave()
                await program.session.close()
        await asyncio.sleep(10 * WINDOW)
        await world.verify()
        for engine in world.engines:
            assert engine.account.sessions.used == engine.account.requests.used == 0
            assert engine.account.watches.used == 0
    finally:
        await world.raw.aclose()
