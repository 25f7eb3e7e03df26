"""Reads of a store on behalf of a visitor, in pages and in bounded time.

Nothing here knows a list as a whole, if the store has lists in pages (`Engine.pages`). A store
without them has to return its list, of which one page is kept.

All errors are those of `tenure.errors`; a store that does not answer raises `EngineUnavailable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from tenure._client.blocked import read_queues
from tenure.console.waits import NodeWaits, node_waits
from tenure.core import rules
from tenure.core.deadlocks import WAITS, decode, relevant
from tenure.engines.contract import Engine
from tenure.errors import EngineUnavailable, NodeNotFound, SemaphoreNotFound
from tenure.identity import semaphore_with_identities, session_with_identity
from tenure.model import (
    BlockedTask,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

T = TypeVar("T")
K = TypeVar("K")

ANSWER_TIMEOUT = 5.0
"""Seconds within which a store answers a read."""

PAGE = 50
"""Items on a page, unless the visitor chooses another number."""

LARGEST_PAGE = 500

SLICE = 2_500
"""Items that a search reads at a time."""

SEARCHED = 20_000
"""Items that one search examines. Then it returns what it has found, and where to continue."""

LARGEST_ID = 2**63 - 1

PUBLICATIONS = 1_000
"""Published waits of a node that are read."""

TASKS = 400
"""Tasks whose waits are examined; those that may be part of a deadlock come first."""

QUEUES = 60
"""Semaphores that one reading of the waits describes."""

QUEUE = 500
"""Owners, and waiters, of each of these semaphores that are read."""

SESSION_PAGE = 100
SESSION_PAGES = 20
"""Sessions on a page, and pages, that one reading of the waits reads."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T, K]):
    """A part of a list.

    Attributes:
        items: the items.
        following: where the next page begins (`after`); ``None`` at the end of the list.
        examined: number of items that a search examined.
    """

    items: Sequence[T]
    following: K | None
    examined: int = 0


async def answered(engine: Engine, what: str, reading: Awaitable[T]) -> T:
    """Await a read of the store, within `ANSWER_TIMEOUT`."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            return await reading
    except TimeoutError as error:
        trouble = engine.trouble()
        cause = f": {trouble}" if trouble is not None else ""
        raise EngineUnavailable(
            f"{what} was not read: {engine.url} has not answered within {ANSWER_TIMEOUT:g} s{cause}"
        ) from error


async def list_nodes(engine: Engine) -> Sequence[str]:
    """Return the paths of the nodes, sorted."""
    return await answered(engine, "the list of nodes", engine.list_nodes())


async def describe_node(engine: Engine, path: str) -> NodeDescription:
    """Describe a node."""
    rules.check_path(path)
    return await answered(engine, f"node {path}", engine.describe_node(path))


async def describe_nodes(
    engine: Engine, *, after: str = "", most: int = PAGE
) -> Page[NodeDescription, str]:
    """Describe the next nodes, by path."""
    paths = [each for each in await list_nodes(engine) if each > after]
    found = []
    for path in paths[:most]:
        try:
            found.append(await describe_node(engine, path))
        except NodeNotFound:
            continue  # dropped just now
    return Page(found, paths[most - 1] if len(paths) > most else None)


async def semaphores(
    engine: Engine, node: str, *, search: str = "", after: str = "", most: int = PAGE
) -> Page[SemaphoreDescription, str]:
    """Return the next semaphores of a node whose names contain a text, by name.

    Their owners and waiters are not described. Upper and lower case are the same to a search. The
    semaphore in which clients publish their waits is left out.
    """
    rules.check_path(node)
    wanted = search.casefold()
    what = f"the list of semaphores on {node}"
    pages = engine.pages()

    def fits(each: SemaphoreDescription) -> bool:
        return each.name != WAITS and wanted in each.name.casefold()

    def name(each: SemaphoreDescription) -> str:
        return each.name

    if pages is None:
        found = await answered(
            engine, what, engine.list_semaphores(node, owners=False, waiters=False)
        )
        return _page_of(found, fits, name, after, most)

    if wanted:

        async def read_names(after: str, most: int) -> tuple[Sequence[str], bool]:
            names = await answered(engine, what, pages.names(node, after=after, most=most))
            return names, bool(names)

        return await _described(
            engine,
            node,
            await _searched(
                *(engine, read_names, lambda each: each != WAITS and wanted in each.casefold()),
                *(str, after, most),
                search=True,
            ),
        )

    async def read(after: str, most: int) -> tuple[Sequence[SemaphoreDescription], bool]:
        page = await answered(
            engine,
            what,
            pages.semaphores(node, owners=False, waiters=False, after=after, most=most),
        )
        return page, bool(page)

    return await _searched(engine, read, fits, name, after, most, search=False)


async def _described(
    engine: Engine, node: str, names: Page[str, str]
) -> Page[SemaphoreDescription, str]:
    """Describe the semaphores of a page, without those that have just been deleted."""

    async def describe(name: str) -> SemaphoreDescription | None:
        try:
            return await describe_semaphore(engine, node, name)
        except SemaphoreNotFound:
            return None

    items = []
    # With `return_exceptions`, none of the reads is left behind when another one fails.
    for found in await asyncio.gather(*map(describe, names.items), return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            items.append(found)
    return Page(items, names.following, names.examined)


async def sessions(
    engine: Engine, node: str, *, search: str = "", after: int = 0, most: int = PAGE
) -> Page[SessionDescription, int]:
    """Return the next sessions of a node, by id.

    A search finds a text in the description, the host, the program, the pid and the id.
    """
    rules.check_path(node)
    wanted = search.casefold()
    what = f"the list of sessions on {node}"
    pages = engine.pages()

    def fits(each: SessionDescription) -> bool:
        if not wanted:
            return True
        texts = (each.description, each.host, each.program, each.pid, each.id)
        return any(wanted in str(text).casefold() for text in texts if text is not None)

    def number(each: SessionDescription) -> int:
        return each.id

    if pages is None:
        found = await answered(engine, what, engine.list_sessions(node))
        named = [session_with_identity(each) for each in found if each.id > after]
        return _page_of(named, fits, number, after, most)

    async def read(after: int, most: int) -> tuple[Sequence[SessionDescription], bool]:
        page = await answered(engine, what, pages.sessions(node, after=after, most=most))
        return [session_with_identity(each) for each in page], len(page) == most

    return await _searched(engine, read, fits, number, after, most, search=bool(wanted))


def _page_of(
    found: Sequence[T], fits: Callable[[T], bool], key: Callable[[T], K], after: K, most: int
) -> Page[T, K]:
    """Return one page of a whole list, sorted by `key`."""
    items: list[T] = []
    for each in found:
        if key(each) > after and fits(each):  # type: ignore[operator]  # str or int
            if len(items) == most:
                return Page(items, key(items[-1]), len(found))
            items.append(each)
    return Page(items, None, len(found))


async def _searched(
    engine: Engine,
    read: Callable[[K, int], Awaitable[tuple[Sequence[T], bool]]],
    fits: Callable[[T], bool],
    key: Callable[[T], K],
    after: K,
    most: int,
    *,
    search: bool,
) -> Page[T, K]:
    """Read a list in slices, until a page is full or enough has been examined.

    Args:
        engine: the store.
        read: returns the next items after a key, and whether there may be more.
        fits: whether an item belongs on the page.
        key: the sort key of an item.
        after: the key after which to begin.
        most: number of items on the page.
        search: whether items may be left out; then the slices are long.
    """
    items: list[T] = []
    examined = 0
    size = SLICE if search else most + 1
    while True:
        began = engine.clock.now()
        part, more = await read(after, size)
        for each in part:
            if len(items) == most and fits(each):
                return Page(items, key(items[-1]), examined)
            examined += 1
            after = key(each)
            if fits(each):
                items.append(each)
        if not more:
            return Page(items, None, examined)
        if examined >= SEARCHED:
            return Page(items, after, examined)
        # Other work has its turn, because a store in this process never waits.
        await asyncio.sleep((engine.clock.now() - began) / 2)


async def describe_semaphore(engine: Engine, node: str, name: str) -> SemaphoreDescription:
    """Describe a semaphore without its requests."""
    rules.check_path(node)
    rules.check_name(name, node)
    reading = engine.describe_semaphore(node, name, owners=False, waiters=False)
    return await answered(engine, f"{name!r} on {node}", reading)


async def requests(
    engine: Engine, node: str, name: str, *, waiters: bool, after: int = 0, most: int = PAGE
) -> Page[RequestDescription, int]:
    """Return the next owners or waiters of a semaphore, by order id."""
    rules.check_path(node)
    rules.check_name(name, node)
    what = f"the queue of {name!r} on {node}"
    pages = engine.pages()
    found: Sequence[RequestDescription]
    if pages is None:
        described = await answered(
            engine,
            what,
            engine.describe_semaphore(node, name, owners=not waiters, waiters=waiters),
        )
        queue = (*described.owners, *described.waiters)
        found = [each for each in queue if each.order_id > after]
    else:
        reading = pages.requests(node, name, waiters=waiters, after=after, most=most + 1)
        found = await answered(engine, what, reading)
    items = with_identities(found[:most])
    return Page(items, items[-1].order_id if len(found) > most else None)


async def find_request(
    engine: Engine, node: str, name: str, order_id: int
) -> tuple[RequestDescription, bool] | None:
    """Return one request and whether it waits; ``None`` if it is not in the queue."""
    for waiters in (False, True):
        page = await requests(
            engine, node, name, waiters=waiters, after=max(0, order_id - 1), most=1
        )
        if page.items and page.items[0].order_id == order_id:
            return page.items[0], waiters
    return None


async def find_session(engine: Engine, node: str, number: int) -> SessionDescription | None:
    """Return one session, or ``None`` if it does not exist."""
    page = await sessions(engine, node, after=max(0, number - 1), most=1)
    return next((each for each in page.items if each.id == number), None)


def with_identities(found: Sequence[RequestDescription]) -> Sequence[RequestDescription]:
    """Return requests with their sessions' descriptions split."""
    together = SemaphoreDescription("", b"", 1, 0, ephemeral=True, owners=tuple(found))
    return semaphore_with_identities(together).owners


# Waits


async def read_waits(
    engine: Engine, node: str, *, first: Collection[str] = (), whole: bool = True
) -> NodeWaits:
    """Read the waits of a node, as far as `PUBLICATIONS`, `TASKS`, `QUEUES` and `QUEUE` allow.

    A part can only hide waits and deadlocks, and shows none that do not exist.

    Args:
        engine: a store that shows waits.
        node: the node.
        first: semaphores that are read even if no task waits for them.
        whole: whether to read all waits; else only those to which the first semaphores lead.
    """
    rules.check_path(node)
    now = engine.clock.now()
    tasks, complete = await _read_tasks(engine, node)

    async def describe(name: str) -> SemaphoreDescription:
        nonlocal complete
        found, all_read = await _read_queue(engine, node, name)
        complete = complete and all_read
        return found

    names = [*first, *(task.name for task in tasks)] if whole else first
    queues, all_read = await read_queues(describe, names, tasks, QUEUES)
    complete = complete and all_read
    owners = [each.session_id for queue in queues.values() for each in queue.owners]
    sessions = await _read_sessions(engine, node, {*owners, *(each.session_id for each in tasks)})
    if not tasks:
        return node_waits(node, now, tasks, queues, sessions, complete=complete)
    # Hundreds of tasks take a while, which is not the event loop's.
    return await asyncio.to_thread(
        node_waits, node, now, tasks, queues, sessions, complete=complete
    )


async def _read_tasks(engine: Engine, node: str) -> tuple[list[BlockedTask], bool]:
    """Return the published waits, and whether these are all."""
    try:
        page = await requests(engine, node, WAITS, waiters=False, most=PUBLICATIONS)
    except SemaphoreNotFound:
        return [], True
    # Any program may publish much, which takes a while to decode.
    tasks = await asyncio.to_thread(_decoded, page.items)
    return tasks[:TASKS], page.following is None and len(tasks) <= TASKS


def _decoded(owners: Sequence[RequestDescription]) -> list[BlockedTask]:
    """Return the published waits, first those that may be part of a deadlock."""
    tasks = [task for owner in owners if (task := decode(owner)) is not None]
    chosen = {task.order_id for task in relevant(tasks)}
    return sorted(tasks, key=lambda task: task.order_id not in chosen)


async def _read_queue(engine: Engine, node: str, name: str) -> tuple[SemaphoreDescription, bool]:
    """Return a semaphore with its first requests, and whether these are all."""
    described = await describe_semaphore(engine, node, name)
    if engine.pages() is None and (described.waiting or 0) > QUEUE:
        return described, False
    # In this order no request is missed that is granted meanwhile: it then counts as neither.
    owners = await requests(engine, node, name, waiters=False, most=QUEUE)
    waiters = await requests(engine, node, name, waiters=True, most=QUEUE)
    queue = replace(described, owners=tuple(owners.items), waiters=tuple(waiters.items))
    return queue, owners.following is None and waiters.following is None


async def _read_sessions(
    engine: Engine, node: str, wanted: Iterable[int]
) -> dict[int, SessionDescription]:
    """Return sessions by id; those that would take too many pages are left out."""
    ids = set(wanted)
    left = sorted(ids, reverse=True)
    found: dict[int, SessionDescription] = {}
    if ids and engine.pages() is None:
        reading = engine.list_sessions(node)
        listed = await answered(engine, f"the list of sessions on {node}", reading)
        return {each.id: session_with_identity(each) for each in listed if each.id in ids}
    for _ in range(SESSION_PAGES):
        if not left:
            break
        page = await sessions(engine, node, after=max(0, left[-1] - 1), most=SESSION_PAGE)
        found |= {each.id: each for each in page.items}
        last = page.items[-1].id if page.items else left[-1]
        while left and left[-1] <= last:
            left.pop()
    return found
