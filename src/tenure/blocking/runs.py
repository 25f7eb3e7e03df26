"""The mirror of `tenure._client.runs`."""

from __future__ import annotations

from typing import TypeVar, cast

from tenure._client import lease as lease_twins
from tenure._client import runs as twins
from tenure._client.loss import OnLoss
from tenure.blocking.lease import Lease, give_up
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.portal import Portal
from tenure.durations import Duration
from tenure.model import LastRun

__all__ = ["Jobs", "RunLease", "perhaps_run"]

J = TypeVar("J", bound=twins.Jobs)


@mirrors(twins.RunLease)
class RunLease(Lease):
    """`tenure.RunLease`, for threads."""

    __slots__ = ()

    def succeed(self) -> None:
        self._portal.call(cast("twins.RunLease", self._twin).succeed)

    def __enter__(self) -> RunLease:
        super().__enter__()
        return self


def perhaps_run(portal: Portal, lease: lease_twins.Lease | None) -> RunLease | None:
    """The handle on the lease of a run, if there is one."""
    return None if lease is None else RunLease(portal, lease)


@mirrors(twins.Jobs)
class Jobs(Mirror[J]):
    """`tenure._client.runs.Jobs`, for threads."""

    __slots__ = ()

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
    ) -> RunLease | None:
        return self._portal.obtain(
            perhaps_run,
            give_up,
            self._twin.once,
            name,
            per=per,
            timeout=timeout,
            count_failed=count_failed,
            data=data,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def last_run(self, name: str) -> LastRun | None:
        return self._portal.call(self._twin.last_run, name)
