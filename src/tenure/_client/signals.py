"""Signals that end a program: its clients are closed before it ends.

A signal is handled once for all clients of the process: they are closed one after the other, and
then the action is taken that the program had before. That action is restored at once, so that a
second signal does not wait. A forked child takes the action alone: the clients are its parent's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from tenure import fork
from tenure._client.client_core import ClientCore
from tenure.background import persist
from tenure.errors import InvalidArgument, Misuse

CLOSE_TIMEOUT = 5.0
"""Longest time in seconds for which a signal's action waits for one client to close."""

Then: TypeAlias = Callable[[], None]
Close: TypeAlias = Callable[[Then], None]
"""Closes a client, and then calls the function that it is given, in the main thread."""

_log = logging.getLogger("tenure")


class _Signal:
    """One signal that is handled for clients.

    Args:
        number: its number.
        former: the program's action: a handler, or the default one.
    """

    def __init__(self, number: int, former: Any) -> None:
        self.clients: dict[ClientCore, Close] = {}
        self._number = number
        self._former = former
        self._born = fork.generation

    def handle(self, _number: int, frame: FrameType | None) -> None:
        """Close the clients, and then take the program's action."""
        _signals.pop(self._number, None)
        signal.signal(self._number, self._former)
        if fork.generation != self._born:
            self.clients.clear()
        self._close_next(frame)

    def _close_next(self, frame: FrameType | None) -> None:
        if self.clients:
            _, close = self.clients.popitem()
            close(partial(self._close_next, frame))
        elif callable(self._former):
            self._former(self._number, frame)
        else:
            signal.raise_signal(self._number)
            if os.getpid() == 1:  # of a container: the kernel takes no default action
                os._exit(128 + self._number)


_signals: dict[int, _Signal] = {}
_closing: set[asyncio.Task[None]] = set()


def release_on(client: ClientCore, numbers: Sequence[int], close: Close) -> None:
    """Close a client when one of the signals arrives, before its action is taken.

    Args:
        client: the client.
        numbers: of the signals; SIGTERM if empty.
        close: closes the client.

    Raises:
        Misuse: it is not called in the main thread, or a handler cannot be restored.
        InvalidArgument: a signal cannot be handled.
    """
    if threading.current_thread() is not threading.main_thread():
        raise Misuse(
            "release_on_signals was called in another thread than the main thread, which alone "
            "handles signals; call it in the main thread"
        )
    for number in numbers or (signal.SIGTERM,):
        handled = _signals.get(number) or _install(number)
        if handled is not None:
            for other in [each for each in handled.clients if each.closed]:
                del handled.clients[other]
            handled.clients[client] = close


def _install(number: int) -> _Signal | None:
    """Handle a signal from now on, unless the program ignores it."""
    try:
        former = signal.getsignal(number)
        if former is signal.SIG_IGN:
            return None
        if former is None:
            raise Misuse(
                f"signal {number} has a handler that was not installed by Python, and could not "
                "be called after the clients have been closed"
            )
        handled = _Signal(number, former)
        signal.signal(number, handled.handle)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"signal {number} cannot be handled: {error}") from error
    _signals[number] = handled
    return handled


async def close_in_time(client: ClientCore) -> None:
    """Close a client, for `CLOSE_TIMEOUT` at most; a failure is logged."""

    async def close() -> None:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await client.aclose()

    try:
        await persist(close)
    except Exception as failure:
        _log.warning("could not close at a signal: url=%s error=%r", client.url, failure)


def close_on_loop(client: ClientCore, loop: asyncio.AbstractEventLoop, then: Then) -> None:
    """Close a client of an event loop, and then call `then` on that loop."""

    def begin() -> None:
        task = loop.create_task(close_in_time(client))
        _closing.add(task)  # a loop has no strong reference
        task.add_done_callback(_closing.discard)
        task.add_done_callback(lambda _: then())

    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:  # the loop is closed, and the client with it
        then()
