"""A session, through which a program sends all its requests, and the primitives it makes.

The session's state is in `session_core`, and `session_life` has the diagram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from tenure._client.acquire import as_it_is
from tenure._client.election import Election
from tenure._client.habits import unknown_argument
from tenure._client.handles import call_site
from tenure._client.loss import OnLoss
from tenure._client.mutex import Mutex
from tenure._client.once import Once
from tenure._client.request import RequestOptions
from tenure._client.runs import SUFFIX, RunLease, last_run, once
from tenure._client.semaphore import Semaphore
from tenure._client.session_handle import SessionAnchor, SessionHandle
from tenure._client.source import SessionSource
from tenure.core import rules
from tenure.durations import Duration, seconds, timeout_seconds
from tenure.model import EPHEMERAL_LIMIT, LastRun


class Primitives:
    """Methods of clients and sessions that make primitives, in one session."""

    if TYPE_CHECKING:

        def _source(self) -> SessionSource:
            """Return the session of the primitives."""

    def mutex(self, name: str, **_unknown: Never) -> Mutex:
        """Return the mutex of that name, on the session's node; a client's is on ``/default``."""
        if _unknown:
            raise unknown_argument("mutex", _unknown)
        return Mutex(self._source(), name)

    def semaphore(
        self,
        name: str,
        *,
        limit: int | None = None,
        per_key: int | None = None,
        ephemeral: bool = False,
        **_unknown: Never,
    ) -> Semaphore:
        """Return the semaphore of that name, on the session's node; a client's is on ``/default``.

        Args:
            name: the name of the semaphore.
            limit: its number of tokens. It is created at the first use, if it is missing; one that
                exists with another limit is an error then (`SemaphoreExists`). Without a limit,
                `Semaphore.create` creates it.
            per_key: a limit for each key beneath that of all: `Semaphore.acquire` gets a ``key``
                then, such as a tenant. The keys take turns. All programs use the same one.
            ephemeral: it exists while it has requests, and needs no creation.
        """
        if _unknown:
            raise unknown_argument("semaphore", _unknown)
        return Semaphore(self._source(), name, ephemeral=ephemeral, limit=limit, per_key=per_key)

    def election(self, name: str) -> Election:
        """Return the election of that name on the session's node; a client's is on ``/default``."""
        return Election(self._source(), name)

    def once(
        self,
        name: str,
        *,
        per: Duration,
        timeout: Duration | None = 0.0,
        count_failed: bool = False,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[RunLease | None]:
        """Begin a run of a job unless it ran within the last `per`; return a lease or ``None``.

        Example::

            from datetime import timedelta

            if run := await client.once("nightly", per=timedelta(hours=12)):
                async with run:
                    await work(fencing_token=run.fencing_token)

        By the store's clock, a job is not due when a run was started within `per` and has
        succeeded. A run succeeds when its block ends normally, or by `RunLease.succeed`. After a
        run that raised, was killed or lost its lease, the next caller may run the job again.

        Choose `per` longer than the clock differences between the callers, and shorter than the
        time between two runs: half of it, for example.

        The run holds the mutex `name`; the last run is recorded in the data of the semaphore
        ``name:last-run`` on the same node.

        Args:
            name: the job's name, 1 to 1,015 bytes.
            per: period during which a run counts, from its start.
            timeout: seconds to wait for the end of a current run; ``None`` waits for ever. If it
                succeeds, the call returns ``None``; if it fails, this caller runs the job.
            count_failed: whether unsuccessful runs count.
            data: bytes of the request, which clients see in descriptions of the holder.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation.

        Returns:
            ``None`` when the job is not due, or is running; see `last_run`.

        Raises:
            AcquireTimeout, EngineUnavailable: the store did not answer in time.
            InvalidArgument: a semaphore of one of the two names is used for something else.
            Unsupported: the store keeps no data.
            SessionExpired, SessionClosed: the session has ended.
        """
        rules.check_name(name)
        rules.check_name(name + SUFFIX)
        period = seconds(per, "a period")
        options = RequestOptions(
            "mutex",
            name,
            EPHEMERAL_LIMIT,
            data,
            handle=as_it_is,
            ephemeral=True,
            on_loss=on_loss,
            stop_time=stop_time,
        )
        limit = timeout_seconds(timeout)
        return Once(
            options,
            once,
            self._source(),
            options,
            period,
            limit,
            bool(count_failed),
            call_site(),
        )

    async def last_run(self, name: str) -> LastRun | None:
        """Read the last run of a job that `once` guards, or ``None`` if it never ran.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: the semaphore with the record is used for something else.
            Unsupported: the store keeps no data.
            SessionExpired, SessionClosed: the session has ended.
        """
        rules.check_name(name)
        source = self._source()
        return await source.contact.answered(
            f"last run of {name!r} on {source.node}", last_run(source, name)
        )


class Session(Primitives, SessionHandle):
    """A program's session on a node. `Client.session` makes one.

    Example::

        async with client.session(recovery_window=15) as session:
            async with session.mutex("nightly").lock() as lease:
                await work(lease.fencing_token)

    ``async with client.session(...) as session`` closes it at the end of the block, and cancels the
    body when it expires; the block then raises `SessionExpired`. Close an awaited session with
    `aclose`.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
        max_stall: seconds that the event loop may be stuck before the session is no longer renewed.
    """

    def _source(self) -> SessionAnchor:
        return self._anchor
