"""Listener: one way into the server.

A listener is made without I/O, then opened, drained and closed by the server that runs it. It
binds the address in its URL, where port 0 means any free port, or serves the sockets that it is
given, which are bound already (socket activation).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Protocol

from tenure.server.auth import Verdict
from tenure.server.context import Context

__all__ = ["Endable", "Listener", "ListenerFactory", "end_in_slices"]

_ENDED, _SEEN = 16, 1024  # connections that are ended, and looked at, in one turn of the loop


class Endable(Protocol):
    """A connection that can be ended."""

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End it if it may not go on, and return whether it was ended."""
        ...


async def end_in_slices(connections: Iterable[Endable], verdict: Verdict) -> int:
    """End the connections that may not go on, a few in each turn of the loop."""
    total = ended = 0
    for seen, connection in enumerate(list(connections), start=1):
        ended += connection.end_unless_valid(verdict)
        if ended >= _ENDED or seen % _SEEN == 0:
            total, ended = total + ended, 0
            await asyncio.sleep(0)
    return total + ended


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
            tls: the context with the new certificates.
            cut_handshakes: end those that are under way, whose client may not come in any more.
        """

    async def end_connections(self, verdict: Verdict) -> int:
        """End every connection that may not go on, and return their number.

        Their sessions are detached: each lives on for its recovery window. Other connections have
        their turns in between; one that comes meanwhile is judged by its greeting. A call that is
        cancelled has ended some.
        """
        ...

    async def drain(self) -> None:
        """Stop accepting, and send connected clients to other servers.

        It does not wait until they have gone, and it ends no session.
        """

    async def aclose(self) -> None:
        """Cut off connected clients; their sessions live on in the store. Safe to call twice.

        It may wait for the store. A caller that cannot wait any longer cancels it; then nothing of
        the listener runs any more. After a cancellation or a failure, sessions may still be
        attached. The store must not be closed in order then: that would end them.

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
        """Make one, without I/O.

        Args:
            context: what the listeners of one server share.
            url: as given to ``--listen``.
            tls: if the URL's scheme requires TLS; ``None`` otherwise.
            sockets: bound and perhaps listening already; the listener owns them from now on.

        Raises:
            InvalidArgument: the URL is wrong; the message says in what.
        """
        ...
