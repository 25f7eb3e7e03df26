"""Finding of the server that has a namespace: the one of the URL, a master, or a node of a cluster.

Rules:

* Sentinels and nodes are queried all at once. Of two answers, the one of the later failover or
  resharding counts (``config-epoch``). Answers that come much later than the first one do not.
* A node of a cluster that does not serve the namespace names the node that does (``MOVED``). That
  one is tried first, once; otherwise the nodes are queried, those of the URL and others that they
  have named.
* An account that may not use ``CLUSTER`` relies on ``MOVED`` and the nodes of the URL.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tenure.engines.redis.commands import Refusal, is_denied
from tenure.engines.redis.connecting import (
    Moved,
    Server,
    announced,
    connect_once,
    greet,
    in_time,
    not_a_cluster,
    require_keys,
    shown,
    translated,
)
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.url import Place, RedisUrl
from tenure.errors import EngineUnavailable, TenureError

HOPS = 5
"""Nodes that name another one, until an attempt to connect has failed."""

_OTHERS = 0.2  # seconds for other servers to answer, after the first one
_QUERIED = 5  # nodes besides those of the URL
_SLOTS = 16384
_MOST_KNOWN = 1000


class _Claim(NamedTuple):
    """Answer to a query: the server that has the namespace.

    Attributes:
        epoch: number of the failover or resharding; the latest counts.
        itself: whether the server names itself.
        place: the address.
        node: its id in the cluster, if known.
    """

    epoch: int
    itself: bool
    place: Place
    node: str


class Locator(ABC):
    """Finder of the server, over connections that are kept."""

    def __init__(self, address: RedisUrl) -> None:
        self._address = address
        self._connections: dict[Place, RedisConnection] = {}

    @property
    @abstractmethod
    def follows(self) -> bool:
        """True if another server may become the right one."""

    @abstractmethod
    async def locate(self) -> Place:
        """Return the address of the server.

        Raises:
            TenureError: it is unknown.
        """

    @abstractmethod
    async def newer(self, server: Server) -> Place | None:
        """Return the address of a server that has replaced this one, or ``None``.

        Raises:
            TenureError: it is unknown.
        """

    @abstractmethod
    async def serve(self, connection: RedisConnection, server: Server) -> None:
        """Use this server from now on."""

    @abstractmethod
    def moved(self, place: Place) -> None:
        """Try this server first, because another one has named it."""

    def disconnect(self) -> None:
        """Drop the connections. Safe to call twice."""
        while self._connections:
            self._connections.popitem()[1].drop("it is not needed")

    @abstractmethod
    async def _login(self, connection: RedisConnection) -> None:
        """Authenticate on a new connection."""

    @abstractmethod
    async def _claim_of(self, connection: RedisConnection, place: Place) -> _Claim:
        """Query one server."""

    @abstractmethod
    def _refused(self, place: Place, refusal: Refusal) -> TenureError:
        """Return the error for a refused query."""

    async def _query_all(self, places: Iterable[Place], what: str) -> _Claim:
        """Query servers, and return the latest of their answers."""
        loop = asyncio.get_running_loop()
        pending = {loop.create_task(self._query(place)) for place in places}
        claims: list[_Claim] = []
        troubles: list[TenureError] = []
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=_OTHERS if claims else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                for query in done:
                    try:
                        claims.append(query.result())
                    except TenureError as error:
                        troubles.append(error)
        finally:
            for query in pending:
                query.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if claims:
            return max(claims)
        for trouble in troubles:
            if not isinstance(trouble, EngineUnavailable):
                raise trouble
        raise EngineUnavailable(
            f"{self._address.url}: {what}: {'; '.join(sorted(map(str, troubles)))}"
        )

    async def _query(self, place: Place) -> _Claim:
        try:
            connection = await self._connected(place)
            try:
                async with in_time(self._address, place):
                    return await self._claim_of(connection, place)
            except BaseException:
                connection.drop("it is not needed")
                if self._connections.get(place) is connection:
                    del self._connections[place]
                raise
        except Refusal as refusal:
            raise self._refused(place, refusal) from refusal

    async def _connected(self, place: Place) -> RedisConnection:
        known = self._connections.get(place)
        if known is not None and not known.over:
            return known
        connection = await connect_once(self._address, place, _ignore, _ignore)
        try:
            async with in_time(self._address, place):
                await self._login(connection)
        except BaseException:
            connection.drop("it is not needed")
            raise
        other = self._connections.get(place)
        if other is not None and not other.over:  # a reconnect and a look query the same server
            connection.drop("there is another one")
            return other
        self._connections[place] = connection
        return connection


class Sentinels(Locator):
    """Queries of the sentinels for the master."""

    @property
    def follows(self) -> bool:
        """True: they may promote a replica."""
        return True

    async def locate(self) -> Place:
        """Return the master that the sentinels name; after a failover, the one of the latest."""
        claim = await self._query_all(self._address.places, "no sentinel names a master")
        return claim.place

    async def newer(self, server: Server) -> Place | None:
        """Return the master, if it is another one."""
        place = await self.locate()
        return None if place == server.place else place

    async def serve(self, connection: RedisConnection, server: Server) -> None:
        """Do nothing: the sentinels know the others."""

    def moved(self, place: Place) -> None:
        """Do nothing: the sentinels are queried each time."""

    async def _login(self, connection: RedisConnection) -> None:
        address = self._address
        if address.sentinel_password:
            account = filter(None, (address.sentinel_username, address.sentinel_password))
            await connection.execute("AUTH", *account)

    async def _claim_of(self, connection: RedisConnection, place: Place) -> _Claim:
        service = self._address.service
        found = await connection.execute("SENTINEL", "MASTER", service)
        master = await connection.execute("SENTINEL", "get-master-addr-by-name", service)
        if master is None:
            raise self._unknown(place)
        facts = dict(zip(found[::2], found[1::2], strict=False))
        there = master[0].decode(), int(master[1])
        return _Claim(int(facts.get(b"config-epoch", 0)), False, there, "")

    def _refused(self, place: Place, refusal: Refusal) -> TenureError:
        if "No such master" in str(refusal):
            return self._unknown(place)
        return EngineUnavailable(
            f"{shown(place)} is not a sentinel, or refuses this client: {refusal}"
        )

    def _unknown(self, place: Place) -> EngineUnavailable:
        return EngineUnavailable(
            f"the sentinel at {shown(place)} has no service {self._address.service!r}"
        )


class ClusterNodes(Locator):
    """One server, or the nodes of a cluster, queried for the one that serves the namespace.

    Attributes:
        slot: the hash slot of the namespace.
    """

    def __init__(self, address: RedisUrl) -> None:
        super().__init__(address)
        self.slot = crc_hqx(address.prefix[1 : address.prefix.index("}")].encode(), 0) % _SLOTS
        self._clustered = address.cluster
        self._named: Place | None = None  # by a node that does not serve the namespace
        self._known: list[Place] = []  # named by the nodes
        self._current: _Claim | None = None  # of the node in use
        self._first, self._turn = random.randrange(_MOST_KNOWN), 0

    @property
    def follows(self) -> bool:
        """True if it is a cluster."""
        return self._clustered

    def moved(self, place: Place) -> None:
        """Try this node first."""
        self._clustered = True
        self._named = place

    async def locate(self) -> Place:
        """Return the server of the URL, or the node that serves the namespace."""
        named, self._named = self._named, None
        if named is not None:
            return named
        if not self._clustered:
            return self._address.places[0]
        others = [each for each in self._known if each not in self._address.places]
        places = *self._address.places, *random.sample(others, min(_QUERIED, len(others)))
        what = "no node of the cluster names the one of the namespace"
        try:
            return (await self._query_all(places, what)).place
        finally:
            self.disconnect()

    async def serve(self, connection: RedisConnection, server: Server) -> None:
        """Use this node from now on, and learn the addresses of the others."""
        if not (server.clustered or self._clustered):
            return
        self._clustered = True
        try:
            async with in_time(self._address, server.place):
                self._current = await self._claim_of(connection, server.place)
        except Refusal as refusal:
            raise self._refused(server.place, refusal) from refusal

    async def newer(self, server: Server) -> Place | None:
        """Return the node that one of the other nodes names, if that is later knowledge."""
        others = [each for each in self._known if each != server.place]
        current = self._current
        if not others or current is None:
            return None
        # A few of them, in turn: each is a connection. Another client has others.
        self._turn = (self._turn + 1) % _QUERIED
        try:
            claim = await self._query(others[(self._first + self._turn) % len(others)])
        except TenureError:
            self._first += 1  # it may be gone for good
            raise
        if current is not self._current or claim.epoch <= current.epoch:
            return None
        if claim.node == current.node:
            self._current = claim
            return None
        return claim.place

    async def _login(self, connection: RedisConnection) -> None:
        await greet(connection, self._address, protocol=2)

    async def _claim_of(self, connection: RedisConnection, place: Place) -> _Claim:
        try:
            ranges, text = await asyncio.gather(
                connection.execute("CLUSTER", "SLOTS"), connection.execute("CLUSTER", "NODES")
            )
        except Refusal as refusal:
            if "cluster support disabled" in str(refusal):
                raise not_a_cluster(self._address, place) from refusal
            if not is_denied(str(refusal)):
                raise
            return await self._try(connection, place)
        nodes = {each.id: each for each in nodes_of(text)}
        claim = None
        known: dict[Place, None] = {}
        for first, last, *servers in ranges:
            for host, port, node, *_ in servers:
                found = nodes.get(node.decode())
                itself = found is not None and found.is_reporter
                there = place if itself else announced((host or b"").decode(), port, place)
                if there is None:
                    continue
                known[there] = None
                if claim is None and first <= self.slot <= last:  # the master is the first one
                    epoch = 0 if found is None else found.epoch
                    claim = _Claim(epoch, itself, there, node.decode())
        if claim is None:
            raise EngineUnavailable(
                f"the node at {shown(place)} knows no node that serves slot {self.slot}"
            )
        self._known = list(known)[:_MOST_KNOWN]
        return claim

    async def _try(self, connection: RedisConnection, place: Place) -> _Claim:
        """Find out by a command for a key, where this account may not use ``CLUSTER``."""
        try:
            await require_keys(connection, self._address, place)
        except Moved as moved:
            return _Claim(0, False, moved.place, "")
        return _Claim(0, True, place, "")

    def _refused(self, place: Place, refusal: Refusal) -> TenureError:  # noqa: ARG002
        return translated(self._address, refusal)


class Node(NamedTuple):
    """A node of a cluster, as one of them reports it.

    Attributes:
        id: its id.
        flags: what it is, such as "master" or "fail".
        epoch: number of its latest change of slots.
        moving: slots that are on their way from or to it, as reported.
    """

    id: str
    flags: frozenset[str]
    epoch: int
    moving: tuple[str, ...]

    @property
    def is_reporter(self) -> bool:
        """True if this node has made the report."""
        return "myself" in self.flags


def nodes_of(report: Any) -> Iterator[Node]:
    """Parse the answer to ``CLUSTER NODES``."""
    text = report.decode("utf-8", "replace") if isinstance(report, bytes) else str(report)
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[6].isdecimal():
            moving = tuple(each.strip("[]") for each in words[8:] if each.startswith("["))
            yield Node(words[0], frozenset(words[2].split(",")), int(words[6]), moving)


def locator_of(address: RedisUrl) -> Locator:
    """Return the locator for the servers of a URL."""
    return Sentinels(address) if address.service else ClusterNodes(address)


async def locate(address: RedisUrl) -> Place:
    """Return the address of the server that has the namespace, or would have it."""
    locator = locator_of(address)
    try:
        place = await locator.locate()
        for _ in range(0 if address.service else HOPS):
            connection = await connect_once(address, place, _ignore, _ignore)
            try:
                async with in_time(address, place):
                    await greet(connection, address, address.protocol)
                    await require_keys(connection, address, place)
                break
            except Moved as moved:
                place = moved.place
            except Refusal:  # it cannot serve now
                break
            finally:
                connection.drop("it is not needed")
        return place
    finally:
        locator.disconnect()


def _ignore(*_: object) -> None:
    """Ignore pushes and the end of a connection for queries."""
