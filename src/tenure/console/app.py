"""The application: its pages, its live updates and its API, as one Starlette application.

Its lifespan owns the observer and the hub. A server that mounts the application runs its lifespan
(``app.router.lifespan_context(app)``), and calls `end_streams` before it waits for connections to
end, because live pages end no request by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from tenure.console import api, views
from tenure.console.access import Door, Visitor
from tenure.console.live import LiveStream
from tenure.console.rendering import ASSETS, Rendering, link
from tenure.console.security import SAFE, Shield
from tenure.console.service import Console, Visit, host_of, read_body, status_of
from tenure.console.views import PageRequest, View
from tenure.engines.contract import Engine
from tenure.errors import AuthenticationFailed, TenureError

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

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class ConsolePages:
    """Endpoints of the pages of one console.

    Args:
        console: its visitors, and what they may see and change.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rendering = Rendering()

    # Pages

    def values(
        self, request: Request, visit: Visit | None, path: str, title: str
    ) -> dict[str, Any]:
        """Return the values that every page shows."""
        root = request.scope.get("root_path", "")
        trouble = self.console.observer.trouble
        token = (
            "" if visit is None else self.console.sign_ins.form_token(visit.secret, visit.visitor)
        )
        return {
            "root": root,
            "path": path,
            "title": title,
            "store": self.console.store.url,
            "visitor": None if visit is None else visit.visitor.name,
            "signed_in": visit is not None and bool(visit.secret),
            "form_token": token,
            "live": "",
            "trouble": None if trouble is None else str(trouble),
            **self.present(),
        }

    def present(self) -> dict[str, Any]:
        """Return the values that are read again for each update of a page."""
        standstill = self.console.store.trouble()
        return {
            "now": self.console.clock.now(),
            "wall": self.console.clock.wall(),
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
                visit = await self.console.visit(request)
                if visit is None:
                    return self.lead_to_sign_in(request)
                self.console.observer.want()
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
            if not self.console.observer.record.rounds:
                await self.console.observer.first_round()
            shown = await view(PageRequest(self.console, visit.visitor, request.query_params))
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
            visit = await self.console.api_visit(request)
            query = request.query_params
            values = self.values(request, visit, path, title)

            async def render(visitor: Visitor) -> str:
                self.console.observer.want()
                shown = await view(PageRequest(self.console, visitor, query))
                return self.rendering.part(template, values | self.present() | shown)

            key = visit.visitor.name, path, str(query)
            stream = self.console.hub.stream(key, visit.visitor, render)
            if stream is None:
                return PlainTextResponse("Too many pages are live.\n", 503)
            return _StreamResponse(stream)

        return endpoint

    async def confirmed(self, request: Request, visit: Visit) -> Response:
        """Carry out what a visitor has confirmed."""
        form = await read_form(request)
        if not self.console.sign_ins.is_form_token(
            form.get("form_token", ""), visit.secret, visit.visitor
        ):
            title = "This form is out of date"
            text = "It was made for another sign-in. Go back, load the page again, and repeat it."
            return self.message(request, visit, title, text, 403)
        host, visitor, root = host_of(request), visit.visitor, request.scope.get("root_path", "")
        # In the address, because a form changes control characters in a name.
        sent = PageRequest(self.console, visitor, request.query_params)
        node = sent.text("node")
        if request.url.path.endswith("/end-session"):
            ended = await self.console.end_session(visitor, host, node, sent.number("session"))
            done = "ended" if ended else "had-ended"
            return RedirectResponse(link(root, "/sessions", node=node, done=done), 303)
        name = sent.text("name")
        evicted = await self.console.evict(visitor, host, node, name, sent.number("order_id"))
        done = "evicted" if evicted else "had-left"
        return RedirectResponse(link(root, "/semaphore", node=node, name=name, done=done), 303)

    def confirmation(self, path: str) -> Endpoint:
        """Return the endpoint of a confirmation page, which also carries the action out."""
        template, view, title = CONFIRMATIONS[path]

        async def work(request: Request, visit: Visit) -> Response:
            if request.method == "POST":
                return await self.confirmed(request, visit)
            sent = PageRequest(self.console, visit.visitor, request.query_params)
            self.console.check(visit.visitor, sent.text("node"))
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
        name = self.console.cookie(request)
        self.console.sign_ins.remove(request.cookies.get(name, ""))
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

    async def sign_in(self, token: str, request: Request, target: str) -> Response:
        """Sign a browser in, and lead it to a page."""
        visitor = await self.console.door.sign_in(token, host_of(request), request.scope)
        secret = self.console.sign_ins.add(visitor, self.console.clock.now())
        response = RedirectResponse(target, 303)
        response.set_cookie(
            self.console.cookie(request),
            secret,
            path="/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response


class _StreamResponse(Response):
    """The response that is a stream."""

    def __init__(self, stream: LiveStream) -> None:
        self._stream = stream
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        await self._stream(scope, receive, send)


def is_local(target: str) -> bool:
    """Return true for a path of this server, and false for the URL of another one."""
    if not target.startswith("/") or target.startswith("//") or not target.isprintable():
        return False
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc and "\\" not in target


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
    pages = ConsolePages(console)
    routes = [Route(path, pages.page(path)) for path in PAGES]
    routes += [Route("/live" + path.rstrip("/"), pages.live(path)) for path in PAGES]
    routes += [
        Route(path, pages.confirmation(path), methods=["GET", "POST"]) for path in CONFIRMATIONS
    ]
    routes += [
        Route("/sign-in", pages.sign_in_page, methods=["GET", "POST"]),
        Route("/sign-out", pages.sign_out, methods=["POST"]),
        Route("/static/{name}", pages.asset),
    ]
    routes += api.routes(console)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with console.running():
            yield

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Shield, names=hosts)],
        exception_handlers={HTTPException: pages.failed},
        lifespan=lifespan,
    )
    app.state.console = console
    return app
