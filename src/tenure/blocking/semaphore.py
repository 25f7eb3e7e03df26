"""The mirror of `tenure._client.semaphore`."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar

from tenure._client import lease as lease_twins
from tenure._client import semaphore as twins
from tenure._client.loss import OnLoss
from tenure.blocking.lease import Lease, give_up, perhaps
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.portal import Portal
from tenure.blocking.watch import Watch
from tenure.durations import Duration
from tenure.model import SemaphoreDescription

__all__ = ["Semaphore", "Ticket"]

L = TypeVar("L", bound=Lease)


@mirrors(twins.Ticket)
class Ticket(Mirror["twins.Ticket[lease_twins.Lease]"], Generic[L]):
    """`tenure.Ticket`, for threads."""

    __slots__ = ("_handle",)

    def __init__(
        self, portal: Portal, twin: twins.Ticket[lease_twins.Lease], handle: type[L]
    ) -> None:
        super().__init__(portal, twin)
        self._handle = handle

    @property
    def granted(self) -> bool:
        return self._twin.granted

    @property
    def fencing_token(self) -> int | None:
        return self._twin.fencing_token

    def position(self) -> int:
        return self._portal.call(self._twin.position)

    def wait(self, timeout: Duration | None = None) -> L:
        return self._handle(self._portal, self._portal.call(self._twin.wait, timeout))

    def withdraw(self) -> None:
        self._portal.give_back(self._twin.withdraw)

    def __enter__(self) -> Ticket[L]:
        return self._portal.obtain(lambda *_: self, _abandon, self._twin.__aenter__)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)


def _abandon(ticket: twins.Ticket[lease_twins.Lease]) -> None:
    """What undoes the entering of a ticket, or its making."""
    if ticket._scope is not None:
        ticket._scope.exit(None)
    give_up(ticket._lease)


def _ticket(portal: Portal, twin: twins.Ticket[lease_twins.Lease]) -> Ticket[Lease]:
    return Ticket(portal, twin, Lease)


@mirrors(twins.Semaphore)
class Semaphore(Mirror[twins.Semaphore]):
    """`tenure.Semaphore`, for threads."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    @property
    def ephemeral(self) -> bool:
        """Whether it is asked for as an ephemeral one."""
        return self._twin.ephemeral

    @property
    def node(self) -> str:
        return self._twin.node

    def create(self, limit: int, data: bytes = b"", *, exist_ok: bool = False) -> None:
        self._portal.call(self._twin.create, limit, data, exist_ok=exist_ok)

    def update(self, data: bytes) -> None:
        self._portal.call(self._twin.update, data)

    def delete(self, *, force: bool = False) -> None:
        self._portal.call(self._twin.delete, force=force)

    def describe(self, *, owners: bool = False, waiters: bool = False) -> SemaphoreDescription:
        return self._portal.call(self._twin.describe, owners=owners, waiters=waiters)

    def count(self) -> int:
        return self._portal.call(self._twin.count)

    def acquire(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease:
        return self._portal.obtain(
            Lease,
            give_up,
            self._twin.acquire,
            count,
            data=data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def try_acquire(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease | None:
        return self._portal.obtain(
            perhaps,
            give_up,
            self._twin.try_acquire,
            count,
            data=data,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def enqueue(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Ticket[Lease]:
        return self._portal.obtain(
            _ticket,
            _abandon,
            self._twin.enqueue,
            count,
            data=data,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Lease] | None:
        ticket = self._portal.run(self._twin.recover, on_loss=on_loss, stop_time=stop_time)
        return None if ticket is None else Ticket(self._portal, ticket, Lease)

    def watch(self, *, data: bool = False, owners: bool = False) -> Watch[SemaphoreDescription]:
        return Watch(self._portal, self._twin.watch(data=data, owners=owners))
