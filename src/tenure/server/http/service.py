"""Answers of the HTTP listeners of a server: health checks, metrics and the console.

    /healthz   the process is alive: 200 with the lag of the event loop; it reads no store
    /readyz    200 if the store answers, else 503 with the reason; 503 while draining
    /metrics   Prometheus' text format
    the rest   the console, which decides about its own pages

Rules:

* One `HttpService` belongs to one server. Its listeners share it (`share`, `unshare`).
* **Access.** Health checks need no token. The metrics need the permission ``read`` on ``/``, if the
  server requires tokens, unless they are open; nodes that the identity may not read are not named.
* **Wrong tokens** are answered late, recorded, and end their connection.
* **Strangers** (`HttpServerConnection.is_stranger`) get one response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tenure.background import Failures
from tenure.console.app import make_app
from tenure.errors import AuthenticationFailed
from tenure.server.auth import REFUSAL_DELAY, Identity
from tenure.server.auth.identity import EVERYTHING, Access, Permissions
from tenure.server.context import Context
from tenure.server.http.connection import BODY_BYTES, HEAD_BYTES, HttpServerConnection
from tenure.server.http.door import CURRENT, ServerDoor, shown_store
from tenure.server.http.health import Health
from tenure.server.http.metrics import CONTENT_TYPE, Exposition
from tenure.server.http.options import HttpOptions
from tenure.server.limits import LimitReached

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_NOT_STORED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_CLOSE = (b"connection", b"close")


def bearer(headers: Headers) -> str:
    """Return the token in the header ``Authorization``; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def connection_of(scope: Scope) -> HttpServerConnection:
    """Return the connection that a request came on."""
    connection: HttpServerConnection = scope["state"]["connection"]
    return connection


class HttpService:
    """Answers of the HTTP listeners of one server.

    Args:
        context: the server's context.
        options: the options of its HTTP listeners.

    Attributes:
        health: the server's health.
    """

    def __init__(self, context: Context, options: HttpOptions) -> None:
        door = ServerDoor(context, self.reject)
        self._console = make_app(door, shown_store(context.engine), hosts=options.hosts)
        self._running: asyncio.Task[None] | None = None  # the console's background tasks
        self._runs = asyncio.Event()
        self.health = Health(context)
        self._context = context
        self._options = options
        self._exposition = Exposition(context, self.health, options.identities)
        self._failures = Failures("answering an HTTP request", context.logger)
        self._users = 0
        own = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        self._own = Starlette(routes=[Route(path, endpoint) for path, endpoint in own.items()])
        self._paths = frozenset(own)
        self._app: App = self._choose

    # Shared by the listeners

    @classmethod
    async def share(cls, context: Context, options: HttpOptions) -> HttpService:
        """Return the server's service, shared by one more listener."""
        service: HttpService | None = context.shared.get(cls)
        if service is None:
            service = context.shared[cls] = cls(context, options)
        service._users += 1
        try:
            await service._start()
        except BaseException:
            await service.unshare()
            raise
        return service

    async def unshare(self) -> None:
        """End the share of one listener, whose connections are closed. The last one ends it."""
        self._users -= 1
        if not self._users:
            del self._context.shared[HttpService]
            try:
                if self._running is not None:
                    self._running.cancel()
                    await asyncio.wait([self._running])
            finally:
                await self.health.aclose()

    async def _start(self) -> None:
        """Start the console's background tasks, unless they run."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        started = asyncio.ensure_future(self._runs.wait())
        try:
            await asyncio.wait([started, self._running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if self._running.done():
            self._running.result()

    async def _run(self) -> None:
        """Own the console's background tasks, until it is cancelled."""
        async with self._console.router.lifespan_context(self._console):
            self._runs.set()
            await asyncio.Event().wait()

    def end_streams(self) -> None:
        """End the responses of the console that would last for ever."""
        self._console.state.console.end_streams()

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, within the limits (an ASGI application)."""
        CURRENT.set(connection_of(scope))  # of this request's task
        limited = _Limited(scope, receive, send)
        try:
            if refusal := self._refusal(scope):
                await refusal(scope, receive, limited.send)
            else:
                await self._app(scope, limited.receive, limited.send)
        except _TooLong:
            text = f"a body has at most {BODY_BYTES} bytes\n"
            await limited.end(PlainTextResponse(text, 413, _NOT_STORED))
        except Exception as error:
            self._failures.report(error)
            await limited.end(PlainTextResponse("Internal Server Error\n", 500, _NOT_STORED))

    async def _choose(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._own if scope["path"] in self._paths else self._console
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Admit the client of a server without tokens; return why a request is refused."""
        if _length_of_head(scope) > HEAD_BYTES:
            return PlainTextResponse("the headers are too long\n", 431, _NOT_STORED)
        connection = connection_of(scope)
        if connection.is_stranger and not self._context.authenticator.required:
            try:
                connection.let_in(self._context.authenticator.authenticate("", connection.shown))
            except LimitReached as error:
                return _busy(error)
            except AuthenticationFailed as error:  # a revoked certificate
                return _forbidden(str(error))
        return None

    async def _healthz(self, _: Request) -> Response:
        loop = self.health.loop
        found = {
            "alive": True,
            "loop_lag_seconds": round(loop.latest, 6),
            "loop_lag_max_seconds": round(loop.largest, 6),
        }
        return JSONResponse(found, headers=_NOT_STORED)

    async def _readyz(self, request: Request) -> Response:
        if self.health.draining:
            return _not_ready("draining", "the server is being stopped")
        reason = await self.health.store.read()
        if reason is None:
            return JSONResponse({"ready": True}, headers=_NOT_STORED)
        # The reason may have names of hosts, which strangers need not know.
        shown = not connection_of(request.scope).is_stranger
        return _not_ready("store", reason if shown else "the store cannot be used")

    async def _metrics(self, request: Request) -> Response:
        permissions = EVERYTHING
        if not self._options.open_metrics:
            try:
                permissions = await self._readers_permissions(request)
            except _Refused as refused:
                return refused.response
        text = await self._exposition.text(permissions)
        return Response(text, headers=_NOT_STORED, media_type=CONTENT_TYPE)

    async def _readers_permissions(self, request: Request) -> Permissions:
        """Return what the identity of a request may see. Raises `_Refused`."""
        connection = connection_of(request.scope)
        token = bearer(request.headers)
        try:
            identity = self._context.authenticator.authenticate(token, connection.shown)
        except AuthenticationFailed as error:
            if token:
                await self.reject(connection, error)
            raise _Refused(_unauthorized(str(error))) from error
        self.let_in(connection, identity)
        if identity.permissions.access("/") < Access.READ:
            raise _Refused(
                _forbidden(f"the metrics need the permission read on /, which {identity} has not")
            )
        return identity.permissions

    async def reject(self, connection: HttpServerConnection, error: AuthenticationFailed) -> None:
        """Record a wrong token, and return when that may be reported."""
        self._context.log(logging.WARNING, "wrong token", peer=connection.peer, why=error)
        self._context.refused_login(connection.peer, error, listener="http")
        await asyncio.sleep(REFUSAL_DELAY)

    def let_in(self, connection: HttpServerConnection, identity: Identity) -> None:
        """Serve the client from now on. Raises `_Refused` if there are too many."""
        try:
            connection.let_in(identity)
        except LimitReached as error:
            raise _Refused(_busy(error)) from error


def _length_of_head(scope: Scope) -> int:
    """Return the bytes of a request's first line and headers, or a little less."""
    headers = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


class _Refused(Exception):
    """A request is refused.

    Attributes:
        response: the answer.
    """

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class _TooLong(Exception):
    """Error: the body of a request is longer than `BODY_BYTES`."""


def _busy(error: LimitReached) -> Response:
    return PlainTextResponse(f"{error}\n", 503, {**_NOT_STORED, "Retry-After": "1"})


def _forbidden(why: str) -> Response:
    return PlainTextResponse(f"{why}\n", 403, _NOT_STORED)


def _unauthorized(why: str) -> Response:
    return PlainTextResponse(f"{why}\n", 401, {**_NOT_STORED, "WWW-Authenticate": "Bearer"})


def _not_ready(reason: str, detail: str) -> Response:
    return JSONResponse(
        {"ready": False, "reason": reason, "detail": detail}, 503, headers=_NOT_STORED
    )


class _Limited:
    """One request and its response, within the limits.

    Args:
        scope, receive, send: those of the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._size = 0
        self._is_too_long = False
        self._begun = self._complete = False

    async def receive(self) -> Message:
        """Return the next part of the body.

        Raises:
            _TooLong: there is too much of it.
        """
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size > BODY_BYTES:
            self._is_too_long = True
            raise _TooLong
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response; a stranger's connection ends with it."""
        if self._is_too_long and not self._begun:
            return  # the application's answer to `_TooLong`
        await self._send_on(message)

    async def _send_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            headers = list(message.get("headers", ()))
            if connection_of(self._scope).is_stranger or message["status"] in _LAST:
                headers = [each for each in headers if each[0].lower() != b"connection"]
                headers.append(_CLOSE)
            message["headers"] = headers
        else:
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def end(self, response: Response) -> None:
        """Send a response, if none was begun; end the connection if it is not complete."""
        if not self._begun:
            await response(self._scope, self._receive, self._send_on)
        elif not self._complete:
            connection_of(self._scope).cut_off()


_LAST = frozenset({400, 401, 413, 431, 500})
"""Responses after which a connection ends."""
