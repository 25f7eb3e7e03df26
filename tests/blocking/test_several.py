"""Several locks as one, for threads; `tests.primitives.test_several` has what both APIs share."""

from __future__ import annotations

import pytest

from tenure import blocking
from tenure.errors import AcquireTimeout, InvalidArgument, LeaseLost
from tenure.model import DEFAULT_NODE
from tests.blocking.helpers import Thread, until, waiting


def test_all_of_holds_every_lock(client: blocking.Client, eye: blocking.Client) -> None:
    b, gpu = client.mutex("b"), client.semaphore("gpu", limit=3)
    with client.all_of(b, (gpu, 2), client.mutex("a"), timeout=30) as leases:
        assert [each.name for each in leases] == ["b", "gpu", "a"]
        assert (leases[1].count, len(leases), leases.held, leases.loss) == (2, 3, True, None)
        assert [each.name for each in leases[1:]] == ["gpu", "a"]
        assert leases[0] in leases
        leases.check()
        assert eye.mutex("a").try_lock() is None
    assert not leases.held
    assert not eye.mutex("a").locked()


def test_threads_with_other_orders_do_not_block_each_other(
    client: blocking.Client, eye: blocking.Client
) -> None:
    def work(each: blocking.Client, names: str) -> int:
        for _ in range(20):
            with each.all_of(*map(each.mutex, names), timeout=60):
                pass
        return 20

    threads = [
        Thread(lambda each=each, names=names: work(each, names))  # type: ignore[misc]
        for each, names in ((client, "ab"), (client, "ba"), (eye, "bca"))
    ]
    assert [each.result() for each in threads] == [20, 20, 20]


def test_a_timeout_keeps_nothing(client: blocking.Client, eye: blocking.Client) -> None:
    with eye.mutex("b").lock():
        block = client.all_of(client.mutex("a"), client.mutex("b"), timeout=1)
        with pytest.raises(AcquireTimeout, match="mutex 'b'"):
            block.__enter__()
        assert not eye.mutex("a").locked()
        with pytest.raises(AcquireTimeout, match="none of 'b'"):
            client.any_of(client.mutex("b"), timeout=0)


def test_the_loss_of_one_is_raised_in_the_block(
    client: blocking.Client, eye: blocking.Client
) -> None:
    block = client.all_of(client.mutex("a"), client.mutex("b"))
    leases = block.__enter__()
    assert eye.evict(DEFAULT_NODE, "a", leases[0].fencing_token)
    until(lambda: not leases.held)
    for call in (leases.check, client.mutex("c").lock):
        with pytest.raises(LeaseLost, match="'a'"):
            call()
    with pytest.raises(LeaseLost, match="'a'"):
        block.__exit__(None, None, None)
    assert not eye.mutex("b").locked()


def test_any_of_takes_the_first_that_is_free(client: blocking.Client, eye: blocking.Client) -> None:
    held = [eye.mutex(name).lock() for name in "ab"]
    thread = Thread(lambda: client.any_of(client.mutex("a"), client.mutex("b")))
    until(lambda: waiting(eye, "a") and waiting(eye, "b"))
    held[1].release()
    with thread.result() as lease:
        assert lease.name == "b"
        assert waiting(eye, "a") == 0
    held[0].release()


def test_a_lease_is_no_lock(client: blocking.Client) -> None:
    with client.mutex("a").lock() as lease:
        for call in (client.all_of, client.any_of):
            with pytest.raises(InvalidArgument, match=r"acquired already: write the mutex"):
                call(lease)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="takes mutexes"):
                call(client)  # type: ignore[arg-type]
