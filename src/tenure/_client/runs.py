"""Runs of a job that is due once per period: `Client.once` and `Session.once`.

The job's mutex prevents concurrent runs. The data of a lasting semaphore, named after the mutex
with `SUFFIX` appended, records the latest runs (`tenure.core.periods` defines the rule and the
record).

Rules:

* A record is read and written under the mutex, by the session that holds it. The next waiter gets
  the mutex only after that session has expired, and the store then rejects its commands, so a
  paused former holder cannot write. (The session of an evicted holder is still alive.)
* The start of a run is recorded before the program gets the lease, its success before the lease is
  released. A success is recorded only if the record is of the same run, with the same fencing
  token.
* The mutex is always released, also after a cancellation or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType

from tenure._client.acquire import acquire, try_acquire
from tenure._client.handles import CallSite
from tenure._client.lease import Lease
from tenure._client.request import Request, RequestOptions
from tenure._client.session_core import SessionCore, session_of
from tenure._client.source import SessionSource
from tenure.core import rules
from tenure.core.periods import RunRecord, decode, encode
from tenure.errors import (
    InvalidArgument,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    Unsupported,
)
from tenure.identity import ANONYMOUS, described, part
from tenure.model import FULL_STORES, LastRun

SUFFIX = ":last-run"
"""Suffix of the name of the semaphore with the record."""

_log = logging.getLogger("tenure")


class RunLease(Lease):
    """The lease of one run of a job. `Client.once` returns one.

    When its block ends normally, the run is recorded as succeeded. When the block raises, it is
    not, and the job is due again. Without a block, call `succeed` before `release`.
    """

    __slots__ = ("_record",)

    def __init__(self, request: Request, record: RunRecord) -> None:
        super().__init__(request)
        self._record = record

    async def succeed(self) -> None:
        """Record that the run succeeded. The lease stays held; safe to call twice.

        Raises:
            LeaseLost: the lease has been lost; nothing is recorded.
            LeaseReleased: it has been released.
        """
        self.check()
        if self._record.done:
            return
        record, request = self._record.succeed(), self._request
        try:
            if await _read(session_of(request), self.name, create=False) != self._record:
                request.taken("another run has been recorded since")
                raise request.why_not_held()
            await _write(session_of(request), self.name, record)
        except (SessionExpired, SessionClosed):
            raise request.why_not_held() from None
        self._record = record

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self.held:
            try:
                await self.succeed()
            except BaseException as failure:
                await super().__aexit__(type(failure), failure, failure.__traceback__)
                raise
        await super().__aexit__(kind, error, trace)


async def once(
    source: SessionSource,
    options: RequestOptions[Request],
    period: float,
    timeout: float | None,
    count_failed: bool,
    site: CallSite,
) -> RunLease | None:
    """Carry out `Client.once`."""
    if timeout is None:
        request: Request | None = await acquire(source, options, None, site)
    else:
        request = await try_acquire(source, options, timeout, site)
    session = source.current()
    assert session is not None  # its store has answered
    if request is None:
        _check_store(session, options.name)
        return None
    try:
        _check_store(session, options.name)
        record = await source.contact.answered(
            f"last run of {options.name!r} on {source.node}",
            _begin(request, period, count_failed=count_failed),
        )
    except BaseException as error:
        request.withdraw_because(error)
        raise
    if record is not None:
        return RunLease(request, record)
    with contextlib.suppress(TimeoutError):  # the release is sent, and takes effect in any case
        async with asyncio.timeout(source.contact.answer_timeout):
            await Lease(request).release()
    return None


async def _begin(request: Request, period: float, *, count_failed: bool) -> RunRecord | None:
    """Record the start of a run. Return ``None`` if the job is not due."""
    session, name = session_of(request), request.name
    now = await _store_time(session)
    old = await _read(session, name, create=True)
    if old is not None:
        known = old.clamped(now)
        wait = known.due_in(now, period, count_failed=count_failed)
        if wait > 0:
            if known != old:
                await _write(session, name, known)
            _log.info(
                "job is not due: node=%s name=%r seconds=%.0f started=%.0f holder=%s",
                *(request.node, name, wait, now - known.started, known.by),
            )
            return None
        old = known
    # A store without fencing tokens has no order to compare.
    token = request.order_id or 0
    by = described(session.how.description, session.client.identity)
    record = RunRecord(now, token, by) if old is None else old.begin(now, token, by)
    request.check()
    await _write(session, name, record)
    request.check()
    return record


async def last_run(source: SessionSource, name: str) -> LastRun | None:
    """Carry out `Client.last_run`, without a timeout."""
    session = await source.obtain()
    _check_store(session, name)
    record = await _read(session, name, create=False)
    if record is None:
        return None
    now = await _store_time(session)
    known = record.clamped(now)
    text, identity = part(known.by)
    return LastRun(
        known.started,
        now - known.started,
        known.done,
        known.token,
        *(identity or ANONYMOUS),
        description=text,
    )


# The store


def _check_store(session: SessionCore, name: str) -> None:
    can = session.client.capabilities
    if not (can.data and can.lasting):
        raise Unsupported(
            f"the store of {session.client.url} stores no data, so no run of {name!r} is recorded; "
            f"{FULL_STORES} do",
            node=session.node,
            name=name,
        )


async def _store_time(session: SessionCore) -> float:
    return await session.race(session.client.engine.store_time())


async def _read(session: SessionCore, name: str, *, create: bool) -> RunRecord | None:
    """Read the record of a job, or ``None`` if there is none."""
    where, engine = name + SUFFIX, session.engine
    try:
        described = await session.race(
            engine.describe_semaphore(where, owners=False, waiters=False)
        )
    except SemaphoreNotFound:
        if create:
            await session.race(engine.create_semaphore(where, 1, b"", exist_ok=True))
        return None
    rules.check_kind(False, described.ephemeral, session.node, where)
    try:
        return decode(described.data)
    except ValueError as error:
        raise InvalidArgument(
            f"the data of semaphore {where!r} on {session.node} cannot be read as the last run of "
            f"{name!r}: {error}. Delete it, or choose another name",
            node=session.node,
            name=where,
        ) from error


async def _write(session: SessionCore, name: str, record: RunRecord) -> None:
    await session.race(session.engine.update_semaphore(name + SUFFIX, encode(record)))
