"""A member of etcd that is cut off from the others, as chaos does it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from chaos.adapter import Scene
from chaos.etcd import Etcd, healthy

PATIENCE = 60.0


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    engine = Etcd(folder)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def until_healthy(engine: Etcd, number: int) -> None:
    """Return when exactly so many members say that they are well."""
    async with asyncio.timeout(PATIENCE):
        while number != sum(  # noqa: ASYNC110  nothing tells
            await asyncio.gather(*(asyncio.to_thread(healthy, port) for port in engine.ports))
        ):
            await asyncio.sleep(0.05)


async def test_a_member_that_is_cut_off_knows_of_no_leader_and_the_others_do(
    tmp_path: Path,
) -> None:
    scene = Scene(crew=None, engine=None, journal=None, random=Random(1))  # type: ignore[arg-type]
    async with running(tmp_path) as engine:
        (isolate,) = (fault for fault in engine.faults() if fault.name == "isolate")
        async with isolate.inflict(scene):
            await until_healthy(engine, 2)
        await until_healthy(engine, 3)
