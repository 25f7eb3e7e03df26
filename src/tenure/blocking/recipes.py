"""The mirrors of `tenure.recipes`, each made from a blocking session or client."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from tenure import recipes as twins
from tenure._client.loss import OnLoss
from tenure.blocking.client import Client
from tenure.blocking.lease import Lease, give_up, perhaps
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.portal import as_it_is
from tenure.blocking.session import Session
from tenure.durations import Duration
from tenure.recipes import (
    Change,
    Codec,
    Endpoint,
    Joined,
    Left,
    Member,
    Updated,
    dataclass_codec,
    json_codec,
)

__all__ = [
    "Barrier",
    "Change",
    "Changes",
    "Codec",
    "Endpoint",
    "Group",
    "Joined",
    "Left",
    "Member",
    "RWLock",
    "ServiceRegistry",
    "SharedConfig",
    "Source",
    "States",
    "Updated",
    "dataclass_codec",
    "json_codec",
]

T = TypeVar("T")

Source: TypeAlias = "Client | Session"
"""What a recipe is made from: a session, or a client for its implicit session."""


@mirrors(twins.States)
class States(Mirror["twins.States[T]"], Generic[T]):
    """`tenure.recipes.States`, for threads. Closed by any of them, it ends."""

    __slots__ = ()

    def close(self) -> None:
        self._portal.give_back(self._twin.aclose)

    def __enter__(self) -> States[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)

    def __iter__(self) -> States[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._portal.obtain(as_it_is, self._tell_again, self._twin.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def _tell_again(self, _state: T) -> None:
        watch = self._twin._watch
        watch._told = None
        watch._changed.set()


@mirrors(twins.Changes)
class Changes(Mirror[twins.Changes]):
    """`tenure.recipes.Changes`, for threads. Closed by any of them, it ends."""

    __slots__ = ()

    def close(self) -> None:
        self._portal.give_back(self._twin.aclose)

    def __enter__(self) -> Changes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)

    def __iter__(self) -> Changes:
        return self

    def __next__(self) -> Change:
        try:
            return self._portal.obtain(
                as_it_is, self._twin._untold.appendleft, self._twin.__anext__
            )
        except StopAsyncIteration:
            raise StopIteration from None


@mirrors(twins.RWLock)
class RWLock(Mirror[twins.RWLock]):
    """`tenure.recipes.RWLock`, for threads."""

    __slots__ = ()

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(source._portal, twins.RWLock(source._twin, name))

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def read(
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
            self._twin.read,
            data=data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def write(
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
            self._twin.write,
            data=data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )

    def try_read(
        self, *, data: bytes = b"", on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Lease | None:
        return self._portal.obtain(
            perhaps, give_up, self._twin.try_read, data=data, on_loss=on_loss, stop_time=stop_time
        )

    def try_write(
        self, *, data: bytes = b"", on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Lease | None:
        return self._portal.obtain(
            perhaps, give_up, self._twin.try_write, data=data, on_loss=on_loss, stop_time=stop_time
        )


@mirrors(twins.SharedConfig)
class SharedConfig(Mirror["twins.SharedConfig[T]"], Generic[T]):
    """`tenure.recipes.SharedConfig`, for threads."""

    __slots__ = ()

    def __init__(self, source: Source, name: str, *, codec: Codec[T] = json_codec) -> None:
        twin: twins.SharedConfig[T] = twins.SharedConfig(source._twin, name, codec=codec)
        super().__init__(source._portal, twin)

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def get(self) -> T | None:
        return self._portal.call(self._twin.get)

    def set(self, value: T) -> None:
        self._portal.call(self._twin.set, value)

    def watch(self) -> States[T | None]:
        return States(self._portal, self._twin.watch())


@mirrors(twins.ServiceRegistry)
class ServiceRegistry(Mirror[twins.ServiceRegistry]):
    """`tenure.recipes.ServiceRegistry`, for threads."""

    __slots__ = ()

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(source._portal, twins.ServiceRegistry(source._twin, name))

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def register(self, endpoint: bytes | str, *, on_loss: OnLoss | None = None) -> Lease:
        return self._portal.obtain(Lease, give_up, self._twin.register, endpoint, on_loss=on_loss)

    def list(self) -> tuple[Endpoint, ...]:
        return self._portal.call(self._twin.list)

    def watch(self) -> States[tuple[Endpoint, ...]]:
        return States(self._portal, self._twin.watch())


@mirrors(twins.Group)
class Group(Mirror[twins.Group]):
    """`tenure.recipes.Group`, for threads."""

    __slots__ = ()

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(source._portal, twins.Group(source._twin, name))

    @property
    def name(self) -> str:
        """1 to 1,024 bytes."""
        return self._twin.name

    def join(self, data: bytes = b"", *, on_loss: OnLoss | None = None) -> Lease:
        return self._portal.obtain(Lease, give_up, self._twin.join, data, on_loss=on_loss)

    def members(self) -> tuple[Member, ...]:
        return self._portal.call(self._twin.members)

    def watch(self) -> States[tuple[Member, ...]]:
        return States(self._portal, self._twin.watch())

    def changes(self) -> Changes:
        return Changes(self._portal, self._twin.changes())


@mirrors(twins.Barrier)
class Barrier(Mirror[twins.Barrier]):
    """`tenure.recipes.Barrier`, for threads."""

    __slots__ = ()

    def __init__(self, source: Source, name: str, parties: int) -> None:
        super().__init__(source._portal, twins.Barrier(source._twin, name, parties))

    @property
    def name(self) -> str:
        """1 to 1,016 bytes."""
        return self._twin.name

    @property
    def parties(self) -> int:
        """How many wait for each other."""
        return self._twin.parties

    def wait(self, timeout: Duration | None = None) -> int:
        return self._portal.call(self._twin.wait, timeout)
