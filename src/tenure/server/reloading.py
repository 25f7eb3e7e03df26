"""Reloads: read the files on a thread, and apply the result on the event loop.

Rules:

* Reading and parsing take place on a daemon thread, so a large file or a hanging file system blocks
  neither the event loop nor the end of the process.
* One reload at a time. A request during a reload causes another one, because the files may have
  changed after they were read. Several such requests are merged.
* A failed reload is reported to its callback and changes nothing; the next one is carried out.
* **Cancel.** `aclose` does not wait for the thread, and discards its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Reloader(Generic[T]):
    """Reloads of one server.

    Args:
        read: reads the files, on a thread.
        apply: applies the result, on the event loop.
        failed: called on the event loop with the error of a reload.
    """

    def __init__(
        self,
        read: Callable[[], T],
        apply: Callable[[T], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._read = read
        self._apply = apply
        self._failed = failed
        self._idle: Callable[[], object] | None = None
        self._requested = False
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def request(self, idle: Callable[[], object]) -> None:
        """Schedule a reload.

        Args:
            idle: called afterwards, unless there was another request meanwhile.
        """
        self._requested = True
        self._idle = idle
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Apply nothing from now on."""
        self._is_closed = True
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        try:
            while self._requested:
                self._requested = False
                try:
                    self._apply(await self._read_on_a_thread())
                except Exception as error:
                    self._failed(error)
            if self._idle is not None:
                self._idle()
        finally:
            self._task = None

    async def _read_on_a_thread(self) -> T:
        """Read the files. Raises the errors of reading."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def read() -> None:
            try:
                found = self._read()
            except Exception as error:
                settle(partial(answer.set_exception, error))
            else:
                settle(partial(answer.set_result, found))

        def settle(how: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(lambda: None if answer.done() else how())

        threading.Thread(target=read, name="tenure-reload", daemon=True).start()
        return await answer
