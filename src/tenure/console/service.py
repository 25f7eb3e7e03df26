"""Service behind the pages and the API of one console: its visitors, and what they change.

It owns the observer of the store and the hub of the live pages. The observer reads the store once
for all visitors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from tenure.clock import Clock
from tenure.console.access import Door, Visitor
from tenure.console.live import Hub
from tenure.console.observer import Observer
from tenure.console.reading import ANSWER_TIMEOUT
from tenure.console.security import SignIns
from tenure.engines.contract import Engine
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    NodeNotFound,
    SemaphoreNotFound,
    TenureError,
    Unsupported,
)

LOGGER = logging.getLogger("tenure.console")

LARGEST_BODY = 64 * 1024
BEARERS = 256
BEARER_TIME = 60.0
"""Visitors with a bearer token that are remembered, and for how many seconds."""


class NoSuchObject(NodeNotFound):
    """A session or a request that does not exist."""


STATUS: tuple[tuple[type[TenureError], int], ...] = (
    (AuthenticationFailed, 403),
    (NoSuchObject, 404),
    (NodeNotFound, 404),
    (SemaphoreNotFound, 404),
    (InvalidArgument, 400),
    (Unsupported, 501),
    (EngineUnavailable, 503),
    (EngineError, 503),
)


def status_of(error: TenureError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


@dataclass(frozen=True, slots=True)
class Visit:
    """A visitor's request.

    Attributes:
        secret: the secret of the sign-in; empty if the connection itself shows the visitor.
        bearer: whether it came with a bearer token.
    """

    visitor: Visitor
    secret: str = ""
    bearer: bool = False


class Console:
    """State and services of one console, behind its pages and its API.

    Args:
        door: decides who comes in.
        store: the open store, without permissions, which the observer reads for all visitors.

    Attributes:
        observer: the observer of the store.
        hub: the live pages.
    """

    def __init__(self, door: Door, store: Engine) -> None:
        self.door = door
        self.store = store
        self.observer = Observer(store, LOGGER)
        self.hub = Hub(store.clock, door.still_valid, LOGGER)
        self.sign_ins = SignIns()
        self._searches = WeakValueDictionary[str, asyncio.Lock]()
        self._bearers: OrderedDict[bytes, tuple[Visitor, float]] = OrderedDict()
        self._bearer_key = secrets.token_bytes(32)

    @property
    def clock(self) -> Clock:
        """The clock of the store."""
        return self.store.clock

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks for the length of a block."""
        tasks = [asyncio.create_task(self.observer.run()), asyncio.create_task(self.hub.run())]
        try:
            yield
        finally:
            self.end_streams()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end_streams(self) -> None:
        """End the streams of all live pages."""
        self.hub.end_streams()

    def searching(self, visitor: Visitor) -> asyncio.Lock:
        """Return the lock that a search of a visitor holds."""
        return self._searches.setdefault(visitor.name, asyncio.Lock())

    # Visitors

    def cookie(self, request: Request) -> str:
        """Return the name of the cookie: browsers send cookies to all ports of a host."""
        server = request.scope.get("server")
        port = server[1] if server and server[1] else 0
        prefix = "__Host-" if request.url.scheme == "https" else ""
        return f"{prefix}tenure-console-{port}"

    async def visit(self, request: Request) -> Visit | None:
        """Return the visitor of a request, or ``None`` if it has to sign in.

        Raises:
            AuthenticationFailed: its bearer token is not valid.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return Visit(await self._bearer(token.strip(), request), bearer=True)
        secret = request.cookies.get(self.cookie(request), "")
        if secret:
            visitor = self.sign_ins.find(secret, self.clock.now())
            if visitor is not None:
                if self.door.still_valid(visitor):
                    return Visit(visitor, secret)
                self.sign_ins.remove(secret)
        recognised = self.door.recognise(request.scope)
        return None if recognised is None else Visit(recognised)

    async def _bearer(self, token: str, request: Request) -> Visitor:
        if not token:
            raise AuthenticationFailed("the bearer token is empty")
        now = self.clock.now()
        digest = hmac.digest(self._bearer_key, token.encode(errors="surrogatepass"), "sha256")
        visitor, until = self._bearers.pop(digest, (None, 0.0))
        if visitor is None or until < now or not self.door.still_valid(visitor):
            visitor = await self.door.sign_in(token, host_of(request), request.scope)
            until = now + BEARER_TIME
        self._bearers[digest] = visitor, until
        if len(self._bearers) > BEARERS:
            self._bearers.popitem(last=False)
        return visitor

    async def api_visit(self, request: Request) -> Visit:
        """Return the visitor of a request that is not a page.

        Raises:
            HTTPException: 401: there is none.
        """
        try:
            visit = await self.visit(request)
        except AuthenticationFailed as error:
            raise HTTPException(401, str(error), {"WWW-Authenticate": "Bearer"}) from error
        if visit is None:
            raise HTTPException(401, "sign in first", {"WWW-Authenticate": "Bearer"})
        self.observer.want()
        return visit

    # Acts

    async def act(
        self, visitor: Visitor, host: str, event: str, work: Awaitable[bool], **facts: object
    ) -> bool:
        """Carry out an administrative action, and record it; return whether its object existed."""
        with self.door.action(event, visitor, host, **facts) as entry:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    found = await work
            except TimeoutError as error:
                raise EngineUnavailable(
                    f"it is not known whether this was done: {self.store.url} has not answered "
                    f"within {ANSWER_TIMEOUT:g} s. Look again before you repeat it"
                ) from error
            if not found and isinstance(entry, dict):
                entry["outcome"] = None  # there was nothing to do
            return found

    async def end_session(self, visitor: Visitor, host: str, node: str, number: int) -> bool:
        """End a session, if the visitor may."""
        self.check(visitor, node)
        ending = visitor.engine.end_session(node, number)
        return await self.act(visitor, host, "session ended", ending, node=node, session=number)

    async def evict(self, visitor: Visitor, host: str, node: str, name: str, order_id: int) -> bool:
        """Evict a request, if the visitor may."""
        self.check(visitor, node)
        evicting = visitor.engine.evict(node, name, order_id)
        facts = {"node": node, "name": name, "order_id": order_id}
        return await self.act(visitor, host, "request evicted", evicting, **facts)

    def check(self, visitor: Visitor, node: str) -> None:
        """Check that a visitor may administer a node.

        Raises:
            AuthenticationFailed: it may not.
            NodeNotFound: it may not even see the node.
        """
        if visitor.may(node, "administer"):
            return
        if not visitor.may(node, "read"):
            raise NodeNotFound(f"there is no node {node}", node=node)
        raise AuthenticationFailed(
            f"{visitor.name} may not administer {node}: this console shows it, and changes nothing",
            node=node,
        )


def host_of(request: Request) -> str:
    """Return the address of the client."""
    return request.client.host if request.client is not None else "unknown"


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HTTPException: 413: it is too long.
    """
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"the body has more than {LARGEST_BODY} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    return body
