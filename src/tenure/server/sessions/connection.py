"""A connection, as seen by the sessions of its holders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from tenure.server.auth.identity import Identity
    from tenure.server.reads import Reader


class HolderConnection(Protocol):
    """Connection to a holder. Only `room` awaits or raises.

    Attributes:
        identity: the client's identity.
        peer: the client's address.
        reader: the schedule of its costly reads.
    """

    identity: Identity
    peer: str
    reader: Reader

    def send(self, message: Struct) -> None:
        """Send a message; does nothing when the connection is lost."""

    def changed(self, channel: int, number: int) -> None:
        """Send `Changed`, at most once until the holder has read it."""

    def over(self, channel: int) -> None:
        """Forget a channel: it has no session any more."""

    async def room(self, size: int) -> None:
        """Return when an answer of so many bytes may be sent.

        Raises:
            LimitReached: too many bytes of answers are already waiting.
        """

    def begun(self, price: int = 1) -> None:
        """Count an operation that was not answered at once as `price` operations."""

    def finished(self, price: int = 1) -> None:
        """Stop counting an operation: it is answered, or never will be."""
