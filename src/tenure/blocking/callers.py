"""Checks on the threads that call `tenure.blocking`.

A call blocks its thread until the portal's thread has answered. So the portal's thread may not
call, and a thread that runs an event loop blocks that loop. Where gevent has replaced threads, a
call blocks its greenlet alone (`tenure.greenlets`). eventlet's locks do not work between threads.
"""

from __future__ import annotations

import asyncio
import sys
import warnings

from tenure.errors import Misuse, Unsupported

_warned = False


def check_threads() -> None:
    """Check that a library that replaces threads leaves a way to run the event loop.

    Raises:
        Unsupported: eventlet has replaced them, or gevent has replaced only a part.
    """
    eventlet, gevent = sys.modules.get("eventlet.patcher"), sys.modules.get("gevent.monkey")
    if eventlet is not None and any(map(eventlet.is_monkey_patched, ("thread", "select"))):
        raise Unsupported(
            "tenure.blocking needs threads of the operating system, and eventlet has replaced "
            "them: use gevent (gunicorn -k gevent, celery -P gevent), or call "
            "monkey_patch(thread=False, select=False) and use tenure.blocking in eventlet's "
            "thread pool: eventlet.tpool.execute(function)"
        )
    if gevent is not None and len(set(map(gevent.is_module_patched, ("threading", "select")))) > 1:
        raise Unsupported(
            "gevent has replaced only one of threading and select: call monkey.patch_all(), or "
            "monkey.patch_all(thread=False, select=False) and use tenure.blocking in gevent's "
            "thread pool: gevent.get_hub().threadpool.apply(function)"
        )


def check_event_loop(portals: asyncio.AbstractEventLoop) -> None:
    """Warn once if the calling thread runs an event loop, which the call will block.

    Args:
        portals: the portal's loop.

    Raises:
        Misuse: the caller runs on the portal's loop, which could never answer.
    """
    global _warned  # noqa: PLW0603  one warning for the process is the point
    running = asyncio._get_running_loop()  # noqa: SLF001  no error where none runs
    if running is None:
        return
    if running is portals:
        raise Misuse(
            "tenure.blocking was called on its own event loop (by a callback such as on_loss), "
            "where it would wait for itself: hand the call to another thread"
        )
    if not _warned:
        _warned = True
        warnings.warn(
            "tenure.blocking blocks this thread's event loop while it waits; in async code use "
            "tenure itself, or call this in a thread (asyncio.to_thread). In a notebook this is "
            "harmless. This warning is shown once",
            RuntimeWarning,
            stacklevel=_program_level(),
        )


def _program_level() -> int:
    """Return the stack level of the nearest frame outside tenure, for `warnings.warn` here."""
    level = 2
    frame = sys._getframe(2)  # noqa: SLF001  there is no other way to count from here
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tenure."):
        frame = frame.f_back
        level += 1
    return level
