"""The application: its pages, its live updates and its API, as one Starlette application.

Its lifespan owns the observer and the hub. A server that mounts the application runs its lifespan
(``app.router.lifespan_context(app)``), and calls `end_streams` before it waits for connections to
end, because live pages end no request by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qs, quote, urlsplit
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from tenure.clock import Clock
from tenure.console import api, views
from tenure.console.access import Door, Visitor
from tenure.console.live import Hub, Stream
from tenure.console.observer import Observer
from tenure.console.reading import ANSWER_TIMEOUT
from tenure.console.rendering import ASSETS, Rendering, link
from tenure.console.security import SAFE, Shield, SignIns
from tenure.console.views import NoSuchObject, PageRequest, View
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

PAGES: dict[str, tuple[str, View, str]] = {
    "/": ("overview.html", views.overview, "Overview"),
    "/semaphores": ("semaphores.html", views.semaphores, "Semaphores"),
    "/semaphore": ("semaphore.html", views.semaphore, "Semaphore"),
    "/sessions": ("sessions.html", views.sessions, "Sessions"),
    "/waits": ("waits.html", views.waits, "Waits"),
    "/timelines": ("timelines.html", views.timelines, "Timelines"),
    "/events": ("events.html", views.events, "Events"),
}
"""Pages that are kept up to date: template, view and title, by path."""

CONFIRMATIONS: dict[str, tuple[str, View, str]] = {
    "/end-session": ("end_session.html", views.end_session, "End session"),
    "/evict": ("evict.html", views.evict, "Evict request"),
}

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

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


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
    """One console.

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
        self.rendering = Rendering()
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

    async def sign_in(self, token: str, request: Request, target: str) -> Response:
        """Sign a browser in, and lead it to a page."""
        visitor = await self.door.sign_in(token, host_of(request), request.scope)
        secret = self.sign_ins.add(visitor, self.clock.now())
        response = RedirectResponse(target, 303)
        response.set_cookie(
            self.cookie(request),
            secret,
            path="/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    # Pages

    def values(
        self, request: Request, visit: Visit | None, path: str, title: str
    ) -> dict[str, Any]:
        """Return the values that every page shows."""
        root = request.scope.get("root_path", "")
        trouble = self.observer.trouble
        token = "" if visit is None else self.sign_ins.form_token(visit.secret, visit.visitor)
        return {
            "root": root,
            "path": path,
            "title": title,
            "store": self.store.url,
            "visitor": None if visit is None else visit.visitor.name,
            "signed_in": visit is not None and bool(visit.secret),
            "form_token": token,
            "live": "",
            "trouble": None if trouble is None else str(trouble),
            **self.present(),
        }

    def present(self) -> dict[str, Any]:
        """Return the values that are read again for each update of a page."""
        standstill = self.store.trouble()
        return {
            "now": self.clock.now(),
            "wall": self.clock.wall(),
            "standstill": "" if standstill is None else str(standstill),
        }

    def html(self, template: str, values: dict[str, Any], status: int = 200) -> Response:
        """Return a page."""
        return HTMLResponse(self.rendering.page(template, values), status)

    def message(
        self, request: Request, visit: Visit | None, title: str, text: str, status: int
    ) -> Response:
        """Return a page that shows one message."""
        values = self.values(request, visit, "", title) | {"text": text}
        return self.html("message.html", values, status)

    def lead_to_sign_in(self, request: Request) -> Response:
        """Lead a browser to the page where it signs in."""
        root = request.scope.get("root_path", "")
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        shown = (
            {} if target in {root, f"{root}/"} or request.method not in SAFE else {"next": target}
        )
        return RedirectResponse(link(root, "/sign-in", **shown), 303)

    def guarded(self, work: Callable[[Request, Visit], Awaitable[Response]]) -> Endpoint:
        """Return an endpoint for visitors, whose errors are shown as pages."""

        async def endpoint(request: Request) -> Response:
            visit: Visit | None = None
            try:
                visit = await self.visit(request)
                if visit is None:
                    return self.lead_to_sign_in(request)
                self.observer.want()
                return await work(request, visit)
            except TenureError as error:
                status = status_of(error)
                title = {403: "Not permitted", 404: "Not found", 503: "The store does not answer"}
                shown = title.get(status, "This does not work")
                return self.message(request, visit, shown, str(error), status)

        return endpoint

    def page(self, path: str) -> Endpoint:
        """Return the endpoint of a page that is kept up to date."""
        template, view, title = PAGES[path]

        async def work(request: Request, visit: Visit) -> Response:
            if not self.observer.record.rounds:
                await self.observer.first_round()
            shown = await view(PageRequest(self, visit.visitor, request.query_params))
            values = self.values(request, visit, path, title) | shown
            query = request.url.query
            live = "/live" + path.rstrip("/")
            values["live"] = quote(values["root"]) + live + (f"?{query}" if query else "")
            return self.html(template, values)

        return self.guarded(work)

    def live(self, path: str) -> Endpoint:
        """Return the endpoint of a page's updates."""
        template, view, title = PAGES[path]

        async def endpoint(request: Request) -> Response:
            visit = await self.api_visit(request)
            query = request.query_params
            values = self.values(request, visit, path, title)

            async def render(visitor: Visitor) -> str:
                self.observer.want()
                shown = await view(PageRequest(self, visitor, query))
                return self.rendering.part(template, values | self.present() | shown)

            key = visit.visitor.name, path, str(query)
            stream = self.hub.stream(key, visit.visitor, render)
            if stream is None:
                return PlainTextResponse("Too many pages are live.\n", 503)
            return _StreamResponse(stream)

        return endpoint

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

    async def confirmed(self, request: Request, visit: Visit) -> Response:
        """Carry out what a visitor has confirmed."""
        form = await read_form(request)
        if not self.sign_ins.is_form_token(form.get("form_token", ""), visit.secret, visit.visitor):
            title = "This form is out of date"
            text = "It was made for another sign-in. Go back, load the page again, and repeat it."
            return self.message(request, visit, title, text, 403)
        host, visitor, root = host_of(request), visit.visitor, request.scope.get("root_path", "")
        # In the address, because a form changes control characters in a name.
        sent = PageRequest(self, visitor, request.query_params)
        node = sent.text("node")
        if request.url.path.endswith("/end-session"):
            ended = await self.end_session(visitor, host, node, sent.number("session"))
            done = "ended" if ended else "had-ended"
            return RedirectResponse(link(root, "/sessions", node=node, done=done), 303)
        name = sent.text("name")
        evicted = await self.evict(visitor, host, node, name, sent.number("order_id"))
        done = "evicted" if evicted else "had-left"
        return RedirectResponse(link(root, "/semaphore", node=node, name=name, done=done), 303)

    def confirmation(self, path: str) -> Endpoint:
        """Return the endpoint of a confirmation page, which also carries the action out."""
        template, view, title = CONFIRMATIONS[path]

        async def work(request: Request, visit: Visit) -> Response:
            if request.method == "POST":
                return await self.confirmed(request, visit)
            sent = PageRequest(self, visit.visitor, request.query_params)
            self.check(visit.visitor, sent.text("node"))
            values = self.values(request, visit, path, title) | await view(sent)
            return self.html(template, values)

        return self.guarded(work)

    # Signing in and out

    async def sign_in_page(self, request: Request) -> Response:
        """Show the form for a token, or sign in with the token that was sent."""
        values = self.values(request, None, "/sign-in", "Sign in")
        form = await read_form(request) if request.method == "POST" else request.query_params
        token, target = form.get("token", "").strip(), form.get("next", "")
        if not is_local(target):
            target = link(values["root"], "/")
        values |= {"next": target, "token": token, "error": ""}
        # A link on another site only fills the form.
        from_here = request.headers.get("sec-fetch-site", "none") in {"none", "same-origin"}
        if token and (request.method == "POST" or from_here):
            try:
                return await self.sign_in(token, request, target)
            except AuthenticationFailed as error:
                values |= {"error": str(error), "token": ""}
                return self.html("sign_in.html", values, 403)
            except TenureError as error:
                return self.message(
                    request, None, "This does not work", str(error), status_of(error)
                )
        return self.html("sign_in.html", values)

    async def sign_out(self, request: Request) -> Response:
        """Sign a browser out."""
        root = request.scope.get("root_path", "")
        name = self.cookie(request)
        self.sign_ins.remove(request.cookies.get(name, ""))
        response = RedirectResponse(link(root, "/sign-in"), 303)
        secure = request.url.scheme == "https"
        response.delete_cookie(name, path="/", httponly=True, samesite="strict", secure=secure)
        return response

    async def asset(self, request: Request) -> Response:
        """Return a file that pages need."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404)
        current = request.query_params.get("v") == self.rendering.version
        caching = "public, max-age=31536000, immutable" if current else "no-cache"
        headers = {"Content-Type": ASSETS[name], "Cache-Control": caching}
        return Response(self.rendering.assets[name], headers=headers)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Show an HTTP error as a page, or as JSON under the API."""
        assert isinstance(error, HTTPException)
        root = request.scope.get("root_path", "")
        path = request.url.path.removeprefix(root)
        if path.startswith("/api/"):
            return api.error_response(error.status_code, "HTTP", error.detail, error.headers)
        if path.startswith("/live"):
            return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
        shown = {
            404: ("Not found", "There is no such page."),
            405: ("Not possible", "This page cannot be used that way."),
        }
        title, text = shown.get(error.status_code, ("This does not work", error.detail))
        return self.message(request, None, title, text, error.status_code)


class _StreamResponse(Response):
    """The response that is a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        await self._stream(scope, receive, send)


def host_of(request: Request) -> str:
    """Return the address of the client."""
    return request.client.host if request.client is not None else "unknown"


def is_local(target: str) -> bool:
    """Return true for a path of this server, and false for the URL of another one."""
    if not target.startswith("/") or target.startswith("//") or not target.isprintable():
        return False
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc and "\\" not in target


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


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: 415: it is no form; 400: it is damaged.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "a form is application/x-www-form-urlencoded")
    try:
        text = (await read_body(request)).decode("ascii")
        found = parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError as error:
        raise HTTPException(400, "the form is damaged") from error
    return {name: values[0] for name, values in found.items()}


def make_app(door: Door, store: Engine, *, hosts: Collection[str] = ()) -> Starlette:
    """Return the console of a store.

    Its lifespan runs the background tasks, and ``app.state.console`` is the `Console`.

    Args:
        door: decides who comes in.
        store: the store, without permissions. It is open while the application runs.
        hosts: host names under which browsers reach the console, besides addresses and
            ``localhost``.
    """
    console = Console(door, store)
    routes = [Route(path, console.page(path)) for path in PAGES]
    routes += [Route("/live" + path.rstrip("/"), console.live(path)) for path in PAGES]
    routes += [
        Route(path, console.confirmation(path), methods=["GET", "POST"]) for path in CONFIRMATIONS
    ]
    routes += [
        Route("/sign-in", console.sign_in_page, methods=["GET", "POST"]),
        Route("/sign-out", console.sign_out, methods=["POST"]),
        Route("/static/{name}", console.asset),
    ]
    routes += api.routes(console)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with console.running():
            yield

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Shield, names=hosts)],
        exception_handlers={HTTPException: console.failed},
        lifespan=lifespan,
    )
    app.state.console = console
    return app
