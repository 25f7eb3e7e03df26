"""Supervised leadership: campaign, run the leader's work, and campaign again after a failure.

States of one `Client.lead`::

    campaigning --elected--> leading --the work returns--> done
         ^   |                  |
         |   `---a failure------+--> pausing, or raising
         `------------------------------'

* A transient failure is retried after a pause: the store cannot be reached, the session or the
  leadership was lost, or the work raised and `retry` allows it. Any other failure is raised.
* The pause doubles from `FIRST_PAUSE` to `LONGEST_PAUSE`, with jitter. A leadership that lasted for
  `LONGEST_PAUSE` resets it.
* The leadership is resigned before each pause, so that another candidate can lead meanwhile.
* When the caller is cancelled, the leadership is resigned and nothing is retried.

`Supervision` decides and logs, without I/O. `tenure.blocking` uses it, too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from tenure._client.sessions import SessionOptions, attach, is_loss
from tenure.errors import EngineError, EngineUnavailable, LeaseLost, SessionClosed, SessionExpired

if TYPE_CHECKING:
    from tenure._client.client_core import ClientCore
    from tenure._client.election import Leadership
    from tenure._client.source import ClientAnchor
    from tenure.clock import Clock

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""First and longest pause between a failure and the next campaign, in seconds."""

Retry = bool | Callable[[Exception], bool]
"""Whether an error of the work is retried; a callable decides for each error."""

_PASSING = (EngineUnavailable, EngineError, SessionExpired, LeaseLost)
"""Failures of a campaign that may be transient."""

_log = logging.getLogger("tenure")

_LOST = "leadership lost, next campaign after a pause: node=%s name=%r seconds=%.1f error=%s"
_NOT_LED = "campaign failed, next campaign after a pause: node=%s name=%r seconds=%.1f error=%s"
_FAILED = "leader's work failed, leadership resigned: node=%s name=%r seconds=%.1f error=%r"


class _Losable(Protocol):
    @property
    def loss(self) -> LeaseLost | None: ...


class Supervision:
    """The decisions of one `Client.lead`.

    Args:
        clock: measures the length of a leadership.
        node: the path of the election's node.
        name: the election.
        retry: whether errors of the work are retried.
    """

    def __init__(self, clock: Clock, node: str, name: str, retry: Retry) -> None:
        self._now = clock.now
        self._node, self._name = node, name
        self._retry = retry
        self._pause = FIRST_PAUSE
        self._since: float | None = None  # start of the running work
        self._leadership: _Losable  # set with it
        self._done = False

    def begin(self, leadership: _Losable) -> None:
        """Record that the work of that leadership begins."""
        self._leadership = leadership
        self._since = self._now()

    def end(self) -> None:
        """Record that the work has returned: nothing is retried any more."""
        self._done = True

    def failed(self, error: Exception) -> float:
        """Log a failure, and return the pause in seconds before the next campaign.

        Raises:
            Exception: `error` itself, when it is not retried.
        """
        since, self._since = self._since, None
        led = since is not None
        # The work may also raise the loss of another lease, which is an error of the work.
        lost = led and is_loss(error) and self._leadership.loss is not None
        if self._done or isinstance(error, SessionClosed):
            raise error
        if not (lost or self._is_retried(error, led=led)):
            raise error
        if since is not None and self._now() - since >= LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        length = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if not led or lost:
            message = _LOST if led else _NOT_LED
            _log.warning(message, self._node, self._name, length, error)
        else:
            _log.error(_FAILED, self._node, self._name, length, error, exc_info=error)
        return length

    def _is_retried(self, error: Exception, *, led: bool) -> bool:
        if not led:
            return isinstance(error, _PASSING)
        return self._retry(error) if callable(self._retry) else self._retry


async def lead(
    anchor: ClientAnchor,
    options: SessionOptions,
    name: str,
    work: Callable[[Leadership], Awaitable[T]],
    data: bytes,
    retry: Retry,
) -> T:
    """Run `Client.lead`, with sessions attached with `options`."""
    client = anchor.core
    supervision = Supervision(client.clock, options.how.node, name, retry)
    while True:
        try:
            async with (
                attach(anchor, options) as session,
                session.election(name).campaign(data) as leadership,
            ):
                supervision.begin(leadership)
                result = await work(leadership)
                supervision.end()
            return result
        except Exception as error:
            length = supervision.failed(error)
        await pause(client, length)


async def pause(client: ClientCore, length: float) -> None:
    """Wait for some seconds.

    Raises:
        SessionClosed: the client is closed meanwhile.
    """
    sleeping = client.tasks.begin(asyncio.sleep(length))
    try:
        await client.outcome(sleeping)
    finally:
        sleeping.cancel()
