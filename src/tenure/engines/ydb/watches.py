"""Watches of a session: one on the server for each name, however many there are here.

The server reports once for each watch; then the watch is requested anew. The session's watches are
notified when the new one has described what it begins with: of what the old one had reported, and
of what differs from the last description, so that nothing falls between the two.

Rules:

* What the program owns is watched too, from a moment after its grant on: no other message tells an
  owner that its semaphore was deleted by force, or its request evicted. Of a semaphore with many
  owners only the data is watched for that (deletion counts as a change of it), or else each of
  them would hear of every other's grants; the owners are then looked up at every renewal.
* A watch protects an owner only if it was asked for after the grant. An older one may begin with a
  state without the request, and a server that finds the same state again, because a grant and an
  eviction have passed meanwhile, tells of no change.
* The server watches only what exists. What does not is looked for at short intervals.
* Old watches are gone after an attachment, and are asked for anew in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tenure.engines.contract import Removal
from tenure.engines.ydb import messages
from tenure.engines.ydb.members import Members
from tenure.engines.ydb.requests import YdbRequests
from tenure.wire.ydb import Message, Status

__all__ = ["YdbWatches"]

LOOK_AGAIN = 0.25
"""Seconds after which what did not exist is looked for again."""

SETTLED = 0.1
"""Seconds after a grant from which on what is owned is watched."""

FEW = 8
"""So many owners may hear of each other's comings and goings."""


@dataclass(slots=True, eq=False)
class _Listener:
    data: bool
    owners: bool
    changed: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Arm:
    """A watch that was requested from the server, until it has reported something.

    Attributes:
        step: the session's, when it was asked for last.
        described: the server has described what it watches.
        retired: another one has taken its place, and it has only its last word to say.
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
        missing: it does not exist, or cannot be watched.
        many: owners there are too many of to watch them for the sake of what is owned.
        known: it was described before, and so it was then.
        news: what has changed since: the data, the owners.
        for_data, for_owners: how many of the listeners want to know of each.
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
    news: list[bool] = field(default_factory=lambda: [False, False])

    def add(self, listener: _Listener) -> None:
        """Add a listener."""
        self.listeners[listener] = None
        self.for_data += listener.data
        self.for_owners += listener.owners

    def remove(self, listener: _Listener) -> None:
        """Remove a listener, if it is there."""
        if listener in self.listeners:
            del self.listeners[listener]
            self.for_data -= listener.data
            self.for_owners -= listener.owners

    def note(self, data: bytes | None, owners: list[bytes] | None) -> None:
        """Compare a description with the last one; ``None``: there is nothing of that name."""
        if self.known:
            self.news[0] |= data != self.data
            self.news[1] |= owners != self.owners
        self.known, self.data, self.owners = True, data, owners


class YdbWatches:
    """The watches of one session."""

    def __init__(self, members: Members, requests: YdbRequests) -> None:
        """Start without watches."""
        self._members = members
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._names: dict[str, _Name] = {}
        self._again: asyncio.TimerHandle | None = None
        self._settled: asyncio.TimerHandle | None = None
        self._over = False

    def add(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin to watch; the result ends it."""
        listener = _Listener(data, owners, changed)
        self._names.setdefault(name, _Name()).add(listener)
        self.want(name)

        def stop() -> None:
            watched = self._names.get(name)
            if watched is not None:
                watched.remove(listener)

        return stop

    def granted(self) -> None:
        """Something is owned that was not before."""
        if self._settled is None and not self._over:
            self._settled = self._loop.call_later(SETTLED, self._watch_owned)

    def appeared(self, name: str) -> None:
        """The session itself has seen that there is a semaphore of that name."""
        watched = self._names.get(name)
        if watched is not None and watched.missing:
            self.want(name)

    def renewed(self) -> None:
        """Look up what is owned and has no watch of owners."""
        for name, watched in self._names.items():
            if self._requests.owned(name) and not (watched.arm is not None and watched.arm.owners):
                self._look_up(name)

    def close(self) -> None:
        """End all watches."""
        self._over = True
        self._names.clear()
        for timer in (self._again, self._settled):
            if timer is not None:
                timer.cancel()

    def want(self, name: str) -> None:
        """Have the server watch what there are watches for."""
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
            return  # or when it tells of something
        if arm is not None:
            if arm.data >= data and arm.owners >= owners:
                return
            arm.retired = True
        watched.arm = new = _Arm(data, owners)

        def make(req_id: int) -> Message:
            new.step = self._members.step()
            return messages.describe(
                req_id,
                name,
                owners=True,
                watch_data=data and not new.retired,
                watch_owners=owners and not new.retired,
            )

        def heard(kind: str, body: Message) -> bool:
            if kind == "describe_semaphore_changed":
                return self._changed(name, new, body)
            return self._described(name, new, body)

        self._members.main.protocol.ask(make, heard)

    # What the server says

    def _described(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        again, arm.described = arm.described, True
        over: bool = body.status != Status.SUCCESS
        if arm.retired:
            return again or over  # `again`: after an attachment; or else its last word is to come
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
                watched.news = [True, True]  # it cannot be watched: the watchers have to look
            if self._again is None:
                self._again = self._loop.call_later(LOOK_AGAIN, self._look_again)
        self._tell(watched)
        if watched.arm is arm:
            self.want(name)  # of many owners few may be left, who are watched then
        return over

    def _changed(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        watched.news[0] |= body.data_changed
        watched.news[1] |= body.owners_changed
        if watched.arm is arm:
            watched.arm = None
            self.want(name)
        elif watched.arm is not None and watched.arm.described:
            self._tell(watched)
        return True

    def _tell(self, watched: _Name) -> None:
        (data, owners), watched.news = watched.news, [False, False]
        for listener in list(watched.listeners):
            concerned = (data and listener.data) or (owners and listener.owners)
            if concerned and listener in watched.listeners:
                listener.changed()

    # What is owned

    def _watch_owned(self) -> None:
        self._settled = None
        for name in self._requests.owned_names():
            watched = self._names.setdefault(name, _Name())
            arm = watched.arm
            newest = max(request.owned_at for request in self._requests.owned(name))
            if arm is not None and arm.step < newest:
                arm.retired = True
                watched.arm = None
            self.want(name)

    def check_owned(self, name: str, owners: Iterable[Any] | None, step: int) -> None:
        """Compare what the program owns with the owners, as they were asked for at `step`.

        An answer without a request that was granted after the question proves nothing: the
        server may have described the semaphore before the grant, or after the request had left
        again. It is asked once more then.

        Args:
            name: the semaphore.
            owners: ``None`` if there is no such semaphore.
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
            self._look_up(name)

    def _look_up(self, name: str) -> None:
        step = 0

        def make(req_id: int) -> Message:
            nonlocal step
            step = self._members.step()
            return messages.describe(req_id, name, owners=True)

        def heard(_: str, body: Message) -> bool:
            if body.status == Status.SUCCESS:
                self.check_owned(name, body.semaphore_description.owners, step)
            elif body.status == Status.NOT_FOUND:
                self.check_owned(name, None, step)
            return True

        self._members.main.protocol.ask(make, heard)

    # What does not exist

    def _look_again(self) -> None:
        self._again = None
        for name, watched in list(self._names.items()):
            if watched.missing and watched.arm is None:
                self.want(name)
