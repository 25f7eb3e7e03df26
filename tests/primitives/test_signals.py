"""Signals before whose actions clients are closed.

`tests/engines/test_signals.py` has programs that end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import tenure
from tenure import blocking, fork, greenlets
from tenure._client import signals
from tenure._client.client_core import ClientCore
from tenure.errors import EngineError, InvalidArgument, Misuse
from tests.blocking.helpers import is_free

HARMLESS = signal.SIGWINCH
"""A signal whose default action is none."""


@contextmanager
def handler(number: int, handle: object) -> Iterator[None]:
    before = signal.signal(number, handle)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(number, before)


def test_the_programs_own_handler_is_called_afterwards() -> None:
    url = "memory://signals-handler"
    calls: list[tuple[int, bool]] = []
    with blocking.connect(url) as eye, blocking.connect(url) as client:

        def handle(number: int, _: object) -> None:
            calls.append((number, is_free(eye, "a")))

        with handler(signal.SIGUSR1, handle):
            client.release_on_signals(signal.SIGUSR1)
            client.release_on_signals(signal.SIGUSR1)
            lease = client.mutex("a").lock()
            signal.raise_signal(signal.SIGUSR1)
            assert not lease.held
            assert calls == [(signal.SIGUSR1, True)]
            assert signal.getsignal(signal.SIGUSR1) is handle


def test_an_action_that_is_the_default_one_is_taken_afterwards() -> None:
    client = blocking.connect("memory://signals-default")
    client.release_on_signals(HARMLESS)
    lease = client.mutex("a").lock()
    signal.raise_signal(HARMLESS)
    assert not lease.held
    assert signal.getsignal(HARMLESS) is signal.SIG_DFL


def test_the_first_process_of_a_container_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "_exit", statuses.append)
    with blocking.connect("memory://signals-container") as client:
        client.release_on_signals(HARMLESS)
        signal.raise_signal(HARMLESS)
    assert statuses == [128 + HARMLESS]


def test_a_signal_that_the_program_ignores_closes_nothing() -> None:
    with (
        handler(signal.SIGUSR1, signal.SIG_IGN),
        blocking.connect("memory://signals-ignored") as client,
    ):
        client.release_on_signals(signal.SIGUSR1)
        with client.mutex("a").lock() as lease:
            signal.raise_signal(signal.SIGUSR1)
            assert lease.held


def test_a_client_that_is_closed_is_forgotten() -> None:
    calls = []
    with handler(signal.SIGUSR1, lambda *_: calls.append("handled")):
        for _ in range(3):
            with blocking.connect("memory://signals-closed") as client:
                client.release_on_signals(signal.SIGUSR1)
                assert len(signals._signals[signal.SIGUSR1].clients) == 1
        signal.raise_signal(signal.SIGUSR1)
    assert calls == ["handled"]


def test_a_client_of_a_loop_is_closed_on_it() -> None:
    async def main() -> None:
        handled = asyncio.Event()
        with handler(signal.SIGUSR1, lambda *_: handled.set()):
            async with tenure.connect("memory://signals-loop") as client:
                client.release_on_signals(signal.SIGUSR1)
                lease = await client.mutex("a").lock()
                signal.raise_signal(signal.SIGUSR1)
                assert not handled.is_set()
                await handled.wait()
                assert not lease.held

    asyncio.run(main())


def test_a_client_of_a_loop_that_is_closed_does_not_keep_the_action() -> None:
    calls = []

    async def main() -> None:
        client = tenure.connect("memory://signals-closed-loop")
        client.release_on_signals(signal.SIGUSR1)

    with handler(signal.SIGUSR1, lambda *_: calls.append("handled")):
        asyncio.run(main())
        signal.raise_signal(signal.SIGUSR1)
    assert calls == ["handled"]


def test_a_client_that_cannot_be_closed_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: ClientCore) -> None:
        raise EngineError("the store failed")

    with blocking.connect("memory://signals-failing") as client:
        client.release_on_signals(HARMLESS)
        with monkeypatch.context() as patch:
            patch.setattr(ClientCore, "aclose", fail)
            signal.raise_signal(HARMLESS)
    (record,) = [each for each in caplog.records if "at a signal" in each.getMessage()]
    assert record.getMessage() == (
        "could not close at a signal: url=memory://signals-failing "
        "error=EngineError('the store failed')"
    )


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_clients_are_closed_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = threading.Event()
    begun: list[ClientCore] = []
    all_begun = asyncio.Event()
    close = ClientCore.aclose

    async def close_beside_others(core: ClientCore) -> None:
        begun.append(core)
        if len(begun) == 3:
            all_begun.set()
        await all_begun.wait()
        await close(core)

    async def main() -> None:
        clients = [tenure.connect("memory://signals-many") for _ in range(3)]
        for client in clients:
            client.release_on_signals(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        while not handled.is_set():  # noqa: ASYNC110  the handler is called on the loop
            await asyncio.sleep(0)

    with handler(signal.SIGUSR1, lambda *_: handled.set()), monkeypatch.context() as patch:
        patch.setattr(ClientCore, "aclose", close_beside_others)
        if kind == "asynchronous":
            asyncio.run(main())
        else:
            clients = [blocking.connect("memory://signals-many") for _ in range(3)]
            for client in clients:
                client.release_on_signals(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
    assert handled.is_set()
    assert len(begun) == 3


def test_without_threads_a_signal_closes_clients_without_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    calls: list[str] = []
    monkeypatch.setattr(greenlets, "start_thread", fail)
    with (
        handler(signal.SIGUSR1, lambda *_: calls.append("handled")),
        blocking.connect("memory://signals-threads") as client,
    ):
        client.release_on_signals(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert calls == ["handled"]
    assert "closing at a signal has no time limit: error=can't start new thread" in caplog.text


def test_a_client_that_does_not_close_keeps_the_action_for_so_long_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(_: ClientCore) -> None:
        await asyncio.Event().wait()

    calls: list[str] = []
    monkeypatch.setattr(signals, "CLOSE_TIMEOUT", 0.05)
    with (
        handler(signal.SIGUSR1, lambda *_: calls.append("handled")),
        blocking.connect("memory://signals-late") as client,
        monkeypatch.context() as patch,
    ):
        patch.setattr(greenlets, "start_thread", lambda _: None)
        patch.setattr(signals, "ACTION_TIMEOUT", 0.0)
        patch.setattr(ClientCore, "aclose", wait)
        client.release_on_signals(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert calls == ["handled"]
        patch.undo()
    assert calls == ["handled"]


def test_the_action_is_taken_once_when_the_loop_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    limits: list[Callable[[], object]] = []

    async def main() -> None:
        async with tenure.connect("memory://signals-loop-late") as client:
            client.release_on_signals(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            limits[0]()
            assert calls == ["handled"]

    monkeypatch.setattr(greenlets, "start_thread", limits.append)
    monkeypatch.setattr(signals, "ACTION_TIMEOUT", 0.0)
    with handler(signal.SIGUSR1, lambda *_: calls.append("handled")):
        asyncio.run(main())
    assert calls == ["handled"]


def test_the_action_of_a_second_signal_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, _: object) -> None:
        calls.append(number)
        raise Stop

    async def signal_again(core: ClientCore) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        await close(core)

    calls: list[int] = []
    limits: list[Callable[[], object]] = []
    close = ClientCore.aclose
    monkeypatch.setattr(greenlets, "start_thread", limits.append)
    with (
        handler(signal.SIGUSR1, stop),
        blocking.connect("memory://signals-twice") as client,
        monkeypatch.context() as patch,
    ):
        patch.setattr(ClientCore, "aclose", signal_again)
        client.release_on_signals(signal.SIGUSR1)
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGUSR1)
        patch.undo()
        patch.setattr(signals, "ACTION_TIMEOUT", 0.0)
        limits[0]()
    assert calls == [signal.SIGUSR1]


def test_a_forked_child_leaves_its_parents_client_alone() -> None:
    calls = []
    with (
        handler(signal.SIGUSR1, lambda *_: calls.append("handled")),
        blocking.connect("memory://signals-fork") as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        client.release_on_signals(signal.SIGUSR1)
        with client.mutex("a").lock() as lease:
            patch.setattr("tenure.fork.generation", fork.generation + 1)
            signal.raise_signal(signal.SIGUSR1)
            patch.undo()
            assert lease.held
    assert calls == ["handled"]


def test_another_thread_than_the_main_thread_gets_an_error() -> None:
    errors = []
    with blocking.connect("memory://signals-thread") as client:

        def call() -> None:
            with pytest.raises(Misuse, match="in the main thread") as told:
                client.release_on_signals()
            errors.append(told)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert errors


def test_what_cannot_be_handled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking.connect("memory://signals-wrong") as client:
        for number in (signal.SIGKILL, 0, 1000):
            with pytest.raises(InvalidArgument, match=f"signal {int(number)} cannot be handled"):
                client.release_on_signals(number)
        monkeypatch.setattr(signal, "getsignal", lambda _: None)
        with pytest.raises(Misuse, match="not installed by Python"):
            client.release_on_signals(signal.SIGUSR1)
    with pytest.raises(Misuse, match="outside of an event loop"):
        tenure.connect("memory://signals-wrong").release_on_signals()
