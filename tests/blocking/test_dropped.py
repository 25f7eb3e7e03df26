"""Handles that a program with threads drops while they hold something."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tenure import blocking
from tenure.blocking import recipes
from tenure.errors import SemaphoreNotFound, Unsupported
from tests.blocking.helpers import Thread, is_held, until
from tests.engines.stores import stores

HERE = re.escape(__file__)


NETWORKED = ("redis", "postgresql", "etcd", "tenure-sqlite", "ydb", "dflockd")


def engines(*without: str) -> list[Any]:
    """Each engine but these."""
    networked = [each for each in NETWORKED if each not in without]
    exhaustive = [pytest.param(each, marks=pytest.mark.exhaustive) for each in networked]
    return ["memory", "sqlite", *exhaustive]


ADMINISTERED = pytest.mark.parametrize("url", engines("ydb", "dflockd"), indirect=True)
"""Those that can resume and evict."""


@pytest.fixture(params=engines())
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty store of each engine."""
    with stores(request.param).empty() as url:
        yield url


def in_queue(eye: blocking.Client, name: str) -> tuple[bool, int | None]:
    """Whether any request owns that name, and how many wait for it."""
    named = eye.capabilities.owners  # without it the numbers alone can be seen
    try:
        found = eye.semaphore(name).describe(owners=named, waiters=named)
    except SemaphoreNotFound:
        return False, 0
    return found.held > 0, len(found.waiters) if named else found.waiting


def is_free(eye: blocking.Client, name: str) -> bool:
    return in_queue(eye, name) == (False, 0)


def sessions(eye: blocking.Client) -> int:
    """How many there are, where that can be seen."""
    try:
        return len(eye.list_sessions())
    except Unsupported:
        return 0


def pool_of(client: blocking.Client) -> blocking.Semaphore:
    """A semaphore, of the kind that a mutex of the same name is."""
    if client.capabilities.lasting:
        return client.semaphore("a", ephemeral=True)
    return client.semaphore("a", limit=1)


@contextmanager
def dropped(*subjects: str) -> Iterator[None]:
    """The body drops these, and each warning names a line of this file."""

    def told() -> list[str]:
        return [str(each.message) for each in caught if "was dropped by" in str(each.message)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
        # The portal's thread lets go of a result a moment after the caller has it.
        until(lambda: len(told()) >= len(subjects))
    assert len(told()) == len(subjects), told()
    for subject in subjects:
        pattern = rf"{subject} was dropped .* obtained it at {HERE}:\d+\."
        assert any(re.search(pattern, each) for each in told()), told()


def locked(client: blocking.Client) -> Any:
    return client.mutex("a").lock()


def tried(client: blocking.Client) -> Any:
    return client.mutex("a").try_lock()


def acquired(client: blocking.Client) -> Any:
    return pool_of(client).acquire()


def leading(client: blocking.Client) -> Any:
    return client.election("a").campaign()


def run_begun(client: blocking.Client) -> Any:
    return client.once("a", per=60)


def registered(client: blocking.Client) -> Any:
    return recipes.ServiceRegistry(client, "a").register("10.0.0.1:80")


def writing(client: blocking.Client) -> Any:
    return recipes.RWLock(client, "a").write()


def in_pool(client: blocking.Client) -> Any:
    return recipes.Pool(client, "a", {"x": b""}).acquire()


def inside(client: blocking.Client) -> Any:
    return recipes.DoubleBarrier(client, "a", 1).enter()


def queued(client: blocking.Client) -> Any:
    return pool_of(client).enqueue()


def queued_and_granted(client: blocking.Client) -> Any:
    return pool_of(client).enqueue().wait()


def entered_by_hand(client: blocking.Client) -> Any:
    return client.mutex("a").lock().__enter__()


LEASES = [
    *(locked, tried, acquired, leading, run_begun, registered, writing, queued, in_pool, inside),
    *(queued_and_granted, entered_by_hand),
]
WITH_DATA = {run_begun, registered, in_pool, inside}


@pytest.mark.parametrize("obtain", LEASES)
def test_a_lease_that_no_variable_refers_to_is_released(
    client: blocking.Client, eye: blocking.Client, obtain: Callable[[blocking.Client], Any]
) -> None:
    if obtain in WITH_DATA and not client.capabilities.data:
        pytest.skip("this engine's requests have no data")
    held = obtain(client)
    assert not is_free(eye, "a")
    with dropped("the lease of .* 'a(/x)?' on /default"):
        del held
    until(lambda: is_free(eye, "a"))
    client.mutex("b").lock().release()  # the client is as good as before


def test_a_place_in_a_queue_is_withdrawn(client: blocking.Client, eye: blocking.Client) -> None:
    with eye.mutex("a").lock():
        ticket = pool_of(client).enqueue()
        assert in_queue(eye, "a") == (True, 1)
        with dropped("the place in the queue of semaphore 'a' on /default"):
            del ticket
        until(lambda: in_queue(eye, "a") == (True, 0))


def test_a_session_is_closed_with_everything_in_it(
    client: blocking.Client, eye: blocking.Client
) -> None:
    eye.mutex("a").lock().release()
    before = sessions(eye)
    session = client.session()
    lease = session.mutex("a").lock()
    with dropped("the session on /default", "the lease of mutex 'a' on /default"):
        del session, lease
    until(lambda: is_free(eye, "a"))
    until(lambda: sessions(eye) == before)


def test_a_session_lives_while_a_lease_of_it_does(client: blocking.Client) -> None:
    session = client.session()
    lease = session.mutex("a").lock()
    with dropped():
        del session
    assert is_held(lease)
    assert lease.session.state == "attached"
    lease.session.close()


def test_a_client_is_closed_with_its_leases_and_its_thread_ends(
    url: str, eye: blocking.Client
) -> None:
    client = blocking.connect(url)
    lease = client.mutex("a").lock()
    with dropped("the client of .*", "the lease of mutex 'a' on /default"):
        del client, lease
    until(lambda: is_free(eye, "a"))
    eye.close()
    until(lambda: "tenure-blocking" not in [each.name for each in threading.enumerate()])


def test_a_client_that_was_never_used_is_closed_and_its_thread_ends(url: str) -> None:
    client = blocking.connect(url)
    with dropped("the client of .*"):
        del client
    until(lambda: "tenure-blocking" not in [each.name for each in threading.enumerate()])


def test_what_has_ended_is_dropped_silently(client: blocking.Client) -> None:
    session = client.session()
    with session.mutex("a").lock() as left:
        pass
    released = session.mutex("a").lock()
    released.release()
    session.close()
    with dropped():
        del left, released, session


@ADMINISTERED
def test_what_was_detached_is_dropped_silently(client: blocking.Client) -> None:
    session = client.session(resumable=True)
    lease = session.mutex("b").lock()
    token = session.resume_token
    session.detach()
    with dropped():
        del lease, session
    with client.session(resume=token) as resumed:
        assert [each.name for each in resumed.recovered] == ["b"]


@ADMINISTERED
def test_a_resumable_session_is_detached(client: blocking.Client) -> None:
    session = client.session(resumable=True)
    lease = session.mutex("a").lock()
    token = session.resume_token
    with dropped("the session on /default", "the lease of mutex 'a' on /default"):
        del session, lease
    with client.session(resume=token) as resumed:
        assert [each.name for each in resumed.recovered] == ["a"]


def test_a_block_without_a_variable_holds_until_its_end(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with dropped(), client.session() as session, session.mutex("a").lock():
        gc.collect()
        assert not is_free(eye, "a")


def test_a_block_in_a_dropped_generator_ends_silently(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def generate() -> Iterator[bool]:
        with client.session() as session, session.mutex("a").lock() as lease:
            yield lease.held

    with dropped():
        generator = generate()
        assert next(generator)
        del generator
        until(lambda: is_free(eye, "a"))


def test_a_thread_that_ends_drops_what_it_held(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def work() -> None:
        lease = client.mutex("a").lock()
        assert lease.held

    with dropped("the lease of mutex 'a' on /default"):
        Thread(work).result()
    until(lambda: is_free(eye, "a"))


@ADMINISTERED
def test_a_callback_on_the_portals_thread_may_drop_it(
    client: blocking.Client, eye: blocking.Client
) -> None:
    held: list[blocking.Lease] = [client.mutex("a").lock()]
    evicted = client.mutex("b").lock(on_loss=lambda _: held.clear())
    with dropped("the lease of mutex 'a' on /default"):
        eye.evict("/default", "b", evicted.fencing_token)
        until(lambda: not held)
    until(lambda: is_free(eye, "a"))
