"""Watches of semaphores: a copy of what their keys say, kept up to date, and who is told of what.

One lookout for each name that this engine watches, for however many watch it. It begins with the
state as it is read then, and hears of every key of the semaphore that is put or deleted after it;
what the session does next is answered when it does. The prefix rule, over the copy after each
revision, says whether owners have changed: requests that come, wait and go without owning concern
nobody. Nothing is concluded from the copy but that somebody should look. After a gap it is made
anew, and everybody is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tenure.engines._kit.watchers import Watchers
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Event
from tenure.engines.etcd.keys import Entry, Name, limit_of, number_owning, queues
from tenure.engines.etcd.members import Refused
from tenure.engines.etcd.watching import Watch
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT

if TYPE_CHECKING:
    from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.session import EtcdSession

__all__ = ["Lookout", "Watcher"]

_log = logging.getLogger("tenure")

_PAUSE = 0.5


class Watcher:
    """One watch of a session."""

    __slots__ = ("changed", "data", "owners", "session", "stopped")

    def __init__(
        self, session: EtcdSession, data: bool, owners: bool, changed: Callable[[], None]
    ) -> None:
        self.session = session
        self.data = data
        self.owners = owners
        self.changed = changed
        self.stopped = False


class Lookout:
    """The watchers of a name, and the copy."""

    def __init__(
        self,
        engine: EtcdEngine,
        name: Name,
        watchers: Watchers[Lookout, EtcdSession, Watcher],
    ) -> None:
        self._engine = engine
        self._name = name
        self._watchers = watchers
        self._limit: tuple[int, int] | None = None  # when it was created, and what it is
        self._queue: dict[bytes, Entry] = {}
        self._owners: dict[bytes, tuple[int, int]] = {}  # when created, and the count
        self._watches: list[Watch] = []
        self._loading: asyncio.Task[None] | None = None

    async def in_place(self) -> None:
        """Return when everything that happens from now on will be heard of."""
        if self._loading is None and not self._watches:
            self._loading = self._engine.spawn(self._load())
        if self._loading is not None:
            await asyncio.wait([self._loading])

    def add(
        self, session: EtcdSession, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """One more that watches; returns what ends that."""
        watcher = Watcher(session, data, owners, changed)
        self._watchers.add(self, session, watcher)
        return lambda: self.remove(watcher)

    def remove(self, watcher: Watcher) -> None:
        """End a watch."""
        watcher.stopped = True
        self._watchers.remove(self, watcher.session, watcher)
        if not self._is_watched:
            self._stop()
            self._engine.look_away(self._name, self)

    @property
    def _is_watched(self) -> bool:
        return self in self._watchers

    # The copy

    async def _load(self) -> None:
        """Make the copy, and hear of what happens after it."""
        name = self._name
        try:
            everything = wire.get(wire.range_(name.all, wire.after(name.all)))
            read = await self._engine.reader(name.path).read(everything)
        except (TenureError, Refused) as error:
            if self._is_watched:
                _log.warning("%s: watching %r: %s", self._engine.url, name.name, error)
                self._engine.loop.call_later(_PAUSE, self._missed)
            return
        finally:
            self._loading = None
        if not self._is_watched:
            return
        self._limit, self._queue = None, {}
        for found in queues(read.parts[0].found, self._engine.keys.queues(name.path)):
            if found.limit_kv is not None:
                self._limit = (found.limit_kv.created, found.limit)
            self._queue = {each.key: each for each in found.requests}
        self._owners = self._owning()
        self._watches = [
            self._engine.watching.add(key, end, read.revision + 1, happened, self._missed)
            for key, end, happened in (
                (name.all, wire.after(name.all), self._happened),
                (name.data, b"", self._data_happened),
                (name.request_data, wire.after(name.request_data), self._request_data_happened),
            )
        ]

    def _missed(self) -> None:
        """Load the copy again after a gap, and notify all watchers."""
        self._stop()
        if self._is_watched and self._loading is None:
            self._loading = self._engine.spawn(self._load())
            self._loading.add_done_callback(lambda _: self._tell(data=True, owners=True))

    def _stop(self) -> None:
        for watch in self._watches:
            self._engine.watching.remove(watch)
        self._watches = []

    def _owning(self) -> dict[bytes, tuple[int, int]]:
        limit = EPHEMERAL_LIMIT if self._limit is None else self._limit[1]
        queue = list(self._queue.values())
        owners = queue[: number_owning(queue, limit)]
        return {each.key: (each.created, each.count) for each in owners}

    # What happens

    def _happened(self, events: Sequence[Event]) -> None:
        is_other = owners = False
        for _, at_once in groupby(events, lambda event: event.kv.modified):
            before, identity = self._owners, self._identity()
            waiting = len(self._queue) > len(before)
            joined = [self._apply(event) for event in at_once]
            if not (waiting and all(joined)):  # or else they only wait behind others
                self._owners = self._owning()
            is_other |= self._identity() != identity
            owners |= self._owners != before
        if is_other or owners:
            self._tell(data=is_other, owners=True)

    def _identity(self) -> object:
        return self._limit or bool(self._queue)

    def _apply(self, event: Event) -> bool:
        """Apply an event; true if a request has joined the queue, at its end."""
        kv = event.kv
        if kv.key == self._name.limit:
            self._limit = None if event.deleted else (kv.created, limit_of(kv.value))
        elif event.deleted:
            self._queue.pop(kv.key, None)
        else:
            joined = kv.key not in self._queue
            self._queue[kv.key] = Entry(kv)
            return joined
        return False

    def _data_happened(self, _: Sequence[Event]) -> None:
        self._tell(data=True, owners=False)

    def _request_data_happened(self, events: Sequence[Event]) -> None:
        name = self._name
        if any(
            name.requests + event.kv.key[len(name.request_data) :] in self._owners
            for event in events
        ):
            self._tell(data=False, owners=True)

    def _tell(self, *, data: bool, owners: bool) -> None:
        for watcher in self._watchers.on(self):
            concerns = (data and watcher.data) or (owners and watcher.owners)
            if concerns and not watcher.stopped:
                watcher.changed()
