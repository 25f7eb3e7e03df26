"""What a ``tenure://`` URL says: which servers, with what token, and whether inside TLS.

    tenure://coord.example                      one server, at port 7070
    tenure://TOKEN@coord.example:7070           with a token; else TENURE_TOKEN is the token
    tenure://a.example,b.example:7071,[::1]     several servers on one store: any of them will do
    tenures://coord.example                     inside TLS
    tenure+unix:///run/tenure/tenure.sock       a socket on this machine

There may be parameters, as in ``?tls-ca=FILE``. ``busy-poll`` is for how many microseconds, at the
most, the loop stays awake for an answer, while that pays (200; 0: never). With ``tenures://``,
``tls-ca`` is whom to trust instead of the system's authorities; ``tls-cert`` and ``tls-key`` are a
certificate to show; and ``tls-server-name`` is the name that the server's certificate is for, where
it is not the host's.

A token is a secret: no message, description or log has it, nor anything else of a URL in front
of the hosts.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote

from tenure.busy_poll import LONGEST, USUAL
from tenure.errors import InvalidArgument
from tenure.wire.places import host_and_port, is_local, parameters, shown, socket_path

__all__ = ["DEFAULT_PORT", "Address", "Target", "TlsFiles", "parse"]

DEFAULT_PORT = 7070
_BUSY_POLL = "busy-poll"
_TLS_PARAMETERS = ("tls-ca", "tls-cert", "tls-key", "tls-server-name")
_LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """One server, as it is dialled: a host and a port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or shown(self.host, self.port)

    @property
    def local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        return is_local(self.host, self.path)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one end of TLS, all PEM; ``None``: the system's authorities; no certificate."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """What is needed to speak TLS.

        Raises:
            InvalidArgument: a file cannot be read, or is not what it should be.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            keyless = self.cert is not None and self.key is None
            raise InvalidArgument(
                f"a file for TLS ({files}) cannot be used: {error.strerror or error}"
                + ("; is the key in a file of its own? ?tls-key=FILE" if keyless else "")
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted, and nobody is there to type its password")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: where the store is, without secrets and parameters.
        targets: the servers, in the order in which they stand there.
        tls: the files for speaking TLS with them; ``None``: they do not.
        server_name: the name that their certificates are for; empty: each one's host.
        token: what shows that the program may come in; empty: nothing.
        busy_poll: seconds that the loop stays awake for an answer, at the most.
    """

    url: str
    targets: tuple[Target, ...]
    tls: TlsFiles | None = None
    server_name: str = ""
    token: str = field(default="", repr=False)
    busy_poll: float = USUAL / 1e6


def parse(url: str) -> Address:
    """Understand a URL.

    Raises:
        InvalidArgument: it is wrong; the message shows it without its token.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    user, _, place = rest.rpartition("@")
    safe = f"{scheme}://{place}"
    if "#" in place:
        raise InvalidArgument(f"{safe!r} has a '#', which means nothing here")
    place, _, query = place.partition("?")
    known = parameters(safe, query, (_BUSY_POLL, *_TLS_PARAMETERS))
    busy_poll = _busy_poll(safe, known.pop(_BUSY_POLL, str(USUAL)))
    token = _token(safe, user)
    if known and scheme != "tenures":
        raise InvalidArgument(
            f"{safe!r} has parameters for TLS and would not use them; with TLS the scheme is "
            "tenures"
        )
    if scheme == "tenure+unix":
        target = Target(path=socket_path(safe, place))
        return Address(f"{scheme}://{place}", (target,), token=token, busy_poll=busy_poll)
    targets = tuple(_target(safe, each) for each in place.removesuffix("/").split(","))
    if len(set(targets)) < len(targets):
        raise InvalidArgument(f"{safe!r} names a server twice")
    return Address(
        f"{scheme}://{','.join(map(str, targets))}",
        targets,
        _tls(safe, known) if scheme == "tenures" else None,
        known.get("tls-server-name", ""),
        token,
        busy_poll,
    )


def _busy_poll(safe: str, given: str) -> float:
    if not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) <= LONGEST):
        raise InvalidArgument(
            f"{safe!r}: {_BUSY_POLL} is a whole number of microseconds from 0 to {LONGEST}, not "
            f"{given!r}"
        )
    return int(given) / 1e6


def _token(safe: str, user: str) -> str:
    token = unquote(user) if user else os.environ.get("TENURE_TOKEN", "")
    if len(token) > _LONGEST_TOKEN or not token.isprintable():
        raise InvalidArgument(
            f"the token for {safe!r} is none: a token is printable text of at most "
            f"{_LONGEST_TOKEN} characters, and in a URL written with %-escapes where it has to be"
        )
    return token


def _target(safe: str, place: str) -> Target:
    host, port = host_and_port(safe, place, DEFAULT_PORT)
    if not host:
        raise InvalidArgument(f"{safe!r} names no host; write for example tenure://127.0.0.1:7070")
    return Target(host, port)


def _tls(safe: str, known: dict[str, str]) -> TlsFiles:
    cert, key = known.get("tls-cert"), known.get("tls-key")
    if key is not None and cert is None:
        raise InvalidArgument(f"{safe!r} has tls-key, and not the tls-cert that it belongs to")
    return TlsFiles(known.get("tls-ca"), cert, key)
