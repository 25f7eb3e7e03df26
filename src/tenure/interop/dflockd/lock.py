"""A lock, or one slot of a semaphore, on dflockd servers: see the package.

States: idle, queued (it has a ticket) and held (it has a lease). `_end` returns to idle from any
state, and closes the client; so does a call that fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast, overload
from urllib.parse import quote

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure._client.semaphore import Semaphore
from tenure._client.ticket import Ticket
from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.errors import AcquireTimeout, InvalidArgument, LeaseLost, Misuse
from tenure.model import EPHEMERAL_LIMIT

__all__ = [
    "DEFAULT_LEASE",
    "DistributedLock",
    "DistributedSemaphore",
    "Enqueued",
    "OnLockLost",
    "Options",
    "Sharding",
]


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


T = TypeVar("T")

Enqueued: TypeAlias = Literal["acquired", "queued"]

OnLockLost: TypeAlias = Callable[[str, str], object]
"""Callback on the loop, with the key and the token of a lost lock."""

_log = logging.getLogger("tenure")


class LockOrSemaphore:
    """Base of the lock and the semaphore: one holder of one key."""

    def __init__(
        self, key: str, limit: int, on_lock_lost: OnLockLost | None, options: dict[str, Any]
    ) -> None:
        if not isinstance(limit, int) or limit < 1:
            raise InvalidArgument(f"a limit is 1 or more, not {limit!r}", name=key)
        self._options = Options(**options)
        self._key = key
        self._limit = limit
        self._on_lock_lost = on_lock_lost
        self._client: Client | None = None
        self._ticket: Ticket[Lease] | None = None
        self._lease: Lease | None = None
        self._token = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key!r}{' held' if self.held else ''}>"

    @property
    def key(self) -> str:
        """Key of the lock or semaphore."""
        return self._key

    @property
    def limit(self) -> int:
        """Maximum number of holders at a time."""
        return self._limit

    @property
    def lease(self) -> int:
        """Lease in seconds that the server grants; it is renewed while it is held."""
        return self._options.lease

    @property
    def url(self) -> str:
        """URL of the servers, without secrets."""
        return self._options.client().url

    @property
    def token(self) -> str | None:
        """Token from the server; ``None`` when it is not held. Reads the clock."""
        return self._token if self.held else None

    @property
    def held(self) -> bool:
        """Return whether it is held. Reads the clock at every call; safe from any thread."""
        lease = self._lease
        return lease is not None and lease.held

    @property
    def fencing_token(self) -> int:
        """Number that rises with every grant of this key.

        Raises:
            Misuse: it is not held.
            Unsupported: the server has no fencing tokens, as before dflockd 2.0.
        """
        if self._lease is None:
            raise Misuse(f"{self._key!r} is not held", name=self._key)
        return self._lease.fencing_token

    async def acquire(self, *, force: bool = False) -> bool:
        """Wait for it, for `acquire_timeout` seconds; return false on timeout.

        Args:
            force: first release the lock, or withdraw the request, of this object.

        Raises:
            Misuse: this object holds it, or has enqueued.
            EngineUnavailable: no server can be reached.
        """
        semaphore = await self._begin(force=force)
        timeout = self._options.acquire_timeout
        return await self._outcome(self._lease_of(semaphore, timeout))

    async def enqueue(self) -> Enqueued:
        """Join the queue: ``"acquired"`` when it is held at once, else ``"queued"``.

        In either case, call `wait` next. Raises like `acquire`.
        """
        semaphore = await self._begin(force=False)
        try:
            self._ticket = ticket = await semaphore.enqueue(self._count, on_loss=self._lost)
            if ticket.granted:
                self._have(await ticket.wait())
                return "acquired"
        except BaseException:
            await self._end()
            raise
        return "queued"

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for the grant after `enqueue`; on timeout, withdraw and return false.

        Args:
            timeout: seconds; `acquire_timeout` if ``None``.

        Raises:
            Misuse: `enqueue` was not called.
            LeaseLost: it was lost.
        """
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            raise Misuse(f"enqueue for {self._key!r} before you wait for it", name=self._key)
        limit = self._options.acquire_timeout if timeout is None else timeout
        return await self._outcome(ticket.wait(limit))

    async def release(self) -> bool:
        """Release it, or leave the queue, and disconnect. False if it was not held (any more).

        Safe to call twice.
        """
        was_held = self.held
        await self._end()
        return was_held

    async def close(self) -> None:
        """Release, as `release` does."""
        await self._end()

    @overload
    async def with_lock(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T: ...

    @overload
    async def with_lock(self, work: Callable[[], T]) -> T: ...

    async def with_lock(self, work: Callable[[], Any]) -> Any:
        """Acquire, do the work, release; the work is cancelled when the lock is lost.

        Raises:
            AcquireTimeout: it was not granted in time; the work was not done.
            LeaseLost: it was lost during the work.
        """
        async with self:
            result = work()
            return await result if inspect.isawaitable(result) else result

    async def __aenter__(self) -> Self:
        if not await self.acquire():
            raise AcquireTimeout(
                f"{self._key!r} was not granted within {self._options.acquire_timeout:g} s",
                name=self._key,
            )
        try:
            assert self._lease is not None
            await self._lease.__aenter__()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease = self._lease
        try:
            if lease is not None:
                await lease.__aexit__(kind, error, trace)
        finally:
            await self._end()

    def check(self) -> None:
        """Raise unless it is held: `LeaseLost`, or `Misuse` if it never was."""
        if self._lease is None:
            raise Misuse(f"{self._key!r} is not held", name=self._key)
        self._lease.check()

    @property
    def is_idle(self) -> bool:
        """Return true if it neither holds nor waits, and is not connected."""
        return self._client is None

    # Acquiring and releasing

    @property
    def _count(self) -> int:
        return EPHEMERAL_LIMIT if self._limit == 1 else 1

    async def _begin(self, *, force: bool) -> Semaphore:
        """Connect, and return the semaphore for the requests."""
        if self._client is not None:
            if not force:
                raise Misuse(
                    f"this object holds {self._key!r} already, or waits for it; release it first, "
                    "or use another object",
                    name=self._key,
                )
            await self._end()
        self._loop = asyncio.get_running_loop()
        self._client = client = self._options.client()
        try:
            session = await client.session(recovery_window=self._options.lease)
            semaphore = session.semaphore(self._key, ephemeral=self._limit == 1)
            if self._limit > 1:
                await semaphore.create(self._limit, exist_ok=True)
        except BaseException:
            await self._end()
            raise
        return semaphore

    async def _lease_of(self, semaphore: Semaphore, timeout: float) -> Lease:
        return await semaphore.acquire(self._count, timeout=timeout, on_loss=self._lost)

    async def _outcome(self, waiting: Awaitable[Lease]) -> bool:
        try:
            self._have(await waiting)
        except AcquireTimeout:
            await self._end()
            return False
        except BaseException:
            await self._end()
            raise
        return True

    def _have(self, lease: Lease) -> None:
        self._token = lease.store_token
        self._lease = lease

    def _lost(self, _: LeaseLost) -> None:
        """From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._lose, self._token)

    def _lose(self, token: str) -> None:
        _log.warning("lock lost: name=%r", self._key)
        if self._on_lock_lost is not None:
            self._on_lock_lost(self._key, token)

    async def _end(self) -> None:
        """Return to idle; the end of the client releases everything."""
        client, self._client = self._client, None
        kept = self._ticket, self._lease  # until they have ended with the client
        self._ticket = self._lease = None
        if client is not None:
            await client.aclose()
        del kept


class DistributedLock(LockOrSemaphore):
    """A lock on dflockd servers.

    ``async with DistributedLock("nightly", servers=[("lock.example", 6388)]):`` holds it for the
    block, which is cancelled when the lock is lost.

    Args:
        key: the key, without white space, at most 255 bytes.
        on_lock_lost: called on the loop, with the key and the token, when it is lost.
        options: the attributes of `tenure.interop.dflockd.lock.Options`: ``servers``,
            ``lease``, ``acquire_timeout``, ``auth_token``, ``tls``, ...
    """

    def __init__(self, key: str, *, on_lock_lost: OnLockLost | None = None, **options: Any) -> None:
        """Set the options; nothing is sent to the servers."""
        super().__init__(key, 1, on_lock_lost, options)


class DistributedSemaphore(LockOrSemaphore):
    """One slot of a semaphore on dflockd servers; see `DistributedLock`.

    Args:
        limit: number of holders at a time; all clients must use the same.
    """

    def __init__(
        self, key: str, limit: int, *, on_lock_lost: OnLockLost | None = None, **options: Any
    ) -> None:
        """Set the options; nothing is sent to the servers."""
        super().__init__(key, limit, on_lock_lost, options)
