"""A connection, as the sessions see it whose holders use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from tenure.server.auth.identity import Identity
    from tenure.server.reads import Reader

__all__ = ["HolderConnection"]


class HolderConnection(Protocol):
    """The connection over which a holder is reached. Only `room` awaits or raises.

    Attributes:
        identity: of its client.
        peer: address of its client.
        reader: turns of its costly reads.
    """

    identity: Identity
    peer: str
    reader: Reader

    def send(self, message: Struct) -> None:
        """Send a message; nothing happens when the connection is lost."""

    def changed(self, channel: int, number: int) -> None:
        """Send `Changed`; once is enough until the holder has read it."""

    def over(self, channel: int) -> None:
        """Forget a channel: it has no session any more."""

    async def room(self, size: int) -> None:
        """Return when an answer of so many bytes may be sent.

        Raises:
            LimitReached: too many bytes of answers wait for that already.
        """

    def begun(self, price: int = 1) -> None:
        """Count an operation that could not be answered at once as `price` operations."""

    def finished(self, price: int = 1) -> None:
        """Stop counting an operation: it is answered, or will never be."""
