"""Pages of the console: what each template shows.

A view reads the store as its visitor may use it, and the record as far as the visitor may see it.
It returns the values for its template. A page that is kept up to date uses the same view.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from tenure.console import reading
from tenure.console.access import Visitor
from tenure.console.record import Allowed, Seen
from tenure.console.service import Console, NoSuchObject
from tenure.console.timeline import ROWS, WINDOWS, timeline
from tenure.console.waits import MOST_PICTURED, NodeWaits
from tenure.core.deadlocks import shows_waits
from tenure.core.rules import EXACT
from tenure.errors import InvalidArgument, SemaphoreNotFound
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, SemaphoreDescription
from tenure.shown import kind

NODES_OFFERED = 200
"""Nodes that a form offers to choose from."""

LIVELIEST = 6
"""Timelines on the first page."""

ON_TIMELINES = 12
"""Timelines on the page of timelines."""

EVENTS = 200

MOST_TASKS = 200
"""Tasks, and holders, that a list of waits shows."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page.

    Attributes:
        console: has the observer of the store.
        visitor: the visitor.
        query: the parameters of the URL.
    """

    console: Console
    visitor: Visitor
    query: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter."""
        return self.query.get(name, default)

    def number(self, name: str, default: int = 0, most: int = reading.LARGEST_ID) -> int:
        """Return a parameter that is a whole number of at least 0.

        Raises:
            InvalidArgument: it is no such number.
        """
        given = self.query.get(name)
        if given is None or given == "":
            return default
        # int() accepts other digits, and takes long for many of them
        if not (given.isascii() and given.isdigit() and len(given) < 20) or int(given) > most:
            raise InvalidArgument(f"{name} is a whole number from 0 to {most}, not {given[:40]!r}")
        return int(given)

    def page_size(self) -> int:
        """Return the parameter ``limit``: the number of items on a page."""
        return max(1, self.number("limit", reading.PAGE, reading.LARGEST_PAGE))

    def turn(self) -> AbstractAsyncContextManager[object]:
        """Return a context for reading a list; searches of one visitor take turns."""
        if self.text("search"):
            return self.console.searching(self.visitor)
        return nullcontext()

    @property
    def allowed(self) -> Allowed:
        """Return true for nodes that the visitor may read."""
        visitor = self.visitor
        return lambda node: visitor.may(node, "read")


View: TypeAlias = Callable[[PageRequest], Awaitable[dict[str, Any]]]


async def chosen_node(request: PageRequest) -> str:
    """Return the node of the URL, else ``/default`` or the first node that the visitor may read."""
    given = request.text("node")
    if given:
        return given
    if request.visitor.may(DEFAULT_NODE, "read"):
        return DEFAULT_NODE
    nodes = await reading.list_nodes(request.visitor.engine)
    return nodes[0] if nodes else DEFAULT_NODE


async def offered_nodes(request: PageRequest) -> Sequence[str]:
    """Return the nodes that a form offers."""
    return (await reading.list_nodes(request.visitor.engine))[:NODES_OFFERED]


# Pages


async def overview(request: PageRequest) -> dict[str, Any]:
    """Return the values of the first page: nodes, queues, timelines and latest events."""
    record = request.console.observer.record
    allowed = request.allowed
    nodes = await reading.describe_nodes(request.visitor.engine, after=request.text("after"))
    return {
        "nodes": nodes,
        "totals": record.totals(allowed),
        "queues": record.longest_queues(allowed, 8),
        "timelines": timelines_of(request, record.liveliest(allowed, LIVELIEST), 60.0, 5),
        "window": 60,
        "events": record.events(allowed, most=8),
        "deadlocks": [
            (node, len(found.deadlocks))
            for node, found in request.console.observer.waits.items()
            if found.deadlocks and allowed(node)
        ],
        "full": record.full,
    }


async def semaphores(request: PageRequest) -> dict[str, Any]:
    """Return the values of the list of a node's semaphores."""
    node = await chosen_node(request)
    search = request.text("search")
    async with request.turn():
        page = await reading.semaphores(
            request.visitor.engine,
            node,
            search=search,
            after=request.text("after"),
            most=request.page_size(),
        )
    record = request.console.observer.record
    rows = [SemaphoreRow(each, record.find(node, each.name)) for each in page.items]
    return {
        "node": node,
        "search": search,
        "after": request.text("after"),
        "page": page,
        "rows": rows,
        "offered": await offered_nodes(request),
    }


@dataclass(frozen=True, slots=True)
class SemaphoreRow:
    """A semaphore in a list, with its first holder, as far as the observer has seen it."""

    described: SemaphoreDescription
    seen: Seen | None

    @property
    def name(self) -> str:
        """Its name."""
        return self.described.name

    @property
    def kind(self) -> str:
        """Its kind."""
        return kind_of(self.described)

    @property
    def holder(self) -> Any:
        """Its first holder, or ``None``."""
        if self.seen is None or not self.described.held:
            return None
        return next(iter(self.seen.owners.values()), None)

    @property
    def holders(self) -> int:
        """Number of its holders that are followed."""
        return 0 if self.seen is None else len(self.seen.owners)


def kind_of(described: SemaphoreDescription) -> str:
    """Return the kind of primitive that uses a semaphore, as far as the store shows it."""
    return {"election?": "election", "registry": "service"}.get(kind(described), kind(described))


async def semaphore(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page of one semaphore."""
    node, name = await chosen_node(request), request.text("name")
    engine, observer = request.visitor.engine, request.console.observer
    observer.attend(node, name)
    seen = observer.record.find(node, name)
    values: dict[str, Any] = {
        "node": node,
        "name": name,
        "may_administer": request.visitor.may(node, "administer"),
        "events": observer.record.events(request.allowed, most=12, node=node, name=name),
        "window": chosen_window(request),
        "timeline": None,
        "chain": None,
        "described": None,
        "done": request.text("done"),
    }
    after = {role: request.number(f"{role}_after") for role in ("owners", "waiters")}
    try:
        described = await reading.describe_semaphore(engine, node, name)
        owners = await reading.requests(engine, node, name, waiters=False, after=after["owners"])
        waiters = await reading.requests(engine, node, name, waiters=True, after=after["waiters"])
    except SemaphoreNotFound:
        # A free mutex does not exist. Whether there was one, only the record knows.
        await reading.describe_node(engine, node)
    else:
        values |= {
            "described": described,
            "kind": kind_of(described),
            "owners": owners,
            "waiters": waiters,
            "after": after,
            "whole": described.limit > EXACT,
        }
    if seen is not None and request.visitor.may(node, "read"):
        now = request.console.clock.now()
        values["timeline"] = timeline(seen.spans(), now, values["window"])
        found = observer.waits.get(node)
        if found is not None and name in found.queues and found.queues[name].waiters:
            values |= {"chain": found.chain(name), "waits": found}
    return values


async def sessions(request: PageRequest) -> dict[str, Any]:
    """Return the values of the list of a node's sessions."""
    node = await chosen_node(request)
    search = request.text("search")
    after = request.number("after")
    async with request.turn():
        page = await reading.sessions(
            request.visitor.engine, node, search=search, after=after, most=request.page_size()
        )
    return {
        "node": node,
        "search": search,
        "after": after,
        "page": page,
        "offered": await offered_nodes(request),
        "may_administer": request.visitor.may(node, "administer"),
        "done": request.text("done"),
    }


async def waits(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page of a node's waits."""
    node = await chosen_node(request)
    return {
        "node": node,
        "offered": await offered_nodes(request),
        "shown": shows_waits(request.visitor.engine.capabilities),
        "waits": await waits_of(request, node),
        "most": MOST_TASKS,
        "most_pictured": MOST_PICTURED,
    }


async def waits_of(request: PageRequest, node: str) -> NodeWaits | None:
    """Return the waits of a node that the visitor may read, as the observer has read them.

    Returns:
        ``None`` if the observer has not read them yet, or the store does not show them.
    """
    await reading.describe_node(request.visitor.engine, node)  # raises if it may not be seen
    return request.console.observer.waits.get(node)


async def timelines(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page of timelines."""
    node = request.text("node")
    record = request.console.observer.record
    window = chosen_window(request)
    found = record.liveliest(request.allowed, ON_TIMELINES, node)
    return {
        "node": node,
        "window": window,
        "timelines": timelines_of(request, found, window, ROWS),
        "offered": await offered_nodes(request),
        "full": record.full,
    }


async def events(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page of events."""
    node = request.text("node")
    record = request.console.observer.record
    return {
        "node": node,
        "events": record.events(request.allowed, most=EVENTS, node=node),
        "offered": await offered_nodes(request),
    }


# Confirmations


async def end_session(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page that confirms the end of a session."""
    node, number = request.text("node"), request.number("session")
    found = await reading.find_session(request.visitor.engine, node, number)
    if found is None:
        raise NoSuchObject(f"there is no session {number} on {node}; it has ended")
    record = request.console.observer.record
    return {
        "node": node,
        "session": found,
        "requests": record.of_session(request.allowed, node, number, most=20),
    }


async def evict(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page that confirms an eviction."""
    node, name, order_id = request.text("node"), request.text("name"), request.number("order_id")
    engine = request.visitor.engine
    found = await reading.find_request(engine, node, name, order_id)
    if found is None:
        raise NoSuchObject(
            f"{name!r} on {node} has no owner or waiter {order_id}; it has left the queue"
        )
    described = await reading.describe_semaphore(engine, node, name)
    following = await reading.requests(engine, node, name, waiters=True, most=1)
    return {
        "node": node,
        "name": name,
        "request": found[0],
        "waits": found[1],
        "described": described,
        "next": following.items[0] if following.items else None,
    }


# Parts


def chosen_window(request: PageRequest) -> int:
    """Return the length of a timeline in seconds."""
    given = request.number("window", WINDOWS[-1])
    return given if given in WINDOWS else WINDOWS[-1]


def timelines_of(
    request: PageRequest, found: Sequence[Seen], window: float, most: int
) -> list[dict[str, Any]]:
    """Return the timelines of some semaphores."""
    now = request.console.clock.now()
    drawn = [(each, timeline(each.spans(), now, window, most)) for each in found]
    return [{"seen": seen, "timeline": line} for seen, line in drawn if line.rows]


def tokens(count: int) -> str:
    """Return a number of tokens for people; all of them of an ephemeral semaphore as "all"."""
    return "all" if count == EPHEMERAL_LIMIT else f"{count:,}"
