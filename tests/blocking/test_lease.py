# ruff: noqa: PT012  what raises here is a block, with its body
"""Leases of threads: acquired, entered, lost, given back."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import pytest

from tenure import blocking
from tenure._client import leading
from tenure.errors import (
    AcquireTimeout,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SelfDeadlock,
    SessionClosed,
    SessionExpired,
    Unsupported,
)
from tests.blocking.helpers import Thread, end_sessions, is_free, is_held, lose, until, waiting


def test_lock_gives_a_held_lease_to_be_released(
    client: blocking.Client, eye: blocking.Client
) -> None:
    lease = client.mutex("a").lock(timeout=5, data=b"me")
    assert is_held(lease)
    assert (lease.name, lease.node, lease.loss) == ("a", "/default", None)
    assert lease.deadline > client.clock.now()
    holder = eye.mutex("a").inspect()
    assert holder is not None
    assert (holder.data, holder.fencing_token) == (b"me", lease.fencing_token)
    with pytest.raises(Unsupported, match="no tokens of its own"):
        _ = lease.store_token
    assert eye.mutex("a").try_lock() is None
    lease.update(b"still me")
    lease.release()
    lease.release()
    assert not is_held(lease)
    with pytest.raises(LeaseReleased):
        lease.check()
    assert eye.mutex("a").inspect() is None


def test_a_block_releases_at_its_end(client: blocking.Client, eye: blocking.Client) -> None:
    with client.mutex("a").lock() as lease:
        lease.check()
        assert eye.mutex("a").try_lock() is None
    assert not is_held(lease)
    with eye.mutex("a").lock(timeout=0):
        pass


def test_a_lease_is_one_however_it_is_reached(client: blocking.Client) -> None:
    with client.session(description="one") as session, session.mutex("a").lock() as lease:
        assert lease.session == session
        assert hash(lease.session) == hash(session)
        assert lease.session != lease
        assert repr(lease).startswith("<blocking Lease 'a' on /default held")


def test_a_timeout_leaves_the_queue(client: blocking.Client, eye: blocking.Client) -> None:
    with eye.mutex("a").lock():
        with pytest.raises(AcquireTimeout):
            client.mutex("a").lock(timeout=0.01)
        assert waiting(eye, "a") == 0


def test_a_thread_that_would_wait_for_itself_is_told(client: blocking.Client) -> None:
    mutex = client.mutex("a")
    with mutex.lock() as lease:
        with pytest.raises(SelfDeadlock):
            mutex.lock()
        assert mutex.try_lock() is None
        with pytest.raises(AcquireTimeout):
            mutex.lock(timeout=0.01)
        assert is_held(lease)


def test_another_thread_waits_for_what_this_one_is_inside(client: blocking.Client) -> None:
    mutex = client.mutex("a")
    with mutex.lock():
        other = Thread(lambda: mutex.lock().release())
        until(lambda: waiting(client, "a") == 1)
    other.result()


def test_a_lease_may_be_entered_by_another_thread_than_acquired_it(
    client: blocking.Client,
) -> None:
    lease = client.mutex("a").lock()

    def enter() -> None:
        with lease:
            lease.check()
            with pytest.raises(SelfDeadlock):
                client.mutex("a").lock()

    Thread(enter).result()
    assert is_free(client, "a")


def test_a_lease_is_entered_once(client: blocking.Client) -> None:
    with client.mutex("a").lock() as lease, pytest.raises(Misuse, match="entered already"), lease:
        pass


def test_a_lease_that_is_over_is_not_entered(client: blocking.Client, eye: blocking.Client) -> None:
    released, lost = client.mutex("a").lock(), client.mutex("b").lock()
    released.release()
    with pytest.raises(LeaseReleased), released:
        pass
    lose(eye, lost)
    with pytest.raises(LeaseLost), lost:
        pass


# Loss


def test_a_loss_is_raised_by_every_call_in_the_block_that_takes_or_asks(
    client: blocking.Client, eye: blocking.Client
) -> None:
    other = client.mutex("other").lock()
    with pytest.raises(LeaseLost) as told, client.mutex("a").lock() as lease:
        lose(eye, lease)
        for call in (
            client.mutex("b").lock,
            client.mutex("b").try_lock,
            client.mutex("b").inspect,
            client.list_nodes,
            other.check,
            lambda: other.update(b"x"),
            other.__enter__,
        ):
            with pytest.raises(LeaseLost, match="'a'"):
                call()
        client.mutex("b").lock()
    assert told.value.fencing_token == lease.fencing_token
    assert lease.loss is not None
    assert other.held
    assert is_free(eye, "b")
    other.release()


def test_inside_a_lost_block_what_gives_back_is_carried_out(
    client: blocking.Client, eye: blocking.Client
) -> None:
    other = client.mutex("other").lock()
    entered = client.mutex("entered").lock()
    with pytest.raises(LeaseLost, match="'a'") as told, client.mutex("a").lock() as lease:
        with entered:
            lose(eye, lease)
        assert not is_held(entered)
        other.release()
        assert not is_held(other)
        raise lease.loss or AssertionError("it is lost")
    assert not hasattr(told.value, "__notes__")
    assert is_free(eye, "entered")
    assert is_free(eye, "other")


def test_a_loss_that_no_call_meets_is_raised_at_the_end(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with pytest.raises(LeaseLost), client.mutex("a").lock() as lease:
        Thread(lambda: lose(eye, lease)).result()


def test_the_bodys_own_error_passes_through_a_lost_block(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with pytest.raises(KeyError) as told, client.mutex("a").lock() as lease:
        Thread(lambda: lose(eye, lease)).result()
        raise KeyError("mine")
    assert any("lost" in note for note in told.value.__notes__)


def test_a_call_that_waits_in_a_lost_block_is_interrupted(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with eye.mutex("b").lock():

        def work() -> None:
            with client.mutex("a").lock() as lease:
                leases.append(lease)
                client.mutex("b").lock()

        leases: list[blocking.Lease] = []
        worker = Thread(work)
        until(lambda: waiting(eye, "b") == 1)
        lose(eye, leases[0])
        with pytest.raises(LeaseLost, match="'a'"):
            worker.result()
        assert waiting(eye, "b") == 0


def test_outside_of_a_lost_block_the_thread_goes_on(
    client: blocking.Client, eye: blocking.Client
) -> None:
    for _ in range(3):
        with pytest.raises(LeaseLost), client.mutex("a").lock() as lease:
            lose(eye, lease)
        with client.mutex("a").lock(timeout=5):
            client.list_nodes()


def test_the_release_of_a_lost_lease_says_so(client: blocking.Client, eye: blocking.Client) -> None:
    losses: list[LeaseLost] = []
    lease = client.mutex("a").lock(on_loss=losses.append)
    watcher = Thread(lease.wait_lost)
    assert lease.wait_lost(timeout=0.01) is None
    lose(eye, lease)
    with pytest.raises(LeaseLost):
        lease.release()
    assert [lease.loss] == losses
    assert watcher.result() is lease.loss
    assert lease.wait_lost(timeout=5) is lease.loss


def test_waiting_for_the_loss_of_a_lease_ends_with_its_release(client: blocking.Client) -> None:
    lease = client.mutex("a").lock()
    watcher = Thread(lease.wait_lost)
    lease.wait_lost(timeout=0.01)
    lease.release()
    with pytest.raises(LeaseReleased):
        watcher.result()


def test_the_end_of_the_session_is_the_loss_of_its_leases(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with pytest.raises(SessionExpired) as told, client.session() as session:
        lease = session.mutex("a").lock()
        with eye.session() as mine:
            end_sessions(eye, but=mine.id)
            until(lambda: session.state == "expired")
        assert not is_held(lease)
        with pytest.raises(LeaseLost):
            lease.release()
        client.list_nodes()
    assert told.value.node == "/default"


def test_an_expired_session_raises_at_the_end_of_its_block(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with pytest.raises(SessionExpired), client.session() as session:

        def end() -> None:
            end_sessions(eye)
            until(lambda: session.state == "expired")

        Thread(end).result()


def test_a_client_that_another_thread_closes_takes_its_leases_along(
    url: str, eye: blocking.Client
) -> None:
    client = blocking.connect(url)
    with pytest.raises(LeaseLost) as told, client.mutex("a").lock() as lease:
        waiter = Thread(client.mutex("a").lock)
        until(lambda: waiting(eye, "a") == 1)
        Thread(client.close).result()
        with pytest.raises(SessionClosed):
            waiter.result()
        assert not is_held(lease)
        client.mutex("b").lock()
    assert isinstance(told.value.__cause__, SessionClosed)
    with pytest.raises(SessionClosed):
        client.mutex("a").lock()
    client.close()
    assert is_free(eye, "a")


def test_a_generator_that_is_thrown_away_gives_its_lease_back(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def work() -> Iterator[int]:
        with client.mutex("a").lock() as lease:
            yield lease.fencing_token

    steps = work()
    next(steps)
    del steps
    gc.collect()
    eye.mutex("a").lock(timeout=5).release()


# Supervised leadership


def test_a_leaders_work_runs_in_the_calling_thread_and_again_after_an_error(
    client: blocking.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "FIRST_PAUSE", 0.01)
    threads: list[int] = []

    def work(leadership: blocking.Leadership) -> int:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            raise ValueError("failure")
        return leadership.fencing_token

    assert client.lead("scheduler", work, data=b"me") > 0
    assert threads == [threading.get_ident()] * 2
    assert (
        "leader's work failed, leadership resigned: node=/default name='scheduler'" in caplog.text
    )
    assert client.election("scheduler").leader() is None


def test_closing_the_client_ends_a_campaign_of_another_thread(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with eye.election("scheduler").campaign():
        candidate = Thread(lambda: client.lead("scheduler", lambda _: None))
        until(lambda: waiting(eye, "scheduler"))
        client.close()
        with pytest.raises(SessionClosed):
            candidate.result()


def test_a_thread_waits_for_a_lease_that_another_one_may_release(
    client: blocking.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tenure")
    lease = client.mutex("a").lock()

    def release() -> None:
        until(lambda: "waiting for a lease that this program holds" in caplog.text)
        lease.release()

    thread = Thread(release)
    client.mutex("a").lock().release()
    thread.result()
