"""Watch cache: an up-to-date copy of a semaphore's keys, and the watches to notify.

An engine has one cache for each watched name. It reads the state once, and then receives every
change of the semaphore's keys. The prefix rule, applied after each revision, shows whether owners
have changed, so that waiters which join and leave notify no watch. The copy is only used to decide
which watches to notify. After an interruption it is read again, and all watches are notified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from tenure.engines._kit.watchers import Watchers
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Refused, WatchEvent
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import EPHEMERAL, Entry, Name, limit_of, number_owning, queues
from tenure.engines.etcd.watching import EtcdWatch
from tenure.errors import TenureError

_log = logging.getLogger("tenure")

_PAUSE = 0.5


class CacheWatcher:
    """One watch of a session."""

    __slots__ = ("changed", "data", "owners", "session", "stopped")

    def __init__(
        self, session: object, data: bool, owners: bool, changed: Callable[[], None]
    ) -> None:
        self.session = session
        self.data = data
        self.owners = owners
        self.changed = changed
        self.stopped = False


class WatchCache:
    """Copy of a semaphore's keys, with its watchers."""

    def __init__(
        self,
        cluster: EtcdCluster,
        name: Name,
        watchers: Watchers[WatchCache, object, CacheWatcher],
        unwatched: Callable[[WatchCache], None],
    ) -> None:
        """Start without a copy; the first watch loads it."""
        self._cluster = cluster
        self._name = name
        self._watchers = watchers
        self._unwatched = unwatched
        self._limit = EPHEMERAL
        self._queue: dict[bytes, Entry] = {}
        self._owners: dict[bytes, tuple[int, int]] = {}  # their create revisions and counts
        self._watches: list[EtcdWatch] = []
        self._loading: asyncio.Task[None] | None = None

    async def in_place(self) -> None:
        """Wait until the cache receives every change."""
        if self._loading is None and not self._watches:
            self._loading = self._cluster.spawn(self._load())
        if self._loading is not None:
            await asyncio.wait([self._loading])

    def add(
        self, session: object, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Add a watcher; return the function that ends the watch."""
        watcher = CacheWatcher(session, data, owners, changed)
        self._watchers.add(self, session, watcher)
        return lambda: self.remove(watcher)

    def remove(self, watcher: CacheWatcher) -> None:
        """End a watch."""
        watcher.stopped = True
        self._watchers.remove(self, watcher.session, watcher)
        if not self._is_watched:
            self._stop()
            self._unwatched(self)

    @property
    def _is_watched(self) -> bool:
        return self in self._watchers

    # The copy

    async def _load(self) -> None:
        """Read the copy, and watch from its revision."""
        name = self._name
        try:
            everything = wire.get_all(name.all)
            read = await self._cluster.reader(name.path).read(everything)
        except (TenureError, Refused) as error:
            if self._is_watched:
                _log.warning(
                    "could not read a watched semaphore, retrying: url=%s node=%s name=%r error=%s",
                    *(self._cluster.url, name.path, name.name, error),
                )
                self._cluster.loop.call_later(_PAUSE, self._missed)
            return
        finally:
            self._loading = None
        if not self._is_watched:
            return
        self._limit, self._queue = EPHEMERAL, {}
        for found in queues(read.parts[0].found, self._cluster.keys.queues(name.path)):
            self._limit = found.limit
            self._queue = {each.key: each for each in found.requests}
        self._owners = self._owning()
        self._watches = [
            self._cluster.watching.add(key, end, read.revision + 1, happened, self._missed)
            for key, end, happened in (
                (name.all, wire.after(name.all), self._happened),
                (name.data, b"", self._data_happened),
                (name.request_data, wire.after(name.request_data), self._request_data_happened),
            )
        ]

    def _missed(self) -> None:
        """Load the copy again after an interruption, and notify all watchers."""
        self._stop()
        if self._is_watched and self._loading is None:
            self._loading = self._cluster.spawn(self._load())
            self._loading.add_done_callback(lambda _: self._notify(data=True, owners=True))

    def _stop(self) -> None:
        for watch in self._watches:
            self._cluster.watching.remove(watch)
        self._watches = []

    def _owning(self) -> dict[bytes, tuple[int, int]]:
        queue = list(self._queue.values())
        owners = queue[: number_owning(queue, self._limit)]
        return {each.key: (each.created, each.count) for each in owners}

    # Events

    def _happened(self, events: Sequence[WatchEvent]) -> None:
        is_other = resized = owners = False
        for _, at_once in groupby(events, lambda event: event.kv.modified):
            before, identity, tokens = self._owners, self._identity(), self._limit.tokens
            waiting = len(self._queue) > len(before)
            joined = [self._apply(event) for event in at_once]
            if not (waiting and all(joined)):  # otherwise they wait behind others
                self._owners = self._owning()
            is_other |= self._identity() != identity
            resized |= self._limit.tokens != tokens
            owners |= self._owners != before
        if is_other or resized or owners:
            self._notify(data=is_other or resized, owners=is_other or owners)

    def _identity(self) -> object:
        return self._limit.created or bool(self._queue)

    def _apply(self, event: WatchEvent) -> bool:
        """Apply an event; return true if a request has joined at the end of the queue."""
        kv = event.kv
        if kv.key == self._name.limit:
            self._limit = EPHEMERAL if event.deleted else limit_of(kv)
        elif event.deleted:
            self._queue.pop(kv.key, None)
        else:
            joined = kv.key not in self._queue
            self._queue[kv.key] = Entry(kv)
            return joined
        return False

    def _data_happened(self, _: Sequence[WatchEvent]) -> None:
        self._notify(data=True, owners=False)

    def _request_data_happened(self, events: Sequence[WatchEvent]) -> None:
        name = self._name
        if any(
            name.requests + event.kv.key[len(name.request_data) :] in self._owners
            for event in events
        ):
            self._notify(data=False, owners=True)

    def _notify(self, *, data: bool, owners: bool) -> None:
        for watcher in self._watchers.on(self):
            concerns = (data and watcher.data) or (owners and watcher.owners)
            if concerns and not watcher.stopped:
                watcher.changed()


class WatchCaches:
    """The watch caches of an engine, by name."""

    def __init__(self, cluster: EtcdCluster) -> None:
        self._cluster = cluster
        self._caches: dict[tuple[str, str], WatchCache] = {}
        self._watchers: Watchers[WatchCache, object, CacheWatcher] = Watchers()

    def watch(
        self,
        session: object,
        name: Name,
        data: bool,
        owners: bool,
        changed: Callable[[], None],
    ) -> tuple[Callable[[], None], asyncio.Task[None]]:
        """Watch a semaphore.

        Returns:
            The function that ends the watch, and the task that ends when the watch is active.
        """
        key = (name.path, name.name)
        cache = self._caches.get(key)
        if cache is None:
            unwatched = partial(self._remove, key)
            cache = WatchCache(self._cluster, name, self._watchers, unwatched)
            self._caches[key] = cache
        stop = cache.add(session, data, owners, changed)
        return stop, self._cluster.spawn(cache.in_place())

    def _remove(self, key: tuple[str, str], cache: WatchCache) -> None:
        """Forget a cache without watchers."""
        if self._caches.get(key) is cache:
            del self._caches[key]

    def forget(self, session: object) -> None:
        """End all watches of a session that has ended."""
        for cache, watcher in self._watchers.of(session):
            cache.remove(watcher)
