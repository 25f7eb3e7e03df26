"""The mirror of `tenure._client.mutex`."""

from __future__ import annotations

from tenure._client import mutex as twins
from tenure._client.loss import OnLoss
from tenure.blocking.lease import Lease, give_up, perhaps
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.semaphore import Ticket
from tenure.durations import Duration
from tenure.model import MutexHolder, SemaphoreDescription

__all__ = ["Mutex"]


@mirrors(twins.Mutex)
class Mutex(Mirror[twins.Mutex]):
    """`tenure.Mutex`, for threads."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def lock(
        self,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease:
        return self._portal.obtain(
            Lease,
            give_up,
            self._twin.lock,
            data=data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def try_lock(
        self,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease | None:
        return self._portal.obtain(
            perhaps,
            give_up,
            self._twin.try_lock,
            data=data,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Lease] | None:
        ticket = self._portal.run(self._twin.recover, on_loss=on_loss, stop_time=stop_time)
        return None if ticket is None else Ticket(self._portal, ticket, Lease)

    def locked(self) -> bool:
        return self._portal.call(self._twin.locked)

    def describe(self, *, owners: bool = False, waiters: bool = False) -> SemaphoreDescription:
        return self._portal.call(self._twin.describe, owners=owners, waiters=waiters)

    def inspect(self) -> MutexHolder | None:
        return self._portal.call(self._twin.inspect)
