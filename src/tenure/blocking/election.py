"""The mirror of `tenure._client.election`."""

from __future__ import annotations

from typing import cast

from tenure._client import election as twins
from tenure._client import lease as lease_twins
from tenure._client.loss import OnLoss
from tenure._client.semaphore import Ticket as TicketTwin
from tenure.blocking.lease import Lease, give_up
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.semaphore import Ticket
from tenure.blocking.watch import Watch
from tenure.durations import Duration
from tenure.model import Leader, SemaphoreDescription

__all__ = ["Election", "Leadership"]


@mirrors(twins.Leadership)
class Leadership(Lease):
    """`tenure.Leadership`, for threads."""

    __slots__ = ()

    def proclaim(self, data: bytes) -> None:
        self.update(data=data)

    def resign(self) -> None:
        self.release()

    def __enter__(self) -> Leadership:
        super().__enter__()
        return self


@mirrors(twins.Election)
class Election(Mirror[twins.Election]):
    """`tenure.Election`, for threads."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def campaign(
        self,
        data: bytes = b"",
        *,
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Leadership:
        return self._portal.obtain(
            Leadership,
            give_up,
            self._twin.campaign,
            data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Leadership] | None:
        ticket = self._portal.run(self._twin.recover, on_loss=on_loss, stop_time=stop_time)
        if ticket is None:
            return None
        return Ticket(self._portal, cast("TicketTwin[lease_twins.Lease]", ticket), Leadership)

    def describe(self, *, owners: bool = False, waiters: bool = False) -> SemaphoreDescription:
        return self._portal.call(self._twin.describe, owners=owners, waiters=waiters)

    def leader(self) -> Leader | None:
        return self._portal.call(self._twin.leader)

    def observe(self) -> Watch[Leader | None]:
        return Watch(self._portal, self._twin.observe())
