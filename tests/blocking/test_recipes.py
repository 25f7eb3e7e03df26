# ruff: noqa: PT012  what raises here is a block, with its body
"""The recipes, for threads: that what tests/recipes tests arrives here, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tenure import blocking
from tenure.blocking.recipes import (
    Barrier,
    BrokenBarrier,
    CountDownLatch,
    Counter,
    DoubleBarrier,
    Group,
    InnerLease,
    Joined,
    Left,
    Member,
    Pool,
    ReentrantMutex,
    RunFailed,
    RWLock,
    ServiceRegistry,
    SharedConfig,
    Updated,
    run_once,
)
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    SelfDeadlock,
)
from tests.blocking.helpers import (
    Thread,
    end_sessions,
    is_free,
    is_held,
    lose,
    until,
    waiting,
)


def test_readers_share_the_lock_and_a_writer_is_alone(
    client: blocking.Client, eye: blocking.Client
) -> None:
    here, there = RWLock(client, "l"), RWLock(eye, "l")
    assert here.name == "l"
    with here.read(data=b"a"), there.read() as lease:
        assert lease.count == 1
        assert there.try_write() is None
        extra = here.try_read()
        assert extra is not None
        extra.release()
        with pytest.raises(SelfDeadlock):
            here.write()
    with here.write() as writing:
        assert there.try_read() is None
        with pytest.raises(AcquireTimeout):
            there.write(timeout=0.01)
        writing.update(count=1)
        with there.read():
            pass
    written = there.try_write()
    assert written is not None
    written.release()


def test_a_writer_in_another_thread_waits_for_the_readers(client: blocking.Client) -> None:
    lock = RWLock(client, "l")

    def write() -> int:
        with lock.write() as lease:
            return lease.fencing_token

    with lock.read() as lease:
        writing = Thread(write)
        until(lambda: waiting(client, "l"))
        assert lock.try_read() is None
    assert writing.result() > lease.fencing_token


def test_a_value_is_published_and_subscribed_to(
    client: blocking.Client, eye: blocking.Client
) -> None:
    here: SharedConfig[dict[str, int]] = SharedConfig(client, "limits")
    there: SharedConfig[dict[str, int]] = SharedConfig(eye, "limits")
    assert (here.name, here.get()) == ("limits", None)
    with there.watch() as values:
        assert next(values) is None
        for number in (4, 8):
            here.set({"workers": number})
            assert next(values) == {"workers": number}
        values.close()
        assert list(values) == []
    assert there.get() == {"workers": 8}
    anything: SharedConfig[object] = SharedConfig(client, "limits")
    with pytest.raises(InvalidArgument):
        anything.set(object())


def test_an_endpoint_is_listed_while_its_block_lasts(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with client.session() as session:
        here, there = ServiceRegistry(session, "services"), ServiceRegistry(eye, "services")
        assert here.name == "services"
        with there.watch() as states:
            assert next(states) == ()
            with here.register("a") as registration:
                assert [endpoint.text for endpoint in next(states)] == ["a"]
                registration.update(b"b")
                assert [endpoint.text for endpoint in there.list()] == ["b"]
        assert there.list() == ()


def test_a_lost_registration_is_told(client: blocking.Client, eye: blocking.Client) -> None:
    registry = ServiceRegistry(client, "services")
    with pytest.raises(LeaseLost), registry.register("a") as registration:
        lose(eye, registration)
        registry.list()


def test_members_come_change_and_go(client: blocking.Client, eye: blocking.Client) -> None:
    here, there = Group(client, "workers"), Group(eye, "workers")
    assert here.name == "workers"
    with here.join(b"a") as a, there.changes() as changes, here.watch() as states:
        me = Member(b"a", a.session.id, a.fencing_token)
        assert next(changes) == Joined(me)
        assert next(states) == there.members() == (me,)
        b = there.join(b"b")
        joined = next(changes)
        assert isinstance(joined, Joined)
        b.update(b"busy")
        busy = Member(b"busy", b.session.id, b.fencing_token)
        assert next(changes) == Updated(busy, b"b")
        b.release()
        assert next(changes) == Left(busy)
        changes.close()
        assert list(changes) == []


def test_what_an_interruption_kept_from_the_thread_is_told_again(client: blocking.Client) -> None:
    group = Group(client, "workers")
    with group.join(b"a"), group.changes() as changes, group.watch() as states:
        change, state = next(changes), next(states)
        # As a call does that is interrupted when it has its result already.
        client._portal.run(changes._wrapped._untold.appendleft, change)
        client._portal.run(states._wrapped._put_back, state)
        assert (next(changes), next(states)) == (change, state)


def test_threads_wait_for_each_other(client: blocking.Client, eye: blocking.Client) -> None:
    arrived: list[int] = []

    def take_part(source: blocking.Client) -> Iterator[int]:
        barrier = Barrier(source, "phase", 3)
        for number in range(3):
            arrived.append(number)
            yield barrier.wait(timeout=60)
            assert arrived.count(number) == 3

    one, two = Thread(lambda: list(take_part(client))), Thread(lambda: list(take_part(eye)))
    mine = list(take_part(client))
    for places in zip(mine, one.result(), two.result(), strict=True):
        assert sorted(places) == [0, 1, 2]


def test_out_of_time_a_thread_has_left_the_barrier(client: blocking.Client) -> None:
    barrier = Barrier(client, "phase", 2)
    assert (barrier.name, barrier.parties) == ("phase", 2)
    with pytest.raises(AcquireTimeout):
        barrier.wait(timeout=0.01)
    until(lambda: is_free(client, "phase"))


def test_threads_count_together(client: blocking.Client, eye: blocking.Client) -> None:
    counters = [Counter(each, "hits", initial=3) for each in (client, eye)]
    threads = [Thread(lambda each=each: [each.add() for _ in range(5)]) for each in counters]  # type: ignore[misc]
    assert sorted(number for each in threads for number in each.result()) == list(range(4, 14))
    assert counters[0].compare_and_set(13, 0)
    assert counters[1].get() == 0
    with counters[0].watch() as numbers:
        assert next(numbers) == 0
        counters[1].set(7)
        assert next(numbers) == 7


def test_a_latch_opens_for_threads(client: blocking.Client, eye: blocking.Client) -> None:
    latch = CountDownLatch(client, "ready", 2)
    assert (latch.name, latch.count) == ("ready", 2)
    with pytest.raises(AcquireTimeout):
        latch.wait(timeout=0.01)
    waiting = Thread(latch.wait)
    other = CountDownLatch(eye, "ready", 2)
    assert [other.count_down(), other.count_down()] == [1, 0]
    waiting.result()
    latch.reset()
    assert other.left() == 2


def test_a_barrier_is_broken_for_threads(client: blocking.Client, eye: blocking.Client) -> None:
    here, there = Barrier(client, "phase", 2), Barrier(eye, "phase", 2)
    waiting = Thread(here.wait)
    until(lambda: not is_free(eye, "phase"))
    there.abort()
    with pytest.raises(BrokenBarrier):
        waiting.result()
    assert here.broken()
    here.reset()
    assert not there.broken()
    other = Thread(there.wait)
    assert {here.wait(), other.result()} == {0, 1}


def test_threads_enter_and_leave_together(client: blocking.Client, eye: blocking.Client) -> None:
    left: list[int] = []

    def take_part(source: blocking.Client) -> int:
        barrier = DoubleBarrier(source, "phase", 2)
        assert (barrier.name, barrier.parties) == ("phase", 2)
        with barrier.enter(timeout=60) as party:
            left.append(party.position)
            party.leave(timeout=60)
            assert sorted(left) == [0, 1]
            return party.position

    other = Thread(lambda: take_part(eye))
    assert {take_part(client), other.result()} == {0, 1}
    until(lambda: is_free(client, "phase"))


def test_threads_share_a_pool(client: blocking.Client, eye: blocking.Client) -> None:
    resources = {"a": b"1", "b": b"2"}
    here, there = Pool(client, "p", resources), Pool(eye, "p", resources)
    assert (here.name, here.resources) == ("p", resources)
    with here.acquire() as first, there.acquire(timeout=60) as second:
        assert [(each.name, each.data) for each in (first, second)] == [("a", b"1"), ("b", b"2")]
        assert second.fencing_token > 0
        assert here.try_acquire() is None
        with pytest.raises(AcquireTimeout):
            there.acquire(timeout=0.01)
        waits = Thread(lambda: there.acquire(timeout=60))
        until(lambda: waiting(eye, "p"))
        first.release()
        third = waits.result()
        assert third.name == "a"
        third.release()
    until(lambda: is_free(eye, "p") and is_free(eye, "p/a") and is_free(eye, "p/b"))


def test_a_resumed_session_has_its_resource_again(
    client: blocking.Client, eye: blocking.Client
) -> None:
    session = client.session(resumable=True)
    held = Pool(session, "p", {"a": b"1"}).acquire()
    resumed = eye.session(resume=session.resume_token)
    pool = Pool(resumed, "p", {"a": b"1"})
    item = pool.recover()
    assert item is not None
    assert (item.name, item.data, item.fencing_token) == ("a", b"1", held.fencing_token)
    item.release()
    assert pool.recover() is None
    resumed.close()
    until(lambda: is_free(eye, "p") and is_free(eye, "p/a"))


def test_the_loss_of_a_resource_is_raised(client: blocking.Client, eye: blocking.Client) -> None:
    pool = Pool(client, "p", {"a": b""})
    with pytest.raises(LeaseLost), pool.acquire() as item:
        end_sessions(eye, but=0)
        until(lambda: item.loss is not None)
        pool.try_acquire()
    with Pool(eye, "p", {"a": b""}).acquire(timeout=60):
        pass


def test_a_mutex_is_entered_again_with_its_lease(
    client: blocking.Client, eye: blocking.Client
) -> None:
    mutex = ReentrantMutex(client, "m")
    assert mutex.name == "m"
    with mutex.lock() as outer:
        assert not isinstance(outer, InnerLease)
        with mutex.lock(holding=outer) as inner, mutex.lock(holding=inner) as innermost:
            assert isinstance(innermost, InnerLease)
            assert innermost.fencing_token == outer.fencing_token
            innermost.release()
            assert eye.mutex("m").try_lock() is None
        assert is_held(outer)
        with pytest.raises(SelfDeadlock):
            mutex.lock()
        with pytest.raises(InvalidArgument):
            ReentrantMutex(client, "another").lock(holding=outer)
        with pytest.raises(InvalidArgument):
            mutex.lock(holding=True)  # type: ignore[arg-type]
    with pytest.raises(LeaseReleased):
        mutex.lock(holding=outer)
    with eye.mutex("m").lock(timeout=60):
        pass


def test_an_inner_block_in_another_thread_ends_with_the_lease(
    client: blocking.Client, eye: blocking.Client
) -> None:
    mutex = ReentrantMutex(client, "m")
    lease = mutex.lock()

    def callee() -> None:
        with mutex.lock(holding=lease) as inner:
            lose(eye, inner)

    with pytest.raises(LeaseLost):
        Thread(callee).result()
    assert lease.loss is not None


def test_a_function_runs_once_for_all_threads(
    client: blocking.Client, eye: blocking.Client
) -> None:
    runs: list[int] = []

    def work(lease: blocking.Lease) -> dict[str, int]:
        runs.append(lease.fencing_token)
        return {"version": len(runs)}

    threads = [
        Thread(lambda each=each: run_once(each, "w", work, keep=60))  # type: ignore[misc]
        for each in (client, eye, client)
    ]
    assert [each.result() for each in threads] == [{"version": 1}] * 3
    assert run_once(eye, "w", work, keep=60, timeout=1) == {"version": 1}


def test_the_error_of_a_function_is_raised_in_all_threads(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def fail(_: blocking.Lease) -> None:
        raise ValueError("no such table")

    with pytest.raises(ValueError, match="no such table"):
        run_once(client, "w", fail, keep=60)
    with pytest.raises(RunFailed, match="failed: ValueError: no such table"):
        run_once(eye, "w", fail, keep=60)
    assert run_once(eye, "w", lambda _: b"7", keep=60, keep_failed=False) == b"7"


def test_a_run_that_is_interrupted_has_no_outcome(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def interrupted(_: blocking.Lease) -> None:
        raise KeyboardInterrupt

    def lost(lease: blocking.Lease) -> None:
        lose(eye, lease)

    with pytest.raises(KeyboardInterrupt):
        run_once(client, "w", interrupted, keep=60)
    with pytest.raises(LeaseLost):
        run_once(client, "w", lost, keep=60)
    assert run_once(eye, "w", lambda _: 7, keep=60) == 7
