"""Fixture of the suites: an empty store, connections to it, and programs with one session each.

Every connection is a separate `Engine`, so programs on two connections interact like two processes.
A program's state follows from the answers and events that it received. `Stage.settle` waits until
every program agrees with the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Connector, Engine
from tenure.errors import NodeNotFound
from tenure.model import DEFAULT_NODE, Capabilities, Liveness
from tenure.testing.clock import VirtualClock, VirtualLoop
from tenure.testing.program import Program, ProgramRequest, RequestStanding, require_owners
from tenure.testing.recorder import TIMEOUT, Recorder

WINDOW = 4 * TIMEOUT
"""Recovery window in seconds of a session that must not expire although it is not renewed."""

RENEWAL = 20
"""Number of checks of a program that disagrees with the store, between two renewals."""

_KEY = b"a key of a test"


@dataclass(frozen=True)
class Stores:
    """Factory of stores of one kind, and of engines that connect to them.

    Attributes:
        empty: called for every test; returns a context manager that yields the URL of a new, empty
            store and removes the store at the end.
        connector: returns an engine for a URL, like the entry points; by default, the installed
            connector of the URL's scheme.
        virtual: whether the engine uses only the given clock and the timers of its event loop, and
            no threads. Then it is tested in virtual time.
    """

    empty: Callable[[], AbstractContextManager[str]]
    connector: Connector = connect_engine
    virtual: bool = False

    def new_clock(self) -> Clock:
        """Return the clock for one test."""
        return VirtualClock() if self.virtual else SystemClock()


def new_loop(clock: Clock) -> asyncio.AbstractEventLoop:
    """Return an event loop that runs on the given clock."""
    if isinstance(clock, VirtualClock):
        return VirtualLoop(clock)
    return asyncio.new_event_loop()


class Stage:
    """Empty store, with its connections and programs.

    Use it as a context manager, or open and close it. A block that raises no exception ends with
    `settle`.

    Attributes:
        clock: the clock of all connections.
        eye: a connection without a session, which observes and acts as an administrator.
        capabilities: the capabilities of the engine.
    """

    eye: Engine
    capabilities: Capabilities

    def __init__(self, stores: Stores, url: str, clock: Clock) -> None:
        """Prepare the store at `url`; nothing is opened yet."""
        self.clock = clock
        self._stores = stores
        self._url = url
        self._connections = contextlib.AsyncExitStack()
        self._programs: list[Program] = []

    async def open(self) -> Stage:
        """Open the connection `eye`, and read the engine's capabilities."""
        self.eye = await self.engine()
        self.capabilities = self.eye.capabilities
        return self

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connections.aclose()

    async def __aenter__(self) -> Stage:
        """Open the store."""
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Let the store settle after a block without an error, then close everything."""
        try:
            if kind is None:
                await self.settle()
        finally:
            await self.aclose()

    @property
    def virtual(self) -> bool:
        """True if the clock is virtual."""
        return self.clock.virtual

    async def engine(self) -> Engine:
        """Open and return a new connection to the store."""
        engine = self._stores.connector(self._url, self.clock)
        await engine.open()
        self._connections.push_async_callback(self.disconnect, engine)
        return engine

    async def disconnect(self, engine: Engine) -> None:
        """Close a connection, and record that its programs have left their sessions."""
        for program in self._programs:
            program.left |= program.engine is engine
        await engine.aclose()

    async def program(
        self,
        node: str = DEFAULT_NODE,
        *,
        engine: Engine | None = None,
        window: float = WINDOW,
        description: str = "",
        liveness: Liveness = "process",
        resume: Program | None = None,
        key: bytes | None = None,
        assume_dead: bool = False,
        adopt: bool = False,
    ) -> Program:
        """Attach and return a new program, with a separate connection unless `engine` is given.

        With `resume` it takes over the session of another program. By default, all sessions of
        liveness ``"window"`` have the same key.
        """
        if key is None:
            key = _KEY if liveness == "window" else b""
        connection = await self.engine() if engine is None else engine
        recorder = Recorder()
        how = Attach(
            node,
            window,
            description,
            liveness,
            key,
            None if resume is None else resume.id,
            assume_dead,
            adopt,
        )
        session = await connection.attach(how, recorder)
        program = Program(connection, session, recorder, node)
        self._programs.append(program)
        return program

    async def programs(self, number: int, node: str = DEFAULT_NODE) -> list[Program]:
        """Return a number of new programs, each with its own connection."""
        return [await self.program(node) for _ in range(number)]

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Poll until a condition is true, for changes without an event.

        Raises:
            AssertionError: the condition did not become true in time.
        """
        try:
            async with asyncio.timeout(TIMEOUT):
                while not await condition():  # noqa: ASYNC110  no event says when to look again
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {TIMEOUT:g} s: {what}") from None

    async def queue(self, name: str, node: str = DEFAULT_NODE) -> tuple[list[int], list[int]]:
        """Return the session ids of owners and waiters, in order; empty without a semaphore."""
        require_owners(self.capabilities)
        for found in await self.eye.list_semaphores(node, owners=True, waiters=True):
            if found.name == name:
                return (
                    [each.session_id for each in found.owners],
                    [each.session_id for each in found.waiters],
                )
        return [], []

    # State of the store, and of the programs

    def _sees(self, program: Program) -> bool:
        """Return true if the store can list the requests of this program."""
        return self.capabilities.owners and not program.over

    async def settle(self) -> None:
        """Wait until every program agrees with the store on its requests.

        Programs that still disagree with the store renew their sessions meanwhile, like every
        client, because an engine may check for changes at a renewal. If the engine cannot list
        owners and waiters, only the rules for pushes are checked.

        Raises:
            AssertionError: a program and the store still disagree after `TIMEOUT` seconds, or an
                engine violated a rule for pushes.
        """
        for program in self._programs:
            try:
                async with asyncio.timeout(TIMEOUT):
                    looks = 0
                    while self._sees(program) and await _truth(self.eye, program) != _considered(
                        program
                    ):
                        await _next_event(program)
                        looks += 1
                        if looks % RENEWAL == 0:
                            program.session.renew()
            except TimeoutError:
                truth = await _truth(self.eye, program)
                raise AssertionError(
                    f"session {program.id} on {program.node} considers "
                    f"{_considered(program)}, and the store says {truth}; "
                    f"it received {program.recorder.said}"
                ) from None
        broken = [word for program in self._programs for word in program.recorder.broken]
        assert not broken, f"the engine violated rules for events: {broken}"


Beliefs = Counter[tuple[str, int | None, RequestStanding]]


def _considered(program: Program) -> Beliefs:
    return Counter(
        (request.name, _known(request), request.standing)
        for request in program.requests
        if request.queued
    )


def _known(request: ProgramRequest) -> int | None:
    if not _knows_order(request.program, request.standing):
        return None
    return request.program.recorder.grants.get(request.request_id) or request.order_id


def _knows_order(program: Program, standing: RequestStanding) -> bool:
    """Return true if the engine reports the order id of a request in this state."""
    known = program.capabilities
    return known.fencing and (known.waiter_order or standing is not RequestStanding.WAITS)


async def _truth(eye: Engine, program: Program) -> Beliefs:
    with contextlib.suppress(NodeNotFound):
        found = await eye.list_semaphores(program.node, owners=True, waiters=True)
        return Counter(
            (each.name, request.order_id if _knows_order(program, standing) else None, standing)
            for each in found
            for standing, requests in (
                (RequestStanding.OWNS, each.owners),
                (RequestStanding.WAITS, each.waiters),
            )
            for request in requests
            if request.session_id == program.id
        )
    return Counter()


async def _next_event(program: Program) -> None:
    """Wait until the program receives an event, for at most 0.05 seconds."""
    before = len(program.recorder.said)
    with contextlib.suppress(AssertionError):
        await program.recorder.wait_for(
            lambda recorder: len(recorder.said) > before, "an event", within=0.05
        )
