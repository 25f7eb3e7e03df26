"""Functions without an attached session: those that attach, and operations on nodes and stores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands.administration import CommandPages
from tenure.engines._kit.commands.attaching import TakenOver
from tenure.engines._kit.commands.engine import CommandEngine
from tenure.engines._kit.commands.replies import first_word, repeated
from tenure.engines._kit.commands.statements import Statement
from tenure.engines.contract import Attach, GuardStatement
from tenure.engines.postgresql import values
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import Call, Refusal
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import TenureError

_REPORTING = frozenset({"drop_node", "end_session", "evict"})
"""Functions with the engine's channel as an argument, and with events in their replies."""


class PostgresAdministration(CommandEngine[PostgresSession]):
    """Operations without an attached session.

    Attributes:
        channel: names this engine to others.
        guarded: the tokens of leases that were guarded, while these are held.
    """

    channel: str

    def __init__(self, address: PostgresUrl, clock: Clock) -> None:
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address
        self.guarded: set[int] = set()

    @abstractmethod
    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    @abstractmethod
    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle events, later in this iteration of the loop."""

    # Attaching

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        words = (
            *(how.node, token, self.channel, how.recovery_window),
            *(values.to_text(how.description), how.liveness),
            *(how.key.hex(), rules.SESSIONS_PER_NODE),
        )
        self.send(Call("attach", words, answered))

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take a session over."""
        window = how.recovery_window if how.adopt else None
        place = (how.node, number, secret, self.channel, how.key.hex())
        self.send(Call("take_over", (*place, window), answered))

    def read_take_over(self, number: int, reply: Any) -> TakenOver:  # noqa: ARG002  it is in events
        """Decode the reply to a takeover that succeeded."""
        _, token, window, text, events = reply
        self.push_all(events)
        return TakenOver(token, window, values.from_text(text))

    # Administration

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Return the statement that guards a lease in a transaction of a caller."""
        self.guarded.add(token)
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
        if command in _REPORTING:
            words.append(self.channel)

        def replied(reply: Any) -> None:
            if command in _REPORTING and first_word(reply) == "ok":
                self.push_all(reply[-1])
            answered(repeated(command, reply) if call.may_have_run else reply)

        call = Call(command, (*words,), replied)
        self.send(call)

    def note_silence(self) -> TenureError | None:
        """Return the reason why the store does not answer, if it is known."""
        return self.trouble()

    def pages(self) -> CommandPages:
        """Return lists in pages."""
        self.check_open()
        return CommandPages(self)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        found: list[str] = await self.command("", "list_nodes")
        return found

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        return float(await self.command("", "store_time"))
