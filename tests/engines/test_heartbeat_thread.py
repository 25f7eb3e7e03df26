"""The heartbeat thread that engines share (`tenure.engines._kit.heartbeat`)."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tenure.engines._kit import heartbeat
from tenure.engines._kit.heartbeat import HeartbeatThread

NAME = "tenure-test-heartbeat"
LONG = 30.0
"""Seconds after which a test fails that waits for another thread."""


class Thread(HeartbeatThread[str]):
    """Heartbeat thread that sends the names of sessions, and waits for as many bytes."""

    def __init__(self, place: tuple[str, int]) -> None:
        super().__init__(NAME, lambda: 7.0, "heartbeats")
        self.place = place
        self.renewed: list[dict[str, float]] = []
        self.errors: list[Exception] = []  # raised by the next renewals
        self.proven = threading.Semaphore(0)
        self.attempted = threading.Semaphore(0)
        self.disconnected = threading.Semaphore(0)
        self.connection: socket.socket | None = None

    def renew_now(self, wanted: dict[str, float]) -> None:
        self.renewed.append(wanted)
        self.attempted.release()
        if self.errors:
            raise self.errors.pop(0)
        if self.connection is None:
            self.connection = self.connect(self.place, LONG)
        self.connection.sendall(b"".join(map(str.encode, wanted)))
        if not self.connection.recv(100):
            raise ConnectionResetError("closed")
        self.proven.release()

    def disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self.drop(connection)
            self.disconnected.release()


class Server:
    """Server of one connection after the other; it echoes while it answers."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self.listening.getsockname()
        self.answers = True
        self.asked = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            with connection:
                while data := connection.recv(100):
                    if data == b"stop":
                        return
                    self.asked.release()
                    if self.answers:
                        connection.sendall(data)

    def close(self) -> None:
        with socket.create_connection(self.place) as connection:
            connection.sendall(b"stop")
        self.thread.join()
        self.listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[Thread]:
    thread = Thread(server.place)
    try:
        yield thread
    finally:
        await thread.aclose()


def is_alive() -> bool:
    return NAME in {each.name for each in threading.enumerate()}


async def test_sessions_are_renewed_while_the_loop_is_stuck(server: Server) -> None:
    async with opened(server) as thread:
        assert not is_alive()
        thread.renew("a")
        assert thread.proven.acquire(timeout=LONG)  # the loop does not turn meanwhile
        thread.renew("b")
        assert thread.proven.acquire(timeout=LONG)
        assert thread.renewed == [{"a": 7.0}, {"b": 7.0}]
    assert not is_alive()
    await thread.aclose()  # safe to call twice


async def test_a_failed_renewal_drops_the_connection_and_the_next_one_connects(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server) as thread:
        thread.renew("a")
        assert thread.proven.acquire(timeout=LONG)
        thread.errors = [ConnectionResetError("gone"), ValueError("a defect")]
        for _ in range(2):
            thread.attempted = threading.Semaphore(0)
            thread.renew("a")
            assert thread.attempted.acquire(timeout=LONG)
        assert thread.disconnected.acquire(timeout=LONG)
        thread.renew("a")
        assert thread.proven.acquire(timeout=LONG)
    reported = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(reported) == 1
    assert "a defect" in reported[0]


async def test_connections_are_closed_when_nothing_is_renewed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "IDLE", 0.01)
    async with opened(server) as thread:
        for _ in range(2):
            thread.renew("a")
            assert thread.proven.acquire(timeout=LONG)
            assert thread.disconnected.acquire(timeout=LONG)
        assert is_alive()


async def test_closing_interrupts_a_renewal_without_an_answer(server: Server) -> None:
    server.answers = False
    async with opened(server) as thread:
        thread.renew("a")
        assert server.asked.acquire(timeout=LONG)
    assert not is_alive()
    thread.renew("a")  # ignored from now on
    assert len(thread.renewed) == 1


async def test_no_connection_is_opened_once_the_engine_is_being_closed(server: Server) -> None:
    thread = Thread(server.place)
    await thread.aclose()
    with pytest.raises(ConnectionAbortedError):
        thread.connect(server.place, LONG)


async def test_closing_does_not_wait_long_for_what_cannot_be_interrupted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_LONGEST_CLOSE", 0.01)
    thread, begun, looked_up = Thread(server.place), threading.Event(), threading.Event()

    def look_up(_: dict[str, float]) -> None:
        begun.set()
        looked_up.wait(LONG)

    monkeypatch.setattr(thread, "renew_now", look_up)
    thread.renew("a")
    assert begun.wait(LONG)
    await asyncio.wait_for(thread.aclose(), LONG)
    assert is_alive()
    looked_up.set()
    await asyncio.wait_for(thread.aclose(), LONG)


async def test_a_thread_that_cannot_be_started_is_started_by_the_next_renewal(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server) as thread:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            thread.renew("a")
        thread.renew("b")
        assert thread.proven.acquire(timeout=LONG)
        assert thread.renewed == [{"a": 7.0, "b": 7.0}]


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_wait_in_the_thread_ends_when_the_engine_is_being_closed(server: Server) -> None:
    thread, ended = Thread(server.place), threading.Event()
    assert not thread.wait_until_closing(0.001)

    def wait() -> None:
        if thread.wait_until_closing(LONG):
            ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    await thread.aclose()
    waiting.join()
    assert ended.is_set()
