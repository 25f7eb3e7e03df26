"""Two stores, with descriptions in terms that mean the same on both.

A session, a request or a watch of a comparison exists twice: on the side of the reference and on
the side of the other engine. It has one label for both sides. Every id returned by an engine is
replaced by the label of its session or request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines.contract import Engine, Place, Removal
from tenure.errors import NodeNotFound, SemaphoreNotFound, TenureError
from tenure.model import RequestDescription, SemaphoreDescription
from tenure.testing.program import Program, ProgramRequest, Watching
from tenure.testing.stage import Stage, Stores

T = TypeVar("T")

CONNECTIONS = 2
"""Number of connections to each store, each with its own sessions."""


class Unknown:
    """Fact unknown to an engine: equal to every fact of another engine."""

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "?"


def known(fact: T | None) -> T | Unknown:
    """Return the fact, or one that equals every other if it is not known."""
    return Unknown() if fact is None else fact


def placed(request: ProgramRequest) -> tuple[Place, bool | Unknown]:
    """Return the answer of `enqueue` in terms that mean the same on both sides.

    The order id of a request that waits or is withdrawn may be unknown.
    """
    unknown = request.place is Place.WAITING or request.withdrawn
    return request.place, Unknown() if unknown else request.order_id is None


def same_removal(one: ProgramRequest, other: ProgramRequest) -> bool:
    """Return true if both were removed for the same reason, as far as both engines report it."""
    gone = {Removal.DELETED, Removal.EVICTED}
    if not (one.program.capabilities.removal_reason and other.program.capabilities.removal_reason):
        return one.removal == other.removal or {one.removal, other.removal} <= gone
    return one.removal == other.removal


@dataclass(eq=False)
class TwinSession:
    """Session that exists on both sides."""

    label: str
    connection: int
    sides: tuple[Program, Program]
    usable: bool = True  # not detached, and its connection is open

    def __repr__(self) -> str:
        """Return the label."""
        return self.label

    def over(self, number: int) -> bool:
        """Return true if the session has ended on one side."""
        return self.sides[number].over


@dataclass(eq=False)
class TwinRequest:
    """Request that exists on both sides."""

    label: str
    session: TwinSession
    sides: tuple[ProgramRequest, ProgramRequest]

    def __repr__(self) -> str:
        """Return the label."""
        return self.label


@dataclass(eq=False)
class TwinWatch:
    """Watch that exists on both sides, with the state that each side has shown."""

    session: TwinSession
    name: str
    data: bool
    owners: bool
    sides: tuple[Watching, Watching]
    seen: list[Any] = field(default_factory=lambda: [None, None])
    read: list[int] = field(default_factory=lambda: [-1, -1])
    stopped: bool = False

    async def settle(self, number: int, side: Side) -> None:
        """Wait until the state shown on one side is the true state."""
        watching, program = self.sides[number], self.session.sides[number]
        while True:
            if self.read[number] != watching.calls:
                self.read[number] = watching.calls
                self.seen[number] = await side.shown(program, self)
            if self.seen[number] == await side.truth(self):
                return
            await watching.called()


class Side:
    """One of the two stores, with its connections and the labels of its ids."""

    def __init__(self, stores: Stores, url: str, clock: Clock) -> None:
        self.stage = Stage(stores, url, clock)
        self.connections: list[Engine] = []
        self.sessions: dict[int, str] = {}
        self.requests: dict[int, str] = {}
        self.unplaced: list[tuple[ProgramRequest, str]] = []
        self.last_order_id = 0

    async def open(self) -> None:
        """Open the store and its connections."""
        await self.stage.open()
        self.connections = [await self.stage.engine() for _ in range(CONNECTIONS)]

    def note_session(self, program: Program, label: str) -> None:
        """Label a new session; its id must be new in the store."""
        assert program.id not in self.sessions, f"session id {program.id} is used again"
        self.sessions[program.id] = label

    def note_request(self, request: ProgramRequest, label: str) -> None:
        """Label a request; its order id must be greater than all before."""
        order_id = request.order_id
        if order_id is not None:
            assert order_id > self.last_order_id, "order ids rise"
            self.last_order_id = order_id
            self.requests[order_id] = label
        elif not self.stage.capabilities.waiter_order:
            self.unplaced.append((request, label))

    def _place(self, found: SemaphoreDescription) -> None:
        """Read from a description the order ids of requests whose programs do not know them.

        A session's requests for a name are in the queue in the order of their creation.
        """
        for each in (*found.owners, *found.waiters):
            if each.order_id in self.requests:
                continue
            for unplaced in self.unplaced:
                request, label = unplaced
                here = (request.program.id, request.name) == (each.session_id, found.name)
                if here and request.queued:
                    request.order_id = each.order_id
                    self.requests[each.order_id] = label
                    self.unplaced.remove(unplaced)
                    break

    def semaphore(self, found: SemaphoreDescription) -> tuple[object, ...]:
        """Return a description in terms that mean the same on both sides."""
        self._place(found)
        return (
            *(found.name, found.data, found.limit, found.held, found.ephemeral),
            known(found.waiting),
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
        """Return the full state of the store: its nodes, sessions and semaphores."""
        eye = self.stage.eye
        state: dict[str, object] = {}
        for path in await eye.list_nodes():
            node = await eye.describe_node(path)
            sessions = await eye.list_sessions(path)
            state[path] = (
                *(node.config, known(node.sessions), known(node.semaphores)),
                [
                    (
                        self.sessions[each.id],
                        each.description,
                        each.recovery_window,
                        known(each.attached),
                    )
                    for each in sessions
                ],
                [
                    self.semaphore(each)
                    for each in await eye.list_semaphores(path, owners=True, waiters=True)
                ],
            )
        return state

    def watched(self, found: SemaphoreDescription | None, watch: TwinWatch) -> object:
        """Return the part of a description that a watch covers."""
        if found is None:
            return "nothing"
        self._place(found)
        owners = self._queue(found.owners) if watch.owners else ()
        return ((found.data, found.limit) if watch.data else None, owners)

    async def truth(self, watch: TwinWatch) -> object:
        """Return the current state of the watched semaphore, which the watch must show."""
        with contextlib.suppress(NodeNotFound):
            for found in await self.stage.eye.list_semaphores(
                watch.session.sides[0].node, owners=True, waiters=False
            ):
                if found.name == watch.name:
                    return self.watched(found, watch)
        return "nothing"

    async def shown(self, program: Program, watch: TwinWatch) -> object:
        """Return the state that a program reads after its watch has been called."""
        try:
            found = await program.session.describe_semaphore(watch.name, owners=True, waiters=False)
        except SemaphoreNotFound:
            found = None
        return self.watched(found, watch)


async def outcome(operation: Awaitable[object]) -> object:
    """Return the result or error of an operation, in terms that mean the same on both sides."""
    try:
        return await operation
    except TenureError as error:
        return (type(error), error.node, error.name, getattr(error, "limit", None))
