"""What a listener is: one way into the server.

A listener is made without I/O, then opened, drained and closed by the server that runs it. It
binds the address in its URL, where port 0 means any free port, or serves the sockets that it is
given, which are bound already (socket activation).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from tenure.server.auth import Verdict
from tenure.server.context import Context

__all__ = ["Listener", "ListenerFactory"]


class Listener(Protocol):
    """One way into the server."""

    @property
    def address(self) -> str:
        """A URL with the host and port at which it can be reached, once it is open."""
        ...

    async def open(self) -> None:
        """Bind and begin to serve.

        Raises:
            EngineUnavailable: the address cannot be bound; the message says why.
            InvalidArgument: it is not an address for this kind of listener.
        """

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Use other certificates, for the connections that come from now on.

        Args:
            cut_handshakes: end those that are under way, whose client may not come in any more.
        """

    def end_connections(self, verdict: Verdict) -> int:
        """End every connection that may not go on, and return their number.

        Their sessions are detached: each lives on for its recovery window.
        """
        ...

    async def drain(self) -> None:
        """Accept nobody any more, and tell who is connected to go elsewhere.

        It does not wait until they have gone, and it ends no session.
        """

    async def aclose(self) -> None:
        """Cut off who is still connected; their sessions live on in the store. Safe to call twice.

        It may wait for the store; a caller that cannot wait any longer cancels it, after which
        nothing of the listener runs any more. Whether it was cancelled or has failed, sessions may
        still be attached then, and the store is not to be closed in order: that would end them.

        Raises:
            EngineError: sessions could not be detached in the store.
        """


class ListenerFactory(Protocol):
    """How a listener is made of a URL of its scheme."""

    def __call__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> Listener:
        """Make one, without I/O.

        Args:
            context: what the listeners of one server share.
            url: as given to ``--listen``.
            tls: with which the URL's scheme asks for TLS; ``None`` otherwise.
            sockets: bound and perhaps listening already; the listener owns them from now on.

        Raises:
            InvalidArgument: the URL is wrong; the message says in what.
        """
        ...
