"""Operations on nodes and whole stores, as scripts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tenure.clock import Clock
from tenure.engines._kit.commands.engine import CommandEngine
from tenure.engines.redis import values
from tenure.engines.redis.commands import SCRIPTS, LargeRead, ScriptCall, Word
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.engines.redis.session import RedisSession
from tenure.engines.redis.url import RedisUrl
from tenure.errors import TenureError

__all__ = ["RedisAdministration"]

_CHANGES = frozenset({"create_node", "alter_node", "drop_node", "end_session", "evict"})


class RedisAdministration(CommandEngine[RedisSession]):
    """Operations without a session.

    Attributes:
        reconnector: the connection to the server.
    """

    reconnector: RedisReconnector

    def __init__(self, address: RedisUrl, clock: Clock) -> None:
        """Start closed."""
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address

    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Run a script."""
        if command == "describe":
            path, name, included = args
            words: tuple[Word, ...] = ("", path, included, *(() if name is None else (name,)))
            self.reconnector.send(LargeRead(SCRIPTS["describe"], None, words, answered))
            return
        words = tuple(map(_word, args))
        if command == "create_node":  # so that a repeated command recognises its own node
            words += (secrets.token_hex(8),)
        kind = ScriptCall if command in _CHANGES else LargeRead
        self.reconnector.send(kind(SCRIPTS["admin"], None, (command, *words), answered))

    def note_silence(self) -> TenureError | None:
        """Drop the connection; return the reason."""
        self.reconnector.drop("the server does not answer")
        return self.reconnector.failure

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        _, paths = await self.command("", "list_nodes", "")
        return sorted(path.decode() for path in paths)

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        _, microseconds = await self.command("", "store_time", "")
        return int(microseconds) / 1e6


def _word(argument: Any) -> Word:
    if isinstance(argument, bool):
        return int(argument)
    return argument if isinstance(argument, bytes) else str(argument)
