"""A connection, as the sessions see it whose holders speak over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from tenure.server.auth.guard import GuardedEngine
    from tenure.server.auth.identity import Identity
    from tenure.server.reads import Reader
    from tenure.server.sessions.session import Hosted

__all__ = ["Link", "Switchboard"]


class Link(Protocol):
    """The connection over which a holder is reached. None of this raises, blocks or awaits."""

    @property
    def program(self) -> bytes:
        """Program whose connection it is (`Hello.program`)."""
        ...

    @property
    def identity(self) -> Identity:
        """Identity of its client."""
        ...

    @property
    def engine(self) -> GuardedEngine:
        """The store as the client's identity may use it."""
        ...

    @property
    def peer(self) -> str:
        """Address of its client."""
        ...

    def send(self, message: Struct) -> None:
        """Say something; nothing happens when the connection is lost."""

    def changed(self, channel: int, number: int) -> None:
        """Say `Changed`; once is enough until the holder has read it."""

    def over(self, channel: int) -> None:
        """Forget a channel: it has no session any more."""

    async def room(self, size: int) -> None:
        """Return when an answer of so many bytes may be said.

        Raises:
            LimitReached: too many bytes of answers wait for that already.
        """

    @property
    def reader(self) -> Reader:
        """The turns of the connection's costly reads."""
        ...

    def begun(self, price: int = 1) -> None:
        """Count an operation of this connection that could not be answered at once.

        Args:
            price: operations for which it counts.
        """

    def finished(self, price: int = 1) -> None:
        """Stop counting an operation: it is answered, or will never be."""


class Switchboard(Link, Protocol):
    """A connection that has channels."""

    def connect(self, channel: int, hosted: Hosted) -> None:
        """Connect a channel with a session."""
