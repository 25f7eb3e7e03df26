"""Watches of a session: one on the server for each name, regardless of the number of listeners.

The server reports once for each watch; then the watch is requested again. When the new watch has
described the name, the listeners are notified of the changes reported by the old one, and of
differences from the last description. So no change between the two is missed.

Rules:

* Names with an owner are watched, too, from shortly after the grant. No other message reports to an
  owner that its semaphore was deleted by force, or its request evicted.
* If a semaphore has many owners, only its data is watched for that (deletion counts as a change of
  the data), because otherwise each owner would be notified of every other grant. Instead, the
  owners are looked up at every renewal.
* A watch protects an owner only if it was requested after the grant. An older one may have started
  without the request, and a server reports no change if the state is the same again after a grant
  and an eviction.
* The server watches only existing semaphores. Missing ones are looked up at short intervals.
* An attachment loses the watches. They are requested again in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tenure.engines.contract import Removal
from tenure.engines.ydb import messages
from tenure.engines.ydb.members import GroupSession
from tenure.engines.ydb.requests import YdbRequests
from tenure.wire.ydb import Message, Status

LOOK_AGAIN = 0.25
"""Seconds between two look-ups of a missing semaphore."""

SETTLED = 0.1
"""Seconds between a grant and the watch that protects it."""

FEW = 8
"""Maximum number of owners that are watched for the sake of an owner."""


@dataclass(slots=True, eq=False)
class _Listener:
    data: bool
    owners: bool
    changed: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Arm:
    """A watch on the server, until it has reported a change.

    Attributes:
        step: the session's step at which it was last requested.
        described: whether the server has described the name.
        retired: whether it was replaced; only its last report is processed.
    """

    data: bool
    owners: bool
    step: int = 0
    described: bool = False
    retired: bool = False


@dataclass(slots=True, eq=False)
class _Name:
    """A watched name with its watchers.

    Attributes:
        arm: the watch on the server.
        missing: whether the semaphore does not exist, or cannot be watched.
        many: whether it has too many owners to watch them for the sake of an owner.
        known: whether it was described before, with `data` and `owners`.
        changes: whether the data, and the owners, have changed since the last notification.
        for_data, for_owners: the numbers of listeners.
    """

    listeners: dict[_Listener, None] = field(default_factory=dict)
    for_data: int = 0
    for_owners: int = 0
    arm: _Arm | None = None
    missing: bool = False
    many: bool = False
    known: bool = False
    data: bytes | None = None
    owners: list[bytes] | None = None
    changes: list[bool] = field(default_factory=lambda: [False, False])

    def add(self, listener: _Listener) -> None:
        """Add a listener."""
        self.listeners[listener] = None
        self.for_data += listener.data
        self.for_owners += listener.owners

    def remove(self, listener: _Listener) -> None:
        """Remove a listener, if it exists."""
        if listener in self.listeners:
            del self.listeners[listener]
            self.for_data -= listener.data
            self.for_owners -= listener.owners

    def note(self, data: bytes | None, owners: list[bytes] | None) -> None:
        """Compare a description with the last one; ``None``: the semaphore does not exist."""
        if self.known:
            self.changes[0] |= data != self.data
            self.changes[1] |= owners != self.owners
        self.known, self.data, self.owners = True, data, owners


class YdbWatches:
    """The watches of one session."""

    def __init__(self, session: GroupSession, requests: YdbRequests) -> None:
        self._session = session
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._names: dict[str, _Name] = {}
        self._again: asyncio.TimerHandle | None = None
        self._settled: asyncio.TimerHandle | None = None
        self._over = False

    def add(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin to watch; return the function that ends it."""
        listener = _Listener(data, owners, changed)
        self._names.setdefault(name, _Name()).add(listener)
        self.update(name)

        def stop() -> None:
            watched = self._names.get(name)
            if watched is not None:
                watched.remove(listener)

        return stop

    def granted(self) -> None:
        """Watch a new lease, soon."""
        if self._settled is None and not self._over:
            self._settled = self._loop.call_later(SETTLED, self._watch_owned)

    def appeared(self, name: str) -> None:
        """Watch a semaphore that was missing, and that the session itself has found."""
        watched = self._names.get(name)
        if watched is not None and watched.missing:
            self.update(name)

    def renewed(self) -> None:
        """Look up the names with owners whose owners are not watched."""
        for name, watched in self._names.items():
            if self._requests.owned(name) and not (watched.arm is not None and watched.arm.owners):
                self._read_state(name)

    def close(self) -> None:
        """End all watches."""
        self._over = True
        self._names.clear()
        for timer in (self._again, self._settled):
            if timer is not None:
                timer.cancel()

    def update(self, name: str) -> None:
        """Adapt the watch on the server to the listeners and the leases."""
        watched = self._names.get(name)
        if watched is None or self._over:
            return
        guard = bool(self._requests.owned(name))
        data = guard or watched.for_data > 0
        owners = (guard and not watched.many) or watched.for_owners > 0
        arm = watched.arm
        if not (data or owners):
            if arm is None:
                del self._names[name]
            return  # an arm reports first
        if arm is not None:
            if arm.data >= data and arm.owners >= owners:
                return
            arm.retired = True
        watched.arm = new = _Arm(data, owners)

        def make(req_id: int) -> Message:
            new.step = self._session.step()
            return messages.describe(
                req_id,
                name,
                owners=True,
                watch_data=data and not new.retired,
                watch_owners=owners and not new.retired,
            )

        def answered(kind: str, body: Message) -> bool:
            if kind == "describe_semaphore_changed":
                return self._changed(name, new, body)
            return self._described(name, new, body)

        self._session.main.protocol.send(make, answered)

    # Reports of the server

    def _described(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        again, arm.described = arm.described, True
        over: bool = body.status != Status.SUCCESS
        if arm.retired:
            return again or over  # `again`: after an attachment; otherwise its last report follows
        found = body.semaphore_description
        if not over:
            watched.missing = False
            watched.many = len(found.owners) > FEW
            self.check_owned(name, found.owners, arm.step)
            watched.note(found.data, [owner.SerializeToString() for owner in found.owners])
        else:
            watched.arm = None
            watched.missing = True
            if body.status == Status.NOT_FOUND:
                self.check_owned(name, None, arm.step)
                watched.note(None, None)
            else:
                watched.changes = [
                    True,
                    True,
                ]  # it cannot be watched: the listeners have to describe it
            if self._again is None:
                self._again = self._loop.call_later(LOOK_AGAIN, self._read_missing)
        self._notify(watched)
        if watched.arm is arm:
            self.update(name)  # few of many owners may be left, which are watched then
        return over

    def _changed(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        watched.changes[0] |= body.data_changed
        watched.changes[1] |= body.owners_changed
        if watched.arm is arm:
            watched.arm = None
            self.update(name)
        elif watched.arm is not None and watched.arm.described:
            self._notify(watched)
        return True

    def _notify(self, watched: _Name) -> None:
        (data, owners), watched.changes = watched.changes, [False, False]
        for listener in list(watched.listeners):
            concerned = (data and listener.data) or (owners and listener.owners)
            if concerned and listener in watched.listeners:
                listener.changed()

    # Owned names

    def _watch_owned(self) -> None:
        self._settled = None
        for name in self._requests.owned_names():
            watched = self._names.setdefault(name, _Name())
            arm = watched.arm
            newest = max(request.owned_at for request in self._requests.owned(name))
            if arm is not None and arm.step < newest:
                arm.retired = True
                watched.arm = None
            self.update(name)

    def check_owned(self, name: str, owners: Iterable[Any] | None, step: int) -> None:
        """Report the leases that are lost, by the owners in a description requested at `step`.

        A description without a lease that was granted after that step proves nothing, because it
        may be older than the grant. It is then requested again.

        Args:
            name: the semaphore.
            owners: the owners; ``None`` if the semaphore does not exist.
            step: the step at which the description was requested.
        """
        order_ids = {each.session_id: each.order_id for each in owners or ()}
        unproven = False
        for request in self._requests.owned(name):
            assert request.member is not None
            found = order_ids.get(request.member.id)
            if found is not None and (request.order_id is None or found == request.order_id):
                continue
            if request.owned_at > step:
                unproven = True
                continue
            why = Removal.DELETED if owners is None else Removal.EVICTED
            self._requests.removed(request, why, release=found is not None)
        if unproven:
            self._read_state(name)

    def _read_state(self, name: str) -> None:
        step = 0

        def make(req_id: int) -> Message:
            nonlocal step
            step = self._session.step()
            return messages.describe(req_id, name, owners=True)

        def answered(_: str, body: Message) -> bool:
            if body.status == Status.SUCCESS:
                self.check_owned(name, body.semaphore_description.owners, step)
            elif body.status == Status.NOT_FOUND:
                self.check_owned(name, None, step)
            return True

        self._session.main.protocol.send(make, answered)

    # Missing semaphores

    def _read_missing(self) -> None:
        self._again = None
        for name, watched in list(self._names.items()):
            if watched.missing and watched.arm is None:
                self.update(name)
