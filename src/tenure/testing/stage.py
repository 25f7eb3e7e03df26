"""Where the suites act: an empty store, connections to it, and programs with one session each.

Every connection is an `Engine` of its own, so that two programs on two connections meet as two
processes would. What a program was told (answers and pushes) is what it believes; `Stage.settle`
waits until everybody believes what the store says.
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
from tenure.testing.program import Program, ProgramRequest, Standing, require_owners
from tenure.testing.recorder import PATIENCE, Recorder

__all__ = ["WINDOW", "Stage", "Stores", "new_loop"]

WINDOW = 4 * PATIENCE
"""The recovery window of a session that is not meant to expire: nobody renews it."""

_KEY = b"a key of a test"


@dataclass(frozen=True)
class Stores:
    """How to come by stores of one kind.

    Attributes:
        empty: called for every single test; a context manager that gives the URL of a store in
            which nothing has happened yet, and does away with it.
        connector: makes an engine of a URL, as in the entry points; when left out, the one that
            is installed for the URL's scheme.
        virtual: whether the engine lives by the clock that it is given and by its event loop's
            timers alone, so that it can be tested in virtual time. It has no threads then.
    """

    empty: Callable[[], AbstractContextManager[str]]
    connector: Connector = connect_engine
    virtual: bool = False

    def new_clock(self) -> Clock:
        """The clock for one test."""
        return VirtualClock() if self.virtual else SystemClock()


def new_loop(clock: Clock) -> asyncio.AbstractEventLoop:
    """A loop that lives by the clock."""
    if isinstance(clock, VirtualClock):
        return VirtualLoop(clock)
    return asyncio.new_event_loop()


class Stage:
    """An empty store, and who is connected to it.

    To be entered; or opened and closed. A block that ends well ends when all is settled.

    Attributes:
        clock: the time of everything here.
        eye: a connection without a session, which looks on and does what administrators do.
        capabilities: what the engine says that it can.
    """

    eye: Engine
    capabilities: Capabilities

    def __init__(self, stores: Stores, url: str, clock: Clock) -> None:
        self.clock = clock
        self._stores = stores
        self._url = url
        self._connections = contextlib.AsyncExitStack()
        self._programs: list[Program] = []

    async def open(self) -> Stage:
        """Connect the eye."""
        self.eye = await self.engine()
        self.capabilities = self.eye.capabilities
        return self

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connections.aclose()

    async def __aenter__(self) -> Stage:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                await self.settle()
        finally:
            await self.aclose()

    @property
    def virtual(self) -> bool:
        return self.clock.virtual

    async def engine(self) -> Engine:
        """One more connection to the store."""
        engine = self._stores.connector(self._url, self.clock)
        await engine.open()
        self._connections.push_async_callback(self.disconnect, engine)
        return engine

    async def disconnect(self, engine: Engine) -> None:
        """Close a connection, and with it the sessions of its programs."""
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
        """One more program: with a connection of its own, unless it shares `engine`.

        With `resume` it takes over the session of another one. By default, sessions of liveness
        ``"window"`` have a key, and always the same one.
        """
        if key is None:
            key = _KEY if liveness == "window" else b""
        connection = await self.engine() if engine is None else engine
        heard = Recorder()
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
        session = await connection.attach(how, heard)
        program = Program(connection, session, heard, node)
        self._programs.append(program)
        return program

    async def programs(self, number: int, node: str = DEFAULT_NODE) -> list[Program]:
        """Some programs, each with a connection of its own."""
        return [await self.program(node) for _ in range(number)]

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Ask until it is so; for what nobody is told of."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not await condition():  # noqa: ASYNC110  nothing tells when to look again
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE:g} s: {what}") from None

    async def queue(self, name: str, node: str = DEFAULT_NODE) -> tuple[list[int], list[int]]:
        """The ids of the sessions that own and that wait, in order; nobody where nothing is."""
        require_owners(self.capabilities)
        for found in await self.eye.list_semaphores(node, owners=True, waiters=True):
            if found.name == name:
                return (
                    [each.session_id for each in found.owners],
                    [each.session_id for each in found.waiters],
                )
        return [], []

    # What is so, and what is believed

    def _sees(self, program: Program) -> bool:
        """Whether the store can be asked what it says of that program's requests."""
        return self.capabilities.owners and not program.over

    async def settle(self) -> None:
        """Wait until every program believes of its requests what the store says of them.

        Of an engine that cannot tell who owns and who waits, only the rules for pushes are checked.

        Raises:
            AssertionError: that does not come about, or an engine broke a rule for pushes.
        """
        for program in self._programs:
            try:
                async with asyncio.timeout(PATIENCE):
                    while self._sees(program) and await _truth(self.eye, program) != _belief(
                        program
                    ):
                        await _news(program)
            except TimeoutError:
                truth = await _truth(self.eye, program)
                raise AssertionError(
                    f"session {program.id} on {program.node} believes {_belief(program)}, and the "
                    f"store says {truth}; it was told {program.heard.said}"
                ) from None
        broken = [word for program in self._programs for word in program.heard.broken]
        assert not broken, f"rules for what an engine tells were broken: {broken}"


Beliefs = Counter[tuple[str, int | None, Standing]]


def _belief(program: Program) -> Beliefs:
    return Counter(
        (request.name, _known(request), request.standing)
        for request in program.requests
        if request.standing is not Standing.GONE
    )


def _known(request: ProgramRequest) -> int | None:
    if not _tells_order(request.program, request.standing):
        return None
    return request.program.heard.grants.get(request.hold) or request.order_id


def _tells_order(program: Program, standing: Standing) -> bool:
    """Whether the engine tells the order id of a request that stands there."""
    known = program.capabilities
    return known.fencing and (known.waiter_order or standing is not Standing.WAITS)


async def _truth(eye: Engine, program: Program) -> Beliefs:
    with contextlib.suppress(NodeNotFound):
        found = await eye.list_semaphores(program.node, owners=True, waiters=True)
        return Counter(
            (each.name, request.order_id if _tells_order(program, standing) else None, standing)
            for each in found
            for standing, requests in (
                (Standing.OWNS, each.owners),
                (Standing.WAITS, each.waiters),
            )
            for request in requests
            if request.session_id == program.id
        )
    return Counter()


async def _news(program: Program) -> None:
    """Something was said to the program, or a moment has passed."""
    said = len(program.heard.said)
    with contextlib.suppress(AssertionError):
        await program.heard.wait_for(lambda heard: len(heard.said) > said, "news", within=0.05)
