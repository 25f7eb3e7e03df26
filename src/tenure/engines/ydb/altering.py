"""Changing a request in its place: its count, its data, and how long it waits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.contract import Removal
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.hold import LONGEST_WAIT, Hold, State, settle
from tenure.engines.ydb.member import Member
from tenure.errors import LeaseReleased, TenureError
from tenure.model import UNCHANGED, Unchanged
from tenure.wire.ydb import Message, Status

if TYPE_CHECKING:
    from tenure.engines.ydb.requests import Requests
    from tenure.engines.ydb.session import YdbSession

__all__ = ["Altering", "released"]


def released(node: str) -> LeaseReleased:
    """The request to alter is in no queue."""
    return LeaseReleased(f"the request on {node} is over", node=node)


class Altering:
    """The alterations of one session's requests, which have their turns in its lanes."""

    def __init__(self, requests: Requests, session: YdbSession) -> None:
        self._requests = requests
        self._session = session
        self._node = session.node
        self._lanes = session.lanes

    def begin(
        self,
        hold: Hold,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
        answer: asyncio.Future[None],
    ) -> bool:
        if hold.state is State.ASKED or hold.state is State.TAKEN:
            return False
        member = hold.member
        if hold.state is State.GONE or hold.state is State.LEAVING or member is None:
            settle(answer, released(self._node))
            return True
        lane = self._lanes.of(hold.name)
        if not lane.free_for(member):
            return False
        try:
            self._check(hold, count, data, timeout)
        except TenureError as error:
            settle(answer, error)
            return True
        waits = hold.state is State.WAITS
        same = (count is None or count == hold.count) and (data is None or data == hold.data)
        if same and (timeout is UNCHANGED or not waits):
            settle(answer)
            return True
        hold.count = hold.count if count is None else count
        hold.data = hold.data if data is None else data
        lane.begin(member)
        if waits:
            self._change_waiter(hold, member, timeout, answer)
        else:
            self._change_owner(hold, member, answer)
        return True

    def _check(
        self, hold: Hold, count: int | None, data: bytes | None, timeout: float | Unchanged | None
    ) -> None:
        if data is not None:
            rules.check_data(data, self._node, hold.name)
        if count is not None:
            limit = max(hold.count, rules.EXACT)  # what it had was within the semaphore's
            rules.check_shrink(count, hold.count, limit, self._node, hold.name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, self._node, hold.name)

    def _change_waiter(
        self,
        hold: Hold,
        member: Member,
        timeout: float | Unchanged | None,
        answer: asyncio.Future[None],
    ) -> None:
        """Ask for it anew: the request that waits is replaced, in its place."""
        if timeout is not UNCHANGED:
            hold.deadline = None if timeout is None else self._session.now() + timeout
            if timeout is not None and timeout > LONGEST_WAIT:
                self._requests.later(timeout, partial(self._requests.give_up, hold))
        if hold.ask is not None:
            member.strand.drop(hold.ask)
        answered = False

        def make(req_id: int) -> Message:
            return messages.acquire(
                req_id,
                hold.name,
                hold.count,
                hold.data,
                self._requests.left(hold),
                ephemeral=hold.ephemeral,
            )

        def heard(kind: str, body: Message) -> bool:
            nonlocal answered
            pending = kind == "acquire_semaphore_pending"
            if not answered:
                answered = True
                gone = not pending and body.status == Status.NOT_FOUND
                settle(answer, released(self._node) if gone else None)
                self._lanes.of(hold.name).end(member)
            if not pending:
                hold.ask = None
                self._requests.result(hold, body)
            return not pending

        hold.ask = member.strand.ask(make, heard)

    def _change_owner(self, hold: Hold, member: Member, answer: asyncio.Future[None]) -> None:
        def make(req_id: int) -> Message:
            return messages.acquire(
                req_id, hold.name, hold.count, hold.data, None, ephemeral=hold.ephemeral
            )

        def heard(kind: str, body: Message) -> bool:
            granted = kind == "acquire_semaphore_result" and body.status == Status.SUCCESS
            if hold.state is State.OWNS and not granted:
                # It did not own any more: it has joined the queue anew, or the queue is gone.
                pending = kind == "acquire_semaphore_pending"
                gone = pending or body.status == Status.NOT_FOUND
                if gone:
                    why = Removal.EVICTED if pending else Removal.DELETED
                    self._requests.removed(hold, why, release=pending)
                    settle(answer, released(self._node))
                else:
                    settle(answer, errors.semaphore_error(self._node, hold.name, body))
            settle(answer)
            self._lanes.of(hold.name).end(member)
            return True

        member.strand.ask(make, heard)
