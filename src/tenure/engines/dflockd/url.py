"""What a ``dflockd://`` URL says: which servers, with what token, and how they are set up.

    dflockd://lock.example                      one server, at port 6388
    dflockd://TOKEN@a.example,b.example:7000    several, sharded by key, with a token
    dflockds://lock.example                     inside TLS

The parameters are in `PARAMETERS`. A token is a secret: no message and no description has it, nor
anything else of a URL in front of the hosts.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tenure.errors import InvalidArgument

__all__ = ["DEFAULT_PORT", "PARAMETERS", "Address", "Place", "parse"]

DEFAULT_PORT = 6388

Place = tuple[str, int]
"""A host and a port."""

PARAMETERS = {
    "connect-timeout": "seconds for one attempt to connect (10)",
    "socket-timeout": "seconds after which a server that does not answer is given up (5)",
    "read-timeout": "seconds of silence after which the servers close a connection (23)",
    "renew-ratio": "the part of a lease after which it is renewed, where that is under 1/3",
    "connections": "how many connections to one server there may be at most (256)",
    "auth-token-file": "a file with the token",
    "tls-ca": "whom to trust instead of the system's authorities; this and the next four: PEM",
    "tls-cert": "a certificate to show",
    "tls-key": "its key",
    "tls-server-name": "the name that the servers' certificates are for",
}
_LARGEST_TOKEN_FILE = 128 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: without secrets and parameters.
        places: the servers, in the order in which keys are divided among them.
        token: what shows that the program may come in; empty: nothing.
        tls: how to encrypt, or ``None``.
        server_name: the name that the certificates are for; empty: each one's host.
        connect_timeout: seconds for one attempt to connect.
        patience: seconds within which a server answers.
        read_timeout: seconds of silence after which a server closes a connection.
        renew_ratio: the part of a lease after which it is renewed; ``None``: a third.
        connections: the most connections to one server.
    """

    url: str
    places: tuple[Place, ...]
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    connect_timeout: float = 10.0
    patience: float = 5.0
    read_timeout: float = 23.0
    renew_ratio: float | None = None
    connections: int = 256


def parse(url: str) -> Address:
    """Understand a URL. Raises `InvalidArgument`; the message shows it without its token."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    user, _, place = rest.rpartition("@")
    hosts, _, query = place.partition("?")
    shown = f"{scheme}://{hosts}"
    if "#" in place:
        raise InvalidArgument(f"{shown!r} has a '#', which means nothing here")
    hosts = hosts.removesuffix("/")
    places = tuple(_place(shown, each) for each in hosts.split(","))
    if len(set(places)) < len(places):
        raise InvalidArgument(f"{shown!r} names a server twice")
    given = _Given(shown, query)
    tls = given.tls() if scheme == "dflockds" else None
    if tls is None and given.has_any("tls-ca", "tls-cert", "tls-key", "tls-server-name"):
        raise InvalidArgument(
            f"{shown!r} has parameters for TLS and would not use them; with TLS the scheme is "
            "dflockds"
        )
    ratio = given.text("renew-ratio")
    return Address(
        url=f"{scheme}://{','.join(f'{_bracketed(host)}:{port}' for host, port in places)}",
        places=places,
        token=_token(shown, user, given.text("auth-token-file")),
        tls=tls,
        server_name=given.text("tls-server-name"),
        connect_timeout=given.number("connect-timeout", 10.0, 0.1, 600.0),
        patience=given.number("socket-timeout", 5.0, 0.1, 600.0),
        read_timeout=given.number("read-timeout", 23.0, 1.0, 86400.0),
        renew_ratio=given.number("renew-ratio", 0.5, 0.01, 0.99) if ratio else None,
        connections=int(given.number("connections", 256, 2, 65536)),
    )


class _Given:
    """The part of a URL after the question mark."""

    def __init__(self, shown: str, query: str) -> None:
        self._shown = shown
        self._values: dict[str, str] = {}
        for part in filter(None, query.split("&")):
            name, _, value = part.partition("=")
            if name not in PARAMETERS:
                raise InvalidArgument(
                    f"{shown!r}: there is no parameter {name!r}; there are {', '.join(PARAMETERS)}"
                )
            if name in self._values:
                raise InvalidArgument(f"{shown!r} has {name} twice")
            if not value:
                raise InvalidArgument(f"{shown!r}: {name} has no value")
            self._values[name] = unquote(value)

    def has_any(self, *names: str) -> bool:
        return any(name in self._values for name in names)

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def number(self, name: str, default: float, least: float, most: float) -> float:
        text = self._values.get(name)
        if text is None:
            return default
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise InvalidArgument(
                f"{self._shown!r}: {name} is a number from {least:g} to {most:g}, not {text!r}"
            )
        return number

    def tls(self) -> ssl.SSLContext:
        cert, key = self._values.get("tls-cert"), self._values.get("tls-key")
        if key is not None and cert is None:
            raise InvalidArgument(
                f"{self._shown!r} has tls-key, and not the tls-cert that it belongs to"
            )
        try:
            context = ssl.create_default_context(cafile=self._values.get("tls-ca"))
            if cert is not None:
                context.load_cert_chain(cert, key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidArgument(
                f"{self._shown!r}: a file for TLS cannot be used: {error.strerror or error}"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted, and nobody is there to type its password")


def _token(shown: str, user: str, file: str) -> str:
    token = unquote(user)
    if token and file:
        raise InvalidArgument(f"{shown!r} has a token and a file for one")
    if file:
        try:
            with open(file, encoding="utf-8") as opened:
                token = opened.read(_LARGEST_TOKEN_FILE).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{shown!r}: the token cannot be read: {error}") from None
        if not token:
            raise InvalidArgument(f"{shown!r}: the file {file!r} has no token")
    if not token.isprintable():
        raise InvalidArgument(f"the token for {shown!r} is none: it is one line of text")
    return token


def _place(shown: str, text: str) -> Place:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"{shown!r}: {text!r} is not a host and a port") from error
    if not host or parts.path or port == 0:
        raise InvalidArgument(
            f"{shown!r}: {text!r} is not a host; write for example dflockd://127.0.0.1:6388"
        )
    return host, port or DEFAULT_PORT


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
