"""The thread behind the blocking API: when it is there, who may call it, what it is given."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial

import pytest

import tenure
from tenure import blocking
from tenure.blocking import portal
from tenure.blocking.portal import SWITCH_INTERVAL, the_portal
from tenure.blocking.workers import Call, WorkerTask
from tenure.errors import InvalidArgument, LeaseReleased, Misuse, SessionClosed, Unsupported
from tenure.events import Acquired, Event, NotAcquired, Released, Requested, SessionAttached
from tests.blocking.helpers import Thread, is_free, is_held, until, waiting
from tests.guarantees import MEMORY, guarantee
from tests.injection import each_error, failing_once


def loop_threads() -> int:
    return sum(thread.name == "tenure-blocking" for thread in threading.enumerate())


# Its life


def test_one_thread_serves_from_the_first_connect_to_the_last_close(url: str) -> None:
    assert loop_threads() == 0
    first, second = blocking.connect(url), blocking.connect("memory://")
    assert loop_threads() == 1
    with first:
        first.list_nodes()
    assert loop_threads() == 1
    second.list_nodes()
    second.close()
    assert loop_threads() == 0
    with blocking.connect(url) as third:
        assert loop_threads() == 1
        third.list_nodes()


def test_close_ends_the_thread_even_when_the_loop_lags_behind_the_caller(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = blocking.connect(url)
    client.list_nodes()
    portal = client._portal
    lagged = threading.Event()

    def lag(call: Call) -> None:
        """The caller goes on before the loop has put the call aside."""
        worker.notifier.notify()
        if call.over and client._wrapped._core.closed:
            until(lambda: call not in portal._calls)
            lagged.set()
        portal._finished(call)

    worker = portal._workers.mine().next()
    monkeypatch.setattr(worker, "_finished", lag)
    client.close()
    assert loop_threads() == 0
    assert lagged.is_set()


def test_it_comes_again_for_a_call_that_comes_late(url: str) -> None:
    client = blocking.connect(url)
    lease, ticket = client.mutex("a").lock(), client.session()
    released = client.mutex("b").lock()
    released.release()
    client.close()
    assert loop_threads() == 0
    for call in (client.list_nodes, client.mutex("a").lock, client.session, ticket.__enter__):
        with pytest.raises(SessionClosed):
            call()
    with pytest.raises(tenure.LeaseLost):
        lease.release()
    released.release()
    with pytest.raises(LeaseReleased):
        released.check()
    ticket.close()
    client.close()
    until(lambda: loop_threads() == 0)


def test_a_client_that_cannot_be_opened_is_closed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("a")
    with (
        pytest.raises(tenure.EngineError),
        blocking.connect(f"sqlite:///{folder}"),
    ):
        raise AssertionError("a folder is no database")
    assert loop_threads() == 0


def test_a_wrong_url_starts_nothing() -> None:
    with pytest.raises(Unsupported):
        blocking.connect("nonsense://")
    with pytest.raises(InvalidArgument):
        blocking.connect("nonsense")
    assert loop_threads() == 0


def test_threads_that_connect_and_close_do_not_meet(url: str) -> None:
    def work(number: int) -> None:
        for _ in range(20):
            with blocking.connect(url) as client:
                client.mutex(f"m{number}").lock().release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert loop_threads() == 0


def test_a_call_that_the_last_turn_of_the_thread_carries_out_starts_none(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, portal = blocking.connect(url), the_portal()
    released = client.mutex("a").lock()
    released.release()
    start = portal._runner.start
    loop_thread, ended = threading.Event(), threading.Event()

    def stay() -> None:
        loop_thread.set()
        ended.wait(30)

    def be_late(call: Call | None = None) -> None:
        ended.set()
        until(lambda: not portal._calls)  # the thread has carried it out, and ends
        start(call)

    portal._post(stay)
    loop_thread.wait(30)
    portal._discard(client._wrapped._core)  # the thread has no client, and is in its last turn
    monkeypatch.setattr(portal._runner, "start", be_late)
    released.release()
    monkeypatch.undo()
    until(lambda: loop_threads() == 0)
    client.close()
    until(lambda: loop_threads() == 0)


def test_calls_that_race_with_the_last_close_are_answered(url: str) -> None:
    for _ in range(50):
        client = blocking.connect(url)
        lease = client.mutex("a").lock()

        def release(lease: blocking.Lease = lease) -> None:
            try:
                lease.release()
            except (tenure.LeaseLost, SessionClosed):
                return

        threads = [Thread(release) for _ in range(3)]
        client.close()
        for thread in threads:
            thread.result()
    until(lambda: loop_threads() == 0)


def test_a_thread_that_has_ended_leaves_no_agent(client: blocking.Client) -> None:
    client.list_nodes()
    serving = the_portal()
    before = len(serving._workers.all)
    for _ in range(5):
        Thread(client.list_nodes).result()
    gc.collect()
    until(lambda: client.list_nodes() and len(serving._workers.all) <= before)


def test_a_result_is_not_kept_alive_by_how_it_came(client: blocking.Client) -> None:
    with pytest.raises(tenure.NodeNotFound):
        client.describe_node("/none")
    gc.collect()
    calls = [each for each in gc.get_objects() if isinstance(each, Call)]
    assert len(calls) <= 1


def test_the_first_call_of_a_thread_may_be_cancelled_at_once(client: blocking.Client) -> None:
    serving = the_portal()

    async def cancel_at_once() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    def call() -> None:
        for _ in range(2):
            with pytest.raises(SessionClosed):
                serving.call(cancel_at_once)
        client.list_nodes()

    Thread(call).result()


def test_a_cancellation_before_a_call_is_not_for_the_call(client: blocking.Client) -> None:
    serving = the_portal()

    async def this_task() -> asyncio.Task[object] | None:
        return asyncio.current_task()

    task = serving.call(this_task)
    assert task is not None

    async def wait() -> str:
        await asyncio.sleep(0)
        return "undisturbed"

    for _ in range(50):
        before = task.cancelling()
        serving._inbox.append((lambda _: task.cancel(), Call(wait)))
        assert serving.call(wait) == "undisturbed"
        until(lambda before=before: task.cancelling() == before + 1)  # type: ignore[misc]
        serving.run(task.uncancel)


# Who may call


@pytest.fixture
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not been warned of a blocked event loop."""
    monkeypatch.setattr(portal, "_warned", False)


@pytest.mark.usefixtures("not_warned")
def test_a_thread_that_runs_an_event_loop_is_warned_once_and_served(url: str) -> None:
    async def cell_of_a_notebook() -> int:
        with blocking.connect(url) as client:
            with client.mutex("a").lock(timeout=10) as lease:
                assert lease.held
            with client.session() as session, session.mutex("a").lock() as lease:
                return lease.fencing_token

    with pytest.warns(RuntimeWarning, match="blocks this thread's event loop") as warnings:
        assert asyncio.run(cell_of_a_notebook()) > 0
    assert [warning.filename for warning in warnings] == [__file__]


@pytest.mark.usefixtures("not_warned")
def test_a_client_is_shared_by_threads_with_and_without_an_event_loop(
    client: blocking.Client,
) -> None:
    lease = client.mutex("a").lock()

    async def use() -> None:
        with pytest.warns(RuntimeWarning, match="shown once"):
            assert client.mutex("a").try_lock() is None
        lease.release()
        assert await asyncio.to_thread(client.list_nodes) == ["/default"]

    with client.mutex("b").lock() as entered:
        asyncio.run(use())
        assert entered.held
    assert is_free(client, "a")


def test_a_callback_on_the_portals_own_thread_is_refused(
    client: blocking.Client, eye: blocking.Client
) -> None:
    errors: list[BaseException] = []

    def lost(_: tenure.LeaseLost) -> None:
        try:
            client.list_nodes()
        except Misuse as misuse:
            errors.append(misuse)

    lease = client.mutex("a").lock(on_loss=lost)
    eye.evict("/default", "a", lease.fencing_token)
    until(lambda: errors)
    assert "hand the call to another thread" in str(errors[0])


# Many threads


@guarantee("none", "in order", on=MEMORY)
def test_fifty_threads_share_one_mutex_in_the_order_of_their_requests(
    client: blocking.Client,
) -> None:
    mutex = client.mutex("a")
    inside: list[int] = []
    tokens: list[int] = []
    arrived: list[int] = []

    def work(number: int) -> None:
        with mutex.lock() as lease:
            inside.append(number)
            assert inside == [number]
            tokens.append(lease.fencing_token)
            arrived.append(number)
            inside.remove(number)

    blocker = mutex.lock()
    threads = []
    for number in range(50):
        threads.append(Thread(lambda number=number: work(number)))  # type: ignore[misc]
        until(lambda number=number: waiting(client, "a") == number + 1)  # type: ignore[misc]
    blocker.release()
    for thread in threads:
        thread.result()
    assert arrived == list(range(50))
    assert tokens == sorted(tokens)


def test_two_threads_of_one_session_are_two_requests(client: blocking.Client) -> None:
    with client.session() as session:
        mutex = session.mutex("a")
        with mutex.lock() as mine:
            other = Thread(mutex.lock)
            until(lambda: waiting(client, "a") == 1)
            assert is_held(mine)
        other.result().release()


# The interpreter's time


def test_the_switch_interval_is_short_while_the_thread_runs() -> None:
    before = sys.getswitchinterval()
    with blocking.connect("memory://") as client:
        assert sys.getswitchinterval() == SWITCH_INTERVAL
        with blocking.connect("memory://"):
            assert sys.getswitchinterval() == SWITCH_INTERVAL
        client.list_nodes()
        assert sys.getswitchinterval() == SWITCH_INTERVAL
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("chosen", [0.0001, 0.002])
def test_a_switch_interval_that_the_program_chose_stays(chosen: float) -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.0001)
        short = sys.getswitchinterval()
        with blocking.connect("memory://"):
            assert sys.getswitchinterval() == short
        assert sys.getswitchinterval() == short
        sys.setswitchinterval(before)
        with blocking.connect("memory://"):
            sys.setswitchinterval(chosen)
            mine = sys.getswitchinterval()
        assert sys.getswitchinterval() == mine
    finally:
        sys.setswitchinterval(before)


def compute(seconds: float) -> None:
    """Compute, in slices of a millisecond."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        while time.monotonic() < now + 0.001:
            pass
        time.sleep(0)  # as any call that lets go of the interpreter for a moment


@guarantee("stalled", "kept", on=MEMORY)
def test_leases_are_renewed_while_the_main_thread_computes(client: blocking.Client) -> None:
    with client.session(recovery_window=1) as session, session.mutex("a").lock() as lease:
        first = lease.deadline
        compute(2.5)
        lease.check()
        assert lease.deadline > first + 1.5


# A way in for what has no other


def test_a_signal_that_raises_nothing_does_not_end_a_wait(
    client: blocking.Client, eye: blocking.Client
) -> None:
    blocker = eye.mutex("a").lock()
    heard = threading.Event()

    def poke() -> None:
        until(lambda: waiting(eye, "a") == 1)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)
        heard.wait()
        blocker.release()

    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        poker = Thread(poke)
        client.mutex("a").lock().release()
        poker.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_free(eye, "a")


def test_when_no_thread_can_be_started_that_is_what_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = blocking.connect("memory://")
    client.close()

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            client.list_nodes()
        with pytest.raises(RuntimeError, match="can't start"):
            blocking.connect("memory://")
    until(lambda: loop_threads() == 0)
    with pytest.raises(SessionClosed):
        client.list_nodes()
    until(lambda: loop_threads() == 0)


@each_error
def test_a_call_that_the_loop_could_not_take_is_taken_again(
    error: type[Exception],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with blocking.connect(url) as client:
        raised = failing_once(monkeypatch, WorkerTask, "take", error)
        with client.mutex("x").lock() as lease:
            assert is_held(lease)
        assert raised == ["take"]
        assert "injected into take" in caplog.text


# The context of a call


def test_a_call_runs_in_the_context_of_its_thread(client: blocking.Client) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen = []

    async def read() -> str:
        seen.append(request.get())
        await asyncio.sleep(0)
        seen.append(request.get())
        request.set("changed by the call")
        return request.get()

    def work(name: str) -> None:
        request.set(name)
        the_portal().call(read)
        assert request.get() == name

    for name in ("a", "b"):
        Thread(partial(work, name)).result()
    assert seen == ["a", "a", "b", "b"]


# Events


def test_a_thread_reads_the_begin_and_the_end_of_waits(client: blocking.Client) -> None:
    mutex = client.mutex("m")
    with client.events() as events:
        with mutex.lock():
            assert Thread(mutex.try_lock).result() is None
        kinds: list[type[Event]] = []
        for event in events:
            kinds.append(type(event))
            if isinstance(event, Released):
                break
    assert [each for each in kinds if each is not SessionAttached] == [
        *(Requested, Acquired, Requested, NotAcquired, Released)
    ]
