"""What is watched through a session: one watch on the server for each name, however many watch.

The server tells once of each watch, and then it is asked for anew. When it has answered *that*,
everybody who is concerned is told: whoever looks then sees what the new watch began with, or later,
and whatever changes from then on is told again.

Rules:

* What the program owns is watched too, from a moment after its grant on: nobody else tells an
  owner that its semaphore was deleted by force, or its request evicted. Of a semaphore with many
  owners only the data is watched for that (deletion counts as a change of it), or else each of
  them would hear of every other's grants; the owners are then looked up at every renewal.
* The server watches only what exists. What does not is looked for at short intervals.
* Old watches are gone after an attachment; whoever watches is told that something may have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure.engines.ydb import messages
from tenure.engines.ydb.messages import Message, Status

if TYPE_CHECKING:
    from tenure.engines.ydb.session import YdbSession
    from tenure.engines.ydb.strand import Ask

__all__ = ["Watches"]

LOOK_AGAIN = 0.25
"""Seconds after which what did not exist is looked for again."""

SETTLED = 0.1
"""Seconds after a grant from which on what is owned is watched."""

FEW = 8
"""So many owners may hear of each other's comings and goings."""


class _Listener:
    __slots__ = ("changed", "data", "owners")

    def __init__(self, data: bool, owners: bool, changed: Callable[[], None]) -> None:
        self.data = data
        self.owners = owners
        self.changed = changed


class _Arm:
    """A watch that was asked of the server, until it has told of something.

    Attributes:
        step: the session's, when it was asked for last.
        heard: the server has described what it watches.
        retired: another one has taken its place, and it has only its last word to say.
    """

    __slots__ = ("ask", "data", "heard", "owners", "retired", "step")

    def __init__(self, data: bool, owners: bool) -> None:
        self.data = data
        self.owners = owners
        self.ask: Ask | None = None
        self.step = 0
        self.heard = False
        self.retired = False


class _Name:
    __slots__ = ("arm", "data_changed", "listeners", "many", "missing", "owners_changed")

    def __init__(self) -> None:
        self.listeners: dict[_Listener, None] = {}
        self.arm: _Arm | None = None
        self.data_changed = self.owners_changed = False  # which is to be told yet
        self.missing = False  # or not to be watched for another reason
        self.many = False  # owners


class Watches:
    """The watches of one session."""

    def __init__(self, session: YdbSession) -> None:
        self._session = session
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
        self._names.setdefault(name, _Name()).listeners[listener] = None
        self.want(name)

        def stop() -> None:
            watched = self._names.get(name)
            if watched is not None:
                watched.listeners.pop(listener, None)

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
        """Time to look up what is owned among many."""
        for name, watched in self._names.items():
            if watched.many and self._session.owned(name) and not self._covers_owners(watched):
                self._look_up(name)

    def close(self) -> None:
        """Nobody is told anything any more."""
        self._over = True
        self._names.clear()
        for timer in (self._again, self._settled):
            if timer is not None:
                timer.cancel()

    def want(self, name: str) -> None:
        """See to it that the server watches what somebody wants to know."""
        watched = self._names.get(name)
        if watched is None or self._over:
            return
        guard = bool(self._session.owned(name))
        data = guard or any(each.data for each in watched.listeners)
        owners = (guard and not watched.many) or any(each.owners for each in watched.listeners)
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
            new.step = self._session.step()
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

        new.ask = self._session.main.strand.ask(make, heard)

    # What the server says

    def _described(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        gap, arm.heard = arm.heard, True
        if arm.retired:
            if gap:
                self._tell(watched, data=True, owners=True)
            return gap  # asked anew after an attachment; or else its last word is to come
        if body.status == Status.SUCCESS:
            owners = body.semaphore_description.owners
            watched.many = len(owners) > FEW
            gap = gap or watched.missing
            watched.missing = False
            self._session.check_owned(name, owners, arm.step)
            if gap:
                watched.data_changed = watched.owners_changed = True
            self._tell_changes(watched)
            return False
        watched.arm = None
        watched.missing = True
        if body.status == Status.NOT_FOUND:
            self._session.check_owned(name, None, arm.step)
        else:
            gap = True  # it cannot be watched, so that whoever watches has to look
        if gap:
            watched.data_changed = watched.owners_changed = True
        self._tell_changes(watched)
        if self._again is None:
            self._again = self._loop.call_later(LOOK_AGAIN, self._look_again)
        return True

    def _changed(self, name: str, arm: _Arm, body: Message) -> bool:
        watched = self._names.get(name)
        if watched is None:
            return True
        watched.data_changed = watched.data_changed or body.data_changed
        watched.owners_changed = watched.owners_changed or body.owners_changed
        if watched.arm is arm:
            watched.arm = None
            self.want(name)
        if watched.arm is None or watched.arm.heard:  # or else when that one has been answered
            self._tell_changes(watched)
        return True

    def _tell_changes(self, watched: _Name) -> None:
        data, owners = watched.data_changed, watched.owners_changed
        watched.data_changed = watched.owners_changed = False
        self._tell(watched, data=data, owners=owners)

    def _tell(self, watched: _Name, *, data: bool, owners: bool) -> None:
        for listener in list(watched.listeners):
            concerned = (data and listener.data) or (owners and listener.owners)
            if concerned and listener in watched.listeners:
                listener.changed()

    # What is owned

    def _watch_owned(self) -> None:
        self._settled = None
        for name in self._session.all_owned():
            self._names.setdefault(name, _Name())
            self.want(name)

    def _covers_owners(self, watched: _Name) -> bool:
        return watched.arm is not None and watched.arm.owners

    def _look_up(self, name: str) -> None:
        step = 0

        def make(req_id: int) -> Message:
            nonlocal step
            step = self._session.step()
            return messages.describe(req_id, name, owners=True)

        def heard(_: str, body: Message) -> bool:
            if body.status == Status.SUCCESS:
                self._session.check_owned(name, body.semaphore_description.owners, step)
            elif body.status == Status.NOT_FOUND:
                self._session.check_owned(name, None, step)
            return True

        self._session.main.strand.ask(make, heard)

    # What does not exist

    def _look_again(self) -> None:
        self._again = None
        for name, watched in list(self._names.items()):
            if watched.missing and watched.arm is None:
                self.want(name)
