"""The fence before an object of this process."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tenure.errors import InvalidArgument, Misuse, StaleToken
from tenure.fencing import Fence


def test_an_older_token_is_refused_and_the_same_is_not() -> None:
    fence = Fence("report")
    assert fence.newest is None
    for token in (33, 33, 34, 34, 40):
        fence.admit(token)
    for token in (39, 33, 0):
        with pytest.raises(StaleToken) as caught:
            fence.admit(token)
        assert (caught.value.resource, caught.value.token) == ("report", token)
        assert caught.value.newest == fence.newest == 40


def test_a_refused_block_is_not_entered() -> None:
    fence, written = Fence("report"), []
    for token in (2, 1, 2, 3):
        try:
            with fence.writing(token):
                written.append(token)
        except StaleToken:
            pass
    assert written == [2, 2, 3]


def test_a_block_that_fails_leaves_its_token_admitted_and_the_fence_open() -> None:
    fence = Fence("report")
    with pytest.raises(ZeroDivisionError), fence.writing(7):
        _ = 1 / 0
    assert fence.newest == 7
    fence.admit(7)


def test_a_fence_can_begin_where_another_ended() -> None:
    fence = Fence("report", newest=33)
    with pytest.raises(StaleToken):
        fence.admit(32)
    fence.admit(33)
    assert "33" in repr(fence)


@pytest.mark.parametrize("arguments", [{"resource": ""}, {"resource": "x", "newest": -1}])
def test_what_makes_no_fence_is_refused(arguments: Any) -> None:
    with pytest.raises(InvalidArgument):
        Fence(**arguments)


def test_what_is_no_token_is_refused_before_anything_else() -> None:
    fence = Fence("report", newest=33)
    with pytest.raises(InvalidArgument), fence.writing(True):
        pytest.fail("it is no token")
    assert fence.newest == 33


def test_a_block_inside_a_block_is_refused_instead_of_waiting_for_ever() -> None:
    fence = Fence("report")
    with fence.writing(1):
        with pytest.raises(Misuse, match="nested"), fence.writing(2):
            pytest.fail("it is nested")
        with pytest.raises(Misuse, match="nested"):
            fence.admit(2)
    assert fence.newest == 1
    fence.admit(2)


async def test_a_block_that_awaits_is_noticed_by_the_next_task() -> None:
    fence, go_on = Fence("report"), asyncio.Event()

    async def wrong() -> None:
        with fence.writing(1):
            await go_on.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wrong())
        await asyncio.sleep(0)
        with pytest.raises(Misuse, match="await"):
            fence.admit(2)
        go_on.set()


def test_another_thread_waits_for_the_end_of_the_block() -> None:
    fence, order, trying = Fence("report"), [], threading.Event()

    def newer() -> None:
        trying.set()
        with fence.writing(2):
            order.append(2)

    with ThreadPoolExecutor(1) as pool:
        with fence.writing(1):
            waiting = pool.submit(newer)
            trying.wait()
            order.append(1)
        waiting.result()
    assert order == [1, 2]


def test_of_many_threads_the_writes_never_go_back() -> None:
    fence, written = Fence("report"), []
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        chance, refused = random.Random(seed), 0
        start.wait()
        for step in range(500):
            token = step // 5 + chance.randrange(10)
            try:
                with fence.writing(token):
                    written.append(token)
            except StaleToken:
                refused += 1
        return refused

    with ThreadPoolExecutor(8) as pool:
        refused = sum(pool.map(work, range(8)))
    assert written == sorted(written)
    assert len(written) + refused == 8 * 500
    assert refused > 0
