"""A service registry: the live instances of a service.

It is an ephemeral semaphore: each registration is a request of count 1, and its data is the
endpoint. A request ends with its session, so no clean-up is needed after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure.errors import InvalidArgument
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source, States


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One registered instance of a service.

    Attributes:
        data: its current data, an address.
        session_id: the session through which it is registered.
        token: the fencing token of its registration; later registrations have greater ones.
        since: seconds since its registration, where known; ignored in comparisons.
    """

    data: bytes
    session_id: int
    token: int
    since: float | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The data as text.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        return self.data.decode()


class ServiceRegistry:
    """The live instances of a service on a node.

    Example::

        from tenure.recipes import ServiceRegistry

        apis = ServiceRegistry(session, "apis")
        async with apis.register("10.0.0.7:80"):
            assert [each.text for each in await apis.list()] == ["10.0.0.7:80"]

    A registration ends when it is released or its session ends: with the process on an engine that
    notices its death, else after the recovery window. Until then a crashed instance is still
    listed, so a client must be prepared to try the next one.

    A mutex and a registry must not share a name: the store cannot distinguish them.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes.
    """

    def __init__(self, source: Source, name: str) -> None:
        """Set the name; nothing is sent to the store."""
        self.name = name
        self._semaphore = source.semaphore(name, ephemeral=True)

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<ServiceRegistry {self.name!r}>"

    def register(self, endpoint: bytes | str, *, on_loss: OnLoss | None = None) -> Once[Lease]:
        """Register an endpoint: ``async with registry.register("10.0.0.1:80") as registration``.

        A registration is a lease. Its block raises `LeaseLost` when it is lost, and releases it at
        its end; without a block, keep it: it lasts until it is released or dropped, or its session
        ends. ``await registration.update(b"10.0.0.1:81")`` changes the endpoint.

        Args:
            endpoint: at most 1 MiB; a ``str`` is encoded as UTF-8. Several registrations may have
                the same endpoint.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.

        Raises:
            InvalidArgument: a lasting semaphore has that name, or the endpoint is too long, or
                cannot be encoded.
            SessionExpired, SessionClosed: the session has ended.
        """
        try:
            data = endpoint.encode() if isinstance(endpoint, str) else endpoint
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"an endpoint is valid Unicode text: {endpoint!r}", name=self.name
            ) from error
        return self._semaphore.acquire(data=data, on_loss=on_loss)

    async def list(self) -> tuple[Endpoint, ...]:
        """Return the live endpoints, in the order of their registration.

        Raises:
            InvalidArgument: a lasting semaphore has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return _endpoints(await self._semaphore.describe(owners=True))

    def watch(self) -> States[tuple[Endpoint, ...]]:
        """Return the live endpoints, and again after every change."""
        return States(self._semaphore.watch(owners=True), _endpoints)


def _endpoints(described: SemaphoreDescription) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(owner.data, owner.session_id, owner.order_id, owner.since)
        for owner in described.owners
    )
