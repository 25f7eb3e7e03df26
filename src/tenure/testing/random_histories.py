"""Whether two engines answer alike, whatever is asked of them in whatever order.

`histories` makes a Hypothesis state machine that plays one random history on two stores, the
reference's and another engine's, and compares everything that can be seen: answers, errors,
grants and removals, the order of the queues, descriptions, what watches show in the end. What
differs is reported as the shortest history that shows it::

    TestMyStore = histories(MEMORY, MY_STORE).TestCase
    TestMyStore.settings = settings(max_examples=50, stateful_step_count=40)

Rules of the comparison:

* Ids are not compared: a session and a request have a label of their own here, the same on both
  sides, and every id that an engine tells is read as the label it was first seen with. Order ids
  must rise, on each side for itself.
* Times are not compared, and nobody waits for time to pass: timeouts are 0 or none.
* A fact that one of the engines does not know is equal to anything.
* Pushes and watches are compared when they have come to rest, after every step: when what each
  program was told is what the store says.

It needs Hypothesis; nothing else in `tenure.testing` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
)

from tenure.clock import Clock, SystemClock
from tenure.engines.contract import Answer, Engine
from tenure.errors import NodeNotFound, SemaphoreNotFound, TenureError
from tenure.model import (
    DEFAULT_NODE,
    EPHEMERAL_LIMIT,
    NodeConfig,
    RequestDescription,
    SemaphoreDescription,
)
from tenure.testing.clock import VirtualClock
from tenure.testing.program import Program, Request, Watching, answer_of
from tenure.testing.stage import Stage, Stores, new_loop

__all__ = ["histories"]

T = TypeVar("T")

CONNECTIONS = 2
NODES = st.sampled_from([DEFAULT_NODE, DEFAULT_NODE, "/n", "/n/o"])
NAMES = st.sampled_from(["a", "b", "m"])
DATA = st.sampled_from([b"", b"x", b"y"])
EXACT = 2**53 - 1
LIMITS = st.sampled_from([1, 2, 3, 3, 5, EXACT, EXACT + 1, EXACT + 2, EPHEMERAL_LIMIT, 0])
COUNTS = st.sampled_from(
    [1, 1, 1, 2, 2, 3, 5, EXACT - 1, EXACT, EXACT + 1, EPHEMERAL_LIMIT, EPHEMERAL_LIMIT, 0]
)
TIMEOUTS = st.sampled_from([None, None, 0])
CONFIGS = st.builds(
    NodeConfig,
    self_check_period=st.sampled_from([0.0, 1.0, 2.5]),
    session_grace_period=st.sampled_from([0.0, 5.0]),
    read_consistency=st.sampled_from(["unset", "strict", "relaxed"]),
)


class _Unknown:
    """What an engine does not know: equal to whatever another one knows."""

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "?"


def _known(fact: T | None) -> T | _Unknown:
    return _Unknown() if fact is None else fact


@dataclass(eq=False)
class _Session:
    """One session, on both sides."""

    label: str
    connection: int
    sides: tuple[Program, Program]
    usable: bool = True  # not detached, and its connection is open

    def __repr__(self) -> str:
        return self.label

    def over(self, number: int) -> bool:
        return self.sides[number].over


@dataclass(eq=False)
class _Asked:
    """One request, on both sides."""

    label: str
    session: _Session
    sides: tuple[Request, Request]

    def __repr__(self) -> str:
        return self.label


@dataclass(eq=False)
class _Watched:
    """One watch, on both sides, and what it has shown."""

    session: _Session
    name: str
    data: bool
    owners: bool
    sides: tuple[Watching, Watching]
    seen: list[Any] = field(default_factory=lambda: [None, None])
    read: list[int] = field(default_factory=lambda: [-1, -1])
    stopped: bool = False

    async def settle(self, number: int, side: _Side) -> None:
        """Wait until what it has shown on one side is true."""
        watching, program = self.sides[number], self.session.sides[number]
        while True:
            if self.read[number] != watching.calls:
                self.read[number] = watching.calls
                self.seen[number] = await side.shown(program, self)
            if self.seen[number] == await side.truth(self):
                return
            await watching.called()


class _Side:
    """One of the two stores, its connections, and what its ids mean."""

    def __init__(self, stores: Stores, url: str, clock: Clock) -> None:
        self.stage = Stage(stores, url, clock)
        self.connections: list[Engine] = []
        self.sessions: dict[int, str] = {}
        self.requests: dict[int, str] = {}
        self.last_order_id = 0

    async def open(self) -> None:
        await self.stage.open()
        self.connections = [await self.stage.engine() for _ in range(CONNECTIONS)]

    def note_session(self, program: Program, label: str) -> None:
        assert program.id not in self.sessions, f"session id {program.id} is used again"
        self.sessions[program.id] = label

    def note_request(self, request: Request, label: str) -> None:
        order_id = request.order_id
        if order_id is not None:
            assert order_id > self.last_order_id, "order ids rise"
            self.last_order_id = order_id
            self.requests[order_id] = label

    def semaphore(self, found: SemaphoreDescription) -> tuple[object, ...]:
        """A description in terms that mean the same on both sides."""
        return (
            *(found.name, found.data, found.limit, found.held, found.ephemeral),
            _known(found.waiting),
            self._queue(found.owners),
            self._queue(found.waiters),
        )

    def _queue(self, requests: tuple[RequestDescription, ...]) -> tuple[object, ...]:
        return tuple(
            (
                self.sessions[each.session_id],
                self.requests.get(each.order_id, "?"),
                each.count,
                each.data,
            )
            for each in requests
        )

    async def everything(self) -> dict[str, object]:
        """All that the store tells of itself."""
        eye = self.stage.eye
        told: dict[str, object] = {}
        for path in await eye.list_nodes():
            node = await eye.describe_node(path)
            sessions = await eye.list_sessions(path)
            told[path] = (
                *(node.config, _known(node.sessions), _known(node.semaphores)),
                [
                    (
                        self.sessions[each.id],
                        each.description,
                        each.recovery_window,
                        _known(each.attached),
                    )
                    for each in sessions
                ],
                [
                    self.semaphore(each)
                    for each in await eye.list_semaphores(path, owners=True, waiters=True)
                ],
            )
        return told

    def watched(self, found: SemaphoreDescription | None, watch: _Watched) -> object:
        """The part of a description that a watch is about."""
        if found is None:
            return "nothing"
        owners = self._queue(found.owners) if watch.owners else ()
        return (found.data if watch.data else b"", found.limit, owners)

    async def truth(self, watch: _Watched) -> object:
        """What a watch is to show in the end."""
        with contextlib.suppress(NodeNotFound):
            for found in await self.stage.eye.list_semaphores(
                watch.session.sides[0].node, owners=True, waiters=False
            ):
                if found.name == watch.name:
                    return self.watched(found, watch)
        return "nothing"

    async def shown(self, program: Program, watch: _Watched) -> object:
        """What a program sees that looks because its watch has called."""
        try:
            found = await program.session.describe_semaphore(watch.name, owners=True, waiters=False)
        except SemaphoreNotFound:
            found = None
        return self.watched(found, watch)


async def _outcome(operation: Awaitable[object]) -> object:
    """What came of an operation, in terms that mean the same on both sides."""
    try:
        return await operation
    except TenureError as error:
        return (type(error), error.node, error.name, getattr(error, "limit", None))


class Histories(RuleBasedStateMachine):
    """A random history on two stores; `histories` makes one for two engines."""

    stores: tuple[Stores, Stores]

    sessions: Bundle[_Session] = Bundle("sessions")
    requests: Bundle[_Asked] = Bundle("requests")
    watches: Bundle[_Watched] = Bundle("watches")

    def __init__(self) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        virtual = all(stores.virtual for stores in self.stores)
        clock: Clock = VirtualClock() if virtual else SystemClock()
        self._runner = self._closing.enter_context(
            asyncio.Runner(loop_factory=lambda: new_loop(clock))
        )
        urls = [self._closing.enter_context(stores.empty()) for stores in self.stores]
        self._sides = [
            _Side(stores, url, clock) for stores, url in zip(self.stores, urls, strict=True)
        ]
        self._attached: list[_Session] = []
        self._asked: list[_Asked] = []
        self._watched: list[_Watched] = []
        for side in self._sides:
            self._run(side.open())

    def teardown(self) -> None:
        with self._closing:
            for side in self._sides:
                self._run(side.stage.aclose())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def _both(self, operation: Callable[[int, _Side], Awaitable[object]]) -> list[Any]:
        """Do it on both sides, and compare what comes of it."""

        async def both() -> list[Any]:
            return [
                await _outcome(operation(number, side)) for number, side in enumerate(self._sides)
            ]

        one, other = self._run(both())
        assert one == other, f"the reference answers {one!r}, and the other engine {other!r}"
        return [one, other]

    # Nodes

    @rule(path=NODES, config=CONFIGS, exist_ok=st.booleans())
    def create_node(self, path: str, config: NodeConfig, exist_ok: bool) -> None:
        self._both(lambda _, side: side.stage.eye.create_node(path, config, exist_ok=exist_ok))

    @rule(path=NODES, config=CONFIGS)
    def alter_node(self, path: str, config: NodeConfig) -> None:
        self._both(lambda _, side: side.stage.eye.alter_node(path, config))

    @rule(path=NODES, force=st.booleans())
    def drop_node(self, path: str, force: bool) -> None:
        self._both(lambda _, side: side.stage.eye.drop_node(path, force=force))

    # Sessions

    @precondition(lambda self: len(self._attached) < 8)
    @rule(
        target=sessions,
        node=NODES,
        connection=st.integers(0, CONNECTIONS - 1),
        description=st.sampled_from(["", "a description"]),
    )
    def attach(self, node: str, connection: int, description: str) -> Any:
        programs: list[Program] = []

        async def attach(_: int, side: _Side) -> None:
            engine = side.connections[connection]
            program = await side.stage.program(node, engine=engine, description=description)
            programs.append(program)

        self._both(attach)
        if not programs:
            return multiple()
        session = _Session(f"s{len(self._attached)}", connection, (programs[0], programs[1]))
        for side, program in zip(self._sides, programs, strict=True):
            side.note_session(program, session.label)
        self._attached.append(session)
        return session

    @rule(session=sessions)
    def close(self, session: _Session) -> None:
        if session.usable:
            self._both(lambda number, _: session.sides[number].close())

    @rule(session=sessions)
    def detach(self, session: _Session) -> None:
        if session.usable:
            session.usable = False
            self._both(lambda number, _: session.sides[number].detach())

    @rule(session=sessions, path=st.none() | NODES)
    def end_session(self, session: _Session, path: str | None) -> None:
        async def end(number: int, side: _Side) -> bool:
            program = session.sides[number]
            return await side.stage.eye.end_session(path or program.node, program.id)

        self._both(end)

    @rule(connection=st.integers(0, CONNECTIONS - 1))
    def reconnect(self, connection: int) -> None:
        async def reconnect(_: int, side: _Side) -> None:
            await side.stage.disconnect(side.connections[connection])
            side.connections[connection] = await side.stage.engine()

        self._both(reconnect)
        for session in self._attached:
            session.usable &= session.connection != connection

    # Semaphores

    @rule(session=sessions, name=NAMES, limit=LIMITS, data=DATA, exist_ok=st.booleans())
    def create(self, session: _Session, name: str, limit: int, data: bytes, exist_ok: bool) -> None:
        if session.usable:
            self._both(
                lambda number, _: session.sides[number].session.create_semaphore(
                    name, limit, data, exist_ok=exist_ok
                )
            )

    @rule(session=sessions, name=NAMES, data=DATA)
    def update(self, session: _Session, name: str, data: bytes) -> None:
        if session.usable:
            self._both(lambda number, _: session.sides[number].session.update_semaphore(name, data))

    @rule(session=sessions, name=NAMES, force=st.booleans())
    def delete(self, session: _Session, name: str, force: bool) -> None:
        if session.usable:
            self._both(
                lambda number, _: session.sides[number].session.delete_semaphore(name, force=force)
            )

    @rule(session=sessions, name=NAMES, owners=st.booleans(), waiters=st.booleans())
    def describe(self, session: _Session, name: str, owners: bool, waiters: bool) -> None:
        async def describe(number: int, side: _Side) -> object:
            return side.semaphore(
                await session.sides[number].session.describe_semaphore(
                    name, owners=owners, waiters=waiters
                )
            )

        if session.usable:
            self._both(describe)

    # Requests

    @rule(
        target=requests,
        session=sessions,
        name=NAMES,
        count=COUNTS,
        data=DATA,
        timeout=TIMEOUTS,
        ephemeral=st.booleans(),
    )
    def enqueue(
        self,
        session: _Session,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> Any:
        if not session.usable:
            return multiple()
        sent: list[Request] = []

        async def enqueue(number: int, _: _Side) -> object:
            request = await session.sides[number].enqueue(
                name, count, data=data, timeout=timeout, ephemeral=ephemeral
            )
            sent.append(request)
            return (request.place, request.order_id is None)

        self._both(enqueue)
        return self._asked_for(session, sent) if sent else multiple()

    def _asked_for(self, session: _Session, sent: list[Request]) -> _Asked:
        asked = _Asked(f"r{len(self._asked)}", session, (sent[0], sent[1]))
        for side, request in zip(self._sides, sent, strict=True):
            side.note_request(request, asked.label)
        self._asked.append(asked)
        return asked

    @rule(request=requests)
    def withdraw(self, request: _Asked) -> None:
        if request.session.usable:
            self._both(
                lambda number, _: request.session.sides[number].withdraw(request.sides[number])
            )

    @rule(request=requests, count=st.none() | COUNTS, data=st.none() | DATA)
    def alter(self, request: _Asked, count: int | None, data: bytes | None) -> None:
        if request.session.usable:
            self._both(
                lambda number, _: request.session.sides[number].alter(
                    request.sides[number], count=count, data=data
                )
            )

    @rule(request=requests, path=st.none() | NODES, name=st.none() | NAMES)
    def evict(self, request: _Asked, path: str | None, name: str | None) -> None:
        async def evict(number: int, side: _Side) -> bool:
            known = request.sides[number]
            node = path or known.program.node
            return await side.stage.eye.evict(node, name or known.name, known.order_id or 1)

        self._both(evict)

    @rule(
        session=sessions,
        name=NAMES,
        ephemeral=st.booleans(),
        steps=st.lists(
            st.tuples(st.sampled_from(["enqueue", "try", "withdraw"]), COUNTS, st.integers(0, 9)),
            min_size=2,
            max_size=8,
        ),
    )
    def without_waiting_for_answers(
        self, session: _Session, name: str, ephemeral: bool, steps: list[tuple[str, int, int]]
    ) -> None:
        """Several operations of one session in a row, and only then their answers."""
        if not session.usable:
            return
        sent: list[dict[int, Request]] = [{}, {}]

        async def rush(number: int, _: _Side) -> list[object]:
            program, mine = session.sides[number], sent[number]
            holds: list[int] = []
            answers: list[Awaitable[object]] = []
            for what, count, chosen in steps:
                if what != "withdraw":
                    holds.append(program.next_hold())
                    timeout = 0 if what == "try" else None
                    answers.append(
                        _answered(mine, program, holds[-1], name, count, timeout, ephemeral)
                    )
                elif holds:
                    hold = holds[chosen % len(holds)]
                    if hold in mine:
                        mine[hold].withdrawn = True
                    answers.append(_later(program.session.withdraw(hold)))
            return [await _outcome(each) for each in answers]

        self._both(rush)
        for hold in sorted(sent[0].keys() & sent[1].keys()):
            self._asked_for(session, [sent[0][hold], sent[1][hold]])

    # Watches

    @precondition(lambda self: len(self._watched) < 6)
    @rule(
        target=watches,
        session=sessions,
        name=NAMES,
        what=st.sampled_from([(True, True), (True, False), (False, True)]),
    )
    def watch(self, session: _Session, name: str, what: tuple[bool, bool]) -> Any:
        if not session.usable or session.sides[0].over:
            return multiple()
        data, owners = what
        watchings: list[Watching] = []

        async def watch(number: int, _: _Side) -> None:
            watchings.append(session.sides[number].watch(name, data=data, owners=owners))

        self._both(watch)
        watched = _Watched(session, name, data, owners, (watchings[0], watchings[1]))
        self._watched.append(watched)
        return watched

    @rule(watch=watches)
    def stop_watching(self, watch: _Watched) -> None:
        async def stop(number: int, _: _Side) -> None:
            watch.sides[number].stop()

        watch.stopped = True
        self._both(stop)

    # After every step

    @invariant()
    def both_sides_say_the_same(self) -> None:
        self._run(self._settled())
        self._both(lambda _, side: side.everything())

    async def _settled(self) -> None:
        for number, side in enumerate(self._sides):
            await side.stage.settle()
            for watch in self._watched:
                if not watch.stopped and watch.session.usable and not watch.session.over(number):
                    await watch.settle(number, side)
        for session in self._attached:
            ended = {program.heard.end is not None for program in session.sides}
            assert len(ended) == 1 or not session.usable, f"{session} has ended on one side only"
        for asked in self._asked:
            if asked.session.usable:
                one, other = asked.sides
                assert one.standing == other.standing, f"{asked} stands differently"
                assert one.removal == other.removal, f"{asked} was removed differently"


def _answered(
    requests: dict[int, Request],
    program: Program,
    hold: int,
    name: str,
    count: int,
    timeout: float | None,
    ephemeral: bool,
) -> Awaitable[object]:
    """Send a request now; what is awaited later is its answer, or the error that came at once."""
    try:
        request = program.send(name, count, timeout=timeout, ephemeral=ephemeral, hold=hold)
    except TenureError as error:
        return _failed(error)
    requests[hold] = request
    return _placed(request)


async def _failed(error: TenureError) -> object:
    raise error


async def _placed(request: Request) -> object:
    answered = await request.answered()
    return (answered.place, answered.order_id is None)


async def _later(answer: Answer[None]) -> object:
    return await answer_of(answer)


def histories(reference: Stores, other: Stores) -> type[Histories]:
    """The state machine that compares two engines; its ``TestCase`` is what pytest collects.

    Time is virtual when both engines can live in virtual time.
    """
    return type("Histories", (Histories,), {"stores": (reference, other)})
