"""Connection to one of several hosts, with automatic reconnect.

`ReconnectPolicy` chooses the next host and the pause before it, without I/O. A `Reconnector` is the
task that connects. Rules:

* The hosts are tried in turn. After a lost connection its host is first, unless the owner decides
  otherwise; a failed host is last.
* Between two rounds there is a growing pause, with jitter. A connection whose host must not be
  first counts as a failed attempt, so that a server that accepts and then rejects is not tried in a
  tight loop. A connection that lasted for twice the pause before it resets the pause.
* An error may report that the server of this connection cannot serve now: it is a replica, starts,
  ends, is not part of its cluster, or a proxy cannot reach it. That is an outage. The connection is
  dropped, the host's name is looked up again, and what was called for is sent again. An engine has
  the codes of its store; all other errors are raised to the caller. The connection must not have
  lasted for long for its host to be the last one then (`first=None`).
* One task connects. Errors of attempts, or of callbacks of the owner, never end it.
* The end of a connection is reported exactly once, after `lost`, a failed `up` or `aclose`.
* Losses and re-established connections are logged at the level DEBUG, because the client logs each
  outage. An error that an administrator has to repair is logged as an ERROR, once for each host and
  message.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from tenure.background import Failures, supervise
from tenure.errors import EngineUnavailable, TenureError

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


def backoff(failures: int, longest: float = LONGEST_PAUSE) -> float:
    """Return the seconds before the next attempt.

    Pauses double up to a limit, with jitter, so that programs that lost the same server do not
    reconnect at the same time.

    Args:
        failures: number of consecutive failed attempts before the last one.
        longest: the limit in seconds; at least the first pause.
    """
    pause = FIRST_PAUSE * 2.0 ** min(failures, 16)
    return min(pause, max(longest, FIRST_PAUSE)) * random.uniform(0.5, 1.0)


H = TypeVar("H")
H_contra = TypeVar("H_contra", contravariant=True)
C = TypeVar("C")
_log = logging.getLogger("tenure")


class ReconnectPolicy(Generic[H]):
    """Order of the hosts and pauses between the rounds.

    Attributes:
        hosts: the hosts, in the order of the attempts.
    """

    def __init__(self, hosts: Iterable[H]) -> None:
        self.hosts = deque(hosts)
        self._failures = 0  # in a row

    def failed(self, host: H) -> None:
        """Record a failed attempt: the host becomes the last."""
        self.hosts.remove(host)
        self.hosts.append(host)
        self._failures += 1

    def lost(self, host: H, *, first: bool, lasted: bool = False) -> None:
        """Record a lost connection: the host becomes the first, or its attempt counts as failed.

        Args:
            host: the host of the connection.
            first: whether the host becomes the first.
            lasted: whether earlier failures are forgotten.
        """
        if first or lasted:
            self._failures = 0
        if not first:
            self.failed(host)

    def pause(self, longest: float = LONGEST_PAUSE) -> float:
        """Return the seconds before the next attempt."""
        rounds, others = divmod(self._failures, len(self.hosts))
        return backoff(rounds - 1, longest) if rounds and not others else 0.0


class ReconnectorOwner(Protocol[H_contra, C]):
    """Maker and user of the connections."""

    async def connect(self, host: H_contra) -> C:
        """Return a usable connection. When cancelled or failed, it leaves nothing open."""

    def up(self, connection: C) -> None:
        """Begin to use a connection."""

    def down(self, connection: C, why: TenureError) -> None:
        """Close a connection, and stop using it."""

    def longest_pause(self) -> float:
        """Return the longest pause in seconds."""


class Reconnector(Generic[H, C]):
    """The task that keeps a connection.

    Args:
        url: the URL without secrets, for messages.
        hosts: the hosts, in the order of the attempts.

    Attributes:
        connection: the current connection; ``None`` while disconnected.
    """

    def __init__(self, url: str, hosts: Iterable[H], owner: ReconnectorOwner[H, C]) -> None:
        self.connection: C | None = None
        self._url = url
        self._owner = owner
        self._policy = ReconnectPolicy(hosts)
        self._host = self._policy.hosts[0]  # of the latest connection
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._connected_at = 0.0
        self._paused = FIRST_PAUSE  # before the latest attempt, at the least
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failures = Failures(f"keeping a connection to {url}", _log)
        self._causes: deque[TenureError] = deque(maxlen=len(self._policy.hosts))
        self._logged: dict[H, str] = {}  # errors since the latest connection
        self._failure: TenureError = EngineUnavailable(f"{url} is not open")

    @property
    def several(self) -> bool:
        """True if there is more than one host."""
        return len(self._policy.hosts) > 1

    @property
    def failure(self) -> TenureError | None:
        """Reason why there is no connection; ``None`` while there is one."""
        return self._failure if self.connection is None else None

    async def open(self, *, required: bool = True) -> None:
        """Connect to the first host that accepts, and keep a connection from then on.

        Args:
            required: whether to raise if no host accepts; otherwise the attempts continue.

        Raises:
            EngineUnavailable: no host can be reached.
            TenureError: the error of a host that was reached.
        """
        for _ in range(len(self._policy.hosts)):
            if await self._attempt():
                break
        else:
            if required:
                raise self._failure
            self._down.set()
        self._task = asyncio.create_task(supervise(self._keep, self._failures))

    async def aclose(self) -> None:
        """Disconnect for ever. Safe to call twice."""
        self._closed = True
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            closed = EngineUnavailable(f"{self._url} was closed")
            if self.connection is not None:
                self.lost(self.connection, closed)
            self._failure = closed
            self._up.set()  # wakes callers of `connected`

    async def connected(self, timeout: float | None) -> C:
        """Return the connection, waiting for it if necessary; with ``None`` without a limit.

        Raises:
            EngineUnavailable: there was no connection for that many seconds, or this is closed.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.connection is None and not self._closed:
                    await self._up.wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"{self._url} has been out of reach for {timeout:g} s: {self._failure}"
            ) from None
        if self.connection is None:
            raise EngineUnavailable(f"{self._url} was closed")
        return self.connection

    def lost(self, connection: C, why: TenureError, *, first: bool | None = True) -> None:
        """Drop a connection and make another one, unless that is in progress.

        Args:
            connection: the failed connection; ignored if it is not the current one.
            why: the failure.
            first: whether to try the same host first; ``None``: if the connection lasted for a
                while.
        """
        if self.connection is not connection:
            return
        lasted = asyncio.get_running_loop().time() - self._connected_at
        if first is None:
            first = lasted > LONGEST_PAUSE
        self.connection = None
        self._failure = why
        self._up.clear()
        self._policy.lost(self._host, first=first, lasted=lasted > 2 * self._paused)
        self._down.set()
        if not self._closed:
            _log.debug("connection lost, reconnecting: peer=%s error=%s", self._host, why)
        with self._failures.contained():
            self._owner.down(connection, why)

    async def _keep(self) -> None:
        while not self._closed:  # the cancellation may be lost in a library
            await self._down.wait()
            pause = self._policy.pause(self._owner.longest_pause())
            self._paused = max(pause, FIRST_PAUSE)
            await asyncio.sleep(pause)
            if await self._attempt():
                _log.debug("connection re-established: peer=%s", self._host)

    async def _attempt(self) -> bool:
        """Try the next host; return whether it accepted."""
        self._host = host = self._policy.hosts[0]
        try:
            connection = await self._owner.connect(host)
        except Exception as error:
            self._policy.failed(host)
            self._note(host, error)
            return False
        self._causes.clear()
        self._logged.clear()
        self.connection = connection
        self._connected_at = asyncio.get_running_loop().time()
        self._down.clear()
        self._up.set()
        try:
            self._owner.up(connection)
        except Exception as error:
            self._failures.report(error)
            self.lost(connection, EngineUnavailable(f"{host} could not be used"), first=False)
        return True

    def _note(self, host: H, error: Exception) -> None:
        """Derive the reason for being disconnected from the failures of the latest round."""
        if not isinstance(error, TenureError):
            self._failures.report(error)
            error = EngineUnavailable(f"{host}: {error!r}")
        elif not isinstance(error, EngineUnavailable) and self._task is not None:
            if self._logged.get(host) != str(error):
                _log.error("connection refused, trying again: url=%s error=%s", self._url, error)
            self._logged[host] = str(error)
        self._causes.append(error)
        self._failure = _worst(list(self._causes))


def _worst(causes: list[TenureError]) -> TenureError:
    """Return the error of a host that was reached, else the combined errors of all hosts."""
    for each in causes:
        if not isinstance(each, EngineUnavailable):
            return each
    if len(causes) == 1:
        return causes[0]
    worst = EngineUnavailable("; ".join(map(str, causes)))
    worst.__cause__ = causes[0].__cause__
    return worst
