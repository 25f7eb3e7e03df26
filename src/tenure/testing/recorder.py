"""Recorder of the events of one session, in order, with a method to wait for more.

A `Recorder` is the `SessionEvents` of a test. It also checks the contract's rules for pushes;
violations are in `broken`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tenure.engines.contract import Removal
from tenure.errors import SessionExpired
from tenure.model import Recovered

TIMEOUT = 30.0
"""Seconds after which a test stops waiting for an event. An idle machine needs milliseconds; a busy
one may need much more."""


class Proven(NamedTuple):
    """Call of `SessionEvents.proven`."""

    at: float


class GrantedRequest(NamedTuple):
    """Call of `SessionEvents.granted`."""

    request_id: int
    order_id: int | None


class Removed(NamedTuple):
    """Call of `SessionEvents.removed`."""

    request_id: int
    why: Removal


class Detached(NamedTuple):
    """Call of `SessionEvents.detached`."""


class Attached(NamedTuple):
    """Call of `SessionEvents.attached`."""


class Ended(NamedTuple):
    """Call of `SessionEvents.ended`."""

    error: SessionExpired


class Resumed(NamedTuple):
    """Call of `SessionEvents.resumed`."""

    requests: tuple[Recovered, ...]


Said: TypeAlias = Proven | Resumed | GrantedRequest | Removed | Detached | Attached | Ended


class Recorder:
    """Recorder of the events that an engine sends to one session.

    Attributes:
        said: all events, in order.
        proofs: the instants of the `Proven` events, in order.
        grants: the order ids of requests that were granted by an event, by request id.
        removals: the reasons of removal, by request id.
        found: the requests that the session had when it was taken over, in order.
        end: the error with which the store ended the session.
        broken: descriptions of the engine's violations of the contract.
    """

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.proofs: list[float] = []
        self.grants: dict[int, int | None] = {}
        self.removals: dict[int, Removal] = {}
        self.found: tuple[Recovered, ...] = ()
        self.end: SessionExpired | None = None
        self.broken: list[str] = []
        self._sent: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._changed = asyncio.Event()

    def sending(self, request_id: int) -> None:
        """Record that `enqueue` is about to be called for a request."""
        self._sent.add(request_id)

    async def wait_for(
        self, condition: Callable[[Recorder], bool], what: str, *, within: float = TIMEOUT
    ) -> None:
        """Wait until a condition on the recorded events is true.

        Args:
            condition: called at once and after each event.
            what: the awaited event, for the message.
            within: the maximum time to wait, in seconds.

        Raises:
            AssertionError: the condition did not become true in time. The message has `what` and
                the recorded events.
        """
        try:
            async with asyncio.timeout(within):
                while not condition(self):
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"not within {within:g} s: {what}; received: {self.said or 'nothing'}"
            ) from None

    # SessionEvents

    def proven(self, at: float) -> None:
        """Record a proof; called from any thread."""
        self._record(Proven(at))
        self.proofs.append(at)
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._wake)
        else:
            self._wake()

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Record the recovered requests; a second call is a violation."""
        if any(isinstance(word, Resumed) for word in self.said):
            self.broken.append("recovered requests were reported twice")
        self.found = tuple(requests)
        self._record(Resumed(self.found))
        for request in requests:
            self._sent.add(request.request_id)
        self._wake()

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Record a grant; another order id or a grant after removal is a violation."""
        self._record(GrantedRequest(request_id, order_id))
        self._check_sent(request_id, "granted")
        if request_id in self.removals:
            self.broken.append(f"request {request_id} was granted after it had been removed")
        known = self.grants.get(request_id)
        if known is not None and order_id != known:
            self.broken.append(
                f"request {request_id} was granted as {known}, and then as {order_id}"
            )
        self.grants[request_id] = order_id
        self._wake()

    def removed(self, request_id: int, why: Removal) -> None:
        """Record a removal."""
        self._record(Removed(request_id, why))
        self._check_sent(request_id, "removed")
        self.removals[request_id] = why
        self._wake()

    def detached(self, cause: BaseException | None = None) -> None:  # noqa: ARG002
        """Record the loss of contact."""
        self._record(Detached())
        self._wake()

    def attached(self) -> None:
        """Record re-established contact."""
        self._record(Attached())
        self._wake()

    def ended(self, error: SessionExpired) -> None:
        """Record the end of the session."""
        self._record(Ended(error))
        self.end = error
        self._wake()

    def _record(self, said: Said) -> None:
        if self.end is not None:
            self.broken.append(f"{said} was reported after the end")
        if threading.get_ident() != self._thread and not isinstance(said, Proven):
            self.broken.append(f"{said} was reported on another thread than the loop's")
        self.said.append(said)

    def _check_sent(self, request_id: int, what: str) -> None:
        if request_id not in self._sent:
            self.broken.append(f"request {request_id} was {what}, and had never been sent")

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
