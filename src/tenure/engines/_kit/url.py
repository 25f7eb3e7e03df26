"""URLs of stores: hosts, credentials, TLS and parameters, read with one table.

An engine lists its parameters once, as `Parameter`s, and reads a URL with `StoreUrl`. A name has
the same meaning on every engine. Rules:

* A parameter's name may be written with hyphens or underscores, and may have aliases.
* Values are percent-decoded. A parameter without a value, or given twice, is an error.
* Messages, descriptions and logs never contain a password or a token.
* No file is read and no connection is opened; `Tls.context` reads the files for TLS.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast
from urllib.parse import unquote

from tenure.busy_poll import LONGEST, USUAL
from tenure.errors import InvalidArgument, Unsupported
from tenure.wire.places import host_and_port, is_host, is_local, parameters, shown, socket_path


@contextmanager
def needs_extra(scheme: str, extra: str) -> Iterator[None]:
    """Context for importing an engine's modules; a missing package names the extra to install.

    Raises:
        Unsupported: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "tenure":
            raise
        raise Unsupported(
            f"{scheme}:// needs {missing}, which is not installed; install it with: "
            f"pip install 'tenure[{extra}]'"
        ) from error


def selector_loop(scheme: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop, which has to wait for sockets (`add_reader`).

    Raises:
        Unsupported: it is asyncio's default on Windows, which cannot.
    """
    loop = asyncio.get_running_loop()
    proactor: type[asyncio.AbstractEventLoop] | None = getattr(asyncio, "ProactorEventLoop", None)
    if proactor is not None and isinstance(loop, proactor):
        raise Unsupported(
            f"{scheme}:// needs asyncio's SelectorEventLoop, and Windows has another one by "
            "default: with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner: "
            "runner.run(main()). tenure.blocking has its own"
        )
    return loop


T = TypeVar("T")
Verify = Literal["full", "ca", "none"]


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Generic[T]):
    """One parameter of a URL.

    Attributes:
        name: the name with underscores.
        default: the default value.
        read: converts the text to the value; its `ValueError` describes valid texts.
        aliases: other names, customary for the store or former.
        secret: whether the value must not be shown.
    """

    name: str
    default: T
    read: Callable[[str], T]
    aliases: tuple[str, ...] = ()
    secret: bool = False


def text(
    name: str, default: str = "", *, aliases: tuple[str, ...] = (), secret: bool = False
) -> Parameter[str]:
    """Return a parameter of any text."""
    return Parameter(name, default, str, aliases, secret)


def flag(name: str, *, default: bool = False, aliases: tuple[str, ...] = ()) -> Parameter[bool]:
    """Return a parameter that is on or off."""
    return Parameter(name, default, _flag, aliases)


def number(
    name: str, default: T, least: float, most: float, *, aliases: tuple[str, ...] = ()
) -> Parameter[T]:
    """Return a parameter between two numbers; a whole number if its default is an `int`."""
    kind = int if isinstance(default, int) else float
    read = cast("Callable[[str], T]", partial(_number, kind, least, most))
    return Parameter(name, default, read, aliases)


def choice(
    name: str, default: T, values: dict[str, T], *, aliases: tuple[str, ...] = ()
) -> Parameter[T]:
    """Return a parameter with a set of words, and the meaning of each."""
    return Parameter(name, default, partial(_chosen, values), aliases)


def _flag(value: str) -> bool:
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError("true or false")


def _number(kind: type[float], least: float, most: float, value: str) -> float:
    try:
        found = kind(value)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:
        whole = "a whole number" if kind is int else "a number"
        raise ValueError(f"{whole} from {least:g} to {most:g}")
    return found


def _chosen(values: dict[str, T], value: str) -> T:
    if value not in values:
        raise ValueError(f"one of {', '.join(values)}")
    return values[value]


def _host_name(value: str) -> str:
    if not is_host(value):  # a TLS library would raise UnicodeError
        raise ValueError("the name of a host")
    return value


def _microseconds(value: str) -> float:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) <= LONGEST):
        raise ValueError(f"a whole number of microseconds from 0 to {LONGEST}")
    return int(value) / 1e6


USERNAME = text("username", aliases=("user",))
PASSWORD = text("password", secret=True)

CONNECT_TIMEOUT = number("connect_timeout", 10.0, 0.1, 600.0, aliases=("socket_connect_timeout",))
"""Timeout in seconds of one attempt to connect; on some engines, of attaching too."""

SOCKET_TIMEOUT = number("socket_timeout", 5.0, 0.1, 600.0, aliases=("timeout",))
"""Timeout in seconds after which a server that does not answer is abandoned."""

BUSY_POLL = Parameter("busy_poll", USUAL / 1e6, _microseconds)
"""Longest time in seconds that the loop polls for an answer; microseconds in the URL."""

_CA = text("tls_ca", aliases=("ssl_ca_certs", "ssl_ca_path", "root_certificates"))
_CERT = text("tls_cert", aliases=("ssl_certfile", "certificate_chain"))
_KEY = text("tls_key", aliases=("ssl_keyfile", "private_key"))
_SERVER_NAME = Parameter("tls_server_name", "", _host_name, ("server_name",))
_VERIFICATIONS: dict[str, Verify] = {"full": "full", "ca": "ca", "none": "none"}
_VERIFY: Parameter[Verify] = choice(
    "tls_verify",
    "full",
    {**_VERIFICATIONS, "required": "full", "optional": "full"},
    aliases=("ssl_cert_reqs",),
)
TLS: tuple[Parameter[Any], ...] = (_CA, _CERT, _KEY, _SERVER_NAME, _VERIFY)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one server: a host and a port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or shown(self.host, self.port)

    @property
    def local(self) -> bool:
        """True if data for it stays on this machine."""
        return is_local(self.host, self.path)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS options of a URL.

    Attributes:
        ca: a PEM file, or a folder of hashed certificates; empty: the system's authorities.
        cert, key: PEM files of the client's certificate; the key may be in the first.
        server_name: the name in the servers' certificates; empty: the host of each.
        verify: ``"full"``; ``"ca"``: any name; ``"none"``: any certificate.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    verify: Verify = "full"

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            InvalidArgument: a file cannot be read, or is invalid.
        """
        folder = os.path.isdir(self.ca)
        try:
            context = ssl.create_default_context(
                cafile=None if folder else self.ca or None, capath=self.ca if folder else None
            )
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            raise InvalidArgument(
                f"a file for TLS ({files}) cannot be used: {error.strerror or error}"
                + (
                    "; is the key in a file of its own? ?tls_key=FILE"
                    if self.cert and not self.key
                    else ""
                )
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the same certificates on every Python
        context.check_hostname = self.verify == "full"
        context.verify_mode = ssl.CERT_NONE if self.verify == "none" else ssl.CERT_REQUIRED
        return context


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted, and there is no terminal to type its password at")


class StoreUrl:
    """A parsed URL. The value of a parameter is ``url[PARAMETER]``.

    Attributes:
        scheme: in lower case.
        user: the decoded user before the hosts.
        secret: the password after the user; or, with `token`, everything before the hosts.
        hosts: the hosts as written, with their ports.
        path: the path as written, with its slash.
        shown: the URL without secrets.
    """

    __slots__ = ("_place", "_values", "hosts", "path", "scheme", "secret", "shown", "user")

    def __init__(
        self,
        url: str,
        schemes: Sequence[str],
        known: Iterable[Parameter[Any]],
        *,
        token: bool = False,
    ) -> None:
        """Parse a URL.

        Args:
            url: the URL with its scheme.
            schemes: the engine's schemes.
            known: the engine's parameters.
            token: whether a token stands before the hosts, instead of a user.

        Raises:
            InvalidArgument: it is wrong; the message shows it without secrets.
        """
        scheme, _, rest = url.partition("://")
        self.scheme = scheme.lower()
        if self.scheme not in schemes:  # without "://", all of it, including secrets
            raise InvalidArgument(f"the URL does not begin with {schemes[0]}://")
        end = min(f"{rest}{sign}".index(sign) for sign in "/?#")
        authority, location = rest[:end], rest[end:]
        if authority and "@" in location:  # a secret may be split: nothing can be shown
            raise InvalidArgument(
                f"the {self.scheme}:// URL has an '@' after its hosts; write %40 there, and %2F, "
                "%3F or %23 for a '/', '?' or '#' in a user, a password or a token"
            )
        location, mark, _ = location.partition("#")
        self.path, _, query = location.partition("?")
        userinfo, at, self.hosts = authority.rpartition("@")
        user, _, secret = ("", "", userinfo) if token else userinfo.partition(":")
        self.user, self.secret = unquote(user), unquote(secret)
        self._place = f"{self.scheme}://{user + at if user else ''}{self.hosts}{self.path}"
        self.shown = self._place
        if mark:
            raise self.wrong("a '#' means nothing here; write %23 for the sign itself")
        known = tuple(known)
        names = {name: each for each in known for name in (each.name, *each.aliases)}
        given = parameters(self._place, query, {name: each.name for name, each in names.items()})
        public = "&".join(
            part
            for part in filter(None, query.split("&"))
            if not names[part.partition("=")[0].replace("-", "_")].secret
        )
        self.shown += f"?{public}" if public else ""
        self._values = {
            names[name].name: self._read(names[name], value) for name, value in given.items()
        }

    def _read(self, parameter: Parameter[Any], value: str) -> Any:
        if "\0" in value:  # no file, account or server has one in its name
            raise self.wrong(f"{parameter.name} contains a NUL character")
        try:
            return parameter.read(value)
        except ValueError as error:
            raise self.wrong(f"{parameter.name} is {error}, not {value!r}") from None

    def __getitem__(self, parameter: Parameter[T]) -> T:
        return cast("T", self._values.get(parameter.name, parameter.default))

    def __contains__(self, parameter: Parameter[Any]) -> bool:
        return parameter.name in self._values

    def wrong(self, why: str) -> InvalidArgument:
        """Return the error for this URL."""
        return InvalidArgument(f"{self.shown!r}: {why}")

    def account(self) -> tuple[str, str]:
        """Return the user and the password, from before the hosts or from the parameters."""
        if (self.user and USERNAME in self) or (self.secret and PASSWORD in self):
            raise self.wrong("the account is given twice, before the hosts and as a parameter")
        return self.user or self[USERNAME], self.secret or self[PASSWORD]

    def endpoints(self, port: int, default: str = "") -> tuple[Endpoint, ...]:
        """Return the servers, in their order.

        Args:
            port: the default port.
            default: the default host; empty: a missing host is an error.
        """
        found = []
        for each in (self.hosts or default).split(","):
            host, given = host_and_port(self.shown, each, port)
            if not host:
                raise self.wrong(f"{each!r} is not a host, such as one.example.org:{port}")
            found.append(Endpoint(host, given))
        if len(set(found)) < len(found):
            raise self.wrong("a server is named twice")
        return tuple(found)

    def socket(self) -> Endpoint:
        """Return the Unix socket that the URL names."""
        return Endpoint(path=socket_path(self.shown, self.hosts + self.path))

    def tls(self, *, inside: bool, scheme: str) -> Tls | None:
        """Return the TLS options; ``None`` without TLS.

        Args:
            inside: whether the URL requires TLS.
            scheme: the scheme that does.
        """
        given = [each.name for each in TLS if each in self]
        if not inside and given:
            raise self.wrong(f"{given[0]} is for TLS, and this is not encrypted; write {scheme}://")
        if _KEY in self and _CERT not in self:
            raise self.wrong("tls_key needs the tls_cert that it belongs to")
        if not inside:
            return None
        return Tls(self[_CA], self[_CERT], self[_KEY], self[_SERVER_NAME], self[_VERIFY])
