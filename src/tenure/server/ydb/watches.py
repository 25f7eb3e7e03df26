"""Descriptions and watches of a session: one watch for each name, which reports one change.

A change is reported if the state differs from the answer of the describe. So a change that the
store repeats, or that the client already knows, is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenure.errors import TenureError
from tenure.model import SemaphoreDescription
from tenure.server.limits import LimitReached, Limits
from tenure.server.ydb import requests
from tenure.server.ydb.long_replies import LongReplies, size_of
from tenure.server.ydb.messages import Status, status_of
from tenure.server.ydb.operations import (
    Answered,
    DescribeOperation,
    Script,
    StartWatch,
    no_semaphore,
)


class OneTimeWatch:
    """Watch started by a describe, which reports one change.

    Attributes:
        seen: the state in the answer of the describe. Stores may report changes that it already
            contains; these are not passed on.
    """

    __slots__ = ("data", "name", "owners", "req_id", "seen", "stop")

    def __init__(self, name: str, req_id: int, data: bool, owners: bool) -> None:
        self.name = name
        self.req_id = req_id
        self.data = data
        self.owners = owners
        self.seen = (0, 0)
        self.stop: Callable[[], None] = _nothing


def _nothing() -> None:
    """Do nothing: the watch has not begun."""


def _state(found: SemaphoreDescription) -> tuple[int, int]:
    """Return values that differ when the data, and when the owners have changed."""
    owners = tuple((each.order_id, each.count, each.data) for each in found.owners)
    return hash(found.data), hash(owners)


class OneTimeWatches:
    """The watches of one session.

    Args:
        limits: the limits of the client.
        start_watch: starts a watch.
        look: called when a change was recorded.
        replies: the list for replies.
        timeouts: timeouts of waiters, in milliseconds, by session and name.
        long_replies: the long descriptions that are being sent.

    Attributes:
        noted: watches with recorded changes, in order.
    """

    def __init__(
        self,
        limits: Limits,
        start_watch: StartWatch,
        look: Callable[[], None],
        replies: list[Any],
        timeouts: Mapping[tuple[int, str], int],
        long_replies: LongReplies,
    ) -> None:
        self.noted: dict[OneTimeWatch, None] = {}
        self._limits = limits
        self._start_watch = start_watch
        self._look = look
        self._replies = replies
        self._timeouts = timeouts
        self._long_replies = long_replies
        self._watches: dict[str, OneTimeWatch] = {}
        self._begun: set[OneTimeWatch] = set()  # including those whose describe is not answered yet

    def deleted(self, name: str) -> None:
        """Report that the session has deleted the semaphore, if it watches it."""
        watch = self._watches.get(name)
        if watch is not None:
            self._drop(watch)
            self._replies.append(requests.changed(watch.req_id, data=True, owners=True))

    def stop_all(self) -> None:
        """Stop all watches: the conversation has ended."""
        for watch in list(self._begun):
            self._drop(watch)

    # Scripts

    def describe(self, message: Any) -> Script:
        """Answer a describe, and start the watch that it requests."""
        yield Answered()
        if text := no_semaphore(message.name):
            self._replies.append(requests.not_described(message.req_id, Status.NOT_FOUND, text))
            return
        watches = message.watch_data or message.watch_owners
        old = self._watches.get(message.name) if watches else None
        new = None  # in `_watches` from the beginning, unless it replaces one
        try:
            if watches:
                new = self._watch(message, old)
            found: SemaphoreDescription = yield DescribeOperation(
                message.name,
                message.include_owners or message.watch_owners,
                message.include_waiters,
            )
        except TenureError as error:
            self._replies.append(
                requests.not_described(message.req_id, status_of(error), str(error))
            )
            self._keep(old, new)
            return
        described = self._described(message, found, watched=watches)
        if described is None:
            self._keep(old, new)
            return
        if new is not None:
            new.seen = _state(found)
            if old is not None:
                self._drop(old)
                self._replies.append(requests.changed(old.req_id, data=False, owners=False))
            self._watches[message.name] = new
        self._replies.append(described)

    def _described(self, message: Any, found: SemaphoreDescription, *, watched: bool) -> Any:
        """Return the reply; ``None`` if it was rejected as too long."""
        how: dict[str, bool] = {"owners": message.include_owners, "watched": watched}
        size = size_of(found, owners=message.include_owners)
        if size <= self._limits.output_bytes // 2:
            return requests.described(message.req_id, found, self._timeouts, **how)
        if text := self._long_replies.why_not(size):
            text += "; describe it without owners and waiters"
            self._replies.append(requests.not_described(message.req_id, Status.OVERLOADED, text))
            return None
        reply = requests.described_at_length(message.req_id, found, self._timeouts, **how)
        self._long_replies.add(reply)
        return reply

    def _watch(self, message: Any, old: OneTimeWatch | None) -> OneTimeWatch:
        if old is not None:
            old.stop()  # before the new one begins: the identity may be at its quota
        elif len(self._watches) >= self._limits.watches_per_session:
            raise LimitReached(
                "the session has as many watches as the server's limit watches_per_session = "
                f"{self._limits.watches_per_session} allows",
                "watches_per_session",
            )
        watch = OneTimeWatch(message.name, message.req_id, message.watch_data, message.watch_owners)
        self._start(watch)
        self._watches.setdefault(message.name, watch)
        self._begun.add(watch)
        return watch

    def _start(self, watch: OneTimeWatch) -> None:
        watch.stop = self._start_watch(
            watch.name, watch.data, watch.owners, lambda: self._note(watch)
        )

    def _keep(self, old: OneTimeWatch | None, new: OneTimeWatch | None) -> None:
        """Continue a watch that should have been replaced, because the describe has failed."""
        if new is not None:
            self._drop(new)
        if old is None:
            return
        try:
            self._start(old)
        except TenureError:  # the client reads the state itself, and may add another watch
            self._drop(old)
            self._replies.append(requests.changed(old.req_id, data=True, owners=True))
        else:
            self._note(old)  # it may have changed while it was not watched

    def _note(self, watch: OneTimeWatch) -> None:
        """Record a possible change; it is reported when no script of that name runs."""
        if watch in self._begun:
            self.noted[watch] = None
            self._look()

    def report_change(self, watch: OneTimeWatch) -> Script:
        """Report a change once, if the watched state has changed."""
        if self._watches.get(watch.name) is not watch:
            return
        try:
            found: SemaphoreDescription = yield DescribeOperation(watch.name, owners=watch.owners)
        except TenureError:
            data = owners = True  # it does not exist any more; or the client will read it itself
        else:
            now = _state(found)
            data = watch.data and now[0] != watch.seen[0]
            owners = watch.owners and now[1] != watch.seen[1]
        if data or owners:
            self._drop(watch)
            self._replies.append(requests.changed(watch.req_id, data=data, owners=owners))

    def _drop(self, watch: OneTimeWatch) -> None:
        watch.stop()
        self._begun.discard(watch)
        self.noted.pop(watch, None)
        if self._watches.get(watch.name) is watch:
            del self._watches[watch.name]
