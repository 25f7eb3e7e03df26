"""Work that runs once, and whose outcome all callers get: `run_once`.

State and its owners:

* The mutex ``<name>``, the one that `Client.once` uses, too: its holder is the runner. If it dies,
  the store passes the mutex to the next waiter, which finds no outcome and runs.
* The data of the lasting semaphore ``<name>:outcome``, of limit 1: the latest outcome, with the
  store's time at which the run ended. The runner writes it before it releases the mutex.

Rules:

* An outcome is written under the mutex, in the session that holds it (`tenure.recipes.base`).
* It counts for `keep` seconds from the end of the run, so a run may take longer than `keep`. One
  from the future (the store's clock was set back) is corrected by the first caller that gets the
  mutex, and counts from then on.
* Only a value or an exception is an outcome. A cancelled runner, and one that lost its lease, leave
  none.

`Client.once` keeps no outcome, and its period counts from the start of a run.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tenure._client.handles import note_failure
from tenure._client.internals import session_core, source_of
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.session_core import SessionCore
from tenure.durations import Duration, seconds
from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound, TenureError
from tenure.identity import Identity, described, part
from tenure.recipes.base import Source, write_under

SUFFIX = ":outcome"
"""Suffix of the name of the semaphore with the outcome."""

_VERSION = 1
_LONGEST_ERROR = 10_000
"""Characters of an error that are kept."""


class RunFailed(TenureError, RuntimeError):
    """The function of `run_once` raised in another caller; its error is not raised twice.

    Attributes:
        error: the type and the message of the error, such as ``"ValueError: no such table"``.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        error: str = "",
    ) -> None:
        """Keep the message, and the text of the error."""
        super().__init__(message, node=node, name=name)
        self.error = error


class Outcome(NamedTuple):
    """The outcome of a run.

    Attributes:
        ended: the store's time at which it ended.
        by: the description of the runner's session.
        error: the text of its error; ``None``: it succeeded.
        value: its result.
    """

    ended: float
    by: str
    error: str | None = None
    value: Any = None

    def encode(self) -> bytes:
        """Encode it as JSON. Raises `TypeError` or `ValueError` for a value that JSON has not."""
        fields: dict[str, Any] = {"v": _VERSION, "ended": self.ended, "by": self.by}
        if self.error is not None:
            fields["error"] = self.error
        elif isinstance(self.value, bytes):
            fields["bytes"] = base64.b64encode(self.value).decode()
        else:
            fields["value"] = self.value
        return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        """Decode it. Raises `ValueError` for other data."""
        try:
            fields: Any = json.loads(data)
            if not isinstance(fields, dict) or fields.get("v") != _VERSION:
                raise ValueError("it is not an outcome, or is from a later version of tenure")
            ended, by, error = float(fields["ended"]), str(fields["by"]), fields.get("error")
            if not math.isfinite(ended) or not isinstance(error, str | None):
                raise ValueError("it is damaged")
            if error is not None or "bytes" not in fields:
                return cls(ended, by, error, fields.get("value"))
            return cls(ended, by, None, base64.b64decode(fields["bytes"], validate=True))
        except (KeyError, TypeError, RecursionError, binascii.Error) as failure:
            raise ValueError(f"it is damaged ({failure!r})") from None


class Outcomes:
    """The outcomes of one name. `tenure.blocking.recipes` uses it, too.

    Args:
        source: a session or a client.
        name: of the mutex.
        keep: seconds for which an outcome counts.
        keep_failed: whether a failure is an outcome.
    """

    def __init__(self, source: Source, name: str, keep: Duration, *, keep_failed: bool) -> None:
        self.name = name
        self.mutex = source.mutex(name)
        self._source = source_of(self.mutex)
        self._record = source.semaphore(name + SUFFIX)
        self._keep = seconds(keep, "a time to keep an outcome")
        self._keep_failed = keep_failed

    async def known(self) -> Outcome | None:
        """Read the outcome, without the mutex. ``None``: there is none that counts."""
        outcome = await self._read()
        if outcome is None:
            return None
        age = await self._now(await self._source.obtain()) - outcome.ended
        return outcome if 0 <= age < self._keep and self._counts(outcome) else None

    async def begin(self, lease: Lease) -> Outcome | None:
        """Return the outcome that counts for the holder of the mutex, or ``None``: it runs."""
        outcome = await self._read()
        if outcome is None or not self._counts(outcome):
            await self._create()
            return None
        now = await self._now(session_core(lease.session))
        if outcome.ended > now:
            outcome = outcome._replace(ended=now)
            await write_under(lease, self._record.name, outcome.encode())
        return outcome if now - outcome.ended < self._keep else None

    async def succeed(self, lease: Lease, value: object) -> Any:
        """Write the value, and return it as other callers get it.

        Raises:
            InvalidArgument: it cannot be kept; that is the outcome then.
            LeaseLost: the mutex has been lost; nothing is kept.
        """
        lease.check()
        try:
            outcome = (await self._outcome(lease))._replace(value=value)
            data = self._encoded(outcome)
            await write_under(lease, self._record.name, data)
        except InvalidArgument as error:
            await self.fail(lease, error)
            raise
        return Outcome.decode(data).value

    async def fail(self, lease: Lease, error: Exception) -> None:
        """Write the error, unless failures are not kept. Its own failure is noted on the error."""
        if not self._keep_failed or not lease.held:
            return
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        try:
            outcome = (await self._outcome(lease))._replace(error=text)
            await write_under(lease, self._record.name, outcome.encode())
        except TenureError as failure:
            note_failure(error, failure, f"keeping the outcome of {self.name!r}")

    def result(self, outcome: Outcome) -> Any:
        """Return the value of another caller's run.

        Raises:
            RunFailed: it failed.
        """
        if outcome.error is None:
            return outcome.value
        node = self.node
        raise RunFailed(
            f"the run of {self.name!r} on {node} by {_runner(outcome.by)} failed: {outcome.error}",
            node=node,
            name=self.name,
            error=outcome.error,
        )

    @property
    def node(self) -> str:
        """The path of the node."""
        return self._source.node

    def _counts(self, outcome: Outcome) -> bool:
        return outcome.error is None or self._keep_failed

    async def _now(self, session: SessionCore) -> float:
        return await session.race(session.client.engine.store_time())

    async def _outcome(self, lease: Lease) -> Outcome:
        session = session_core(lease.session)
        by = described(session.how.description, session.client.identity)
        return Outcome(await self._now(session), by)

    def _encoded(self, outcome: Outcome) -> bytes:
        try:
            return outcome.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise self._invalid(
                f"the result of {self.name!r} on {self.node} is neither bytes nor a value "
                f"for JSON: {error}"
            ) from error

    async def _read(self) -> Outcome | None:
        try:
            found = await self._record.describe()
        except SemaphoreNotFound:
            return None
        if found.ephemeral or found.limit != 1:
            raise self._invalid(
                f"{self._record.name!r} on {self.node} is a semaphore of limit "
                f"{found.limit}, and is used here for an outcome; use another name"
            )
        if not found.data:
            return None
        try:
            return Outcome.decode(found.data)
        except ValueError as error:
            raise self._invalid(
                f"the data of {self._record.name!r} on {self.node} cannot be read as an "
                f"outcome: {error}. Delete it, or use another name"
            ) from error

    async def _create(self) -> None:
        try:
            await self._record.create(1, exist_ok=True)
        except SemaphoreExists:  # created meanwhile, as something else
            await self._read()
            raise

    def _invalid(self, message: str) -> InvalidArgument:
        return InvalidArgument(message, node=self.node, name=self._record.name)


def _runner(by: str) -> str:
    text, identity = part(by)
    host, pid, program = identity or Identity()
    who = [program or text or "another program"]
    if pid is not None:
        who.append(f"pid {pid}")
    return ", ".join(who) + (f" on {host}" if host else "")


async def run_once(
    source: Source,
    name: str,
    function: Callable[[Lease], Awaitable[Any]],
    *,
    keep: Duration,
    timeout: Duration | None = None,
    keep_failed: bool = True,
    on_loss: OnLoss | None = None,
    stop_time: Duration = 0.0,
) -> Any:
    """Run a function in one of its callers, and give its outcome to all of them.

    Example::

        from tenure.recipes import run_once

        async def migrate(lease):
            await work(fencing_token=lease.fencing_token)
            return {"version": 7}

        result = await run_once(session, "migrate", migrate, keep=3600)
        assert result == {"version": 7}

    The first caller runs the function, with the lease of the mutex `name`. The others wait for its
    outcome, and so do later callers, in any program, for `keep` seconds after the run.

    If the runner dies, is cancelled or loses its lease, the next waiter runs the function, which
    may have run in part. If the store fails before it has the outcome, the function runs again.

    The outcome is kept in the data of the semaphore ``<name>:outcome``. Delete it to forget it.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,016 bytes; the same for all callers.
        function: called with the lease. It returns bytes, or a value for JSON, up to 1 MiB in JSON;
            a tuple becomes a list.
        keep: seconds for which the outcome counts, from the end of the run, by the store's clock.
        timeout: seconds to wait for the runner, on the local clock; ``None`` waits until it ends.
        keep_failed: whether an error is an outcome. If false, the next waiter runs the function
            when it has failed.
        on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
        stop_time: seconds that the work needs to stop after its cancellation.

    Returns:
        The result of the function.

    Raises:
        RunFailed: the function raised an error in another caller.
        Exception: any error of the function, in the caller that ran it.
        AcquireTimeout: the runner took too long.
        EngineUnavailable: the store cannot be reached, or does not answer.
        InvalidArgument: the result cannot be kept; or a semaphore of one of the two names is used
            for something else.
        LeaseLost, SessionExpired, SessionClosed: the session has ended.
        SelfDeadlock: the function waits for itself.
        Unsupported: the store keeps no data.
    """
    outcomes = Outcomes(source, name, keep, keep_failed=keep_failed)
    outcome = await outcomes.known()
    if outcome is None:
        lock = outcomes.mutex.lock(timeout=timeout, on_loss=on_loss, stop_time=stop_time)
        async with lock as lease:
            outcome = await outcomes.begin(lease)
            if outcome is None:
                try:
                    value = await function(lease)
                except Exception as error:
                    await outcomes.fail(lease, error)
                    raise
                return await outcomes.succeed(lease, value)
    return outcomes.result(outcome)
