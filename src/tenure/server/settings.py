"""Settings of `tenure serve`, and their sources.

Every setting has one name. As an option it is ``--max-connections``, in the environment
``TENURE_SERVE_MAX_CONNECTIONS``, in the file (TOML) ``max-connections``; `sources` reads them.

A setting without effect (a certificate without a TLS listener) is an error, because it was set for
a purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from tenure.busy_poll import USUAL
from tenure.core.rules import check_path
from tenure.errors import InvalidArgument
from tenure.server.addresses import TLS_FILES, Address, parse
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.http.options import HttpOptions
from tenure.server.limits import Limits
from tenure.server.log import LogFormat, LogLevel
from tenure.server.meter import NODES
from tenure.server.tls import TlsFiles

PREFIX = "TENURE_SERVE_"

Kind: TypeAlias = Literal["text", "texts", "file", "choice", "count", "seconds", "microseconds"]
Loop: TypeAlias = Literal["auto", "asyncio", "uvloop"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting.

    Attributes:
        name: the name, as an option and in the file.
        kind: the type of its value; ``texts`` is a list, ``file`` a path.
        metavar: the placeholder of the value in a help text.
        about: a description of one or two lines.
        default: the default value, or ``None``.
        choices: the values of the kind ``choice``.
        limit: the limit that it sets (`tenure.server.limits`), or empty.
    """

    name: str
    kind: Kind
    metavar: str
    about: str
    default: Any = None
    choices: tuple[str, ...] = ()
    limit: str = ""

    @property
    def variable(self) -> str:
        """Name of the variable in the environment."""
        return PREFIX + self.name.upper().replace("-", "_")


def _limits() -> Iterator[Setting]:
    for each in fields(Limits):
        kind: Kind = "count" if each.type == "int" else "seconds"
        yield Setting(
            f"max-{each.name.replace('_', '-')}",
            kind,
            "N" if kind == "count" else "S",
            f"{each.metadata['meaning'][:1].upper()}{each.metadata['meaning'][1:]}.",
            each.default,
            limit=each.name,
        )


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "store",
        "text",
        "URL",
        "The store to serve. By default your own SQLite file, in which "
        "every grant is on disk before it is reported.",
    ),
    Setting(
        "listen",
        "texts",
        "URL",
        "An address to listen at; may be repeated: tenure://HOST:PORT, tenures:// "
        "(TLS), tenure+unix:///PATH, ydb://HOST:PORT, ydbs:// (TLS), dflockd://HOST:PORT, "
        "dflockds:// (TLS), http://HOST:PORT, https:// (TLS). Port 0 is any free one.",
        ("tenure://127.0.0.1:7070",),
    ),
    Setting("tls-cert", "file", "FILE", "The certificate (PEM) of the listeners with TLS."),
    Setting("tls-key", "file", "FILE", "Its private key (PEM)."),
    Setting(
        "tls-client-ca",
        "file",
        "FILE",
        "Authorities (PEM); a client must have a certificate that one of them has signed.",
    ),
    Setting(
        "tls-client-crl",
        "file",
        "FILE",
        "Revocation lists (PEM) of these authorities. Read again on SIGHUP.",
    ),
    Setting(
        "auth-token-file",
        "file",
        "FILE",
        "The tokens of clients: as 'tenure token' writes them, or one on "
        "each line. Read again on SIGHUP.",
    ),
    Setting(
        "audit-log",
        "file",
        "FILE",
        "Log of administrative actions and rejected logins, one JSON object per line. Reopened on "
        "SIGHUP. Without it they are in the server's log.",
    ),
    Setting(
        "database",
        "text",
        "PATH",
        "For YDB's clients: the database in which the nodes are.",
        "/local",
    ),
    Setting(
        "advertise",
        "text",
        "HOST:PORT",
        "For YDB's clients: the address of this server, if it differs from --listen.",
    ),
    Setting(
        "dflockd-node",
        "text",
        "PATH",
        "For dflockd's clients: the node of their locks; created if it is missing.",
        "/dflockd",
    ),
    Setting(
        "console-host",
        "texts",
        "NAME",
        "A name under which browsers reach the console at http://; may be repeated. Addresses, "
        "localhost and the hosts in --listen need none.",
        (),
    ),
    Setting(
        "metrics-access",
        "choice",
        "WHO",
        "Clients that may read /metrics at http://, if tokens are required: those with a token "
        "that has the permission read on /, or everyone.",
        "token",
        ("token", "everyone"),
    ),
    Setting(
        "metrics-nodes",
        "count",
        "N",
        "Nodes that have metrics of their own; all further ones are added up.",
        NODES,
    ),
    Setting(
        "metrics-identities",
        "count",
        "N",
        "Identities whose usage is shown in the metrics. By default none.",
    ),
    Setting(
        "drain-time",
        "seconds",
        "S",
        "Timeout of the shutdown after SIGTERM or Ctrl-C; then it is forced.",
        10.0,
    ),
    Setting(
        "busy-poll",
        "microseconds",
        "US",
        "How many microseconds the event loop polls for further input before it sleeps, while that "
        "pays; 0: it sleeps at once.",
        USUAL,
    ),
    Setting(
        "loop",
        "choice",
        "LOOP",
        "The event loop: auto is uvloop where it is installed.",
        "auto",
        ("auto", "asyncio", "uvloop"),
    ),
    Setting(
        "log-format",
        "choice",
        "FORMAT",
        "The format of the log, on stderr.",
        "text",
        ("text", "json"),
    ),
    Setting(
        "log-level",
        "choice",
        "LEVEL",
        "The lowest level that is logged.",
        "info",
        ("debug", "info", "warning", "error"),
    ),
    *_limits(),
)


class Wrong(InvalidArgument):
    """Error: the settings are wrong.

    Attributes:
        faults: the mistakes.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Given:
    """Value of a setting, and its origin.

    Attributes:
        origin: the option, the variable or the file; empty for the default.
    """

    value: Any
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one server.

    Attributes:
        given: the value of every setting by name, with its origin.
        tokens: further valid tokens, each with its name in the log.
    """

    store: str
    listen: tuple[Address, ...]
    tls: Mapping[Address, TlsFiles]
    auth_token_file: str | None
    audit_log: str | None
    database: str
    advertise: str | None
    dflockd: DflockdOptions
    http: HttpOptions
    metrics_nodes: int
    drain_time: float
    busy_poll: int
    loop: Loop
    log_format: LogFormat
    log_level: LogLevel
    limits: Limits
    given: Mapping[str, Given]
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def exposed(self) -> tuple[Address, ...]:
        """Addresses that other machines can reach without a token or a certificate."""
        if self.auth_token_file is not None or self.tokens:
            return ()
        return tuple(
            each
            for each in self.listen
            if not each.local and (each not in self.tls or self.tls[each].client_ca is None)
        )

    @property
    def legible(self) -> tuple[Address, ...]:
        """Addresses at which tokens are sent unencrypted over a network."""
        if self.auth_token_file is None and not self.tokens:
            return ()
        return tuple(each for each in self.listen if not each.local and not each.tls)


# Interpretation


def put_together(given: Mapping[str, Given], faults: list[str]) -> Settings | None:
    """Return the settings given by the values; on mistakes, add these to the list: ``None``."""
    addresses = list(_addresses(given["listen"], faults))
    tls: dict[Address, TlsFiles] = {}
    for address in addresses:
        if address.tls:
            files = _tls_files(address, given, faults)
            if files is not None:
                tls[address] = files
    _check_effect(addresses, given, faults)
    limits = _limits_of(given, faults)
    dflockd = DflockdOptions(node=given["dflockd-node"].value)
    try:
        check_path(dflockd.node)
    except InvalidArgument as error:
        faults.append(f"{given['dflockd-node'].origin}: {error}")
    if faults or limits is None:
        return None
    return Settings(
        store=given["store"].value,
        listen=tuple(addresses),
        tls=tls,
        auth_token_file=given["auth-token-file"].value,
        audit_log=given["audit-log"].value,
        database=given["database"].value,
        advertise=given["advertise"].value,
        dflockd=dflockd,
        http=HttpOptions(
            open_metrics=given["metrics-access"].value == "everyone",
            identities=given["metrics-identities"].value or 0,
            hosts=frozenset(
                (*given["console-host"].value, *(each.host for each in addresses if each.host))
            ),
        ),
        metrics_nodes=given["metrics-nodes"].value,
        drain_time=given["drain-time"].value,
        busy_poll=given["busy-poll"].value,
        loop=given["loop"].value,
        log_format=given["log-format"].value,
        log_level=given["log-level"].value,
        limits=limits,
        given=given,
    )


def _addresses(listen: Given, faults: list[str]) -> Iterator[Address]:
    seen: dict[tuple[str, int, str], str] = {}
    for url in listen.value:
        try:
            address = parse(url)
        except InvalidArgument as error:
            faults.append(f"{listen.origin}: {error}")
            continue
        place = address.host, address.port, address.path
        if place in seen and (address.port or address.path):
            faults.append(f"{seen[place]} and {address.url} are the same address")
        seen[place] = address.url
        yield address


def _tls_files(address: Address, given: Mapping[str, Given], faults: list[str]) -> TlsFiles | None:
    own = dict(address.files)
    # A key belongs to its certificate, so both come from one source.
    pair = own if "tls-cert" in own or "tls-key" in own else {}
    cert = pair.get("tls-cert") if pair else given["tls-cert"].value
    key = pair.get("tls-key") if pair else given["tls-key"].value
    if cert is None or key is None:
        missing = "tls-cert" if cert is None else "tls-key"
        faults.append(f"{address.url} has TLS, which needs --tls-cert and --tls-key: no {missing}")
        return None
    client_ca = own.get("tls-client-ca", given["tls-client-ca"].value)
    client_crl = own.get("tls-client-crl", given["tls-client-crl"].value)
    if client_crl is not None and client_ca is None:
        faults.append(
            f"{address.url} has a revocation list of client certificates and requires none; add "
            "--tls-client-ca"
        )
    return TlsFiles(cert, key, client_ca, client_crl)


def _check_effect(addresses: list[Address], given: Mapping[str, Given], faults: list[str]) -> None:
    """Report settings without effect."""
    if not any(address.tls for address in addresses):
        faults += (
            f"{given[name].origin}: {name} is set, and no listener has TLS; write tenures://, "
            "ydbs://, dflockds:// or https:// instead of tenure://, ydb://, dflockd:// or http://"
            for name in TLS_FILES
            if given[name].origin
        )
    if not any(address.protocol == "ydb" for address in addresses):
        faults += (
            f"{given[name].origin}: {name} is for YDB's clients, and no listener is for them; "
            "add ydb://127.0.0.1:2136"
            for name in ("database", "advertise")
            if given[name].origin
        )
    if given["dflockd-node"].origin and not any(each.protocol == "dflockd" for each in addresses):
        faults.append(
            f"{given['dflockd-node'].origin}: dflockd-node is for dflockd's clients, and no "
            "listener is for them; add dflockd://127.0.0.1:6388"
        )
    if not any(address.protocol == "http" for address in addresses):
        faults += (
            f"{given[name].origin}: {name} is for the console and the metrics, and no listener "
            "has them; add http://127.0.0.1:7080"
            for name in ("console-host", "metrics-access", "metrics-nodes", "metrics-identities")
            if given[name].origin
        )


def _limits_of(given: Mapping[str, Given], faults: list[str]) -> Limits | None:
    chosen = {each.limit: given[each.name].value for each in SETTINGS if each.limit}
    try:
        return Limits(**chosen)
    except InvalidArgument as error:
        origins = {given[each.name].origin for each in SETTINGS if each.limit} - {""}
        faults.append(f"{', '.join(sorted(origins))}: {error}")
        return None
