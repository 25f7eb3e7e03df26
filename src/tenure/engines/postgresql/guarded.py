"""Releases that wait for a transaction of a caller which guards the lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

__all__ = ["GuardedRelease"]

_log = logging.getLogger("tenure")

PAUSE = 0.05
"""Seconds until the release is tried again."""

REPORTED_AFTER = 5.0
"""Seconds of waiting after which it is logged, because such a transaction should be short."""


class GuardedRelease:
    """Wait of one release. It is logged once when it is long.

    Args:
        loop: the event loop.
        node: the path of the node.
        name: the name of the semaphore; empty for all of the session's.
        session: the id of the session.
    """

    __slots__ = ("_began", "_loop", "_name", "_node", "_reported", "_session")

    def __init__(self, loop: asyncio.AbstractEventLoop, node: str, name: str, session: int) -> None:
        """Begin to wait."""
        self._loop = loop
        self._node = node
        self._name = name
        self._session = session
        self._began = loop.time()
        self._reported = False

    def again(self, release: Callable[[], object]) -> None:
        """Try the release again after a pause."""
        waited = self._loop.time() - self._began
        if waited >= REPORTED_AFTER and not self._reported:
            self._reported = True
            _log.warning(
                "release waits for the end of a transaction that guards the lease: "
                "node=%s name=%r session=%d seconds=%.0f",
                *(self._node, self._name, self._session, waited),
            )
        self._loop.call_later(PAUSE, release)
