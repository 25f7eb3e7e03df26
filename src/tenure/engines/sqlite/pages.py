"""Lists of the SQLite engine in pages: of each page, the dead are taken out first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tenure.engines.sqlite import describe, nodes, sessions
from tenure.engines.sqlite.over import over_in_queue
from tenure.engines.sqlite.store import Store
from tenure.model import SemaphoreDescription, SessionDescription

__all__ = ["SQLitePages"]


class SQLitePages:
    """Pages of one engine.

    Args:
        store: the engine's, open.
        take_out: ends participants that are dead, and sessions that are silent.
    """

    def __init__(
        self, store: Store, take_out: Callable[[Sequence[int], Sequence[int]], Awaitable[None]]
    ) -> None:
        """Read from `store`; `take_out` removes dead participants and silent sessions."""
        self._store = store
        self._take_out = take_out

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Describe the next sessions of a node, by id."""
        with self._store.reading() as tx:
            over = sessions.over_on_node(tx, nodes.find(tx, path), after, most)
        await self._take_out(*over)
        with self._store.reading() as tx:
            return describe.session_list(tx, nodes.find(tx, path), path, after, most)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Describe the next semaphores of a node, by name."""
        dead: set[int] = set()
        silent: set[int] = set()
        with self._store.reading() as tx:
            node = nodes.find(tx, path)
            if owners or waiters:
                for name in describe.semaphore_names(tx, node, after, most):
                    participants, suspects = over_in_queue(tx, node, name)
                    dead.update(participants)
                    silent.update(suspects)
        await self._take_out(sorted(dead), sorted(silent))
        page: list[SemaphoreDescription] = []
        size = 0
        with self._store.reading() as tx:
            node = nodes.find(tx, path)
            for name in describe.semaphore_names(tx, node, after, most):
                page.append(describe.semaphore(tx, node, path, name, owners, waiters))
                size += 1 + len(page[-1].owners) + len(page[-1].waiters)
                if size >= most:
                    break
        return page
