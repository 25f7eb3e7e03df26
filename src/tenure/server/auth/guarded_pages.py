"""Guarded pages: a store's lists in pages, for one identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure.engines.contract import Pages
from tenure.model import SemaphoreDescription, SessionDescription
from tenure.server.auth.permissions import Access


class GuardedPages:
    """Lists in pages, restricted to nodes that the identity may read (`Pages`).

    Args:
        pages: the store's pages.
        check: raises unless the identity has at least that access to a node.
    """

    __slots__ = ("_check", "_pages")

    def __init__(self, pages: Pages, check: Callable[[str, Access], None]) -> None:
        """Show the pages of nodes that `check` allows."""
        self._pages = pages
        self._check = check

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node."""
        self._check(path, Access.READ)
        return await self._pages.sessions(path, after=after, most=most)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node."""
        self._check(path, Access.READ)
        return await self._pages.semaphores(
            path, owners=owners, waiters=waiters, after=after, most=most
        )
