"""An identity that takes all that it gets, on every listener, beside one that works on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tenure
from tenure import TenureError
from tests.hostile.arena import WINDOW
from tests.server.serving import PATIENCE, Served, serving

GREEDY, HONEST = "greedy-0123456789abcdef", "honest-0123456789abcdef"
LIMITS = {"sessions": 80, "requests": 400, "watches": 80, "nodes": 40, "stored-bytes": 400_000}
REFUSALS = 40
"""After which the greedy identity has met its limits often enough."""


@contextlib.asynccontextmanager
async def shared(folder: Path) -> AsyncIterator[Served]:
    """A server with low limits and two identities."""
    tokens = folder / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text(
        "".join(
            f'[tokens.{name}]\nhash = "sha256:{hashlib.sha256(token.encode()).hexdigest()}"\n'
            f'permissions = {{"/default" = "hold", "/{name}" = "administer"}}\n'
            for name, token in (("greedy", GREEDY), ("honest", HONEST))
        )
    )
    options = [word for name, most in LIMITS.items() for word in (f"--max-{name}", str(most))]
    listen = ["tenure://127.0.0.1:0", "ydb://127.0.0.1:0"]
    async with serving(folder, "--auth-token-file", str(tokens), *options, listen=listen) as server:
        yield server


def url(server: Served, listener: str, token: str) -> str:
    native, ydb = server.addresses
    if listener == "tenure":
        return native.replace("://", f"://{token}@")
    return f"{ydb}?token={token}"


async def take_all(client: tenure.Client, refused: asyncio.Queue[str]) -> None:
    """Open sessions, and take requests, data, watches and nodes in each, until it is cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        number = 0
        while True:
            number += 1
            try:
                session = await stack.enter_async_context(client.session(recovery_window=WINDOW))
                await client.create_node(f"/greedy/{number}")
                for each in range(20):
                    pool = session.semaphore(f"s{number}-{each}")
                    await pool.create(limit=1, data=b"x" * 10_000)
                    ticket = pool.enqueue(data=b"x" * 1000)
                    await stack.enter_async_context(ticket)
            except TenureError as error:
                refused.put_nowait(str(error))
            await asyncio.sleep(0)


@pytest.mark.parametrize("listener", ["tenure", "ydb"])
async def test_an_identity_at_its_limits_costs_no_other_one_anything(
    listener: str, tmp_path: Path
) -> None:
    if listener == "ydb":
        pytest.importorskip("ydb")
    async with (
        shared(tmp_path) as server,
        tenure.connect(url(server, "tenure", HONEST)) as honest,
        tenure.connect(url(server, listener, GREEDY)) as greedy,
        honest.session(recovery_window=WINDOW) as session,
        session.mutex("held").lock(timeout=PATIENCE) as lease,
    ):
        refused: asyncio.Queue[str] = asyncio.Queue()
        attack = asyncio.create_task(take_all(greedy, refused))
        try:
            for _ in range(REFUSALS):
                async with asyncio.timeout(PATIENCE):
                    assert "reached its limit" in await refused.get()
            for number in range(10):  # the attack goes on
                async with honest.session(recovery_window=WINDOW) as more:
                    await honest.create_node(f"/honest/{number}")
                    async with more.mutex(f"m{number}").lock(timeout=PATIENCE):
                        await more.semaphore("own").create(1, b"x" * 1000, exist_ok=True)
            with pytest.raises(tenure.AuthenticationFailed):
                await greedy.create_node("/honest/taken")
            mine = await session.semaphore("held").describe(owners=True)
            assert [each.order_id for each in mine.owners] == [lease.fencing_token]
            assert lease.held
        finally:
            attack.cancel()
            await asyncio.wait({attack})
