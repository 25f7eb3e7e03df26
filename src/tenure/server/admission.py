"""Admission of connections: the limits of each source, and the displacement of connections.

A *source* is an IPv4 address, an IPv6 network of 64 bits (the smallest of a subscriber), or the
user of a Unix socket. A connection is a *greeting* from its acceptance, including the TLS
handshake, until its client has identified itself; then it is *let in*.

Rules:

* **Greetings** are never rejected. When there are too many, the oldest one of the source with the
  most yields its slot. So silent connections of other sources do not displace a client that greets
  at once, and a source that opens many displaces its own.
* **Unix sockets** have separate slots for greetings and connections, so that network connections
  never exclude the local administrator.
* **Connections** are let in up to the limit. Beyond it, slots are reserved for programs with
  sessions on this server, for Unix sockets, and for sources and identities with few connections.
* **Rates** are limited for each source and each identity, but not for the loopback addresses. A
  rejected connection costs little.
* Each operation takes constant time, regardless of the number of sources.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from tenure.clock import Clock
from tenure.server.auth.authenticator import uid_of
from tenure.server.auth.identity import Identity
from tenure.server.limits import Count, LimitReached, Limits

LOCAL = 64
"""Minimum number of slots for Unix sockets beyond the limit, and for greetings."""

_RESERVED = 8  # connections for each slot reserved for sources with few
_FEW = 100  # a source with less than this part of the connections has few
_OTHER_FILES = 64  # open files that are not connections of clients: the store's, the loop's
_COUNTED = frozenset({"token", "certificate"})  # kinds of identities that are not sources already
_REMEMBERED = 4096  # sources whose rates are remembered before old ones are forgotten


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a connection, for counting connections.

    Attributes:
        name: an address, a network, or a user.
        local: whether it uses a Unix socket.
        shared: whether it is this machine's own address, which users share without trusting each
            other.
    """

    name: str
    local: bool = False
    shared: bool = False

    def __str__(self) -> str:
        """Return the name of the source, for the log."""
        return self.name


@lru_cache(maxsize=4096)
def source_at(host: str) -> Source:
    """Return the source of an IP address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Source(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return Source(str(address), shared=True)
    if isinstance(address, ipaddress.IPv6Address):
        return Source(str(ipaddress.IPv6Network((address, 64), strict=False)))
    return Source(str(address))


def local_source(connection: socket.socket) -> Source:
    """Return the source of a Unix socket's connection: its user, if the system reports it."""
    uid = uid_of(connection)
    return Source("a local socket" if uid is None else f"uid {uid}", local=True)


class PendingConnection(Protocol):
    """A greeting, as seen by `Admission`."""

    @property
    def source(self) -> Source:
        """Origin of the connection."""
        ...

    def displace(self, error: LimitReached) -> None:
        """Close the connection, whose slot is needed; it is no longer counted."""


class _Greetings:
    """Greetings by source, oldest first, and sources by their number of greetings."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[Source, dict[PendingConnection, None]] = {}
        self._levels: list[dict[Source, None]] = [{}]  # by number of greetings
        self._size = 0

    def add(self, pending: PendingConnection) -> PendingConnection | None:
        """Add a greeting; if one must yield its slot, remove and return it."""
        pendings = self._sources.setdefault(pending.source, {})
        pendings[pending] = None
        self._move(pending.source, len(pendings) - 1, len(pendings))
        self._size += 1
        return self.pop() if self._size > self._most else None

    def remove(self, pending: PendingConnection) -> None:
        """Remove a greeting."""
        pendings = self._sources[pending.source]
        del pendings[pending]
        self._move(pending.source, len(pendings) + 1, len(pendings))
        if not pendings:
            del self._sources[pending.source]
        self._size -= 1

    def pop(self) -> PendingConnection | None:
        """Remove the oldest greeting of the source with the most, and return it."""
        if not self._size:
            return None
        source = next(iter(self._levels[-1]))
        pending = next(iter(self._sources[source]))
        self.remove(pending)
        return pending

    def _move(self, source: Source, before: int, after: int) -> None:
        if before:
            del self._levels[before][source]
        if after == len(self._levels):
            self._levels.append({})
        if after:
            self._levels[after][source] = None
        while len(self._levels) > 1 and not self._levels[-1]:
            self._levels.pop()


class _Rates:
    """Rate limit of events per origin, with a burst."""

    def __init__(self, limit: str, per_second: float, at_once: float) -> None:
        self._limit = limit
        self._per_second = per_second
        self._window = at_once / per_second  # seconds after which a full burst is allowed again
        self._due: dict[Hashable, float] = {}  # when the events so far would be within the rate
        self._most = _REMEMBERED

    def count(self, origin: Hashable, whose: str, now: float) -> None:
        """Count an event.

        Raises:
            LimitReached: the rate is exceeded; the event is not counted.
        """
        due = max(self._due.get(origin, now), now) + 1 / self._per_second
        if due - now > self._window:
            raise LimitReached(
                f"{whose} opens connections faster than the server's limit {self._limit} = "
                f"{self._per_second:g} allows; try again later, or have the limit raised",
                self._limit,
            )
        self._due[origin] = due
        if len(self._due) > self._most:
            self._due = {each: due for each, due in self._due.items() if due > now}
            self._most = max(_REMEMBERED, 2 * len(self._due))


class Admission:
    """Connections of one server by source and identity, over all of its listeners.

    Args:
        limits: the server's limits.
        connections: counts the admitted connections.
        greetings: counts the greetings.
        clock: the engine's clock.
    """

    def __init__(self, limits: Limits, connections: Count, greetings: Count, clock: Clock) -> None:
        self._limits = limits
        self._connections = connections
        self._greetings = greetings
        self._clock = clock
        self._of_network = _Greetings(limits.greetings)
        self._of_unix = _Greetings(max(LOCAL, limits.greetings))
        self._local = 0  # connections through Unix sockets
        self._let_in: dict[Hashable, int] = {}  # by source and by identity
        at_once = max(limits.connections, limits.connections_per_second)
        self._rates = _Rates(
            "connections_per_second", limits.connections_per_second, float(at_once)
        )

    def arrive(self, source: Source) -> None:
        """Count a new connection's arrival.

        Raises:
            LimitReached: its source opens connections too fast. This does not apply to a source
                that users share without trusting each other: one of them could exclude the others.
        """
        if not source.shared:
            self._rates.count(source, source.name, self._clock.now())

    def greet(self, pending: PendingConnection) -> None:
        """Count a greeting; another one may yield its slot to it."""
        self._greetings.take_anyway()
        displaced = self._greetings_of(pending.source).add(pending)
        if displaced is not None:
            self._displace(displaced)

    def make_room(self) -> bool:
        """Displace a greeting to free a resource; return false if there is none."""
        displaced = self._of_network.pop() or self._of_unix.pop()
        if displaced is not None:
            self._displace(displaced)
        return displaced is not None

    def stop_greeting(self, pending: PendingConnection) -> None:
        """Stop counting a greeting that has ended, and was not displaced."""
        self._greetings_of(pending.source).remove(pending)
        self._greetings.release()

    def let_in(self, source: Source, identity: Identity, *, returning: bool) -> None:
        """Count an admitted connection.

        Args:
            source: the connection's origin.
            identity: its client's.
            returning: its program has sessions here, and returns to them.

        Raises:
            LimitReached: the limit is reached; the connection is not counted.
        """
        if not returning:
            self._check(source, identity)
        self._connections.take_anyway()
        self._local += source.local
        for each in _keys(source, identity):
            self._let_in[each] = self._let_in.get(each, 0) + 1

    def leave(self, source: Source, identity: Identity) -> None:
        """Stop counting a connection."""
        self._connections.release()
        self._local -= source.local
        for each in _keys(source, identity):
            self._let_in[each] -= 1
            if not self._let_in[each]:
                del self._let_in[each]

    def _check(self, source: Source, identity: Identity) -> None:
        most = self._limits.connections_per_source
        for each in _keys(source, identity):
            if self._let_in.get(each, 0) >= most:
                raise Count("connections_per_source", most, str(each)).reached()
        taken, most = self._connections.taken, self._connections.most
        if taken >= most:
            reserved = source.local and self._local < LOCAL
            few = all(self._let_in.get(each, 0) * _FEW < most for each in _keys(source, identity))
            if not reserved and not (few and taken < most + _reserve(most)):
                raise self._connections.reached()
        if identity.kind in _COUNTED:
            self._rates.count(identity, f"{identity}", self._clock.now())

    def _greetings_of(self, source: Source) -> _Greetings:
        return self._of_unix if source.local else self._of_network

    def _displace(self, pending: PendingConnection) -> None:
        self._greetings.release()
        pending.displace(self._greetings.reached())


def _keys(source: Source, identity: Identity) -> tuple[Hashable, ...]:
    return (source, identity) if identity.kind in _COUNTED else (source,)


def _reserve(connections: int) -> int:
    return max(1, connections // _RESERVED)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as possible, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return _number(soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # some systems take less than they promise
        return _number(soft)
    return _number(hard)


def _number(files: int) -> int:
    return 2**31 if files == resource.RLIM_INFINITY else files


def fitted(limits: Limits, files: int) -> Limits:
    """Return limits whose connections leave open files for the rest of the server.

    Args:
        limits: the limits as set.
        files: the number of files that this process may open.
    """
    room = max(files - _OTHER_FILES - 2 * LOCAL, 16)
    greetings = min(limits.greetings, room // 6)
    left = room - 2 * greetings  # slots of Unix sockets are separate
    connections = limits.connections
    if connections + _reserve(connections) > left:
        connections = max(1, left * _RESERVED // (_RESERVED + 1))
    if (greetings, connections) == (limits.greetings, limits.connections):
        return limits
    return replace(limits, greetings=greetings, connections=connections)
