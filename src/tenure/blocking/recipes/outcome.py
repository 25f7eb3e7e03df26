"""Work that runs once, and whose outcome all callers get: `run_once`, for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenure._client.loss import OnLoss
from tenure.blocking.lease import Lease
from tenure.blocking.recipes.wrappers import Source
from tenure.blocking.wrapper import made_from
from tenure.durations import Duration
from tenure.recipes.outcome import Outcomes


def run_once(
    source: Source,
    name: str,
    function: Callable[[Lease], Any],
    *,
    keep: Duration,
    timeout: Duration | None = None,
    keep_failed: bool = True,
    on_loss: OnLoss | None = None,
    stop_time: Duration = 0.0,
) -> Any:
    """Run a function in one of its callers, and give its outcome to all of them.

    Example::

        from tenure.blocking.recipes import run_once

        def migrate(lease):
            work(fencing_token=lease.fencing_token)
            return {"version": 7}

        result = run_once(session, "migrate", migrate, keep=3600)
        assert result == {"version": 7}

    The first caller runs the function in its thread, with the lease of the mutex `name`. The others
    wait for its outcome, and so do later callers, in any program, for `keep` seconds after the run.

    If the runner dies, is interrupted or loses its lease, the next waiter runs the function, which
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
        stop_time: seconds that the work needs to stop after the loss.

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
    portal, outcomes = made_from(source, Outcomes, name, keep, keep_failed=keep_failed)
    outcome = portal.call(outcomes.known)
    if outcome is None:
        lock = source.mutex(name).lock(timeout=timeout, on_loss=on_loss, stop_time=stop_time)
        with lock as lease:
            held = lease._wrapped  # noqa: SLF001  its own class
            outcome = portal.call(outcomes.begin, held)
            if outcome is None:
                try:
                    value = function(lease)
                except Exception as error:
                    portal.release(outcomes.fail, held, error)
                    raise
                return portal.call(outcomes.succeed, held, value)
    return outcomes.result(outcome)
