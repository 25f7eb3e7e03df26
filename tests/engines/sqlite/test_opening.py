"""First contact with a new file: what other programs do, or have done, at each of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.files import prepare
from tenure.engines.sqlite.transaction import Turn
from tenure.engines.sqlite.url import parse
from tests.engines.first_contact import Meetings, meetings
from tests.engines.sqlite.helpers import engine_of


@pytest.fixture(scope="module")
def others() -> Iterator[Meetings]:
    with meetings(1) as processes:
        yield processes


class Steps:
    """Calls `between` before a chosen statement of an opening, if it has not taken the turn yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, between: Callable[[], None]) -> None:
        self.left = 0
        self.opening = True
        steps, connect = self, sqlite3.connect

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> sqlite3.Cursor:
                steps.opening = steps.opening and args[0] != "BEGIN IMMEDIATE"
                if steps.opening and steps.left > 0:
                    steps.left -= 1
                    if steps.left == 0:
                        between()
                return super().execute(*args)

        def connected(*args: Any, **named: Any) -> sqlite3.Connection:
            return connect(*args, factory=Connection, **named)

        monkeypatch.setattr(sqlite3, "connect", connected)

    def choose(self, step: int) -> None:
        """Choose a statement of the next opening."""
        self.left, self.opening = step, True


async def test_another_program_may_create_and_leave_a_store_at_each_step_of_an_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Meetings
) -> None:
    url = ""
    steps = Steps(monkeypatch, lambda: others.meet([url]))
    for step in itertools.count(1):
        url = f"sqlite:///{tmp_path}/{step}.db"
        steps.choose(step)
        async with tenure.connect(url) as client:
            lease = await client.mutex("m").try_lock()
            assert lease is not None
        if steps.left:  # an opening has fewer steps
            break
    assert step > 8


@pytest.mark.parametrize("state", ["new", "used"])
async def test_an_open_connection_keeps_other_programs_from_removing_the_log(
    state: str, tmp_path: Path
) -> None:
    address = parse(f"sqlite:///{tmp_path}/store.db")
    if state == "used":
        async with tenure.connect(address.url) as client:
            await client.list_nodes()
    prepare(address)
    with (
        contextlib.closing(schema.connect(address)) as connection,
        contextlib.closing(sqlite3.connect(address.path, timeout=0)) as last_closer,
    ):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            last_closer.execute("PRAGMA journal_mode = DELETE")
        assert schema.is_ready(connection, address.path, portable=False) == (state == "used")


async def test_a_program_that_waits_for_the_creator_of_a_store_reads_no_missing_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = parse(f"sqlite:///{tmp_path}/store.db")
    place = prepare(address)
    reported = asyncio.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.set()

    log, handler = logging.getLogger("tenure.sqlite"), Handler(logging.WARNING)
    log.addHandler(handler)
    turn = Turn(place.turn, place.mode)
    try:
        turn.take()
        async with asyncio.TaskGroup() as tasks:
            engine = engine_of(address.url)
            opening = tasks.create_task(engine.open())
            await reported.wait()
            turn.release()
            await opening
            await engine.aclose()
    finally:
        turn.close()
        log.removeHandler(handler)
    assert "has kept the turn" in caplog.text
    assert "background task failed" not in caplog.text


_KILLED = """
import asyncio, os, sqlite3, sys
import tenure
import tenure.engines.sqlite.engine, concurrent.futures, ctypes
left, url = int(sys.argv[1]), sys.argv[2]
folder = os.path.dirname(url.removeprefix("sqlite:///"))
connect = sqlite3.connect

def step():
    global left
    left -= 1
    if left == 0:
        os._exit(9)

class Connection(sqlite3.Connection):
    def execute(self, *args):
        step()
        return super().execute(*args)

def audit(event, args):
    if event in {"open", "os.mkdir", "os.chmod"} and str(args[0]).startswith(folder):
        step()

async def main():
    async with tenure.connect(url) as client, client.mutex("first").lock():
        pass

sqlite3.connect = lambda *args, **named: connect(*args, factory=Connection, **named)
sys.addaudithook(audit)
asyncio.run(main())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["", "?mode=0660"])
def test_a_creator_may_be_killed_at_each_step(
    options: str, tmp_path: Path, others: Meetings
) -> None:
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        folder.mkdir()
        url = f"sqlite:///{folder}/store.db{options}"
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(step), url], check=False)
        others.meet([url])
        if killed.returncode == 0:  # it has fewer steps
            break
        assert killed.returncode == 9
    assert step > 40
