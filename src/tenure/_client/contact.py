"""Contact between a client and its store: outages, their causes and their log lines.

A `Contact` belongs to one client. Its sessions report when they lose and re-establish contact; the
client logs an outage once for all its sessions. A brief interruption, such as a proxy that closes
idle connections, is one line at the level DEBUG. A timed-out operation gets the `Obstacle` here, so
that an outage is never reported as contention.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

from tenure import fork
from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import EngineError, EngineUnavailable, Misuse, TenureError

T = TypeVar("T")

ANSWER_TIMEOUT = 5.0
"""Default of the URL option ``answer_timeout``: timeout in seconds of reads and attempts."""

BRIEF = 1.0
"""Seconds within which an interruption is not logged as an outage."""

_log = logging.getLogger("tenure")

_ERRNO = re.compile(r"\[Errno (\d+)\]")


class Obstacle(NamedTuple):
    """Reason, other than contention, why the store did not grant or answer in time.

    Attributes:
        clause: the reason as text, without a full stop.
        cause: the failure that caused it.
    """

    clause: str
    cause: TenureError


class Contact:
    """The contact of one client's sessions to their store. Used on the client's loop.

    Attributes:
        answer_timeout: timeout in seconds of reads and of attempts to acquire.
    """

    def __init__(self, engine: Engine, clock: Clock, answer_timeout: float) -> None:
        self.answer_timeout = answer_timeout
        self._engine = engine
        self._now = clock.now
        self._born = fork.generation
        self._attached: set[object] = set()
        self._detached: set[object] = set()
        self._lost_at: float | None = None
        self._cause: BaseException | None = None  # of the outage
        self._warning: asyncio.TimerHandle | None = None  # not logged yet

    @property
    def url(self) -> str:
        """URL of the store, without secrets."""
        return self._engine.url

    # Reports of the sessions

    def attached(self, session: object) -> None:
        """Note that a session is attached, for the first time or again."""
        self._detached.discard(session)
        self._attached.add(session)
        self._end_outage()

    def detached(self, session: object, cause: BaseException | None) -> None:
        """Note that a session has lost its contact. The first loss of an outage is logged."""
        self._attached.discard(session)
        self._detached.add(session)
        if self._lost_at is None:
            self._lost_at, self._cause = self._now(), cause
            self._warning = asyncio.get_running_loop().call_later(BRIEF, self._warn)

    def _warn(self) -> None:
        self._warning = None
        _log.warning(
            "lost contact, nothing is granted meanwhile: url=%s error=%s",
            self._engine.url,
            self._take_cause(),
        )

    def _take_cause(self) -> str:
        cause, self._cause = self._cause, None
        return "unknown" if cause is None else self._reason(cause)

    def ended(self, session: object) -> None:
        """Forget a session that has ended."""
        self._attached.discard(session)
        self._detached.discard(session)
        self._end_outage()

    def _end_outage(self) -> None:
        if self._detached:
            return
        if self._warning is not None:
            self._warning.cancel()
            cause = self._take_cause()
            self._warning = self._lost_at = None
            if self._attached:
                _log.debug("lost contact for a moment: url=%s error=%s", self._engine.url, cause)
        elif self._lost_at is not None and self._attached:
            lasted, self._lost_at = self._now() - self._lost_at, None
            _log.info("re-established contact: url=%s seconds=%.1f", self._engine.url, lasted)

    # Obstacles of operations that timed out

    def obstacle(self, name: str | None = None) -> Obstacle | None:
        """Return the known reason why the store grants nothing, or ``None`` while it works."""
        trouble = self._engine.trouble(name)
        if trouble is None:
            return None
        if self._lost_at is None or not isinstance(trouble, EngineUnavailable):
            return Obstacle(str(trouble), trouble)
        lasted = self._now() - self._lost_at
        return Obstacle(
            f"{self._engine.url} has been unreachable for {lasted:.1f} s ({self._reason(trouble)})",
            trouble,
        )

    def silence(self, name: str | None, lasted: float) -> Obstacle:
        """Return the reason why the store has not answered for so many seconds."""
        found = self.obstacle(name)
        if found is not None:
            return found
        clause = f"{self._engine.url} has not answered for {lasted:.1f} s"
        return Obstacle(clause, EngineUnavailable(clause))

    async def answered(
        self, subject: str, reading: Coroutine[Any, Any, T], *, failed: str = "not read"
    ) -> T:
        """Return the answer to a read, within `answer_timeout`.

        Args:
            subject: what is read, for the message.
            reading: the coroutine that reads; it is closed in any case.
            failed: what failed, if there was no answer in time.

        Raises:
            EngineUnavailable: there was no answer in time.
            Misuse: the client belongs to another process, or no event loop runs.
        """
        with contextlib.closing(reading):
            fork.check(self._born, f"the client of {self._engine.url}")
            running_loop(self._engine.url)
            try:
                return await self._in_time(subject, reading, failed)
            except TenureError as error:
                raise shortened(error)  # noqa: B904  the same error

    async def _in_time(self, subject: str, reading: Coroutine[Any, Any, T], failed: str) -> T:
        timeout = self.answer_timeout
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await reading
        except TimeoutError:
            if not limit.expired():
                raise
        clause, cause = self.silence(None, timeout)
        raise EngineUnavailable(
            f"{subject}: {failed} within {timeout:g} s, because {clause}."
        ) from cause

    def _reason(self, cause: BaseException) -> str:
        return reason_of(cause).removeprefix(f"{self._engine.url}: ")


def shortened(error: TenureError) -> TenureError:
    """Return the error without the frames that it came through, which say nothing to a program.

    Neither do those of its causes. The error of a store that failed keeps them.
    """
    error.__traceback__ = None
    if type(error) is EngineError:
        return error
    cause = error.__cause__
    while cause is not None:
        cause.__traceback__ = None
        cause.__suppress_context__ = True
        cause = cause.__cause__
    return error


def running_loop(url: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        Misuse: none of asyncio's is running.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise Misuse(
            f"the client of {url} needs asyncio's event loop, and none runs here: begin with "
            "asyncio.run(). With trio, curio or no event loop use tenure.blocking, with trio in a "
            "thread of trio.to_thread.run_sync()"
        ) from None


def reason_of(error: BaseException) -> str:
    """Return the cause of a failed connection in a few words, such as "connection refused"."""
    each: BaseException | None = error
    while each is not None:
        # The subclasses of other modules (TLS, name resolution) have numbers of their own.
        is_plain = isinstance(each, OSError) and type(each).__module__ == "builtins"
        number: int | None = getattr(each, "errno", None) if is_plain else None
        found = _ERRNO.search(str(each))
        if number is None and found is not None:
            number = int(found[1])
        if number is not None and number in errno.errorcode:
            return os.strerror(number).lower()
        each = each.__cause__
    return (str(error) or type(error).__name__).partition("; ")[0]
