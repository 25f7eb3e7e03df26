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
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tenure.clock import Clock, SystemClock
from tenure.engines.contract import Answer
from tenure.errors import TenureError
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, NodeConfig
from tenure.testing.clock import VirtualClock
from tenure.testing.program import Program, Request, Standing, Watching, answer_of
from tenure.testing.sides import (
    CONNECTIONS,
    Side,
    TwinRequest,
    TwinSession,
    TwinWatch,
    outcome,
)
from tenure.testing.stage import Stores, new_loop

__all__ = ["histories"]

T = TypeVar("T")

SESSIONS = 12
WATCHES = 8

EXACT = 2**53 - 1
WHOLE = EPHEMERAL_LIMIT
ANY = st.integers(0, 999)
"""Chooses one of what there is, however many there are."""

NODES = st.sampled_from([DEFAULT_NODE, DEFAULT_NODE, DEFAULT_NODE, "/n", "/n/o"])
NAMES = st.sampled_from(["a", "a", "b", "m"])
AS_NAMED = st.sampled_from([True, True, True, True, False])
"""Whether "m", and nothing else, is used as an ephemeral semaphore."""

DATA = st.sampled_from([b"", b"x", b"y"])
LIMITS = st.sampled_from([1, 2, 3, 3, 5, EXACT, EXACT + 1, EXACT + 2, WHOLE, 0])
COUNTS = st.sampled_from([1, 1, 1, 1, 2, 2, 3, WHOLE, WHOLE, EXACT, EXACT - 1, EXACT + 1, 5, 0])
TIMEOUTS = st.sampled_from([None, None, None, 0])
CONFIGS = st.builds(
    NodeConfig,
    self_check_period=st.sampled_from([0.0, 1.0, 2.5]),
    session_grace_period=st.sampled_from([0.0, 5.0]),
    read_consistency=st.sampled_from(["unset", "strict", "relaxed"]),
)


class Histories(RuleBasedStateMachine):
    """A random history on two stores; `histories` makes one for two engines."""

    stores: tuple[Stores, Stores]

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
            Side(stores, url, clock) for stores, url in zip(self.stores, urls, strict=True)
        ]
        self._attached: list[TwinSession] = []
        self._asked: list[TwinRequest] = []
        self._watched: list[TwinWatch] = []
        for side in self._sides:
            self._run(side.open())

    def teardown(self) -> None:
        with self._closing:
            for side in self._sides:
                self._run(side.stage.aclose())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def _both(self, operation: Callable[[int, Side], Awaitable[object]]) -> None:
        """Do it on both sides, and compare what comes of it."""

        async def both() -> list[object]:
            return [
                await outcome(operation(number, side)) for number, side in enumerate(self._sides)
            ]

        one, other = self._run(both())
        assert one == other, f"the reference answers {one!r}, and the other engine {other!r}"

    # Who does it

    def _living(self) -> list[TwinSession]:
        return [each for each in self._attached if each.usable and not each.sides[0].over]

    def _session(self, chosen: int) -> TwinSession:
        """Nine times in ten one that lives, if there is any."""
        living = self._living()
        candidates = [each for each in self._attached if each.usable]
        return _choose(living if living and chosen % 10 else candidates, chosen // 10)

    def _request(self, chosen: int) -> TwinRequest:
        """Four times in five one that is in its queue, if there is any."""
        candidates = [asked for asked in self._asked if asked.session.usable]
        queued = [each for each in candidates if each.sides[0].standing is not Standing.GONE]
        return _choose(queued if queued and chosen % 5 else candidates, chosen // 5)

    def _somebody(self) -> bool:
        return any(session.usable for session in self._attached)

    def _something(self) -> bool:
        return any(asked.session.usable for asked in self._asked)

    # Nodes and sessions

    @initialize(limit=LIMITS.filter(bool))
    def begin(self, limit: int) -> None:
        """Three sessions that may meet at once, and one elsewhere."""
        self._both(lambda _, side: side.stage.eye.create_node("/n", NodeConfig(), exist_ok=False))
        for connection in (0, 1, 0):
            self._attach(DEFAULT_NODE, connection, "")
        self._attach("/n", 1, "")
        self.change(who=1, what="create", name="a", limit=limit, data=b"")

    @rule(
        what=st.sampled_from(["create", "create anyway", "alter", "drop", "drop by force"]),
        path=NODES,
        config=CONFIGS,
    )
    def node(self, what: str, path: str, config: NodeConfig) -> None:
        async def node(_: int, side: Side) -> None:
            eye = side.stage.eye
            if what == "alter":
                await eye.alter_node(path, config)
            elif what.startswith("create"):
                await eye.create_node(path, config, exist_ok=what == "create anyway")
            else:
                await eye.drop_node(path, force=what == "drop by force")

        self._both(node)

    @precondition(lambda self: len(self._living()) < 6 and len(self._attached) < SESSIONS)
    @rule(
        node=NODES,
        connection=st.integers(0, CONNECTIONS - 1),
        description=st.sampled_from(["", "a description"]),
    )
    def attach(self, node: str, connection: int, description: str) -> None:
        self._attach(node, connection, description)

    def _attach(self, node: str, connection: int, description: str) -> None:
        programs: list[Program] = []

        async def attach(_: int, side: Side) -> None:
            engine = side.connections[connection]
            program = await side.stage.program(node, engine=engine, description=description)
            programs.append(program)

        self._both(attach)
        if not programs:
            return
        session = TwinSession(f"s{len(self._attached)}", connection, (programs[0], programs[1]))
        for side, program in zip(self._sides, programs, strict=True):
            side.note_session(program, session.label)
        self._attached.append(session)

    @precondition(lambda self: len(self._living()) > 2)
    @rule(who=ANY, how=st.sampled_from(["close", "end", "detach", "disconnect"]))
    def leave(self, who: int, how: str) -> None:
        session = self._session(who)

        async def leave(number: int, side: Side) -> None:
            program = session.sides[number]
            if how == "close":
                await program.close()
            elif how == "detach":
                await program.detach()
            elif how == "end":
                over = program.over
                assert await side.stage.eye.end_session(program.node, program.id) is not over
            else:
                await side.stage.disconnect(side.connections[session.connection])
                side.connections[session.connection] = await side.stage.engine()

        self._both(leave)
        for each in self._attached:
            if how == "disconnect" and each.connection == session.connection:
                each.usable = False
        session.usable &= how != "detach"

    @rule(chosen=ANY, path=NODES)
    def end_session(self, chosen: int, path: str) -> None:
        """By an administrator, who may look for it in the wrong place, or too late."""
        over = [each for each in self._attached if each.sides[0].over] or self._attached
        session = _choose(over, chosen)
        self._both(lambda number, side: side.stage.eye.end_session(path, session.sides[number].id))

    # Semaphores

    @precondition(_somebody)
    @rule(
        who=ANY,
        what=st.sampled_from(
            ["create", "create anyway", "update", "update", "delete", "delete by force"]
        ),
        name=NAMES,
        limit=LIMITS,
        data=DATA,
    )
    def change(self, who: int, what: str, name: str, limit: int, data: bytes) -> None:
        chosen = self._session(who)

        async def change(number: int, _: Side) -> None:
            session = chosen.sides[number].session
            if what == "update":
                await session.update_semaphore(name, data)
            elif what.startswith("create"):
                exist_ok = what == "create anyway"
                await session.create_semaphore(name, limit, data, exist_ok=exist_ok)
            else:
                await session.delete_semaphore(name, force=what == "delete by force")

        self._both(change)

    @precondition(_somebody)
    @rule(who=ANY, name=NAMES, owners=st.booleans(), waiters=st.booleans())
    def describe(self, who: int, name: str, owners: bool, waiters: bool) -> None:
        session = self._session(who)

        async def describe(number: int, side: Side) -> object:
            return side.semaphore(
                await session.sides[number].session.describe_semaphore(
                    name, owners=owners, waiters=waiters
                )
            )

        self._both(describe)

    # Requests

    @precondition(_somebody)
    @rule(who=ANY, name=NAMES, as_named=AS_NAMED, count=COUNTS, data=DATA, timeout=TIMEOUTS)
    def enqueue(
        self,
        who: int,
        name: str,
        as_named: bool,
        count: int,
        data: bytes,
        timeout: float | None,
    ) -> None:
        session = self._session(who)
        ephemeral = (name == "m") == as_named
        sent: list[Request] = []

        async def enqueue(number: int, _: Side) -> object:
            request = await session.sides[number].enqueue(
                name, count, data=data, timeout=timeout, ephemeral=ephemeral
            )
            sent.append(request)
            return (request.place, request.order_id is None)

        self._both(enqueue)
        if sent:
            self._note(session, sent[0], sent[1])

    @precondition(_somebody)
    @rule(who=ANY, timeout=TIMEOUTS)
    def lock(self, who: int, timeout: float | None) -> None:
        self.enqueue(who=who, name="m", as_named=True, count=WHOLE, data=b"", timeout=timeout)

    @precondition(_somebody)
    @rule(who=ANY, count=st.sampled_from([1, 1, 2]), timeout=TIMEOUTS)
    def acquire(self, who: int, count: int, timeout: float | None) -> None:
        self.enqueue(who=who, name="a", as_named=True, count=count, data=b"", timeout=timeout)

    def _note(self, session: TwinSession, one: Request, other: Request) -> None:
        asked = TwinRequest(f"r{len(self._asked)}", session, (one, other))
        for side, request in zip(self._sides, asked.sides, strict=True):
            side.note_request(request, asked.label)
        self._asked.append(asked)

    @precondition(_something)
    @rule(which=ANY)
    def withdraw(self, which: int) -> None:
        asked = self._request(which)
        self._both(lambda number, _: asked.session.sides[number].withdraw(asked.sides[number]))

    @precondition(_something)
    @rule(which=ANY, count=st.none() | COUNTS, data=st.none() | DATA)
    def alter(self, which: int, count: int | None, data: bytes | None) -> None:
        asked = self._request(which)
        self._both(
            lambda number, _: asked.session.sides[number].alter(
                asked.sides[number], count=count, data=data
            )
        )

    @precondition(_something)
    @rule(which=ANY, name=st.none() | st.none() | NAMES)
    def evict(self, which: int, name: str | None) -> None:
        asked = self._request(which)

        async def evict(number: int, side: Side) -> bool:
            known = asked.sides[number]
            node = asked.session.sides[number].node
            return await side.stage.eye.evict(node, name or known.name, known.order_id or 1)

        self._both(evict)

    @precondition(_somebody)
    @rule(
        who=ANY,
        name=NAMES,
        as_named=AS_NAMED,
        steps=st.lists(
            st.tuples(st.sampled_from(["enqueue", "try", "withdraw"]), COUNTS, ANY),
            min_size=2,
            max_size=8,
        ),
    )
    def rush(self, who: int, name: str, as_named: bool, steps: list[tuple[str, int, int]]) -> None:
        """Several operations of one session in a row, and only then their answers."""
        session = self._session(who)
        ephemeral = (name == "m") == as_named
        sent: list[dict[int, Request]] = [{}, {}]

        async def rush(number: int, _: Side) -> list[object]:
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
                    hold = _choose(holds, chosen)
                    if hold in mine:
                        mine[hold].withdrawn = True
                    answers.append(_later(program.session.withdraw(hold)))
            return [await outcome(each) for each in answers]

        self._both(rush)
        for hold in sorted(sent[0].keys() & sent[1].keys()):
            self._note(session, sent[0][hold], sent[1][hold])

    # Watches

    @precondition(lambda self: self._somebody() and len(self._watched) < WATCHES)
    @rule(who=ANY, name=NAMES, what=st.sampled_from([(True, True), (True, False), (False, True)]))
    def watch(self, who: int, name: str, what: tuple[bool, bool]) -> None:
        session = self._session(who)
        data, owners = what
        watchings: list[Watching] = []

        async def watch(number: int, _: Side) -> None:
            watchings.append(session.sides[number].watch(name, data=data, owners=owners))

        self._both(watch)
        if watchings:
            watched = TwinWatch(session, name, data, owners, (watchings[0], watchings[1]))
            self._watched.append(watched)

    @precondition(lambda self: self._watched)
    @rule(which=ANY)
    def stop_watching(self, which: int) -> None:
        watched = _choose(self._watched, which)

        async def stop(number: int, _: Side) -> None:
            watched.sides[number].stop()

        watched.stopped = True
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


def _choose(candidates: list[T], chosen: int) -> T:
    return candidates[chosen % len(candidates)]


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
