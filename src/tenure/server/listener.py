"""Listener: one address of the server.

A listener is created without I/O; then the server opens, drains and closes it. It binds the address
in its URL, where port 0 means any free port, or serves given sockets that are already bound (socket
activation).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Protocol

from tenure.server.auth import Verdict
from tenure.server.context import Context

_ENDED, _SEEN = 16, 1024  # connections that are checked and ended in one iteration of the loop


class Endable(Protocol):
    """A connection that can be ended."""

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End it if it may not continue, and return whether it was ended."""
        ...


async def end_in_slices(connections: Iterable[Endable], verdict: Verdict) -> int:
    """End the connections that may not continue, a few in each iteration of the loop."""
    total = ended = 0
    for seen, connection in enumerate(list(connections), start=1):
        ended += connection.end_unless_valid(verdict)
        if ended >= _ENDED or seen % _SEEN == 0:
            total, ended = total + ended, 0
            await asyncio.sleep(0)
    return total + ended


class Listener(Protocol):
    """One address of the server."""

    @property
    def address(self) -> str:
        """URL with the host and port at which it can be reached, once it is open."""
        ...

    async def open(self) -> None:
        """Bind and begin to serve.

        Raises:
            EngineUnavailable: the address cannot be bound; the message says why.
            InvalidArgument: the address is invalid for this kind of listener.
        """

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Use other certificates for new connections.

        Args:
            tls: the context with the new certificates.
            cut_handshakes: whether to end handshakes in progress, whose clients may no longer be
                trusted.
        """

    async def end_connections(self, verdict: Verdict) -> int:
        """End every connection that may not continue, and return their number.

        Their sessions are detached, and survive for their recovery windows. Other connections are
        served in between; new ones are checked by their greetings. A cancelled call may have ended
        some.
        """
        ...

    async def drain(self) -> None:
        """Stop accepting, and send connected clients to other servers.

        It does not wait until they have disconnected, and ends no session.
        """

    async def aclose(self) -> None:
        """Disconnect all clients; their sessions survive in the store. Safe to call twice.

        It may wait for the store. A caller may cancel it; then the listener is stopped, too. After
        a cancellation or a failure, sessions may still be attached. Then the store must not be
        closed, because that would end them.

        Raises:
            EngineError: sessions could not be detached in the store.
        """


class ListenerFactory(Protocol):
    """Factory of listeners for URLs of one scheme."""

    def __call__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> Listener:
        """Create one, without I/O.

        Args:
            context: the state shared by the server's listeners.
            url: the URL given to ``--listen``.
            tls: the TLS context if the URL's scheme requires it, else ``None``.
            sockets: bound sockets, perhaps already listening; the listener owns them.

        Raises:
            InvalidArgument: the URL is wrong; the message says why.
        """
        ...
