"""Leases when the server has no space left: for its tables, or for its log."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import tenure
from tests.clean_up import clean_up_with
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, queue_of, until
from tests.engines.postgresql.servers import PostgresServer
from tests.guarantees import POSTGRESQL, guarantee

pytestmark = pytest.mark.exhaustive

_WINDOW = 2.0
_USE_LOG = """SELECT count(pg_logical_emit_message(false, '', repeat('x', 250000)))
    FROM generate_series(1, 20)"""
"""Statement that writes much to the server's log of changes."""


@contextmanager
def _a_disk(folder: Path, size: str, owner: str | None) -> Iterator[Path]:
    """Mount a small disk."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
    with clean_up_with(lambda: subprocess.run(["umount", "-l", str(folder)], check=True)):
        if owner is not None:
            shutil.chown(folder, owner)
        yield folder


def _fill(disk: Path) -> Path:
    """Leave no space on a disk; return the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@contextmanager
def _a_server_with_a_small_log(size: str) -> Iterator[tuple[PostgresServer, Path]]:
    """Run a server with its write-ahead log on a small disk."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        server = PostgresServer(folder, "max_wal_size=1GB")  # it recycles nothing
        with _a_disk(folder / "disk", size, server.user) as disk:
            server.create("--wal-segsize=1", f"--waldir={disk / 'log'}")
            server.start()
            with clean_up_with(server.end):
                yield server, disk


def _is_back(server: PostgresServer) -> bool:
    """Start a server that has ended, unless it recovers by itself; return whether it has."""
    try:
        server.execute("SELECT")
    except psycopg.OperationalError:
        if not (server.data / "postmaster.pid").exists():
            server.start()
        return False
    return True


async def _use_space(session: tenure.Session, held: list[tenure.Lease]) -> None:
    """Acquire mutexes and keep them until the store refuses one."""
    for number in range(10_000):
        lease = await session.mutex(f"{'x' * 800}{number}").lock(timeout=_WINDOW)
        held.append(lease)
    pytest.fail("there was space for all")


@guarantee("disk full", "kept", "others proceed", on=POSTGRESQL)
async def test_a_lease_outlives_a_lack_of_space_for_the_tables(server: PostgresServer) -> None:
    with _a_disk(server.folder / "disk", "4m", server.user) as disk:
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
        server.execute("ALTER ROLE tenure SET default_tablespace = 'small'")
        async with (
            tenure.connect(server.url) as client,
            tenure.connect(server.url) as other,
            client.session(recovery_window=_WINDOW) as session,
            other.session() as second,
        ):
            async with session.mutex("m").lock() as lease:
                filler = _fill(disk)
                held: list[tenure.Lease] = []
                async with client.session(recovery_window=_WINDOW) as greedy:
                    with pytest.raises(tenure.AcquireTimeout, match="refuses to commit: could not"):
                        await _use_space(greedy, held)
                    waiting = asyncio.ensure_future(second.mutex("m").lock())
                    await asyncio.wait([waiting], timeout=2 * _WINDOW)
                    lease.check()
                    assert not waiting.done()
                    filler.unlink()
            async with asyncio.timeout(PATIENCE), await waiting as later:
                assert later.fencing_token > lease.fencing_token
                assert await queue_of(client, "m") == (1, 0)
        server.execute("DROP SCHEMA tenure CASCADE")
        server.execute("DROP TABLESPACE small")


@guarantee("disk full", "answers stand", "others proceed", on=POSTGRESQL)
async def test_a_server_that_ends_for_lack_of_space_for_its_log_has_kept_every_grant() -> None:
    with _a_server_with_a_small_log("16m") as (server, disk):
        async with tenure.connect(server.url) as client, tenure.connect(server.url) as other:
            tokens: list[int] = []

            async def use_space(session: tenure.Session) -> None:
                while True:
                    async with session.mutex("x" * 800).lock() as lease:
                        tokens.append(lease.fencing_token)

            async with client.session(recovery_window=60) as session:
                lease = await session.mutex("m").lock()
                using = asyncio.ensure_future(use_space(session))
                filler = _fill(disk)
                with contextlib.suppress(psycopg.OperationalError):  # the server ends meanwhile
                    await asyncio.to_thread(server.execute, _USE_LOG)
                await until(lambda: "PANIC" in (server.folder / "said").read_text())
                filler.unlink()
                await until(lambda: _is_back(server))
                waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
                await is_waited_for(other, "m")
                lease.check()
                before = len(tokens)
                await until(lambda: len(tokens) > before + 10)
                using.cancel()
                await asyncio.wait([using])
                await lease.release()
                async with await waiting as later:
                    assert later.fencing_token > lease.fencing_token
            assert tokens == sorted(set(tokens))
            assert await queue_of(other, "m") == (0, 0)
