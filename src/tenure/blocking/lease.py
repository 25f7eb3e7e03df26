"""The mirror of `tenure._client.lease`: a granted request, held by a thread."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from tenure._client import lease as twins
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.portal import Portal
from tenure.durations import Duration, timeout_seconds
from tenure.errors import LeaseLost, TenureError

if TYPE_CHECKING:
    from tenure.blocking.session import Session

__all__ = ["AnyLease", "Lease", "give_up", "perhaps"]

AnyLease = TypeVar("AnyLease", bound=twins.Lease)

# So that of two threads that enter one lease, one is told; a signal handler may enter one, too.
_entering = threading.RLock()


def give_up(lease: twins.Lease | None) -> None:
    """What undoes the acquisition of a lease."""
    if lease is not None:
        lease._give_up()


def perhaps(portal: Portal, lease: twins.Lease | None) -> Lease | None:
    """The handle on a lease, if there is one."""
    return None if lease is None else Lease(portal, lease)


@mirrors(twins.Lease)
class Lease(Mirror[twins.Lease]):
    """`tenure.Lease`, for threads.

    A thread cannot be cancelled. Inside the block of a lost lease the next call of this library
    raises `LeaseLost`, and so does every other but those that give something back.
    """

    __slots__ = ()

    def __init__(self, portal: Portal, twin: twins.Lease) -> None:
        super().__init__(portal, twin)

    @property
    def session(self) -> Session:
        """The session that holds it."""
        from tenure.blocking.session import Session

        return Session(self._portal, self._twin.session)

    @property
    def name(self) -> str:
        """The name of the mutex, semaphore or election."""
        return self._twin.name

    @property
    def node(self) -> str:
        return self._twin.node

    @property
    def count(self) -> int:
        return self._twin.count

    @property
    def fencing_token(self) -> int:
        return self._twin.fencing_token

    @property
    def store_token(self) -> str:
        return self._twin.store_token

    def slot(self) -> int:
        return self._portal.call(self._twin.slot)

    def slots(self) -> tuple[int, ...]:
        return self._portal.call(self._twin.slots)

    @property
    def deadline(self) -> float:
        return self._twin.deadline

    @property
    def held(self) -> bool:
        return self._twin.held

    @property
    def loss(self) -> LeaseLost | None:
        return self._twin.loss

    def check(self) -> None:
        self._portal.check_blocks()
        self._twin.check()

    def wait_lost(self, timeout: Duration | None = None) -> LeaseLost | None:
        """Wait until the lease is lost, and return how; ``None`` when `timeout` is over first.

        Args:
            timeout: seconds; ``None`` waits for as long as it takes.

        Raises:
            LeaseReleased: it was released instead.
        """
        return self._portal.call(_wait_lost, self._twin, timeout_seconds(timeout))

    def release(self) -> None:
        self._portal.give_back(self._twin.release)

    def update(self, data: bytes | None = None, *, count: int | None = None) -> None:
        self._portal.call(self._twin.update, data, count=count)

    def __enter__(self) -> Lease:
        portal, twin, may_enter = self._portal, self._twin, False
        try:
            portal.check_caller()
            portal.check_blocks()
            task = portal.task()
            with _entering:
                twin._check_enterable()
                may_enter = True
                twin._enter(task)
            return self
        except TenureError:
            raise  # a refusal leaves the lease as it was
        except BaseException as interruption:
            # Nobody will leave a block that nobody came to be inside.
            scope = twin._scope
            if scope is None or scope.task is None:
                portal.give_back(twin.release)
            elif may_enter:
                portal.leave(twin.__aexit__, type(interruption), interruption, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)


async def _wait_lost(lease: twins.Lease, timeout: float | None) -> LeaseLost | None:
    expiry = asyncio.timeout(timeout)
    try:
        async with expiry:
            return await lease.wait_lost()
    except TimeoutError:
        if not expiry.expired():
            raise
        return None
