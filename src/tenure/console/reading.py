"""Reads of a store on behalf of a visitor, in pages and in bounded time.

Nothing here knows a list as a whole, if the store has lists in pages (`Engine.pages`). A store
without them has to return its list, of which one page is kept.

All errors are those of `tenure.errors`; a store that does not answer raises `EngineUnavailable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tenure.core import rules
from tenure.engines.contract import Engine
from tenure.errors import EngineUnavailable, NodeNotFound
from tenure.identity import semaphore_with_identities, session_with_identity
from tenure.model import (
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

    Their owners and waiters are not described. Upper and lower case are the same to a search.
    """
    rules.check_path(node)
    wanted = search.casefold()
    what = f"the list of semaphores on {node}"
    pages = engine.pages()

    def fits(each: SemaphoreDescription) -> bool:
        return wanted in each.name.casefold()

    def name(each: SemaphoreDescription) -> str:
        return each.name

    if pages is None:
        found = await answered(
            engine, what, engine.list_semaphores(node, owners=False, waiters=False)
        )
        return _page_of(found, fits, name, after, most)

    async def read(after: str, most: int) -> tuple[Sequence[SemaphoreDescription], bool]:
        page = await answered(
            engine,
            what,
            pages.semaphores(node, owners=False, waiters=False, after=after, most=most),
        )
        return page, bool(page)

    return await _searched(engine, read, fits, name, after, most, search=bool(wanted))


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
