"""Servers of dflockd's protocol in a thread, and the store behind each of them.

The protocol does not tell who owns and who waits. `Behind` is a `dflockd://` engine that shows the
queues of the store itself, so that what programs were told is compared with the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tenure.clock import Clock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.engines.dflockd import connect
from tenure.errors import SemaphoreNotFound
from tenure.model import SemaphoreDescription
from tenure.testing.conformance import Stores
from tests.engines.dflockd.servers import InThread

_NODE = "/dflockd"
"""Where the server keeps its clients' locks."""

_LONG = 150
"""Seconds of silence that the server allows: a proof is worth no more than that."""

_numbers = itertools.count(1)
_stores: dict[str, str] = {}  # behind the servers, by their URLs


class Behind:
    """A `dflockd://` engine, and the store behind its server."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._inner = connect(url, clock)
        self._store_url = _stores.get(url)  # a way around the server's front door has none
        self._store: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def aclose(self) -> None:
        await self._inner.aclose()
        store, self._store = self._store, None
        if store is not None:
            await store.aclose()

    async def list_semaphores(
        self,
        path: str,  # a dflockd server has but one
        *,
        owners: bool,
        waiters: bool,
    ) -> Sequence[SemaphoreDescription]:
        assert self._store_url is not None
        if self._store is None:
            self._store = connect_engine(self._store_url, self._inner.clock)
            await self._store.open()
        return await self._store.list_semaphores(_NODE, owners=owners, waiters=waiters)

    async def describe_semaphore(
        self,
        path: str,  # a dflockd server has but one
        name: str,
        *,
        owners: bool,
        waiters: bool,
    ) -> SemaphoreDescription:
        if not (owners or waiters):
            found: SemaphoreDescription = await self._inner.describe_semaphore(
                path, name, owners=owners, waiters=waiters
            )
            return found
        for each in await self.list_semaphores(path, owners=owners, waiters=waiters):
            if each.name == name:
                return each
        raise SemaphoreNotFound(f"there is no {name!r} on {path}", node=path, name=name)


@contextmanager
def _served() -> Iterator[str]:
    store = f"memory://behind-dflockd-{next(_numbers)}"
    with InThread(store, read_timeout=_LONG) as server:
        url = f"{server.url}?read-timeout={_LONG}"
        _stores[url] = store
        try:
            yield url
        finally:
            del _stores[url]


def stores() -> Stores:
    """Stores behind servers of their own."""
    return Stores(_served, Behind)
