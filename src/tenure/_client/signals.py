"""Signals that end a program: its clients are closed before it ends.

A signal is handled once for all clients of the process: they are closed, all at once, and then the
action is taken that the program had before. Rules:

* The former action is restored at once, so that a second signal does not wait.
* An event loop closes its clients while the interrupted code continues. The main thread waits for
  those of `tenure.blocking`, so that it does not work without its leases.
* After `ACTION_TIMEOUT`, a thread sends the signal again, in case the loop stands still or does not
  run. The action is taken once.
* A forked child takes the action only: the clients are its parent's.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from tenure import fork, greenlets
from tenure._client.client_core import ClientCore
from tenure.background import persist
from tenure.errors import InvalidArgument, Misuse

ACTION_TIMEOUT = 5.0
"""Longest time in seconds for which a signal's action waits for the clients to close."""

CLOSE_TIMEOUT = ACTION_TIMEOUT - 0.5
"""Longest time in seconds that closing a client may take; the rest is for the log."""

Ended: TypeAlias = Callable[[], None]
Close: TypeAlias = Callable[[Ended], None]
"""Begins to close a client, and calls the function that it is given at the end, in any thread."""

_log = logging.getLogger("tenure")


class _Closing:
    """The closing of clients at a signal, and the action after it.

    Args:
        number: the signal.
        action: the program's, which is restored already: a handler, or the default one.
        frame: the interrupted one.
    """

    def __init__(self, number: int, action: Any, frame: FrameType | None) -> None:
        self._number = number
        self._action = action
        self._frame = frame
        self._open: set[ClientCore] = set()
        self._waited_for: set[ClientCore] = set()  # those of them that belong to no event loop
        self._none_waited_for = greenlets.new_event()
        self._taking = _thread.allocate_lock()  # acquired by the one that takes the action
        self._taken = greenlets.new_event()

    def close(self, clients: dict[ClientCore, tuple[Close, bool]]) -> None:
        """Close these clients, and take the action, now or later."""
        self._open.update(clients)
        self._waited_for.update(each for each, (_, waits) in clients.items() if waits)
        if self._open:
            try:
                greenlets.start_thread(self._limit)
            except RuntimeError as error:  # there are no more threads
                _log.warning("closing at a signal has no time limit: error=%s", error)
        waits = bool(self._waited_for)
        try:
            for client, (close, _) in clients.items():
                close(partial(self._ended, client))
            if waits and not self._none_waited_for.wait(ACTION_TIMEOUT):
                self._open.clear()
        except BaseException:  # of the action, which a second signal has taken
            self._taking.acquire(blocking=False)
            self._taken.set()
            raise
        if not self._open:
            self._take()

    def _ended(self, client: ClientCore) -> None:
        self._open.discard(client)
        if client in self._waited_for:
            self._waited_for.discard(client)
            if not self._waited_for:
                self._none_waited_for.set()
        elif not self._open:
            self._take()

    def _take(self) -> None:
        """Take the action, unless it was taken."""
        if not self._taking.acquire(blocking=False):
            return
        self._taken.set()
        if callable(self._action):
            self._action(self._number, self._frame)
        else:
            signal.raise_signal(self._number)
            self._end_container()

    def _limit(self) -> None:
        """Let the main thread take the action when the time is over. In a thread of its own."""
        if not self._taken.wait(ACTION_TIMEOUT) and self._taking.acquire(blocking=False):
            os.kill(os.getpid(), self._number)
            self._end_container()

    def _end_container(self) -> None:
        """End the first process of a container: the kernel takes no default action for it."""
        if os.getpid() == 1 and not callable(self._action):
            os._exit(128 + self._number)


class _Signal:
    """One signal that is handled for clients.

    Args:
        number: its number.
        former: the program's action: a handler, or the default one.

    Attributes:
        clients: what closes each of them, and whether the main thread waits for that.
    """

    def __init__(self, number: int, former: Any) -> None:
        self.clients: dict[ClientCore, tuple[Close, bool]] = {}
        self._number = number
        self._former = former
        self._born = fork.generation

    def handle(self, _number: int, frame: FrameType | None) -> None:
        """Close the clients, and then take the program's action."""
        _signals.pop(self._number, None)
        signal.signal(self._number, self._former)
        if fork.generation != self._born:
            self.clients.clear()
        _Closing(self._number, self._former, frame).close(self.clients)


_signals: dict[int, _Signal] = {}
_tasks: set[asyncio.Task[None]] = set()


def release_on(client: ClientCore, numbers: Sequence[int], close: Close, *, waits: bool) -> None:
    """Close a client when one of the signals arrives, before its action is taken.

    Args:
        client: the client.
        numbers: of the signals; SIGTERM if empty.
        close: begins to close the client.
        waits: whether the main thread waits for its end.

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
            handled.clients[client] = close, waits


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


def close_on_loop(client: ClientCore, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
    """Begin to close a client of an event loop."""

    def begin() -> None:
        task = loop.create_task(close_in_time(client))
        _tasks.add(task)  # a loop has no strong reference
        task.add_done_callback(_tasks.discard)
        task.add_done_callback(lambda _: ended())

    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:  # the loop is closed, and the client with it
        ended()
