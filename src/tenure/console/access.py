"""Doors of the console: who comes in, and what each visitor may do.

The console does not decide about access. A server has a door with its tokens, identities and
permissions; `tenure console` has one for the user of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

from tenure.engines.contract import Engine

Access: TypeAlias = Literal["read", "hold", "administer"]
"""A level of access to a node, as in `tenure serve`; each includes those before it."""

Connection: TypeAlias = Mapping[str, Any]
"""The ASGI scope of a request, with what the server knows of the connection."""


class Visitor(Protocol):
    """An identity that uses the console."""

    @property
    def name(self) -> str:
        """Name of the identity. Visitors with the same name see the same pages."""

    @property
    def engine(self) -> Engine:
        """The store as this identity may use it.

        Operations that it may not use raise `AuthenticationFailed`, or `NodeNotFound` for a node
        that it may not see.
        """

    def may(self, node: str, access: Access) -> bool:
        """Return true if the identity has at least that access to a node."""


class Door(Protocol):
    """Authentication of visitors, and the record of what they do."""

    def recognise(self, connection: Connection) -> Visitor | None:
        """Return the visitor that needs no token, if the connection shows one.

        Such as the owner of a client certificate, or any client of a server that requires no
        tokens. It is called for each request without a sign-in, and does no I/O.
        """

    async def sign_in(self, token: str, host: str, connection: Connection) -> Visitor:
        """Return the visitor with this token.

        Args:
            token: the token that was sent, never empty.
            host: the address of the client.
            connection: the ASGI scope of the request.

        Raises:
            AuthenticationFailed: the token is not valid.
        """

    def still_valid(self, visitor: Visitor) -> bool:
        """Return true unless the token of a visitor was revoked, or its permissions changed.

        It is called for each request of a visitor, and once a second for each open page.
        """

    def action(
        self, event: str, visitor: Visitor, host: str, /, **facts: object
    ) -> AbstractContextManager[Any]:
        """Return a context that records an administrative action with its outcome.

        Args:
            event: ``"session ended"`` or ``"request evicted"``.
            visitor: the visitor that acts.
            host: the address of the client.
            facts: the object of the action: ``node``, ``session``, or ``name`` and ``order_id``.
        """
