"""The mirrors of `tenure._client.watch` and of the stream of `tenure.events`."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar

from tenure import events as event_twins
from tenure._client import watch as twins
from tenure.blocking.mirror import Mirror, mirrors
from tenure.blocking.portal import Portal, as_it_is
from tenure.events import Event

__all__ = ["EventStream", "Watch"]

T = TypeVar("T")


@mirrors(twins.Watch)
class Watch(Mirror["twins.Watch[T]"], Generic[T]):
    """`tenure._client.watch.Watch`, for threads. Closed by any of them, it ends."""

    __slots__ = ()

    def __init__(self, portal: Portal, twin: twins.Watch[T]) -> None:
        super().__init__(portal, twin)

    def close(self) -> None:
        self._portal.give_back(self._twin.aclose)

    def __enter__(self) -> Watch[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)

    def __iter__(self) -> Watch[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._portal.obtain(as_it_is, self._tell_again, self._twin.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def _tell_again(self, _state: T) -> None:
        self._twin._told = None
        self._twin._changed.set()


@mirrors(event_twins.EventStream)
class EventStream(Mirror[event_twins.EventStream]):
    """`tenure.events.EventStream`, for threads. Closed by any of them, it ends."""

    __slots__ = ()

    @property
    def dropped(self) -> int:
        """How many events were dropped because nobody read them in time."""
        return self._twin.dropped

    def close(self) -> None:
        self._portal.give_back(self._twin.aclose)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.leave(self._twin.__aexit__, kind, error, trace)

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        try:
            return self._portal.obtain(
                as_it_is, self._twin._events.appendleft, self._twin.__anext__
            )
        except StopAsyncIteration:
            raise StopIteration from None
