"""Nodes, sessions, semaphores and deadlines, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.core import rules
from tenure.core.node import StoredRequest, StoredSession
from tenure.core.store import CHANGED, DELETED, ENDED, EVICTED, GRANTED, TIMED_OUT, Store
from tenure.errors import (
    AuthenticationFailed,
    InvalidArgument,
    LeaseReleased,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.model import EPHEMERAL_LIMIT, NodeConfig


class Bench:
    """A store, a clock, and short words for the commands."""

    def __init__(self) -> None:
        self.store = Store()
        self.now = 0.0
        self.holds = 0

    def attach(self, path: str = "/default", window: float = 10.0) -> StoredSession:
        return self.store.attach(path, "", window, "process", b"", self.now)

    def enqueue(
        self,
        session: StoredSession,
        name: str = "x",
        count: int = EPHEMERAL_LIMIT,
        timeout: float | None = None,
        *,
        ephemeral: bool = True,
        data: bytes = b"",
    ) -> StoredRequest | None:
        self.holds += 1
        order_id = self.store.last_order_id + 1
        return self.store.enqueue(
            session, self.holds, name, count, data, timeout, ephemeral, self.now, order_id
        )

    def put(self, *arguments: Any, **named: Any) -> StoredRequest:
        request = self.enqueue(*arguments, **named)
        assert request is not None
        return request

    def create(self, name: str = "pool", limit: int = 4, data: bytes = b"") -> None:
        self.store.create(self.store.node("/default"), name, limit, data, exist_ok=False)

    def effects(self) -> list[tuple[int, Any]]:
        """(kind, what), and none of them a second time."""
        effects = [(effect[1], effect[2]) for effect in self.store.effects]
        self.store.effects.clear()
        return effects


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Nodes


def test_a_node_exists_once(bench: Bench) -> None:
    bench.store.create_node("/a", NodeConfig(2.0), exist_ok=False)
    with pytest.raises(NodeExists):
        bench.store.create_node("/a", NodeConfig(), exist_ok=False)
    bench.store.create_node("/a", NodeConfig(3.0), exist_ok=True)
    assert bench.store.node("/a").config.self_check_period == 2.0


def test_a_node_that_is_not_there_is_an_error(bench: Bench) -> None:
    for call in (
        lambda: bench.store.node("/a"),
        lambda: bench.attach("/a"),
        lambda: bench.store.alter_node("/a", NodeConfig()),
        lambda: bench.store.drop_node("/a", force=True),
    ):
        with pytest.raises(NodeNotFound):
            call()


def test_altering_changes_what_is_set(bench: Bench) -> None:
    bench.store.alter_node("/default", NodeConfig(session_grace_period=3))
    assert bench.store.node("/default").config.session_grace_period == 3


def test_a_node_with_attached_sessions_is_dropped_by_force_only(bench: Bench) -> None:
    bench.store.create_node("/a", NodeConfig(), exist_ok=False)
    session = bench.attach("/a")
    bench.put(session)
    watcher = bench.attach("/a")
    bench.store.watch(watcher, "x", data=True, owners=True, sink=None)
    with pytest.raises(NodeBusy):
        bench.store.drop_node("/a", force=False)
    bench.store.drop_node("/a", force=True)
    assert [kind for kind, _ in bench.effects()] == [ENDED, ENDED]
    assert not session.alive
    with pytest.raises(NodeNotFound):
        bench.store.node("/a")


def test_detached_sessions_do_not_hold_a_node(bench: Bench) -> None:
    bench.store.create_node("/a", NodeConfig(), exist_ok=False)
    session = bench.attach("/a")
    bench.store.detach(session, bench.now)
    bench.store.detach(session, bench.now)
    bench.store.drop_node("/a", force=False)
    bench.store.detach(session, bench.now)
    assert not session.alive


def test_the_default_node_cannot_be_dropped(bench: Bench) -> None:
    with pytest.raises(InvalidArgument):
        bench.store.drop_node("/default", force=True)


# Sessions


def test_session_ids_are_never_used_again(bench: Bench) -> None:
    first = bench.attach()
    bench.store.close(first, bench.now)
    bench.store.close(first, bench.now)
    assert bench.attach().id > first.id


def test_a_node_has_room_for_so_many_sessions_and_semaphores(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "SESSIONS_PER_NODE", 1)
    monkeypatch.setattr(rules, "SEMAPHORES_PER_NODE", 1)
    session = bench.attach()
    with pytest.raises(InvalidArgument, match="sessions"):
        bench.attach()
    bench.put(session, "one")
    with pytest.raises(InvalidArgument, match="semaphores"):
        bench.enqueue(session, "two")


def test_a_session_that_is_not_heard_of_for_its_window_is_over(bench: Bench) -> None:
    session = bench.attach(window=10)
    other = bench.attach(window=100)
    bench.put(session)
    waiter = bench.put(other)
    bench.effects()
    bench.now = 9
    assert session.touch(bench.now)
    bench.now = 18.9
    bench.store.expire(bench.now)
    assert session.alive
    assert bench.store.next_deadline() == 19
    bench.store.expire(19)
    assert [kind for kind, _ in bench.effects()] == [ENDED, GRANTED]
    assert waiter.granted_at == 19
    assert not session.touch(20)
    with pytest.raises(SessionExpired):
        bench.enqueue(session)


def test_a_session_that_closes_leaves_all_its_queues_in_one_step(bench: Bench) -> None:
    closing, other = bench.attach(), bench.attach()
    for name in ("a", "b"):
        bench.put(closing, name)
        bench.put(closing, name)
        bench.put(other, name)
    bench.effects()
    bench.store.close(closing, bench.now)
    granted = [what for kind, what in bench.effects() if kind == GRANTED]
    assert [request.session for request in granted] == [other, other]
    assert not closing.requests


def test_an_ended_session_is_told_why(bench: Bench) -> None:
    session = bench.attach()
    bench.store.close(session, bench.now, "because")
    assert bench.effects() == [(ENDED, "because")]


# Semaphores


def test_a_semaphore_exists_once_and_its_limit_sticks(bench: Bench) -> None:
    node = bench.store.node("/default")
    bench.create("pool", 4)
    bench.store.create(node, "pool", 4, b"other", exist_ok=True)
    assert node.semaphores["pool"].data == b""
    with pytest.raises(SemaphoreExists):
        bench.create("pool", 4)
    with pytest.raises(SemaphoreExists) as error:
        bench.store.create(node, "pool", 5, b"", exist_ok=True)
    assert error.value.limit == 4


def test_one_name_is_one_kind(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool")
    with pytest.raises(InvalidArgument):
        bench.enqueue(session, "pool")
    bench.put(session, "mutex")
    with pytest.raises(InvalidArgument):
        bench.create("mutex")
    with pytest.raises(InvalidArgument):
        bench.enqueue(session, "mutex", 1, ephemeral=False)


def test_a_semaphore_that_is_not_there_is_an_error(bench: Bench) -> None:
    session, node = bench.attach(), bench.store.node("/default")
    for call in (
        lambda: bench.enqueue(session, "nothing", 1, ephemeral=False),
        lambda: bench.store.update(node, "nothing", b""),
        lambda: bench.store.delete(node, "nothing", force=True),
        lambda: bench.store.evict(node, "nothing", 1, 0.0),
    ):
        with pytest.raises(SemaphoreNotFound):
            call()


def test_an_ephemeral_semaphore_goes_with_its_last_request(bench: Bench) -> None:
    session, node = bench.attach(), bench.store.node("/default")
    one, two = bench.put(session), bench.put(session)
    bench.store.withdraw(session, one.request_id, bench.now)
    assert "x" in node.semaphores
    bench.store.withdraw(session, two.request_id, bench.now)
    bench.store.withdraw(session, two.request_id, bench.now)
    assert "x" not in node.semaphores


def test_a_busy_semaphore_is_deleted_by_force_only_and_everyone_in_it_learns_it(
    bench: Bench,
) -> None:
    session, node = bench.attach(), bench.store.node("/default")
    bench.create("pool", 1)
    owner = bench.put(session, "pool", 1, ephemeral=False)
    waiter = bench.put(session, "pool", 1, 5.0, ephemeral=False)
    bench.effects()
    with pytest.raises(SemaphoreBusy):
        bench.store.delete(node, "pool", force=False)
    bench.store.delete(node, "pool", force=True)
    assert bench.effects() == [(DELETED, owner), (DELETED, waiter)]
    assert not session.requests
    bench.store.expire(6.0)
    assert bench.effects() == []


# Requests


def test_a_small_request_does_not_pass_a_large_one_that_waits(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    three = bench.put(session, "pool", 3, ephemeral=False)
    two = bench.put(session, "pool", 2, ephemeral=False)
    one = bench.put(session, "pool", 1, ephemeral=False)
    assert bench.enqueue(session, "pool", 1, 0.0, ephemeral=False) is None
    assert (two.granted_at, one.granted_at) == (None, None)
    bench.store.withdraw(session, three.request_id, 1.0)
    assert bench.effects() == [(GRANTED, two), (GRANTED, one)]


def test_who_does_not_wait_does_not_queue_behind_one_that_has_the_whole(bench: Bench) -> None:
    session = bench.attach()
    bench.put(session)  # of a limit so great that the counts are not added up
    assert bench.enqueue(session, "x", 1, 0.0) is None
    assert list(session.requests) == [1]


def test_a_waiter_that_leaves_lets_those_behind_it_in(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 3, ephemeral=False)
    two = bench.put(session, "pool", 2, ephemeral=False)
    one = bench.put(session, "pool", 1, ephemeral=False)
    bench.store.withdraw(session, two.request_id, 1.0)
    assert bench.effects() == [(GRANTED, one)]


def test_a_waiter_in_the_middle_leaves_the_others_in_order(bench: Bench) -> None:
    session = bench.attach()
    requests = [bench.put(session) for _ in range(5)]
    bench.store.withdraw(session, requests[2].request_id, 0.0)
    bench.store.withdraw(session, requests[4].request_id, 0.0)
    semaphore = session.node.semaphore("x")
    assert list(semaphore) == [requests[0], requests[1], requests[3]]
    assert semaphore.last is requests[3]
    assert semaphore.waiting == 2


def test_a_waiter_whose_time_is_up_leaves_the_queue(bench: Bench) -> None:
    session = bench.attach(window=100)
    owner = bench.put(session)
    late = bench.put(session, "x", EPHEMERAL_LIMIT, 5.0)
    patient = bench.put(session)
    assert bench.store.next_deadline() == 5
    bench.store.expire(5)
    assert bench.effects() == [(TIMED_OUT, late)]
    bench.store.withdraw(session, owner.request_id, 6.0)
    assert bench.effects() == [(GRANTED, patient)]


def test_a_waiter_that_was_granted_has_no_deadline_any_more(bench: Bench) -> None:
    session = bench.attach(window=100)
    owner = bench.put(session)
    waiter = bench.put(session, "x", EPHEMERAL_LIMIT, 5.0)
    bench.store.withdraw(session, owner.request_id, 1.0)
    bench.effects()
    bench.store.expire(50)
    assert bench.effects() == []
    assert waiter.granted_at == 1


def test_an_expiry_at_the_same_instant_grants_before_it_times_out(bench: Bench) -> None:
    dying, living = bench.attach(window=5), bench.attach(window=100)
    bench.put(dying)
    waiter = bench.put(living, "x", EPHEMERAL_LIMIT, 5.0)
    bench.store.expire(5)
    assert [kind for kind, _ in bench.effects()] == [ENDED, GRANTED]
    assert waiter.granted_at == 5


def test_sessions_that_run_out_together_leave_together(bench: Bench) -> None:
    one, two, three = bench.attach(window=5), bench.attach(window=5), bench.attach(window=100)
    bench.put(one)
    bench.put(two)
    waiter = bench.put(three)
    bench.store.expire(5)
    assert [what for kind, what in bench.effects() if kind == GRANTED] == [waiter]


def test_sessions_that_run_out_together_let_others_in_wherever_they_were(bench: Bench) -> None:
    waiting = bench.attach(window=100)
    for name in ("a", "b"):
        bench.put(bench.attach(window=5), name)
    waiters = [bench.put(waiting, name) for name in ("a", "b")]
    bench.store.expire(5)
    assert [what for kind, what in bench.effects() if kind == GRANTED] == waiters


def test_deadlines_that_have_become_wrong_do_not_pile_up(bench: Bench) -> None:
    session = bench.attach(window=1000)
    bench.put(session)
    for _ in range(5000):
        waiter = bench.put(session, "x", EPHEMERAL_LIMIT, 3600.0)
        bench.store.withdraw(session, waiter.request_id, 0.0)
    assert len(bench.store._deadlines) <= 1001
    late = bench.put(session, "x", EPHEMERAL_LIMIT, 5.0)
    bench.effects()
    bench.store.expire(5.0)
    assert bench.effects() == [(TIMED_OUT, late)]


def test_a_request_may_shrink_and_change_its_data_in_place(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    big = bench.put(session, "pool", 4, ephemeral=False)
    waiter = bench.put(session, "pool", 2, ephemeral=False)
    bench.store.alter(session, big.request_id, 2, b"new", 1.0)
    assert bench.effects() == [(GRANTED, waiter)]
    assert (big.count, big.data) == (2, b"new")
    with pytest.raises(InvalidArgument):
        bench.store.alter(session, big.request_id, 3, None, 1.0)
    bench.store.withdraw(session, big.request_id, 1.0)
    with pytest.raises(LeaseReleased):
        bench.store.alter(session, big.request_id, 1, None, 1.0)


def test_a_waiter_that_shrinks_may_own_at_once(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 3, ephemeral=False)
    waiter = bench.put(session, "pool", 2, ephemeral=False)
    bench.store.alter(session, waiter.request_id, 1, None, 1.0)
    assert bench.effects() == [(GRANTED, waiter)]


def test_a_waiter_may_be_given_more_time_or_less_and_the_last_word_counts(bench: Bench) -> None:
    session = bench.attach(window=100)
    bench.put(session)
    waiter = bench.put(session, "x", EPHEMERAL_LIMIT, 5.0)
    bench.effects()
    for at, timeout, deadline in ((1.0, 8.0, 9.0), (2.0, 3.0, 5.0), (4.0, 6.0, 10.0)):
        bench.store.alter(session, waiter.request_id, None, None, at, timeout)
        assert waiter.deadline == deadline
    bench.store.alter(session, waiter.request_id, None, b"other", 4.5)
    bench.store.expire(9.9)
    assert bench.effects() == []
    bench.store.expire(10.0)
    assert bench.effects() == [(TIMED_OUT, waiter)]


def test_a_waiter_that_was_given_all_the_time_there_is_does_not_give_up(bench: Bench) -> None:
    session = bench.attach(window=100)
    bench.put(session)
    waiter = bench.put(session, "x", EPHEMERAL_LIMIT, 5.0)
    bench.store.alter(session, waiter.request_id, None, None, 1.0, None)
    bench.store.expire(50.0)
    assert list(session.requests) == [1, waiter.request_id]
    bench.store.alter(session, waiter.request_id, None, None, 50.0, 2.0)
    assert bench.store.next_deadline() == 52.0


def test_a_waiter_left_without_time_goes_and_lets_those_behind_it_in(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 3, ephemeral=False)
    two = bench.put(session, "pool", 3, ephemeral=False)
    one = bench.put(session, "pool", 1, ephemeral=False)
    bench.store.watch(session, "pool", data=False, owners=True, sink=None)
    bench.store.alter(session, two.request_id, 2, None, 1.0, 0)
    assert [kind for kind, _ in bench.effects()] == [TIMED_OUT, GRANTED, CHANGED]
    assert (one.granted_at, two.granted_at) == (1.0, None)
    assert two.request_id not in session.requests


def test_a_waiter_left_without_time_owns_when_what_it_asks_for_now_fits(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 3, ephemeral=False)
    waiter = bench.put(session, "pool", 2, 5.0, ephemeral=False)
    bench.store.alter(session, waiter.request_id, 1, None, 1.0, 0)
    assert bench.effects() == [(GRANTED, waiter)]
    for timeout in (0, 3.0, None):
        bench.store.alter(session, waiter.request_id, None, None, 2.0, timeout)
    bench.store.expire(9.0)
    assert bench.effects() == []
    assert (waiter.granted_at, waiter.deadline) == (1.0, None)


def test_a_timeout_that_is_refused_leaves_the_request_alone(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 4, ephemeral=False)
    waiter = bench.put(session, "pool", 2, 5.0, ephemeral=False)
    with pytest.raises(InvalidArgument):
        bench.store.alter(session, waiter.request_id, 1, b"new", 1.0, -1)
    with pytest.raises(InvalidArgument):
        bench.store.alter(session, waiter.request_id, 3, b"new", 1.0, 1)
    assert (waiter.count, waiter.data, waiter.deadline) == (2, b"", 5.0)


def test_an_administrator_can_evict_one_request(bench: Bench) -> None:
    session, node = bench.attach(), bench.store.node("/default")
    owner, waiter = bench.put(session), bench.put(session)
    assert not bench.store.evict(node, "x", waiter.order_id + 1, 0.0)
    assert bench.store.evict(node, "x", owner.order_id, 0.0)
    assert bench.effects() == [(EVICTED, owner), (GRANTED, waiter)]


def test_sizes_are_checked_before_anything_changes(bench: Bench) -> None:
    session = bench.attach()
    huge = b"x" * (rules.DATA_BYTES + 1)
    with pytest.raises(InvalidArgument):
        bench.enqueue(session, data=huge)
    with pytest.raises(InvalidArgument):
        bench.enqueue(session, "x", 1, -1.0)
    assert not session.requests
    assert not session.node.semaphores
    owner = bench.put(session)
    with pytest.raises(InvalidArgument):
        bench.store.alter(session, owner.request_id, None, huge, 0.0)


# Watches


def test_a_watch_hears_of_what_it_watches_once_a_command(bench: Bench) -> None:
    session, node = bench.attach(), bench.store.node("/default")
    bench.create("pool", 1)
    data = bench.store.watch(session, "pool", data=True, owners=False, sink=None)
    owners = bench.store.watch(session, "pool", data=False, owners=True, sink=None)
    bench.store.update(node, "pool", b"new")
    assert bench.effects() == [(CHANGED, data)]
    bench.store.update(node, "pool", b"new")
    assert bench.effects() == []
    one = bench.put(session, "pool", 1, ephemeral=False)
    assert bench.effects() == [(CHANGED, owners)]
    two = bench.put(session, "pool", 1, ephemeral=False)
    assert bench.effects() == []  # waiters never notify
    bench.store.alter(session, two.request_id, None, b"waiting", 0.0)
    bench.store.alter(session, one.request_id, None, b"", 0.0)
    assert bench.effects() == []
    bench.store.alter(session, one.request_id, None, b"owning", 0.0)
    assert bench.effects() == [(CHANGED, owners)]
    bench.store.withdraw(session, one.request_id, 0.0)
    assert bench.effects() == [(GRANTED, two), (CHANGED, owners)]
    bench.store.delete(node, "pool", force=True)
    assert bench.effects() == [(DELETED, two), (CHANGED, data), (CHANGED, owners)]
    bench.create("pool", 1)
    assert bench.effects() == [(CHANGED, data), (CHANGED, owners)]
    data.stop()
    data.stop()
    bench.store.detach(session, bench.now)
    bench.create("other")
    bench.store.delete(node, "pool", force=False)
    assert bench.effects() == []


def test_a_take_over_raises_the_attach_number_and_ends_the_watches(bench: Bench) -> None:
    session = bench.store.attach("/default", "", 10.0, "window", b"key", 0.0)
    bench.put(session)
    bench.store.watch(session, "x", data=True, owners=True, sink=None)
    bench.store.detach(session, 3.0)
    assert bench.store.take_over("/default", session.id, b"key") is session
    assert (session.attached, session.attach_number, session.last_contact) == (True, 2, 3.0)
    assert not session.watches
    assert len(session.requests) == 1


def test_a_take_over_needs_the_key_a_lasting_session_and_a_living_one(bench: Bench) -> None:
    session = bench.store.attach("/default", "", 10.0, "window", b"key", 0.0)
    mortal = bench.attach()
    watch = bench.store.watch(session, "x", data=True, owners=True, sink=None)
    for key in (b"", b"kez"):
        with pytest.raises(AuthenticationFailed, match="another key"):
            bench.store.take_over("/default", session.id, key)
    with pytest.raises(InvalidArgument, match="ends with its process"):
        bench.store.take_over("/default", mortal.id, b"")
    with pytest.raises(NodeNotFound):
        bench.store.take_over("/other", session.id, b"key")
    assert session.attach_number == 1
    assert watch in session.watches
    bench.store.close(session, 0.0)
    with pytest.raises(SessionExpired, match="cannot be resumed"):
        bench.store.take_over("/default", session.id, b"key")


def test_a_session_lives_for_the_window_that_it_has_adopted(bench: Bench) -> None:
    session = bench.store.attach("/default", "first", 30.0, "window", b"", 0.0)
    for window in (20.0, 60.0, 5.0, 4.0, 12.0):
        bench.store.adopt(session, window, f"{window:g} s")
    assert (session.window, session.description) == (12.0, "12 s")
    bench.store.expire(11.0)
    assert bench.effects() == []
    bench.store.expire(12.0)
    assert [kind for kind, _ in bench.effects()] == [ENDED]
    bench.store.expire(100.0)  # what was to be looked at later means nothing any more
    assert bench.effects() == []


def test_sessions_that_adopt_windows_again_and_again_leave_nothing_behind(bench: Bench) -> None:
    session = bench.store.attach("/default", "", 1000.0, "window", b"", 0.0)
    for number in range(5000):
        bench.store.adopt(session, 1000.0 - number / 100, "")
    assert len(bench.store._deadlines) <= 1000
    with pytest.raises(InvalidArgument, match="recovery window"):
        bench.store.adopt(session, 0.5, "")


def test_a_watch_hears_of_an_ephemeral_semaphore_that_comes_and_goes(bench: Bench) -> None:
    session = bench.attach()
    watch = bench.store.watch(session, "x", data=False, owners=True, sink=None)
    owner = bench.put(session)
    assert bench.effects() == [(CHANGED, watch)]
    bench.store.withdraw(session, owner.request_id, 0.0)
    assert bench.effects() == [(CHANGED, watch)]


def test_a_timed_out_waiter_notifies_nobody(bench: Bench) -> None:
    session = bench.attach(window=100)
    bench.put(session)
    bench.store.watch(session, "x", data=True, owners=True, sink=None)
    late = bench.put(session, "x", EPHEMERAL_LIMIT, 1.0)
    bench.store.expire(1.0)
    assert bench.effects() == [(TIMED_OUT, late)]


def test_a_waiter_that_leaves_changes_nothing_for_the_owners(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 1)
    bench.put(session, "pool", 1, ephemeral=False)
    waiter = bench.put(session, "pool", 1, ephemeral=False)
    bench.store.watch(session, "pool", data=True, owners=True, sink=None)
    bench.effects()
    bench.store.withdraw(session, waiter.request_id, 0.0)
    assert bench.effects() == []


def test_a_session_s_end_is_a_change_where_it_owned_and_not_where_it_waited(bench: Bench) -> None:
    dying, other = bench.attach(), bench.attach()
    watched = []
    for name in ("owned", "owned and waited for", "waited for"):
        bench.create(name, 1)
        bench.put(other if name == "waited for" else dying, name, 1, ephemeral=False)
        watched.append(bench.store.watch(other, name, data=False, owners=True, sink=None))
    for name in ("owned and waited for", "waited for"):
        bench.put(dying, name, 1, ephemeral=False)
    bench.effects()
    bench.store.close(dying, 0.0)
    assert bench.effects() == [(CHANGED, watched[0]), (CHANGED, watched[1])]


def test_owners_that_come_in_without_another_s_leaving_are_a_change(bench: Bench) -> None:
    session = bench.attach()
    bench.create("pool", 4)
    bench.put(session, "pool", 2, ephemeral=False)
    large = bench.put(session, "pool", 4, ephemeral=False)
    behind = bench.put(session, "pool", 1, ephemeral=False)
    watch = bench.store.watch(session, "pool", data=False, owners=True, sink=None)
    bench.store.withdraw(session, large.request_id, 0.0)
    assert bench.effects() == [(GRANTED, behind), (CHANGED, watch)]
    late = bench.put(session, "pool", 3, ephemeral=False)
    bench.store.alter(session, late.request_id, 1, None, 0.0)
    assert bench.effects() == [(GRANTED, late), (CHANGED, watch)]


def test_a_waiter_whose_session_ends_at_its_deadline_is_gone_once(bench: Bench) -> None:
    owner, dying = bench.attach(window=100), bench.attach(window=5)
    bench.put(owner)
    bench.put(dying, "x", EPHEMERAL_LIMIT, 8.0)
    dying.touch(3.0)
    bench.store.expire(5.0)  # from here on the session is due after its waiter, at the same instant
    bench.store.expire(8.0)
    assert [kind for kind, _ in bench.effects()] == [ENDED]


def test_a_deadline_passes_in_the_order_of_time_however_late_it_is_noticed(bench: Bench) -> None:
    dying, living = bench.attach(window=6), bench.attach(window=100)
    bench.put(dying)
    early = bench.put(living, "x", EPHEMERAL_LIMIT, 5.0)
    late = bench.put(living, "x", EPHEMERAL_LIMIT, 7.0)
    bench.effects()
    bench.store.expire(50.0)
    assert [kind for kind, _ in bench.effects()] == [TIMED_OUT, ENDED, GRANTED]
    assert early.granted_at is None
    assert late.granted_at == 6


def test_a_session_with_two_entries_for_one_deadline_expires_once(bench: Bench) -> None:
    session = bench.attach(window=10.0)
    bench.store.adopt(session, 4.0, "")  # looked at after 4 s, beside after 10 s
    bench.store.adopt(session, 10.0, "")
    bench.store.expire(bench.now + 4.0)
    bench.store.expire(bench.now + 10.0)
    assert not session.alive
    assert [effect[:2] for effect in bench.store.effects] == [(session, ENDED)]
