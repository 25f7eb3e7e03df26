"""Opening of a connection to the right server: address, greeting, identity, checks.

With sentinels, each connection begins with a query of them. The server that they name must report
itself as the master. Of two that different sentinels name, the one of the later failover counts.
"""

from __future__ import annotations

import asyncio
import logging
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

__all__ = [
    "EARLIEST",
    "Info",
    "Loading",
    "Sentinels",
    "Server",
    "connect",
    "connect_once",
    "greet",
    "in_time",
    "master_of",
    "parse_info",
    "shown",
    "translated",
]

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

_OTHERS = 0.2  # seconds for other sentinels to answer, after the first one
_NOT_ALLOWED = frozenset({"NOAUTH", "WRONGPASS"})


class Server(NamedTuple):
    """A server to which a connection was opened.

    Attributes:
        place: its address.
        protocol: the protocol version; with 3, pushes arrive on the same connection.
        run_id: its identity, which changes with every start.
    """

    place: Place
    protocol: int
    run_id: str


class Loading(EngineUnavailable):
    """Error: the server is loading its data, and does not answer before."""


Lost = Callable[[str, list[Command]], None]
Pushed = Callable[[bytes, bytes], None]


async def connect(
    address: RedisUrl, meta: str, pushed: Pushed, lost: Lost
) -> tuple[RedisConnection, Server]:
    """Open a connection to the server on which scripts can be called.

    Raises:
        EngineUnavailable, AuthenticationFailed, Unsupported, EngineError
    """
    place = await master_of(address) if address.service else address.places[0]
    connection = await connect_once(address, place, meta, pushed, lost)
    try:
        async with in_time(address, place):
            protocol = await greet(connection, address, address.protocol)
            role = await connection.execute("ROLE")
            if role[0] == b"sentinel":
                raise EngineUnavailable(
                    f"{address.url}: there is a sentinel at {shown(place)}. Write "
                    "redis+sentinel://, and after the host the name of the service"
                )
            if role[0] != b"master":
                raise EngineUnavailable(
                    f"{address.url}: the server at {shown(place)} is a replica. Name its "
                    "master, or the sentinels with redis+sentinel://"
                )
            info = await _information(connection, address)
            if info.get("loading") == "1":
                raise Loading(_loading(address, place, info))
            _check(address, info)
            await connection.load_missing_scripts()
    except BaseException as error:
        connection.drop("the greeting failed")
        if isinstance(error, Refusal):
            raise translated(address, error) from error
        raise
    return connection, Server(place, protocol, info.get("run_id", ""))


async def _information(connection: RedisConnection, address: RedisUrl) -> Info:
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
    address: RedisUrl, place: Place, meta: str, pushed: Pushed, lost: Lost
) -> RedisConnection:
    """Open a connection to one address, without a greeting."""
    loop = asyncio.get_running_loop()

    def new() -> RedisConnection:
        return RedisConnection(meta, pushed, lost, address.busy_poll)

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


class Sentinels:
    """Queries of the sentinels for the master, over connections that are kept."""

    def __init__(self, address: RedisUrl) -> None:
        """Start without connections."""
        self._address = address
        self._connections: dict[Place, RedisConnection] = {}

    async def master(self) -> Place:
        """Return the master that the sentinels name; after a failover, the one of the latest.

        Sentinels that answer much later than the first one are not waited for.

        Raises:
            EngineUnavailable: no sentinel names one.
        """
        loop = asyncio.get_running_loop()
        pending = {loop.create_task(self._query(place)) for place in self._address.places}
        named: dict[int, Place] = {}
        troubles: list[str] = []
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=_OTHERS if named else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                for query in done:
                    try:
                        epoch, place = query.result()
                        named[epoch] = place
                    except EngineUnavailable as error:
                        troubles.append(str(error))
        finally:
            for query in pending:
                query.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if named:
            return named[max(named)]
        raise EngineUnavailable(
            f"{self._address.url}: no sentinel names a master: {'; '.join(sorted(troubles))}"
        )

    def disconnect(self) -> None:
        """Drop the connections. Safe to call twice."""
        while self._connections:
            self._connections.popitem()[1].drop("it is not needed")

    async def _query(self, place: Place) -> tuple[int, Place]:
        """Return the master that one sentinel names, and the number of the failover."""
        address = self._address
        connection = None
        try:
            connection = await self._connected(place)
            async with in_time(address, place):
                found = await connection.execute("SENTINEL", "MASTER", address.service)
                master = await connection.execute(
                    "SENTINEL", "get-master-addr-by-name", address.service
                )
        except BaseException as error:
            self._connections.pop(place, None)
            if connection is not None:
                connection.drop("it is not needed")
            if not isinstance(error, Refusal):
                raise
            raise EngineUnavailable(
                f"the sentinel at {shown(place)} has no service {address.service!r}"
                if "No such master" in str(error)
                else f"{shown(place)} is not a sentinel, or refuses this client: {error}"
            ) from error
        if master is None:
            raise EngineUnavailable(
                f"the sentinel at {shown(place)} has no service {address.service!r}"
            )
        facts = dict(zip(found[::2], found[1::2], strict=False))
        return int(facts.get(b"config-epoch", 0)), (master[0].decode(), int(master[1]))

    async def _connected(self, place: Place) -> RedisConnection:
        address = self._address
        connection = self._connections.get(place)
        if connection is None or connection.over:
            connection = await connect_once(address, place, "", _ignore, _ignore)
            self._connections[place] = connection
            if address.sentinel_password:
                async with in_time(address, place):
                    await connection.execute(
                        "AUTH",
                        *filter(None, (address.sentinel_username, address.sentinel_password)),
                    )
        return connection


async def master_of(address: RedisUrl) -> Place:
    """Query the sentinels for the master, once."""
    sentinels = Sentinels(address)
    try:
        return await sentinels.master()
    finally:
        sentinels.disconnect()


def _ignore(*_: object) -> None:
    """Ignore pushes and the end of a connection for one query."""


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
    if info.get("cluster_enabled") == "1":
        raise Unsupported(
            f"{address.url} is a node of a Redis Cluster, which is not supported. Use one server, "
            "or a master with replicas behind sentinels (redis+sentinel://)"
        )
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
    if "DB index" in text:
        return EngineError(
            f"{address.url} has no database {address.db}. Choose one below its setting 'databases' "
            "(16 by default), or another ?prefix= in database 0"
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
