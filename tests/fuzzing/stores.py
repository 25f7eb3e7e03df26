"""Files that SQLite reads: stores and backups, damaged by a disk or changed by another program."""

from __future__ import annotations

import asyncio
import random
import tempfile
from functools import cache
from pathlib import Path

import tenure
from tenure.engines import diagnose
from tenure.engines.sqlite.restore import backup, restore
from tenure.errors import TenureError
from tests.fuzzing.checks import Target


async def _fill(url: str) -> None:
    async with tenure.connect(url) as client:
        await client.create_node("/billing")
        session = await client.session(resumable=True)
        await client.semaphore("pool").create(limit=3, data=b"kept")
        leases = [await session.semaphore("pool").acquire(2), await session.mutex("held").lock()]
        await session.detach()
        assert not any(lease.held for lease in leases)


async def _use(url: str) -> None:
    async with tenure.connect(url) as client:
        for node in await client.list_nodes():
            await client.list_semaphores(node, owners=True, waiters=True)
            await client.list_sessions(node)
        async with client.mutex("held").lock(timeout=0):
            pass


@cache
def _samples() -> tuple[bytes, bytes]:
    """A store and its backup."""
    with tempfile.TemporaryDirectory() as folder:
        store, copy = Path(folder) / "store.db", Path(folder) / "backup"
        asyncio.run(_fill(f"sqlite:///{store}"))
        backup(f"sqlite:///{store}", str(copy))
        return store.read_bytes(), copy.read_bytes()


def _open(data: bytes, _: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        path.touch(0o600)
        path.write_bytes(data)
        list(diagnose(f"sqlite:///{path}"))
        asyncio.run(_use(f"sqlite:///{path}"))


def _restore(data: bytes, _: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backup"
        path.write_bytes(data)
        restore(f"sqlite:///{folder}/store.db", str(path))


def stores() -> tuple[Target, ...]:
    """The targets; their samples are made first."""
    store, copy = _samples()
    return (
        Target("sqlite-stores", _open, (store,), (TenureError,), weight=1),
        Target("sqlite-backups", _restore, (copy,), (TenureError,), weight=2),
    )
