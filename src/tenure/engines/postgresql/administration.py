"""Operations on nodes and whole stores, as functions in the database."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tenure.clock import Clock
from tenure.engines._kit.commands.engine import CommandEngine
from tenure.engines._kit.commands.replies import first_word
from tenure.engines._kit.reconnect import Reconnector
from tenure.engines.contract import GuardStatement
from tenure.engines.postgresql import values
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.pages import PostgresPages
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import Call, Refusal, Statement
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import TenureError

__all__ = ["PostgresAdministration"]

_REPORTING = frozenset({"drop_node", "end_session", "evict"})
"""Functions with the engine's channel as an argument, and with events in their replies."""


class PostgresAdministration(CommandEngine[PostgresSession]):
    """Operations that belong to no session.

    Attributes:
        channel: names this engine to others.
        reconnector: keeps the connection to the server.
    """

    channel: str
    reconnector: Reconnector[str, PostgresConnection]

    def __init__(self, address: PostgresUrl, clock: Clock) -> None:
        """Start closed."""
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address

    @abstractmethod
    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    @abstractmethod
    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle events, later in this iteration of the loop."""

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Return the statement that guards a lease in a transaction of a caller."""
        return GuardStatement(
            f"SELECT {self._address.schema}.guard(?::text, ?::text, ?::bigint)",
            (values.to_text(node), values.to_text(name), token),
            "TN002",
        )

    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Call a function."""
        words = [values.to_text(each) if isinstance(each, str) else each for each in args]
        if command not in _REPORTING:
            self.send(Call(command, (*words,), answered))
            return

        def reported(reply: Any) -> None:
            if first_word(reply) == "ok":
                self.push_all(reply[-1])
            answered(reply)

        self.send(Call(command, (*words, self.channel), reported))

    def note_silence(self) -> TenureError | None:
        """Return the reason why the store does not answer, if it is known."""
        return self.trouble()

    @abstractmethod
    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the reason why the store grants nothing at this moment, if it is known."""

    def pages(self) -> PostgresPages:
        """Return lists in pages."""
        self.check_open()
        return PostgresPages(self.command)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        found: list[str] = await self.command("", "list_nodes")
        return found

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        return float(await self.command("", "store_time"))
