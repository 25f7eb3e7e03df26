"""The part of a session that its requests use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from tenure._client.client_core import ClientCore
from tenure._client.contact import Contact
from tenure._client.listeners import EventKind, Listeners
from tenure._client.loss import OnLoss
from tenure.engines.contract import Withdrawn
from tenure.errors import SessionClosed, SessionExpired

R = TypeVar("R")


class RequestSession(Protocol[R]):
    """A session, as seen by its requests of type `R`. `SessionCore` implements it."""

    node: str
    client: ClientCore
    contact: Contact
    listeners: Listeners
    loop: asyncio.AbstractEventLoop
    lock: threading.Lock
    on_loss: OnLoss
    requests: dict[int, R]
    why: SessionExpired | SessionClosed | None
    ended_by_store: bool
    debug: bool

    # The session itself

    @property
    def anchor(self) -> Callable[[], object]:
        """A weak reference to what keeps the session for the program."""
        ...

    def now(self) -> float:
        """Read the client's clock."""
        ...

    def is_proven(self) -> bool:
        """Return true if the session lives, by the clock."""
        ...

    def check_loop(self) -> None:
        """Raise `Misuse` on another event loop."""

    def ended(self, error: SessionExpired) -> None:
        """End the session: the store has ended it."""

    def error(self) -> SessionExpired | SessionClosed:
        """Return the error of the end, to raise."""
        ...

    def emit(self, kind: EventKind, *facts: object) -> None:
        """Report an event."""

    # One of its requests

    def withdraw(self, request: R) -> asyncio.Future[Withdrawn] | None:
        """Withdraw or release a request; return the answer to wait for, if there is one."""

    def withdraw_dropped(self, request: R) -> None:
        """Withdraw a request whose handle the program has dropped."""

    def retry_withdrawal(self, request: R) -> None:
        """Send a withdrawal again until the store confirms it, or the session ends."""

    def forget(self, request: R) -> None:
        """Forget a request that has left its queue."""

    def lose(self, request: R) -> None:
        """Mark a held lease as lost: the session has ended. From any thread."""

    def add_stop_time(self, request: R) -> None:
        """Move the deadline forward by the lease's stop time."""
