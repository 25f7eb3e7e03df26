"""The console's door on a server: its tokens, certificates, identities and permissions.

`tenure.console.access.Door` is the contract. A visitor uses the store through the same guard as the
clients of the other listeners.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, cast

from tenure.console.access import Visitor
from tenure.engines.contract import Engine, Pages
from tenure.errors import AuthenticationFailed
from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.auth import Identity, Peer
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Access
from tenure.server.context import Context
from tenure.server.http.connection import HttpServerConnection
from tenure.server.limits import LimitReached
from tenure.server.reads import without_server

CURRENT: ContextVar[HttpServerConnection] = ContextVar("CURRENT")
"""The connection of the request that is answered in this context."""

_LEVELS: Mapping[str, Access] = {
    "read": Access.READ,
    "hold": Access.HOLD,
    "administer": Access.ADMINISTER,
}


class _Shown:
    """A store as the console shows it; see `shown_store`. All else is the store's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def describe_semaphore(self, *args: Any, **more: Any) -> SemaphoreDescription:
        found: SemaphoreDescription = await self._store.describe_semaphore(*args, **more)
        return _semaphore(found)

    async def list_semaphores(self, *args: Any, **more: Any) -> Sequence[SemaphoreDescription]:
        return list(map(_semaphore, await self._store.list_semaphores(*args, **more)))

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        return list(map(without_server, await self._store.list_sessions(path)))

    def pages(self) -> Pages | None:
        pages = self._store.pages()
        return None if pages is None else _ShownPages(pages)


class _ShownPages:
    """Lists in pages (`Pages`), as the console shows them."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        found = await self._pages.sessions(path, after=after, most=most)
        return list(map(without_server, found))

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        return await self._pages.names(path, after=after, most=most)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        found = await self._pages.semaphores(
            path, owners=owners, waiters=waiters, after=after, most=most
        )
        return list(map(_semaphore, found))

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        found = await self._pages.requests(path, name, waiters=waiters, after=after, most=most)
        return list(map(without_server, found))


def shown_store(store: Engine) -> Engine:
    """Return a store whose descriptions omit this server's process (`without_server`)."""
    return cast("Engine", _Shown(store))


def _semaphore(found: SemaphoreDescription) -> SemaphoreDescription:
    if not (found.owners or found.waiters):
        return found
    owners, waiters = (tuple(map(without_server, each)) for each in (found.owners, found.waiters))
    return replace(found, owners=owners, waiters=waiters)


class ServerVisitor:
    """An identity that uses the console (`tenure.console.access.Visitor`).

    Attributes:
        identity: the identity.
        peer: the client, as known to its transport.
        engine: the store as the identity may use it.
    """

    def __init__(self, identity: Identity, peer: Peer, engine: GuardedEngine) -> None:
        self.identity = identity
        self.peer = peer
        self.engine = shown_store(engine)
        self._guarded = engine

    @property
    def name(self) -> str:
        """Name of the identity, unique among all kinds: a token's name contains no space."""
        kind = self.identity.kind
        return f"certificate {self.identity}" if kind == "certificate" else self.identity.name

    def may(self, node: str, access: Literal["read", "hold", "administer"]) -> bool:
        """Return true if the identity has at least that access to a node."""
        return self._guarded.allows(node, _LEVELS[access])


class ServerDoor:
    """Authentication of the console's visitors (`tenure.console.access.Door`).

    A connection whose request shows an identity is let in (`HttpServerConnection`). When there are
    too many connections, it is served like a stranger's: one response, within the time of a
    greeting.

    Args:
        context: the server's context.
        reject: records a wrong token, and returns when that may be reported.
    """

    def __init__(
        self,
        context: Context,
        reject: Callable[[HttpServerConnection, AuthenticationFailed], Awaitable[None]],
    ) -> None:
        self._context = context
        self._reject = reject

    def recognise(self, connection: Mapping[str, Any]) -> ServerVisitor | None:
        """Return the visitor that needs no token, if the connection shows one."""
        found: HttpServerConnection = connection["state"]["connection"]
        try:
            return self._visitor(found, self._authenticate("", found))
        except AuthenticationFailed:
            return None

    async def sign_in(
        self,
        token: str,
        host: str,  # noqa: ARG002  the connection has it, with the port
        connection: Mapping[str, Any],
    ) -> ServerVisitor:
        """Return the visitor with this token.

        Raises:
            AuthenticationFailed: the token is not valid.
        """
        found: HttpServerConnection = connection["state"]["connection"]
        try:
            return self._visitor(found, self._authenticate(token, found))
        except AuthenticationFailed as error:
            await self._reject(found, error)
            raise

    def still_valid(self, visitor: Visitor) -> bool:
        """Return true unless the token of a visitor was revoked, or its permissions changed."""
        assert isinstance(visitor, ServerVisitor)
        valid = self._context.authenticator.verdict(visitor.identity, visitor.peer) is None
        current = CURRENT.get(None)
        if valid and current is not None:
            self._let_in(current, visitor.identity)
        return valid

    def action(
        self, event: str, visitor: Visitor, host: str, /, **facts: object
    ) -> AbstractContextManager[dict[str, object]]:
        """Return a context that records an administrative action with its outcome."""
        assert isinstance(visitor, ServerVisitor)
        current = CURRENT.get(None)
        peer = host if current is None else current.peer
        return self._context.audit.action(event, visitor.identity, peer, **facts)

    def _authenticate(self, token: str, connection: HttpServerConnection) -> Identity:
        return self._context.authenticator.authenticate(token, connection.shown)

    def _visitor(self, connection: HttpServerConnection, identity: Identity) -> ServerVisitor:
        self._let_in(connection, identity)
        engine = GuardedEngine(self._context.guard, identity)
        return ServerVisitor(identity, connection.shown, engine)

    def _let_in(self, connection: HttpServerConnection, identity: Identity) -> None:
        if connection.is_stranger or connection.identity != identity:
            try:
                connection.let_in(identity)
            except LimitReached as error:
                self._context.log(
                    logging.DEBUG, "served as a stranger", peer=connection.peer, why=error
                )
