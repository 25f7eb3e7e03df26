"""Opening of a connection to a server: greeting, identity, checks.

It must be a master, and in a cluster the node that serves the namespace: another one names that
node (`Moved`). `locating` has which server comes first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from tenure.engines.advice import on_connecting
from tenure.engines.redis.commands import (
    UNSERVED,
    Command,
    Refusal,
    advice_on_rights,
    code_of,
    is_denied,
    keys_of,
)
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.url import Place, RedisUrl
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    TenureError,
    Unsupported,
)

EARLIEST = (6, 2)
"""The oldest version of Redis."""

_log = logging.getLogger("tenure")

_CHECK_TLS = "If it does not use TLS, write redis://"
_CHECK_SERVER = "Check that it is a Redis server, that it is not stuck, and the firewall"

_ADVICE: dict[type[OSError], str] = {
    ConnectionRefusedError: "check that the server is running, and listens there",
    FileNotFoundError: "check that the server is running, and that this is its 'unixsocket'",
    PermissionError: "let this user use the socket ('unixsocketperm')",
}

_MOVED = re.compile(r"MOVED \d+ (\S*):(\d+)")
_NOT_ALLOWED = frozenset({"NOAUTH", "WRONGPASS"})


class Server(NamedTuple):
    """A server to which a connection was opened.

    Attributes:
        place: its address.
        protocol: the protocol version; with 3, pushes arrive on the same connection.
        run_id: its identity, which changes with every start.
        clustered: whether it is a node of a cluster.
    """

    place: Place
    protocol: int
    run_id: str
    clustered: bool


class Loading(EngineUnavailable):
    """Error: the server is loading its data, and does not answer before."""


class Moved(EngineUnavailable):
    """Error: another node of the cluster serves the namespace.

    Attributes:
        place: the address of that node.
    """

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(message)
        self.place = place


Lost = Callable[[str, list[Command]], None]
Pushed = Callable[[bytes, bytes], None]


async def connect(
    address: RedisUrl, place: Place, pushed: Pushed, lost: Lost
) -> tuple[RedisConnection, Server]:
    """Open a connection to a server on which scripts can be called.

    Raises:
        Moved, EngineUnavailable, AuthenticationFailed, Unsupported, EngineError
    """
    connection = await connect_once(address, place, pushed, lost)
    try:
        async with in_time(address, place):
            protocol = await greet(connection, address, address.protocol)
            role = await connection.execute("ROLE")
            if role[0] == b"sentinel":
                raise EngineUnavailable(
                    f"{address.url}: there is a sentinel at {shown(place)}. Write "
                    "redis+sentinel://, and after the host the name of the service"
                )
            info = await information(connection, address)
            clustered = info.get("cluster_enabled", "0") if info else ""  # unknown if denied
            if address.cluster and clustered == "0":
                raise not_a_cluster(address, place)
            if clustered != "0":
                await require_keys(connection, address, place)
            if role[0] != b"master":
                raise EngineUnavailable(
                    f"{address.url}: the server at {shown(place)} is a replica. Name its "
                    "master, or the sentinels with redis+sentinel://"
                )
            if info.get("loading") == "1":
                raise Loading(_loading(address, place, info))
            _check(address, info)
            await connection.load_missing_scripts()
    except BaseException as error:
        connection.drop("the greeting failed")
        if isinstance(error, Refusal):
            raise translated(address, error) from error
        raise
    return connection, Server(place, protocol, info.get("run_id", ""), clustered == "1")


def not_a_cluster(address: RedisUrl, place: Place) -> Unsupported:
    """Return the error for a server that the URL takes for a node of a cluster."""
    return Unsupported(
        f"{address.url}: the server at {shown(place)} is not a node of a cluster. Write redis://"
    )


async def require_keys(connection: RedisConnection, address: RedisUrl, place: Place) -> None:
    """Raise an error if a node of a cluster does not serve the namespace."""
    try:
        await connection.execute("EXISTS", *keys_of(address.prefix)[1:])
    except Refusal as refusal:
        text = str(refusal)
        there = moved_to(text, place)
        if there is None:
            raise
        raise Moved(
            f"{address.url}: the node at {shown(place)} does not serve the namespace, and names "
            f"{shown(there)}",
            there,
        ) from refusal


def moved_to(error: str, place: Place) -> Place | None:
    """Return the address in a ``MOVED`` error of the server at a place; ``None`` without one."""
    found = _MOVED.match(error)
    return None if found is None else announced(found[1], int(found[2]), place)


def announced(host: str, port: int, place: Place) -> Place | None:
    """Return an address that the server at a place announces; ``None`` if there is none.

    A cluster that does not know how clients reach it leaves the host out: then it is the same one.
    """
    if host in ("", "?"):
        return None if isinstance(place, str) else (place[0], port)
    return host, port


async def information(connection: RedisConnection, address: RedisUrl) -> Info:
    """Read the server's report about itself; empty if this account may not."""
    try:
        return parse_info(await connection.execute("INFO"))
    except Refusal as refusal:
        if not is_denied(str(refusal)):
            raise
        _log.warning(
            "INFO is denied to this account or unknown, so a restart of the server and a "
            "maxmemory-policy that evicts leases stay undetected; grant it the command: url=%s",
            address.url,
        )
        return Info()


async def connect_once(
    address: RedisUrl, place: Place, pushed: Pushed, lost: Lost
) -> RedisConnection:
    """Open a connection to one address, without a greeting."""
    loop = asyncio.get_running_loop()

    def new() -> RedisConnection:
        return RedisConnection(keys_of(address.prefix), pushed, lost, address.busy_poll)

    async with in_time(address, place):
        if isinstance(place, str):
            _, connection = await loop.create_unix_connection(new, place)
        else:
            host, port = place
            name = address.server_name or host
            _, connection = await loop.create_connection(
                new, host, port, ssl=address.tls, server_hostname=name if address.tls else None
            )
    return connection


async def greet(connection: RedisConnection, address: RedisUrl, protocol: int) -> int:
    """Authenticate, and select the protocol and the database; return the protocol's number."""
    protocol = await _authenticate(connection, address, protocol)
    if address.db:
        await connection.execute("SELECT", address.db)
    return protocol


async def _authenticate(connection: RedisConnection, address: RedisUrl, protocol: int) -> int:
    if protocol == 3:
        words = ["HELLO", "3"]
        if address.password:
            words += ["AUTH", address.username or "default", address.password]
        try:
            await connection.execute(*words, "SETNAME", address.client_name)
        except Refusal as refusal:
            error = str(refusal)  # proxies refuse in words of theirs
            if code_of(error) not in {"ERR", "NOPROTO"} or "'PROXY'" in error:
                raise
        else:
            return 3
    if address.password:
        await connection.execute("AUTH", *filter(None, (address.username, address.password)))
    await connection.execute("CLIENT", "SETNAME", address.client_name)
    return 2


def shown(place: Place) -> str:
    """Format an address for people."""
    return place if isinstance(place, str) else "{}:{}".format(*place)


@asynccontextmanager
async def in_time(address: RedisUrl, place: Place) -> AsyncIterator[None]:
    """Limit the time of a connection attempt, and raise its failures as `EngineUnavailable`."""
    where = shown(place)
    if not address.service and place not in address.places:
        where += " (an address that the cluster announces)"
    try:
        async with asyncio.timeout(address.connect_timeout) as limit:
            yield
    except UnicodeError as error:  # of a name that cannot be looked up
        raise EngineUnavailable(
            f"{address.url}: {where} is not a valid host name. A part between two dots has 1 to "
            "63 characters"
        ) from error
    except OSError as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise EngineUnavailable(
                f"{address.url}: no answer from {where} within {address.connect_timeout:g} s. "
                f"{_CHECK_TLS if address.tls else _CHECK_SERVER}"
            ) from error
        if isinstance(error, TenureError):
            raise
        raise EngineUnavailable(
            f"{address.url}: {where} cannot be reached: {error}{_advice(address, error)}"
        ) from error


def _advice(address: RedisUrl, error: OSError) -> str:
    """Return advice about a failure, after a semicolon."""
    if isinstance(error, ConnectionResetError):
        secured = "if it uses TLS, write rediss://; " if address.tls is None else ""
        return f"; {secured}if it is a proxy that lacks commands, name the server itself"
    advice = _ADVICE.get(type(error))
    return f"; {advice}" if advice else on_connecting(error, "redis")


class Info(dict[str, str]):
    """A server's report about itself, the answer to ``INFO``."""

    @property
    def version(self) -> tuple[int, ...]:
        """Version of Redis that it is compatible with; the newest if unknown."""
        numbers = self.get("redis_version", "").split(".")[:2]
        return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else (999,)


def parse_info(info: bytes | str) -> Info:
    """Parse the answer to ``INFO``."""
    text = info if isinstance(info, str) else info.decode("utf-8", "replace")
    return Info(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _check(address: RedisUrl, info: Info) -> None:
    if info.version < EARLIEST:
        raise Unsupported(f"{address.url} is Redis {info.get('redis_version')}. Use 6.2 or later")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        text = f"the server evicts keys, and with them leases, when its memory is full ({policy})"
        if info.get("maxmemory", "0") != "0" and not address.may_evict:
            raise EngineError(
                f"{address.url}: {text}. Set maxmemory-policy to noeviction, or accept this with "
                "?eviction=warn"
            )
        _log.warning(
            "the server may evict leases; set maxmemory-policy to noeviction: url=%s error=%s",
            address.url,
            text,
        )


def _loading(address: RedisUrl, place: Place, info: Info) -> str:
    done = info.get("loading_loaded_perc", "")
    left = info.get("loading_eta_seconds", "")
    progress = f" ({done} % done{f', about {left} s left' if left else ''})" if done else ""
    return f"{address.url}: the server at {shown(place)} is loading its data{progress}"


def translated(address: RedisUrl, refusal: Refusal) -> TenureError:
    """Return the error for a rejected greeting."""
    text = str(refusal)
    code = code_of(text)
    if is_denied(text) or code in _NOT_ALLOWED or "AUTH" in text:
        why = UNSERVED["NOAUTH"] if code == "NOAUTH" else text.rstrip(".")
        unknown = code == "ERR" and "unknown command" in text
        kind = Unsupported if unknown else AuthenticationFailed
        return kind(f"{address.url} refuses this client: {why}. {_remedy(text, address.prefix)}")
    if code == "LOADING":
        return Loading(f"{address.url}: {UNSERVED[code]}")
    if code in UNSERVED:
        return EngineUnavailable(f"{address.url}: {UNSERVED[code]}")
    if "DB index" in text or "SELECT is not allowed in cluster mode" in text:
        return EngineError(
            f"{address.url} has no database {address.db}. Choose one below its setting 'databases' "
            "(16 by default; a cluster has one), or another ?prefix= in database 0"
        )
    return EngineError(f"{address.url} cannot be used: {refusal}")


def _remedy(refusal: str, prefix: str) -> str:
    if is_denied(refusal):
        return advice_on_rights(refusal, prefix)
    if refusal.startswith("NOAUTH"):
        return "Add an account to the URL: redis://user:password@host"
    if "without any password" in refusal:
        return "Remove the password from the URL"
    return "Check the user and the password, with special characters as %XX"
