"""Connection of a lock to its servers: options of dflockd's clients, for a tenure client."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast
from urllib.parse import quote

from tenure._client.client import Client
from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.errors import InvalidArgument

__all__ = ["DEFAULT_LEASE", "Options", "Sharding"]

Sharding: TypeAlias = Callable[[str, int], int]
"""Function from a key and the number of servers to the index of the key's server."""

DEFAULT_LEASE = 33
"""Lease in seconds that a dflockd server grants by default."""


class _Configurable(Engine, Protocol):
    def use(self, *, sharding: Sharding | None, tls: ssl.SSLContext | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of dflockd's clients.

    Attributes:
        servers: hosts and ports; a key belongs to one of them.
        sharding: selects the server; CRC-32 of the key if ``None``, as in other languages.
        acquire_timeout: seconds to wait for the lock by default.
        lease: whole seconds of the lease that the server grants; it is renewed while it is held.
        renew_ratio: the fraction of the lease after which it is renewed, at most a third.
        tls: the TLS context; ``True`` for the system's authorities.
        auth_token: the token for authentication.
        connect_timeout: timeout in seconds of one attempt to connect.
        socket_timeout: seconds after which a server that does not answer is abandoned.
        read_timeout: seconds of silence after which the servers close a connection.
        clock: the source of time, for tests.
    """

    servers: Sequence[tuple[str, int]] = (("127.0.0.1", 6388),)
    sharding: Sharding | None = None
    acquire_timeout: float = 10.0
    lease: int = DEFAULT_LEASE
    renew_ratio: float = 0.5
    tls: ssl.SSLContext | bool = False
    auth_token: str | None = field(default=None, repr=False)
    connect_timeout: float = 10.0
    socket_timeout: float = 5.0
    read_timeout: float = 23.0
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            InvalidArgument: an option is not valid.
        """
        if not self.servers:
            raise InvalidArgument("name one dflockd server at least: servers=[('host', 6388)]")
        if not isinstance(self.lease, int) or self.lease < 1:
            raise InvalidArgument(f"a lease is one whole second or more, not {self.lease!r}")
        if not self.acquire_timeout >= 0:
            raise InvalidArgument(
                f"acquire_timeout is zero or more seconds, not {self.acquire_timeout!r}"
            )
        self.client()  # it checks the others

    def client(self) -> Client:
        """Return a client of these servers, not opened yet."""
        places = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.servers
        )
        parameters = {
            "connect_timeout": self.connect_timeout,
            "socket_timeout": self.socket_timeout,
            "read_timeout": self.read_timeout,
            "renew_ratio": self.renew_ratio,
        }
        user = f"{quote(self.auth_token, safe='')}@" if self.auth_token else ""
        scheme = "dflockds" if self.tls else "dflockd"
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        engine = cast(
            "_Configurable", connect_engine(f"{scheme}://{user}{places}?{query}", self.clock)
        )
        context = self.tls if isinstance(self.tls, ssl.SSLContext) else None
        engine.use(sharding=self.sharding, tls=context)
        return Client(engine, self.clock)
