"""YDB's own driver for JavaScript at `tenure serve`, beside a program of ours on the same lock."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
from tests.engines.ydb.behind import Server, in_memory
from tests.interop.test_node import MODULES

SCRIPT = Path(__file__).parent / "node" / "coordination.mjs"
TOKEN = "correct-horse-battery-staple"
PATIENCE = 30.0
SUCCESS = 400000


class Node:
    """A program in Node.js."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def tell(self, command: str, **how: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **how}).encode() + b"\n")

    async def says(self) -> dict[str, Any]:
        """What it says next."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self._process.stdout.readline()
        assert line, "it has ended"
        said: dict[str, Any] = json.loads(line)
        return said


@pytest.fixture
def script(tmp_path: Path) -> Path:
    if shutil.which("node") is None:
        pytest.skip("no Node.js here: apt-get install nodejs npm")
    if not (MODULES / "@ydbjs" / "core").is_dir():
        pytest.skip(f"no @ydbjs/core in {MODULES}: 'make test' installs it with npm")
    (tmp_path / "node_modules").symlink_to(MODULES)  # it is looked for beside the script
    return Path(shutil.copy(SCRIPT, tmp_path))


@pytest.fixture
def server() -> Iterator[Server]:
    with in_memory() as store:
        server = Server(store, tokens={TOKEN: "anna"})
        server.start()
        yield server
        server.stop()


@asynccontextmanager
async def started(script: Path, server: Server) -> AsyncIterator[Node]:
    address = f"grpc://{server.address}/local"
    process = await asyncio.create_subprocess_exec(
        *("node", str(script), address, TOKEN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Node(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_program_with_ydbs_driver_for_javascript_shares_a_lock_with_one_of_ours(
    script: Path, server: Server
) -> None:
    async with (
        started(script, server) as node,
        tenure.connect(f"{server.url}?token={TOKEN}") as client,
    ):
        assert await node.says() == {"kind": "ready"}  # it has discovered, and shown its token
        node.tell("node", path="/local/shared")
        assert await node.says() == {"kind": "created", "status": SUCCESS}
        async with client.session("/shared") as session:
            node.tell("session", path="/local/shared")
            assert await node.says() == {"kind": "sessionStarted", "known": True}

            node.tell("acquire", name="m")
            assert (await node.says())["acquired"] is True
            waiting = asyncio.create_task(session.mutex("m").lock())
            while not (await session.semaphore("m").describe(waiters=True)).waiters:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.01)
            node.tell("describe", name="m")
            found = {"kind": "describeSemaphoreResult", "owners": 1, "waiters": 1}
            assert await node.says() == found
            assert not waiting.done()
            node.tell("release", name="m")
            assert (await node.says())["released"] is True
            lease = await asyncio.wait_for(waiting, PATIENCE)

            node.tell("acquire", name="m")
            assert (await node.says())["kind"] == "acquireSemaphorePending"
            await lease.release()
            assert (await node.says())["acquired"] is True
            node.tell("stop")
            assert (await node.says())["kind"] == "sessionStopped"
            assert await node.says() == {"kind": "ended"}
            free = await session.mutex("m").try_lock()
            assert free is not None
