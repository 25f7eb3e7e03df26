"""Lists of a PostgreSQL store in pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tenure.core import rules
from tenure.engines._kit.commands.values import included
from tenure.engines.postgresql import values
from tenure.model import SemaphoreDescription, SessionDescription

__all__ = ["PostgresPages"]


class PostgresPages:
    """The lists of one store, as the contract defines them.

    Args:
        command: calls a function in the database.
    """

    def __init__(self, command: Callable[..., Awaitable[Any]]) -> None:
        """Call functions with `command`."""
        self._command = command

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id."""
        rules.check_path(path)
        _, found = await self._command(path, "list_sessions", path, after, most)
        return values.sessions(path, found)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name."""
        rules.check_path(path)
        kinds = included(owners=owners, waiters=waiters)
        _, found = await self._command(path, "describe", path, None, kinds, after, most)
        return [values.semaphore(each, owners=owners, waiters=waiters) for each in found]
