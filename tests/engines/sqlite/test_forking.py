"""A fork waits for threads inside of SQLite, and they never wait for one another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tenure.engines.sqlite import forking
from tenure.engines.sqlite.forking import Guard

PATIENCE = 30.0


def enter(guard: Guard) -> None:
    with guard:
        pass


@pytest.mark.parametrize("step", [lambda _: Guard(), enter], ids=["makes", "enters"])
def test_a_thread_inside_of_a_guard_may_need_another_one(step: Callable[[Guard], object]) -> None:
    outer, inner = Guard(), Guard()
    inside, waited_for, held, looked = (threading.Event() for _ in range(4))
    acquire = outer.acquire

    def asked(blocking: bool = True) -> bool:
        waited_for.set()
        return acquire(blocking)

    def use() -> None:
        with outer:
            outer.acquire = asked  # type: ignore[assignment]
            inside.set()
            assert waited_for.wait(PATIENCE)
            step(inner)

    def fork() -> None:
        assert inside.wait(PATIENCE)
        forking._before()
        held.set()
        looked.wait(PATIENCE)
        forking._after()

    threads = [threading.Thread(target=each, daemon=True) for each in (use, fork)]
    for thread in threads:
        thread.start()
    assert held.wait(PATIENCE), "the fork and the thread wait for each other"
    assert not acquire(blocking=False)
    assert not inner.acquire(blocking=False)
    looked.set()
    for thread in threads:
        thread.join()
    enter(outer)
