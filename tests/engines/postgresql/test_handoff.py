"""Requests of one session that stand side by side in a queue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tenure.engines.postgresql.handoff import Handoff


def a_chain(*numbers: int) -> Handoff:
    """Return a hand-off that knows requests side by side; the first one is the owner."""
    handoff = Handoff()
    for number in numbers:
        assert join(handoff, number, 10 * (number - 1)) is None
    return handoff


def join(handoff: Handoff, number: int, ahead: int, deadline: float | None = None) -> int | None:
    """Have an exclusive request join, with ten times its number as order id."""
    handoff.joined(number, 10 * number)
    return handoff.note_exclusive(number, ahead, deadline)


def test_a_release_makes_the_request_directly_behind_the_next_owner() -> None:
    handoff = a_chain(1, 2, 3)
    assert handoff.released(1) == 2
    assert handoff.released(2) == 3
    assert handoff.released(3) is None


def test_a_request_that_joins_behind_a_release_under_way_is_the_next_owner() -> None:
    handoff = a_chain(1)
    assert handoff.released(1) is None
    assert join(handoff, 2, 10) == 2


def test_a_request_behind_one_of_another_session_is_unknown() -> None:
    handoff = a_chain(1)
    assert join(handoff, 3, 20) is None
    assert handoff.released(1) is None


def test_a_withdrawal_in_between_brings_its_neighbours_together() -> None:
    handoff = a_chain(1, 2, 3)
    assert handoff.left(2) is None
    assert handoff.released(1) == 3


def test_a_withdrawal_behind_a_release_makes_the_request_behind_it_the_next_owner() -> None:
    handoff = a_chain(1, 2, 3)
    handoff.released(1)
    assert handoff.left(2) == 3


def test_a_confirmed_release_is_forgotten_and_the_store_grants_to_what_is_behind() -> None:
    handoff = a_chain(1, 2)
    handoff.released(1)
    handoff.confirmed(1)
    assert join(handoff, 3, 10) is None
    assert handoff.left(2) is None
    assert handoff.order_ids == {3: 30}


def test_an_owner_that_was_removed_hands_nothing_on() -> None:
    handoff = a_chain(1, 2, 3)
    assert handoff.left(1) is None
    assert handoff.released(2) == 3


def test_a_request_with_a_timeout_is_handed_on_to_by_a_release_alone() -> None:
    handoff = a_chain(1)
    assert join(handoff, 2, 10, 99.0) is None
    assert handoff.released(1) == 2
    assert handoff.deadline(2) == 99.0
    assert join(handoff, 3, 20, 99.0) is None
    assert handoff.left(2) is None  # the release on the way does not name 3
    assert handoff.released(1) == 3  # if it is repeated, it does
    handoff.confirmed(1)
    handoff.left(3)
    assert handoff.deadline(3) is None


def test_a_request_that_shares_is_no_neighbour() -> None:
    handoff = a_chain(1)
    handoff.joined(2, 20)
    assert join(handoff, 3, 20) is None
    assert handoff.released(1) is None
    assert handoff.released(2) is None
    handoff.confirmed(1)
    handoff.confirmed(2)
    assert handoff.order_ids == {3: 30}


def test_a_request_that_changes_has_no_neighbours_any_more() -> None:
    handoff = a_chain(1, 2, 3)
    handoff.note_changed(2)
    assert handoff.released(1) is None
    assert handoff.released(2) is None
    assert join(handoff, 4, 20) is None
    assert handoff.released(3) is None
    handoff.note_changed(9)


def test_a_request_that_joins_behind_one_that_the_store_removed_takes_its_place() -> None:
    handoff = a_chain(1, 2)
    assert join(handoff, 3, 10) is None  # 2 was removed, which is reported later
    assert handoff.left(2) is None
    assert handoff.released(1) == 3
    handoff.confirmed(1)
    handoff.released(3)
    handoff.confirmed(3)
    assert handoff.order_ids == {}


def test_requests_stand_side_by_side_until_one_has_left() -> None:
    handoff = a_chain(1, 2, 3)
    assert [*handoff.side_by_side(3)] == [3, 2, 1]
    handoff.released(1)
    assert [*handoff.side_by_side(3)] == [3, 2, 1]
    handoff.confirmed(1)
    assert [*handoff.side_by_side(3)] == [3, 2]
    assert [*handoff.side_by_side(9)] == [9]


def test_what_is_unknown_changes_nothing() -> None:
    handoff = Handoff()
    assert handoff.released(1) is None
    assert handoff.left(1) is None
    handoff.confirmed(1)
    assert handoff.order_ids == {}


@dataclass
class Program:
    """A session, the queue in the store, and what is on the way to it.

    Attributes:
        queue: the session's requests by number, and 0 for those of others.
        order_ids: of the requests in the queue.
        sent: operations on the way to the store.
        owned: requests that the session may consider owners.
        waiting: requests that wait, as far as the session knows.
        removed: requests that the store has removed, which is not reported yet.
    """

    handoff: Handoff = field(default_factory=Handoff)
    queue: list[int] = field(default_factory=list)
    order_ids: list[int] = field(default_factory=list)
    sent: deque[tuple[str, int]] = field(default_factory=deque)
    owned: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    removed: deque[int] = field(default_factory=deque)
    latest: int = 0

    def join(self, number: int) -> None:
        """Have the store add a request, and report what is directly ahead."""
        self.latest += 1
        ahead = self.order_ids[-1] if self.queue else 0
        self.queue.append(number)
        self.order_ids.append(self.latest)
        if number:
            self.waiting.add(number)
            self.handoff.joined(number, self.latest)
            self.hand_on(self.handoff.note_exclusive(number, ahead))
        self.grant()

    def leave(self, place: int) -> None:
        """Have the store remove a request."""
        del self.queue[place], self.order_ids[place]
        self.grant()

    def grant(self) -> None:
        """Have the store report the owner."""
        if self.queue and self.queue[0] in self.waiting:
            self.waiting.discard(self.queue[0])
            self.owned.add(self.queue[0])

    def hand_on(self, number: int | None) -> None:
        """Check that the request is the owner once everything sent has arrived."""
        if number is None:
            return
        leaving = {each for kind, each in self.sent if kind == "leave"}
        staying = [each for each in self.queue if each not in leaving]
        assert number in self.removed or staying[0] == number
        self.waiting.discard(number)
        self.owned.add(number)

    def withdraw(self, number: int) -> None:
        """Send a withdrawal of a request whose place is known."""
        self.sent.append(("leave", number))
        owned = number in self.owned
        self.owned.discard(number)
        self.waiting.discard(number)
        if owned:
            self.hand_on(self.handoff.released(number))
        else:
            self.hand_on(self.handoff.left(number))

    def deliver(self) -> None:
        """Have the oldest operation arrive."""
        if self.sent:
            kind, number = self.sent.popleft()
            if kind == "join":
                self.join(number)
            else:
                if number in self.queue:
                    self.leave(self.queue.index(number))
                self.handoff.confirmed(number)

    def report(self) -> None:
        """Report the oldest removal to the session."""
        number = self.removed.popleft()
        if number in self.waiting:
            self.waiting.discard(number)
            self.hand_on(self.handoff.left(number))
        elif number in self.owned:
            self.owned.discard(number)
            self.handoff.confirmed(number)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("send", "other", "withdraw", "deliver", "gone", "remove", "report")),
        st.integers(0, 9),
    ),
    max_size=80,
)


@given(_STEPS)
def test_a_request_is_the_owner_in_the_store_as_soon_as_the_releases_have_arrived(
    steps: list[tuple[str, int]],
) -> None:
    program = Program()
    for number, (kind, choice) in enumerate(steps, 1):
        known = sorted(program.owned | program.waiting)
        others = [at for at, each in enumerate(program.queue) if not each]
        if kind == "send":
            program.sent.append(("join", number))
        elif kind == "other":
            program.join(0)
        elif kind == "withdraw" and known:
            program.withdraw(known[choice % len(known)])
        elif kind == "deliver":
            program.deliver()
        elif kind == "gone" and others:
            program.leave(others[choice % len(others)])
        elif kind == "remove" and any(program.queue):
            mine = [at for at, each in enumerate(program.queue) if each]
            place = mine[choice % len(mine)]
            program.removed.append(program.queue[place])
            program.leave(place)
        elif kind == "report" and program.removed:
            program.report()
        assert len(program.owned.difference(program.removed)) <= 1
    while program.sent:
        program.deliver()
    while program.removed:
        program.report()
    for each in sorted(program.owned | program.waiting):
        program.withdraw(each)
        while program.sent:
            program.deliver()
    assert program.handoff.order_ids == {}
