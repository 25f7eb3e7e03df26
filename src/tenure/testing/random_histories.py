"""Comparison of two engines on random histories of operations.

`histories` returns a Hypothesis state machine that runs one random history on two stores, of the
reference and of another engine. It compares everything observable: answers, errors, grants and
removals, the order of the queues, descriptions, and the final states of watches. A difference is
reported as the shortest history that shows it::

    TestMyStore = histories(MEMORY, MY_STORE).TestCase
    TestMyStore.settings = settings(max_examples=50, stateful_step_count=40)

Rules of the comparison:

* Ids are not compared. Each session and request has a label, the same on both sides, and every id
  that an engine returns is replaced by the label it was first seen with. Order ids must rise on
  each side separately.
* Times are not compared, and no step waits for time to pass: timeouts are 0 or ``None``.
* A fact unknown to one of the engines is equal to anything.
* Events and watches are compared after every step, once they have settled: when each program
  agrees with the store.

It is the only module of `tenure.testing` that needs Hypothesis.

Steps of a random history on nodes and sessions: attaching, leaving and takeover.

`Sessions` is the base of the state machine, without the steps on semaphores.
It runs each step on both stores, and selects the session or request of the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
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
from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import TenureError
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, UNCHANGED, Liveness, NodeConfig, Unchanged
from tenure.testing.clock import VirtualClock
from tenure.testing.program import Program, ProgramRequest, Watching, answer_of
from tenure.testing.sides import (
    CONNECTIONS,
    Side,
    TwinRequest,
    TwinSession,
    TwinWatch,
    outcome,
    placed,
    same_removal,
)
from tenure.testing.stage import Stores, new_loop

__all__ = ["histories"]


T = TypeVar("T")

SESSIONS = 12
ATTACHMENTS = 20

ANY = st.integers(0, 999)
"""Random number that selects a candidate, for any number of candidates; see `choose`."""

NODES = st.sampled_from([DEFAULT_NODE, DEFAULT_NODE, DEFAULT_NODE, "/n", "/n/o"])
CONNECTION = st.integers(0, CONNECTIONS - 1)
KEYS = st.sampled_from([b"a key", b"a key", b"another key"])
CONFIGS = st.builds(
    NodeConfig,
    self_check_period=st.sampled_from([0.0, 1.0, 2.5]),
    session_grace_period=st.sampled_from([0.0, 5.0]),
    read_consistency=st.sampled_from(["unset", "strict", "relaxed"]),
)


class Sessions(RuleBasedStateMachine):
    """State machine of nodes and sessions on two stores."""

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
        self._requests: list[TwinRequest] = []
        self._watched: list[TwinWatch] = []
        for side in self._sides:
            self._run(side.open())

    def teardown(self) -> None:
        """Close both stores."""
        with self._closing:
            for side in self._sides:
                self._run(side.stage.aclose())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def _both(self, operation: Callable[[int, Side], Awaitable[object]]) -> None:
        """Run an operation on both stores, and compare the outcomes."""

        async def both() -> list[object]:
            return [
                await outcome(operation(number, side)) for number, side in enumerate(self._sides)
            ]

        one, other = self._run(both())
        assert one == other, f"the reference answers {one!r}, and the other engine {other!r}"

    # Candidates

    def _living(self) -> list[TwinSession]:
        return [each for each in self._attached if each.usable and not each.sides[0].over]

    def _session(self, chosen: int) -> TwinSession:
        """Return a usable session; nine times in ten a live one, if there is any."""
        living = self._living()
        candidates = [each for each in self._attached if each.usable]
        return choose(living if living and chosen % 10 else candidates, chosen // 10)

    def _request(self, chosen: int) -> TwinRequest:
        """Return a request; four times in five one that is in its queue, if there is any."""
        candidates = [request_of for request_of in self._requests if request_of.session.usable]
        queued = [each for each in candidates if each.sides[0].queued]
        return choose(queued if queued and chosen % 5 else candidates, chosen // 5)

    def resumable(self) -> bool:
        """Return true if both engines have sessions that can be taken over."""
        return all(side.stage.capabilities.resume for side in self._sides)

    def has_session(self) -> bool:
        """Return true if there is a usable session."""
        return any(session.usable for session in self._attached)

    def something(self) -> bool:
        """Return true if there is a request of a usable session."""
        return any(request_of.session.usable for request_of in self._requests)

    # Nodes and sessions

    @rule(
        what=st.sampled_from(["create", "create anyway", "alter", "drop", "drop by force"]),
        path=NODES,
        config=CONFIGS,
    )
    def node(self, what: str, path: str, config: NodeConfig) -> None:
        """Create, alter or drop a node on both stores."""

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
        connection=CONNECTION,
        description=st.sampled_from(["", "a description"]),
        liveness=st.sampled_from(["process", "window"]),
        key=KEYS,
    )
    def attach(
        self, node: str, connection: int, description: str, liveness: Liveness, key: bytes
    ) -> None:
        """Attach a session on both stores."""
        self._attach(node, connection, liveness, description, key)

    def _attach(
        self,
        node: str,
        connection: int,
        liveness: Liveness,
        description: str = "",
        key: bytes | None = None,
    ) -> None:
        programs: list[Program] = []
        if not self.resumable():
            liveness = "process"

        async def attach(_: int, side: Side) -> None:
            engine = side.connections[connection]
            program = await side.stage.program(
                node, engine=engine, description=description, liveness=liveness, key=key
            )
            programs.append(program)

        self._both(attach)
        if not programs:
            return
        session = TwinSession(f"s{len(self._attached)}", connection, (programs[0], programs[1]))
        for side, program in zip(self._sides, programs, strict=True):
            side.note_session(program, session.label)
        self._attached.append(session)

    @precondition(
        lambda self: self._attached and len(self._attached) < ATTACHMENTS and self.resumable()
    )
    @rule(who=ANY, connection=CONNECTION, key=KEYS, node=st.none() | st.none() | NODES)
    def take_over(self, who: int, connection: int, key: bytes, node: str | None) -> None:
        """Take over a session on either connection, with any key; it may have ended."""
        former = choose(self._attached, who)
        programs: list[Program] = []

        async def take_over(number: int, side: Side) -> object:
            program = await side.stage.program(
                node or former.sides[number].node,
                engine=side.connections[connection],
                liveness="window",
                resume=former.sides[number],
                key=key,
            )
            programs.append(program)
            return [
                (side.requests[found.order_id], replace(found, request_id=0, order_id=0))
                for found in program.recorder.found
            ]

        self._both(take_over)
        if not programs:
            return
        for each in self._attached:
            each.usable &= each.label != former.label
        session = TwinSession(former.label, connection, (programs[0], programs[1]))
        self._attached.append(session)
        for one, other in zip(programs[0].requests, programs[1].requests, strict=True):
            assert one.order_id is not None
            label = self._sides[0].requests[one.order_id]
            self._requests.append(TwinRequest(label, session, (one, other)))

    @precondition(lambda self: len(self._living()) > 2)
    @rule(who=ANY, how=st.sampled_from(["close", "end", "detach", "disconnect"]))
    def leave(self, who: int, how: str) -> None:
        """Close, detach, end or disconnect a session on both stores."""
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
        """End a session as an administrator, possibly with the wrong node, or after its end."""
        over = [each for each in self._attached if each.sides[0].over] or self._attached
        session = choose(over, chosen)
        self._both(lambda number, side: side.stage.eye.end_session(path, session.sides[number].id))


def choose(candidates: list[T], chosen: int) -> T:
    """Return the candidate that a random number selects."""
    return candidates[chosen % len(candidates)]


WATCHES = 8

EXACT = 2**53 - 1
WHOLE = EPHEMERAL_LIMIT
NAMES = st.sampled_from(["a", "a", "b", "m"])
AS_NAMED = st.sampled_from([True, True, True, True, False])
"""True if "m", and no other name, is used as an ephemeral semaphore."""

DATA = st.sampled_from([b"", b"x", b"y"])
LIMITS = st.sampled_from([1, 2, 3, 3, 5, EXACT, EXACT + 1, EXACT + 2, WHOLE, 0])
COUNTS = st.sampled_from([1, 1, 1, 1, 2, 2, 3, WHOLE, WHOLE, EXACT, EXACT - 1, EXACT + 1, 5, 0])
TIMEOUTS = st.sampled_from([None, None, None, 0])
NEW_TIMEOUTS = st.sampled_from([UNCHANGED, UNCHANGED, UNCHANGED, None, 0])


class Histories(Sessions):
    """State machine of a random history on two stores; `histories` derives one for two engines."""

    compare_withdrawals = True
    """Whether to compare the answers of withdrawals; a lost answer may change one to ``True``."""

    @initialize(limit=LIMITS.filter(bool))
    def begin(self, limit: int) -> None:
        """Attach three sessions on the same node and one on another, and create a semaphore."""
        self._both(lambda _, side: side.stage.eye.create_node("/n", NodeConfig(), exist_ok=False))
        for connection in (0, 1, 0):
            self._attach(DEFAULT_NODE, connection, "window" if connection else "process")
        self._attach("/n", 1, "process")
        self.change(who=1, what="create", name="a", limit=limit, data=b"")

    # Semaphores

    @precondition(Sessions.has_session)
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

    def _resizes(self) -> bool:
        """Return true if both stores can change a limit, and there is a session to do it."""
        able = all(side.stage.capabilities.resize for side in self._sides)
        return able and self.has_session()

    @precondition(_resizes)
    @rule(who=ANY, name=NAMES, limit=LIMITS)
    def resize(self, who: int, name: str, limit: int) -> None:
        """Change a limit, while the semaphore is in use, unused or missing."""
        session = self._session(who)
        self._both(lambda number, _: session.sides[number].session.resize_semaphore(name, limit))

    @precondition(Sessions.has_session)
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

    @precondition(Sessions.has_session)
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
        sent: list[ProgramRequest] = []

        async def enqueue(number: int, _: Side) -> object:
            request = await session.sides[number].enqueue(
                name, count, data=data, timeout=timeout, ephemeral=ephemeral
            )
            sent.append(request)
            return placed(request)

        self._both(enqueue)
        if sent:
            self._note(session, sent[0], sent[1])

    @precondition(Sessions.has_session)
    @rule(who=ANY, timeout=TIMEOUTS)
    def lock(self, who: int, timeout: float | None) -> None:
        self.enqueue(who=who, name="m", as_named=True, count=WHOLE, data=b"", timeout=timeout)

    @precondition(Sessions.has_session)
    @rule(who=ANY, count=st.sampled_from([1, 1, 2]), timeout=TIMEOUTS)
    def acquire(self, who: int, count: int, timeout: float | None) -> None:
        self.enqueue(who=who, name="a", as_named=True, count=count, data=b"", timeout=timeout)

    def _note(self, session: TwinSession, one: ProgramRequest, other: ProgramRequest) -> None:
        request_of = TwinRequest(f"r{len(self._requests)}", session, (one, other))
        for side, request in zip(self._sides, request_of.sides, strict=True):
            side.note_request(request, request_of.label)
        self._requests.append(request_of)

    @precondition(Sessions.something)
    @rule(which=ANY)
    def withdraw(self, which: int) -> None:
        request_of = self._request(which)

        async def withdraw(number: int, _: Side) -> object:
            withdrawn = await request_of.session.sides[number].withdraw(request_of.sides[number])
            return withdrawn if self.compare_withdrawals else None

        self._both(withdraw)

    @precondition(Sessions.something)
    @rule(which=ANY, count=st.none() | COUNTS, data=st.none() | DATA, timeout=NEW_TIMEOUTS)
    def alter(
        self,
        which: int,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> None:
        request_of = self._request(which)
        self._both(
            lambda number, _: request_of.session.sides[number].alter(
                request_of.sides[number], count=count, data=data, timeout=timeout
            )
        )

    @precondition(Sessions.something)
    @rule(which=ANY, name=st.none() | st.none() | NAMES)
    def evict(self, which: int, name: str | None) -> None:
        request_of = self._request(which)

        async def evict(number: int, side: Side) -> bool:
            known = request_of.sides[number]
            node = request_of.session.sides[number].node
            return await side.stage.eye.evict(node, name or known.name, known.order_id or 1)

        self._both(evict)

    @precondition(Sessions.has_session)
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
        """Send several operations of one session in a row, and only then await their answers."""
        session = self._session(who)
        ephemeral = (name == "m") == as_named
        sent: list[dict[int, ProgramRequest]] = [{}, {}]

        async def rush(number: int, _: Side) -> list[object]:
            program, mine = session.sides[number], sent[number]
            holds: list[int] = []
            withdrawn: list[int] = []
            answers: list[Awaitable[object]] = []
            for what, count, chosen in steps:
                if what != "withdraw":
                    holds.append(program.next_request_id())
                    timeout = 0 if what == "try" else None
                    answers.append(
                        _answered(mine, program, holds[-1], name, count, timeout, ephemeral)
                    )
                elif holds:
                    request_id = choose(holds, chosen)
                    if request_id in mine:
                        mine[request_id].withdrawn = True
                    withdrawn.append(request_id)
                    first = withdrawn.count(request_id) == 1  # only its first answer is compared
                    compared = first and self.compare_withdrawals
                    answers.append(_withdrawn(program, request_id, compared=compared))
            return [await outcome(each) for each in answers]

        self._both(rush)
        for request_id in sorted(sent[0].keys() & sent[1].keys()):
            self._note(session, sent[0][request_id], sent[1][request_id])

    # Watches

    @precondition(lambda self: self.has_session() and len(self._watched) < WATCHES)
    @rule(who=ANY, name=NAMES, what=st.sampled_from([(True, True), (True, False), (False, True)]))
    def watch(self, who: int, name: str, what: tuple[bool, bool]) -> None:
        session = self._session(who)
        data, owners = what
        watchings: list[Watching] = []

        async def watch(number: int, _: Side) -> None:
            watchings.append(await session.sides[number].watch(name, data=data, owners=owners))

        self._both(watch)
        if watchings:
            watched = TwinWatch(session, name, data, owners, (watchings[0], watchings[1]))
            self._watched.append(watched)

    @precondition(lambda self: self._watched)
    @rule(which=ANY)
    def stop_watching(self, which: int) -> None:
        watched = choose(self._watched, which)

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
        for side in self._sides:
            await side.stage.settle()
        for session in self._attached:
            if session.usable and any(program.recorder.end for program in session.sides):
                for program in session.sides:
                    await program.ended()  # fails if it ended on one side only
        for number, side in enumerate(self._sides):
            for watch in self._watched:
                if not watch.stopped and watch.session.usable and not watch.session.over(number):
                    await watch.settle(number, side)
        for request_of in self._requests:
            if request_of.session.usable:
                one, other = request_of.sides
                assert one.standing == other.standing, f"{request_of} stands differently"
                assert same_removal(one, other), f"{request_of} was removed differently"


def _answered(
    requests: dict[int, ProgramRequest],
    program: Program,
    request_id: int,
    name: str,
    count: int,
    timeout: float | None,
    ephemeral: bool,
) -> Awaitable[object]:
    """Send a request now, and return an awaitable of its answer, or of its immediate error."""
    try:
        request = program.send(
            name, count, timeout=timeout, ephemeral=ephemeral, request_id=request_id
        )
    except TenureError as error:
        return _failed(error)
    requests[request_id] = request
    return _placed(request)


async def _failed(error: TenureError) -> object:
    raise error


async def _placed(request: ProgramRequest) -> object:
    return placed(await request.answered())


def _withdrawn(program: Program, request_id: int, *, compared: bool) -> Awaitable[object]:
    """Withdraw a request now, and return an awaitable of the answer; ``None`` unless `compared`."""
    try:
        answer = program.session.withdraw(request_id)
    except TenureError as error:
        return _failed(error)
    return _left(answer, compared=compared)


async def _left(answer: Answer[Withdrawn], *, compared: bool) -> object:
    withdrawn = await answer_of(answer)
    return withdrawn if compared else None


def histories(
    reference: Stores, other: Stores, *, compare_withdrawals: bool = True
) -> type[Histories]:
    """Return the state machine that compares two engines; pytest collects its ``TestCase``.

    Time is virtual if both engines support virtual time.

    Args:
        reference: the stores of the reference engine.
        other: the stores of the other engine.
        compare_withdrawals: whether to compare the answers of withdrawals. If answers are lost, an
            engine may answer ``True`` for a request that was never in the queue.
    """
    compared = {"stores": (reference, other), "compare_withdrawals": compare_withdrawals}
    return type("Histories", (Histories,), compared)
