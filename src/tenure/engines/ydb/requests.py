"""Requests of one session: joining queues, changes, and leaving.

The server's messages about a request are received here, and its state is changed here alone.

::

    ASKED --> WAITS --> TAKEN --> OWNS        TAKEN: owns, and the order id is on its way
      |         |         |        |
      +---------+---------+--------+--> LEAVING --> GONE     withdrawn, until the server says so
      +---------+---------+--------+--> GONE                 refused, timed out, removed

A server that fails at something for the moment is asked again, after a pause, wherever not to ask
would leave a request in a queue, or a waiter without its grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.altering import Altering, released
from tenure.engines.ydb.hold import LONGEST_WAIT, Hold, State
from tenure.engines.ydb.member import Member
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT, Unchanged
from tenure.wire.ydb import Message, Status

if TYPE_CHECKING:
    from tenure.engines.ydb.session import YdbSession

__all__ = ["Requests"]

_MOST_CONTENDED = 1024
"""How many names are remembered for which requests had to wait."""

AGAIN = 0.25
"""Seconds before a server is asked again for what it failed at."""


class Requests:
    """All of them, from when they are made until they are out of their queues."""

    def __init__(self, session: YdbSession) -> None:
        self._session = session
        self._node = session.node
        self._lanes = session.lanes
        self._contended: set[str] = set()
        self._altering = Altering(self, session)
        self._loop = asyncio.get_running_loop()
        self._holds: dict[int, Hold] = {}
        self._by_name: dict[str, dict[Hold, None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._over = False

    def of(self, name: str) -> list[Hold]:
        """Those for one semaphore."""
        return list(self._by_name.get(name, ()))

    def owned_names(self) -> list[str]:
        """Of what semaphores something is owned."""
        return [
            name
            for name, holds in self._by_name.items()
            if any(hold.state is State.OWNS for hold in holds)
        ]

    def close(self) -> None:
        """The session is over."""
        self._over = True
        for hold in self._holds.values():
            if hold.perhaps_out or (hold.release is not None and hold.release.again):
                hold.tell_leavers(Withdrawn.LEFT)
        self._holds.clear()
        self._by_name.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # Joining

    def enqueue(
        self,
        number: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        rules.check_timeout(timeout, self._node, name)
        rules.check_data(data, self._node, name)
        rules.check_name(name, self._node)
        hold = Hold(
            number,
            name,
            count,
            data,
            None if timeout is None else self._session.now() + timeout,
            at_once=timeout == 0,
            ephemeral=ephemeral,
            answer=self._session.future(),
        )
        self._holds[number] = hold
        self._by_name.setdefault(name, {})[hold] = None
        self._lanes.of(name).add(partial(self._join, hold))
        if timeout is not None and timeout > LONGEST_WAIT:
            self.later(timeout, partial(self.give_up, hold))
        return hold.answer

    def _join(self, hold: Hold) -> bool:
        if not _is_count(hold.count):
            return self._explain(hold)
        try:
            member = self._member_for(hold)
        except TenureError as error:
            self._refuse(hold, error)
            return True
        if member is None:
            return False
        hold.member = member
        member.holds[hold.name] = hold
        self._lanes.of(hold.name).begin(member)
        self._acquire(hold, first=True)
        if self._session.fencing and hold.name not in self._contended:
            self._ask_order_id(hold)
        return True

    def _member_for(self, hold: Hold) -> Member | None:
        """Return the member for a request; ``None``: the request must not be sent yet.

        Raises:
            Unsupported: there are as many siblings as may be.
        """
        session, lane = self._session, self._lanes.of(hold.name)
        leaving = False
        for member in session.members:
            there = member.holds.get(hold.name)
            if there is None and not member.stopping:
                return member if lane.free_for(member) else None
            # What is leaving will be free, and needs no sibling.
            leaving = leaving or (there is not None and there.state is State.LEAVING)
        return session.new_sibling() if lane.idle and not leaving else None

    def _acquire(self, hold: Hold, *, first: bool = False) -> None:
        """Ask for it, or, when it waits already, for the news of its grant."""
        member, answered = hold.member, not first
        assert member is not None

        def make(req_id: int) -> Message:
            return messages.acquire(
                req_id,
                hold.name,
                hold.count,
                hold.data,
                self.left(hold),
                ephemeral=hold.ephemeral,
            )

        def heard(kind: str, body: Message) -> bool:
            nonlocal answered
            pending = kind == "acquire_semaphore_pending"
            if pending:
                self._wait(hold)
            else:
                hold.ask = None
                self.result(hold, body)
            if not answered:
                answered = True
                self._expect(hold.name, waiting=pending)
                self._lanes.of(hold.name).end(member)
            return not pending

        hold.ask = member.strand.ask(make, heard)

    def _expect(self, name: str, *, waiting: bool) -> None:
        """Take note of how a request for that name fared: the next is most likely to fare so."""
        if not waiting:
            self._contended.discard(name)
        elif len(self._contended) < _MOST_CONTENDED:
            self._contended.add(name)

    def left(self, hold: Hold) -> float | None:
        """Seconds that it still waits, for the server."""
        if hold.at_once:
            return 0.0
        if hold.deadline is None:
            return None
        left = hold.deadline - self._session.now()
        return None if left > LONGEST_WAIT else max(left, 0.0)

    def _wait(self, hold: Hold) -> None:
        if hold.state is State.ASKED:
            hold.state = State.WAITS
            self._session.waits(hold)
        _answer(hold, Enqueued(Place.WAITING, None))

    def result(self, hold: Hold, body: Message) -> None:
        """Process the answer to a request that was sent, or waited.

        It may be leaving already; then only the answer to `enqueue` is still to be given.
        """
        leaving = hold.state is State.LEAVING
        if body.status == Status.SUCCESS and body.acquired:
            hold.taken = True
            if not leaving:
                self._take(hold)
        elif body.status == Status.SUCCESS and hold.at_once:
            _answer(hold, Enqueued(Place.REFUSED, None))
            if not leaving:
                self._forget(hold)
        elif body.status == Status.SUCCESS:
            if not leaving:
                self.removed(hold, Removal.TIMED_OUT)
        elif body.status == Status.ABORTED:
            if not leaving:
                self._find_out(hold)
        elif hold.state is State.WAITS:
            if body.status == Status.NOT_FOUND:  # deleted, while the connection was broken
                self.removed(hold, Removal.DELETED)
            else:
                self.later(AGAIN, partial(self._acquire_again, hold))
        else:
            self._refused(hold, body)

    def _acquire_again(self, hold: Hold) -> None:
        if hold.state is State.WAITS and hold.ask is None:
            self._acquire(hold)

    def _refused(self, hold: Hold, body: Message) -> None:
        """The server has not taken a request."""
        if body.status in {Status.BAD_REQUEST, Status.PRECONDITION_FAILED}:
            self._explain(hold, body)
            return
        error = errors.semaphore_error(self._node, hold.name, body)
        if body.status == Status.NOT_FOUND:
            self._refuse(hold, error)
            return
        if hold.state is not State.LEAVING:
            self._release(hold)  # whether it was taken after all is not certain: it is made so
        _fail(hold, error)

    def _refuse(self, hold: Hold, error: TenureError) -> None:
        if hold.state is not State.LEAVING:
            self._forget(hold)
        _fail(hold, error)

    def _explain(self, hold: Hold, body: Message | None = None) -> bool:
        """Look what is wrong with a request, so that it gets the error it would get anywhere."""
        hold.refused = True
        member = hold.member or self._session.main
        if body is None:
            lane = self._lanes.of(hold.name)
            if not lane.free_for(member):
                return False
            lane.begin(member)
        elif hold.state is not State.LEAVING:
            self._forget(hold)

        def heard(_: str, found: Message) -> bool:
            self._refuse(hold, self._wrong(hold, found, body))
            if body is None:
                self._lanes.of(hold.name).end(member)
            return True

        member.strand.ask(lambda req_id: messages.describe(req_id, hold.name), heard)
        return True

    def _wrong(self, hold: Hold, found: Message, refused: Message | None) -> TenureError:
        node, name = self._node, hold.name
        limit = EPHEMERAL_LIMIT
        try:
            if found.status == Status.SUCCESS:
                semaphore = found.semaphore_description
                limit = semaphore.limit
                rules.check_kind(hold.ephemeral, semaphore.ephemeral, node, name)
            elif found.status != Status.NOT_FOUND or not hold.ephemeral:
                return errors.semaphore_error(node, name, found)
            rules.check_count(hold.count, limit, node, name)
        except TenureError as error:
            return error
        assert refused is not None  # or else the count would be wrong
        return errors.semaphore_error(node, name, refused)

    # Owning

    def _take(self, hold: Hold) -> None:
        """It owns."""
        if not self._session.fencing:
            self._own(hold)
        else:
            hold.state = State.TAKEN
            if not hold.order_id_asked:
                self._ask_order_id(hold)

    def _ask_order_id(self, hold: Hold) -> None:
        member = hold.member
        assert member is not None
        hold.order_id_asked = True

        def heard(_: str, body: Message) -> bool:
            hold.order_id_asked = False
            if hold.taken and hold.state in {State.TAKEN, State.LEAVING}:
                self._learn(hold, body)
            return True

        member.strand.ask(lambda req_id: messages.describe(req_id, hold.name, owners=True), heard)

    def _learn(self, hold: Hold, body: Message) -> None:
        """The order id is among the owners'."""
        assert hold.member is not None
        owners = body.semaphore_description.owners if body.status == Status.SUCCESS else ()
        for owner in owners:
            if owner.session_id == hold.member.id:
                hold.order_id = owner.order_id
        if hold.state is State.LEAVING:
            _answer(hold, Enqueued(Place.GRANTED, hold.order_id))
        elif hold.order_id is not None:
            self._own(hold)
        elif body.status == Status.SUCCESS:
            self.removed(hold, Removal.EVICTED)  # meanwhile
        elif body.status == Status.NOT_FOUND:
            self.removed(hold, Removal.DELETED)
        else:
            self.later(AGAIN, partial(self._learn_again, hold))

    def _learn_again(self, hold: Hold) -> None:
        if hold.state is State.TAKEN and not hold.order_id_asked:
            self._ask_order_id(hold)

    def _own(self, hold: Hold) -> None:
        hold.state = State.OWNS
        hold.owned_at = self._session.step()
        if not _answer(hold, Enqueued(Place.GRANTED, hold.order_id)):
            told = self._session.told
            if told is not None:
                told.granted(hold.number, hold.order_id)
        self._session.granted(hold)
        self._lanes.of(hold.name).move()

    # Altering

    def alter(
        self, number: int, count: int | None, data: bytes | None, timeout: float | Unchanged | None
    ) -> Answer[None]:
        hold = self._holds.get(number)
        if hold is None:
            raise released(self._node)
        answer: asyncio.Future[None] = self._session.future()
        self._lanes.of(hold.name).add(
            partial(self._altering.begin, hold, count, data, timeout, answer)
        )
        if answer.done():
            answer.result()
            return None
        return answer

    # Leaving

    def withdraw(self, number: int) -> Answer[Withdrawn]:
        hold = self._holds.get(number)
        if hold is None:
            return Withdrawn.MISSING
        answer: asyncio.Future[Withdrawn] = self._session.future()
        self._lanes.of(hold.name).add(partial(self._leave, hold, answer))
        return answer

    def _leave(self, hold: Hold, answer: asyncio.Future[Withdrawn]) -> bool:
        member = hold.member
        if hold.state is State.GONE or member is None:
            if not answer.done():
                answer.set_result(Withdrawn.MISSING)
            return True
        if hold.state is not State.LEAVING:
            lane = self._lanes.of(hold.name)
            if not lane.free_for(member):
                return False
            lane.begin(member)
            self._release(hold, in_lane=True)
        hold.leavers.append(answer)
        return True

    def _release(self, hold: Hold, *, in_lane: bool = False) -> None:
        """Have the server take it out of the queue, as often as that takes."""
        member = hold.member
        assert member is not None
        if hold.state is State.WAITS and hold.ask is not None:
            member.strand.drop(hold.ask)
        hold.state = State.LEAVING

        def heard(_: str, body: Message) -> bool:
            assert hold.release is not None
            hold.perhaps_out = hold.perhaps_out or hold.release.again
            if body.status in {Status.SUCCESS, Status.NOT_FOUND, Status.BAD_REQUEST}:
                was_there = body.status == Status.SUCCESS and body.released
                self._out(hold, was_there or hold.perhaps_out)
                lane = self._lanes.of(hold.name)
                if in_lane:
                    lane.end(member)
                else:
                    lane.move()
            else:
                hold.perhaps_out = True
                self.later(AGAIN, ask)
            return True

        def ask() -> None:
            release = partial(messages.release, name=hold.name)
            hold.release = member.strand.ask(release, heard)

        ask()

    def give_up(self, hold: Hold) -> None:
        """It has waited for as long as it wanted to, and the server does not know how long."""
        due = hold.deadline is not None and hold.deadline <= self._session.now()
        if hold.state is State.WAITS and due:
            told = self._session.told
            self._release(hold)
            if told is not None:
                told.removed(hold.number, Removal.TIMED_OUT)

    def removed(self, hold: Hold, why: Removal, *, release: bool = False) -> None:
        """It has left its queue, though the program did not ask for it.

        Args:
            release: the server has another request in its place now, which no caller made.
        """
        hold.lost = True
        if release:
            self._release(hold)
        else:
            self._forget(hold)
        _answer(hold, Enqueued(Place.WAITING, None))
        told = self._session.told
        if told is not None:
            told.removed(hold.number, why)
        self._lanes.of(hold.name).move()

    def _find_out(self, hold: Hold) -> None:
        """A waiter was taken out of its queue: by the deletion of that, or alone?"""
        member = hold.member
        assert member is not None
        hold.state = State.LEAVING  # as far as its strand is concerned

        def heard(_: str, body: Message) -> bool:
            self.removed(
                hold, Removal.DELETED if body.status == Status.NOT_FOUND else Removal.EVICTED
            )
            hold.tell_leavers(Withdrawn.MISSING)
            return True

        member.strand.ask(lambda req_id: messages.describe(req_id, hold.name), heard)

    def _out(self, hold: Hold, was_there: bool) -> None:
        self._forget(hold)
        if not hold.refused:  # otherwise the error is still to be reported
            place = Place.GRANTED if hold.taken else Place.WAITING
            _answer(hold, Enqueued(place, hold.order_id))
        left = was_there and not hold.lost
        hold.tell_leavers(Withdrawn.LEFT if left else Withdrawn.MISSING)

    def _forget(self, hold: Hold) -> None:
        hold.state = State.GONE
        if hold.member is not None:
            hold.member.drop(hold)
        self._holds.pop(hold.number, None)
        holds = self._by_name.get(hold.name)
        if holds is not None:
            holds.pop(hold, None)
            if not holds:
                del self._by_name[hold.name]

    def fail_member(self, member: Member, error: TenureError) -> None:
        """A sibling cannot be attached; what was asked of it has not come about."""
        for hold in list(member.holds.values()):
            self._refuse(hold, error)
            hold.tell_leavers(Withdrawn.MISSING)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        if self._over:
            return

        def go() -> None:
            self._timers.discard(timer)
            what()

        timer = self._loop.call_later(seconds, go)
        self._timers.add(timer)


def _is_count(count: int) -> bool:
    """Check that the protocol can express it."""
    return isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT


def _answer(hold: Hold, enqueued: Enqueued) -> bool:
    """Give the answer to a request, if it has none yet; return false if it has one."""
    if hold.answer.done():
        return False
    hold.answer.set_result(enqueued)
    return True


def _fail(hold: Hold, error: TenureError) -> None:
    if not hold.answer.done():
        hold.answer.set_exception(error)
