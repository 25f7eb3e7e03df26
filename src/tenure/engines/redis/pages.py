"""Lists in pages. No script reads more than a page, or a few thousand keys.

The store has no sorted list of names, which would cost every acquire a write. So the names of a
node are read in steps, from its sessions if they are few, else with ``SCAN``, and are sorted here.
They are kept for the further pages of a list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from tenure.core import refusals, rules
from tenure.engines._kit.commands.engine import CommandEngine, CommandPages
from tenure.engines._kit.commands.replies import first_word, included
from tenure.engines.redis import values
from tenure.model import RequestDescription, SemaphoreDescription

_KEPT = 10.0
"""Seconds for which further pages use the names that were read for an earlier one."""

_MOST = 100
"""Largest number of semaphores that a script describes."""


_LONG, _REST = 0.03, 10.0
"""Seconds of a long reading of names, and the multiple of it for which first pages use them."""


class _Names(NamedTuple):
    """Names of a node, sorted.

    Attributes:
        read_at: when their reading began.
        good_for: seconds for which a first page uses them.
    """

    read_at: float
    good_for: float
    names: list[str]


class RedisPages(CommandPages):
    """Lists of one namespace in pages.

    Attributes:
        few: the number of sessions and lasting semaphores up to which a node is small. Its names
            are read at once, even if the database has many keys of other programs.
    """

    few = 1_000

    def __init__(self, engine: CommandEngine[Any]) -> None:
        super().__init__(engine)
        self._kept: dict[str, _Names] = {}  # by node

    async def all_names(self, path: str) -> list[str]:
        """Return the names of a node's semaphores, sorted."""
        names: set[bytes] = set()
        cursor: str | bytes = "0"
        while True:
            _, cursor, found = await self._engine.command(path, "names", path, cursor, self.few)
            names.update(found)
            if cursor == b"0":
                return sorted(name.decode() for name in names)

    async def _names_after(self, path: str, after: str) -> list[str]:
        """Return the names behind a name."""
        now = self._engine.clock.now
        began = now()
        for node, former in list(self._kept.items()):
            if began - former.read_at > _KEPT:
                del self._kept[node]
        kept = self._kept.get(path)
        if kept is None or not (after or began - kept.read_at < kept.good_for):
            found = await self.all_names(path)
            took = now() - began
            kept = _Names(began, _REST * took if took > _LONG else 0.0, found)
            self._kept[path] = kept
        return kept.names[bisect_right(kept.names, after) :]

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted."""
        rules.check_path(path)
        return (await self._names_after(path, after))[:most]

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name."""
        rules.check_path(path)
        kinds, most = included(owners=owners, waiters=waiters), min(most, _MOST)
        names = await self._names_after(path, after)
        at = 0
        while at < len(names):
            _, found, done = await self._engine.command(
                path, "page", path, kinds, most, *names[at : at + most]
            )
            if found:
                return self._engine.described(found, owners=owners, waiters=waiters)
            at += done  # these have been deleted
        return []

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Return the next owners or waiters of a semaphore, by order id."""
        rules.check_path(path)
        rules.check_name(name, path)
        reply = await self._engine.command(path, "queue", path, name, waiters, after, most)
        if first_word(reply) == "missing":
            raise refusals.semaphore_not_found(path, name)
        found = values.semaphore(reply[1], owners=not waiters, waiters=waiters)
        return found.waiters if waiters else found.owners
