"""What runs in threads of the operating system where gevent has replaced them, here without that.

`tests/blocking/test_greenlets.py` has whole programs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from tenure import greenlets


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent is taken to have replaced threads; its own threads are such as a test can trace."""
    monkey = pytest.importorskip("gevent.monkey", reason="pip install gevent")
    original = monkey.get_original

    def start(function: Callable[[], object], _: tuple[()]) -> None:
        threading.Thread(target=function).start()

    def get_original(module: str, name: str) -> Any:
        return start if name == "start_new_thread" else original(module, name)

    monkeypatch.setattr(monkey, "get_original", get_original)
    monkeypatch.setattr(monkey, "is_module_patched", lambda _: True)


def test_without_gevent_they_are_those_of_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "gevent.monkey", raising=False)
    assert not greenlets.are_used()
    assert isinstance(greenlets.new_thread(lambda: None, "a"), threading.Thread)
    assert isinstance(greenlets.new_condition(), threading.Condition)
    assert isinstance(greenlets.new_event(), threading.Event)
    with greenlets.new_selector() as selector:
        assert not selector.get_map()
    assert greenlets.new_queue().empty()


@pytest.mark.usefixtures("replaced")
def test_a_thread_is_alive_until_it_has_ended() -> None:
    go = greenlets.new_event()
    thread = greenlets.new_thread(go.wait, "a")
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    thread.join(0)
    assert thread.is_alive()
    go.set()
    thread.join()
    assert not thread.is_alive()


@pytest.mark.usefixtures("replaced")
def test_a_thread_that_cannot_be_started_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    thread = greenlets.new_thread(lambda: None, "a")
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        thread.start()
    assert not thread.is_alive()
    thread.join()


@pytest.mark.usefixtures("replaced")
def test_an_event_wakes_all_threads_that_wait_and_can_be_cleared() -> None:
    event, came = greenlets.new_event(), greenlets.new_queue()
    threads = [greenlets.new_thread(lambda: came.put(event.wait()), "a") for _ in range(3)]
    for each in threads:
        each.start()
    event.set()
    assert [came.get() for _ in threads] == [True] * 3
    event.clear()
    assert not event.wait(0)
    assert not event.wait(0.001)
    for each in threads:
        each.join()


@pytest.mark.usefixtures("replaced")
def test_a_condition_wakes_one_thread_for_each_notification() -> None:
    condition, came = greenlets.new_condition(), greenlets.new_queue()
    waiting, free = [0], [0]

    def may_go() -> bool:
        came.put("looked")
        return free[0] > 0

    def wait() -> None:
        with condition:
            waiting[0] += 1
            condition.wait_for(may_go)
            free[0] -= 1
        came.put("went")

    threads = [greenlets.new_thread(wait, "a") for _ in range(2)]
    for each in threads:
        each.start()
    assert [came.get(), came.get()] == ["looked", "looked"]
    for _ in threads:
        with condition:
            free[0] += 1
            condition.notify()
        assert [came.get(), came.get()] == ["looked", "went"]
    with condition:
        condition.notify()  # nothing waits
        condition.notify_all()
    for each in threads:
        each.join()


@pytest.mark.usefixtures("replaced")
def test_a_selector_and_a_queue_are_those_that_block_their_thread() -> None:
    with greenlets.new_selector() as selector:
        assert "gevent" not in type(selector).__module__
    assert "gevent" not in type(greenlets.new_queue()).__module__


@pytest.mark.usefixtures("replaced")
def test_a_descriptor_is_waited_for_in_the_hub() -> None:
    there, here = os.pipe()
    os.write(here, b"x")
    greenlets.wait_readable(there)
    assert os.read(there, 9) == b"x"
    os.close(there)
    os.close(here)


@pytest.mark.usefixtures("replaced")
async def test_a_call_in_a_thread_returns_or_raises() -> None:
    loop = asyncio.get_running_loop()
    assert await greenlets.in_thread(loop, lambda: 3) == 3
    with pytest.raises(ValueError, match="invalid"):
        await greenlets.in_thread(loop, lambda: int("a"))


@pytest.mark.usefixtures("replaced")
async def test_the_result_of_a_cancelled_call_is_dropped() -> None:
    loop = asyncio.get_running_loop()
    go, ended = greenlets.new_event(), asyncio.Event()

    def call() -> None:
        go.wait()
        loop.call_soon_threadsafe(loop.call_soon, ended.set)

    future = greenlets.in_thread(loop, call)
    future.cancel()
    go.set()
    await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await future


@pytest.mark.usefixtures("replaced")
async def test_ones_own_lease_is_waited_for_because_another_greenlet_may_release_it() -> None:
    async with tenure.connect("memory://") as client:
        lease = await client.mutex("a").lock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.mutex("a").lock()
        await lease.release()
