"""Steps of a random history on nodes and sessions: attaching, leaving and takeover.

`Sessions` is the base of the state machine of `random_histories`, without the steps on semaphores.
It runs each step on both stores, and selects the session or request of the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tenure.clock import Clock, SystemClock
from tenure.model import DEFAULT_NODE, Liveness, NodeConfig
from tenure.testing.clock import VirtualClock
from tenure.testing.program import Program, Standing
from tenure.testing.sides import (
    CONNECTIONS,
    Side,
    TwinRequest,
    TwinSession,
    TwinWatch,
    outcome,
)
from tenure.testing.stage import Stores, new_loop

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
        queued = [each for each in candidates if each.sides[0].standing is not Standing.GONE]
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
