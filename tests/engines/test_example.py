"""The example of an engine keeps the contract, and survives what its docstrings say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import folder_engine
import pytest
from folder_engine import store as folder_store

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Enqueued, Place, Withdrawn
from tenure.errors import InvalidArgument
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance import Stores, conformance_tests
from tenure.testing.recorder import Recorder

EXAMPLE = Path(__file__).parents[2] / "examples/folder_engine"


@contextmanager
def a_folder() -> Iterator[str]:
    with TemporaryDirectory(prefix="tenure-") as folder:
        yield f"folder://{folder}/store"


TestFolder = conformance_tests(Stores(a_folder, folder_engine.connect))


async def connected(path: Path) -> folder_engine.FolderEngine:
    engine = folder_engine.connect(f"folder://{path}", SystemClock())
    await engine.open()
    return engine


def test_its_project_registers_its_scheme() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = project["entry-points"]["tenure.engines"]["folder"]
    assert name == f"{folder_engine.__name__}:{folder_engine.connect.__name__}"


@pytest.mark.parametrize(
    "url", ["folder://", "folder:///", "folder://host/path", "folder:///p?a=b"]
)
def test_a_url_that_names_no_folder_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="folder:///path"):
        folder_engine.connect(url, SystemClock())


def test_what_is_asked_during_an_outage_is_done_in_order_when_it_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        engine, heard = await connected(tmp_path / "store"), Recorder()
        session = await engine.attach(Attach(DEFAULT_NODE, 60.0), heard)
        (tmp_path / "store/lock").unlink()
        (tmp_path / "store/lock").mkdir()  # cannot be opened as a file
        answers: list[Any] = [
            session.enqueue(1, "m", 1, b"", timeout=0, ephemeral=True),
            session.withdraw(1),
        ]
        assert all(isinstance(each, asyncio.Future) for each in answers)
        await heard.wait_for(lambda it: "Detached()" in map(str, it.said), "the outage")
        assert "cannot be used" in str(engine.trouble())
        (tmp_path / "store/lock").rmdir()
        done = [await each for each in answers if isinstance(each, asyncio.Future)]
        assert done == [Enqueued(Place.GRANTED, done[0][1]), Withdrawn.LEFT]
        await heard.wait_for(lambda it: "Attached()" in map(str, it.said), "the end of the outage")
        assert engine.trouble() is None
        await engine.aclose()

    asyncio.run(main())


def test_a_process_that_is_killed_loses_what_it_holds_after_its_window(tmp_path: Path) -> None:
    program = """
import asyncio, sys, tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.testing.recorder import Recorder
import folder_engine

async def main():
    engine = folder_engine.connect(sys.argv[1], SystemClock())
    await engine.open()
    session = await engine.attach(Attach("/default", 1.0), Recorder())
    session.enqueue(1, "m", 2**64 - 1, b"", timeout=0, ephemeral=True)
    print("holds", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    url = f"folder://{tmp_path}/store"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    command = [sys.executable, "-c", program, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"

        async def main() -> None:
            engine, heard = await connected(tmp_path / "store"), Recorder()
            session = await engine.attach(Attach(DEFAULT_NODE, 60.0), heard)
            answer = session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
            assert isinstance(answer, Enqueued)
            assert answer.place is Place.WAITING
            process.send_signal(signal.SIGKILL)
            await heard.wait_for(lambda it: 1 in it.grants, "the grant")
            await engine.aclose()

        asyncio.run(main())


def test_no_session_survives_a_start_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(folder_store, "_BOOT_ID", boot)

    async def main() -> None:
        boot.write_text("first")
        engine, heard = await connected(tmp_path / "store"), Recorder()
        session = await engine.attach(Attach(DEFAULT_NODE, 60.0), heard)
        await session.create_semaphore("pool", 2, b"kept", exist_ok=False)
        session.enqueue(1, "pool", 1, b"", timeout=0, ephemeral=False)
        boot.write_text("second")
        later = await connected(tmp_path / "store")
        found = await later.describe_semaphore(DEFAULT_NODE, "pool", owners=True, waiters=True)
        assert (found.data, found.limit, found.owners) == (b"kept", 2, ())
        assert await later.list_sessions(DEFAULT_NODE) == []
        await later.aclose()
        await engine.aclose()

    asyncio.run(main())
