"""The file of a Unix socket: bound anew when it is deleted, never taken from another server."""

# ruff: noqa: ASYNC240  the files of these tests are local, and their operations quick

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenure.errors import EngineUnavailable
from tenure.server.addresses import SocketFile, bind_unix
from tenure.server.native import NativeListener
from tenure.server.native import listener as native
from tests.server.talking import PATIENCE, Caller, serving

ANEW = "the socket file was deleted, and is created again"
CANNOT = "the socket file was deleted, and cannot be created again"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "_TICK", 0.01)
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "tenure.sock"


@contextlib.asynccontextmanager
async def called(path: Path) -> AsyncIterator[Caller]:
    """A client with a session."""
    caller = Caller()
    await asyncio.get_running_loop().create_unix_connection(lambda: caller, str(path))
    try:
        await caller.greet()
        await caller.attach()
        yield caller
    finally:
        caller.close()
        await caller.until_lost()


async def told(caplog: pytest.LogCaptureFixture, event: str, times: int = 1) -> None:
    """Wait until the log has told of an event so many times."""
    async with asyncio.timeout(PATIENCE):
        while [record.message for record in caplog.records].count(event) < times:  # noqa: ASYNC110  the log notifies nobody
            await asyncio.sleep(0.005)


async def ticks(listener: NativeListener, number: int = 5) -> None:
    """Wait until the listener has looked at the file so many times."""
    for _ in range(number):
        timer = listener._timer
        async with asyncio.timeout(PATIENCE):
            while listener._timer is timer:  # noqa: ASYNC110  a timer notifies nobody
                await asyncio.sleep(0.005)


async def test_a_deleted_file_is_made_anew_and_connections_stay(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(url=f"tenure+unix://{path}?mode=0660") as listener, called(path) as before:
        for times in (1, 2):
            path.unlink()
            await told(caplog, ANEW, times)
            assert path.stat().st_mode & 0o777 == 0o660
            async with called(path):
                pass
        await before.attach(2)
        assert len(listener.connections) == 1
    assert not path.exists()


async def test_a_renamed_file_is_replaced(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(url=f"tenure+unix://{path}"):
        path.rename(path.with_name("other.sock"))
        await told(caplog, ANEW)
        async with called(path):
            pass


async def test_a_deleted_folder_is_told_once_and_waited_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(url=f"tenure+unix://{path}") as listener:
        shutil.rmtree(path.parent)
        await told(caplog, CANNOT)
        await ticks(listener)
        assert [record.message for record in caplog.records].count(CANNOT) == 1
        path.parent.mkdir()
        await told(caplog, ANEW)
        async with called(path):
            pass


async def test_the_file_of_another_server_is_left_to_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(url=f"tenure+unix://{path}") as listener:
        path.rename(path.with_name("ours.sock"))  # its inode stays taken
        with bind_unix(str(path), 0o600) as other:
            other.listen()
            mine = path.stat().st_ino
            await told(caplog, CANNOT)
            await ticks(listener)
            assert path.stat().st_ino == mine
        await told(caplog, ANEW)  # what a dead server has left is replaced
        async with called(path):
            pass


async def test_a_server_that_drains_makes_no_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(url=f"tenure+unix://{path}") as listener:
        await listener.drain()
        assert not path.exists()
        await ticks(listener)
        assert not path.exists()
    assert ANEW not in caplog.text


async def test_the_file_of_a_socket_that_was_passed_is_the_service_managers(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passed = socket.socket(socket.AF_UNIX)
    passed.bind(str(path))
    async with serving(url=f"tenure+unix://{path}", sockets=[passed]) as listener:
        path.unlink()
        await ticks(listener)
        assert not path.exists()
    assert ANEW not in caplog.text


async def test_a_client_that_waits_to_be_accepted_is_when_the_socket_is_replaced(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="tenure.server")
    async with serving(url=f"tenure+unix://{path}") as listener:
        made = SocketFile(str(path.with_name("other.sock")), 0o600).bind()
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.setblocking(False)
            waiting.connect(str(path))
            assert listener._door is not None
            listener._door.replace([made])
            async with asyncio.timeout(PATIENCE):
                while len(listener.connections) < 1:  # noqa: ASYNC110  the listener notifies nobody
                    await asyncio.sleep(0.005)
        async with called(path.with_name("other.sock")):
            pass


def test_a_file_that_another_one_has_replaced_is_not_removed(path: Path) -> None:
    file = SocketFile(str(path), 0o600)
    with file.bind():
        assert not file.is_gone()
        path.rename(path.with_name("kept"))
        path.touch()
        assert file.is_gone()
        file.remove()
        assert path.exists()
        with pytest.raises(EngineUnavailable, match="the file is not a socket"):
            file.bind(timeout=0)


def test_a_busy_server_is_not_waited_for(path: Path) -> None:
    with bind_unix(str(path), 0o600) as other:
        other.listen(0)
        with contextlib.ExitStack() as stack:
            taken = 0
            while taken == 0:  # until its backlog is full
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                taken = client.connect_ex(str(path))
            assert taken == errno.EAGAIN
            with pytest.raises(EngineUnavailable, match="another server listens there"):
                SocketFile(str(path), 0o600).bind(timeout=0)
