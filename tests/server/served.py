"""A server in a thread of this process, on a loop of its own: for tests whose loop is not its own.

What it keeps is in its store alone, so that a test can stop one and start another on the same
store and at the same port, which is a restart.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tenure.server.auth import Authenticator
from tenure.server.limits import Limits
from tenure.server.native import NativeListener
from tests.clean_up import clean_up_with
from tests.server.talking import PATIENCE, serving

T = TypeVar("T")


class Served:
    """A running server.

    Args:
        store: the URL of its store.
        more: what `tests.server.talking.serving` takes.

    Attributes:
        address: where it can be reached.
    """

    address: str

    def __init__(self, store: str, **more: Any) -> None:
        self._store = store
        self._more = more
        self._loop = asyncio.new_event_loop()
        self._listener: NativeListener | None = None
        self._stop: asyncio.Event | None = None
        self._begun: list[BaseException | None] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)

    def start(self) -> Served:
        """Return when it listens."""
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        if self._begun[0] is not None:
            raise self._begun[0]
        return self

    def stop(self) -> None:
        """Close it: its sessions are detached, and live for their windows. Safe to call twice."""
        if not self._loop.is_closed():
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"

    def on_its_loop(self, work: Callable[[NativeListener], Coroutine[Any, Any, T]]) -> T:
        """Have something done there, and wait for it."""
        assert self._listener is not None
        return asyncio.run_coroutine_threadsafe(work(self._listener), self._loop).result(PATIENCE)

    def drain(self) -> None:
        """Send its clients to other servers."""
        self.on_its_loop(lambda listener: listener.drain())

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._begun:
                raise
            self._begun.append(error)
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with serving(self._store, **self._more) as self._listener:
            self.address = self._listener.address
            self._begun.append(None)
            self._ready.set()
            await self._stop.wait()


@contextmanager
def served(
    store: str,
    *,
    limits: Limits | None = None,
    authenticator: Authenticator | None = None,
    **more: Any,
) -> Iterator[Served]:
    """A server on that store, for as long as the block lasts."""
    server = Served(store, limits=limits, authenticator=authenticator, **more).start()
    with clean_up_with(server.stop):
        yield server
