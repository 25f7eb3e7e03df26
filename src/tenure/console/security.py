"""Checks of each request before the application, and headers of each response.

Rules:

* **Host.** A page of another site can have its name resolve to this server's address, and would
  then count as the same origin. So the ``Host`` of a request is an address, ``localhost``, or one
  of the names that the server was given.
* **Origin.** A request that may change something comes from a page of this console, as the browser
  states it (``Sec-Fetch-Site``, ``Origin``), or it carries a bearer token, which no browser adds by
  itself. Forms carry a token of their sign-in as well.
* **Content.** Browsers load scripts, styles and data from this server alone, run no script inside a
  page, and show no page in a frame.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure.console.access import Visitor

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
SAFE = frozenset({"GET", "HEAD"})
MOST_SIGN_INS = 1_000
LIFETIME = 12 * 3600.0
"""Seconds after which a browser has to sign in again."""


def host_of(authority: str) -> str:
    """Return the host of ``HOST:PORT`` in lower case, without brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    host, colon, port = authority.rpartition(":")
    return (host if colon and port.isdigit() else authority).lower()


def is_known_host(authority: str, names: Collection[str]) -> bool:
    """Return true for an address, ``localhost``, or one of the names."""
    host = host_of(authority)
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_same_origin(headers: Headers) -> bool:
    """Return true if a page of this server sent the request, or a program with a bearer token."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() == headers.get("host", "").lower()
    return headers.get("authorization", "").lower().startswith("bearer ")


class Shield:
    """ASGI middleware with the rules of this module.

    Args:
        app: the application.
        names: host names of the server, besides addresses and ``localhost``.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(each.lower() for each in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
                found.setdefault("Cache-Control", "no-store")
            await send(message)

        app = self._app
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_known_host(hosts[0], self._names):
            app = PlainTextResponse(
                "This server does not serve that host name. Use its address, or have its "
                "administrator add the name to the console's hosts.\n",
                421,
            )
        elif scope["method"] not in SAFE and not is_same_origin(headers):
            app = PlainTextResponse("This request came from another site.\n", 403)
        await app(scope, receive, send_with_headers)


@dataclass(slots=True)
class SignIn:
    """Sign-in of one browser.

    Attributes:
        visitor: who signed in.
        until: the time at which it ends.
    """

    visitor: Visitor
    until: float


class SignIns:
    """Sign-ins of all browsers, found by the secret in their cookies.

    The secrets themselves are not kept. If there are too many sign-ins, the oldest one ends.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._found: dict[bytes, SignIn] = {}

    def add(self, visitor: Visitor, now: float) -> str:
        """Sign a visitor in, and return the secret for its cookie."""
        if len(self._found) >= MOST_SIGN_INS:
            del self._found[next(iter(self._found))]
        secret = secrets.token_urlsafe(32)
        self._found[self._digest(secret)] = SignIn(visitor, now + LIFETIME)
        return secret

    def find(self, secret: str, now: float) -> Visitor | None:
        """Return the visitor with this secret, if it is still signed in."""
        digest = self._digest(secret)
        found = self._found.get(digest)
        if found is None:
            return None
        if found.until <= now:
            del self._found[digest]
            return None
        return found.visitor

    def remove(self, secret: str) -> None:
        """Sign a browser out."""
        self._found.pop(self._digest(secret), None)

    def form_token(self, secret: str, visitor: Visitor) -> str:
        """Return the token that the forms of a visitor carry.

        Args:
            secret: the secret of its sign-in; empty for a visitor without one.
            visitor: the visitor.
        """
        text = f"form\0{secret}\0{visitor.name}"
        return hmac.new(self._key, text.encode(errors="surrogatepass"), "sha256").hexdigest()

    def is_form_token(self, given: str, secret: str, visitor: Visitor) -> bool:
        """Return true if a form carries the right token."""
        return hmac.compare_digest(given.encode(), self.form_token(secret, visitor).encode())

    def _digest(self, secret: str) -> bytes:
        return hashlib.blake2b(
            secret.encode(errors="surrogatepass"), digest_size=32, key=self._key
        ).digest()
