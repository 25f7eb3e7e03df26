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
            'permissions = {"/default" = "hold", "/dflockd" = "hold", '
            f'"/{name}" = "administer"}}\n'
            for name, token in (("greedy", GREEDY), ("honest", HONEST))
        )
    )
    options = [word for name, most in LIMITS.items() for word in (f"--max-{name}", str(most))]
    listen = ["tenure://127.0.0.1:0", "ydb://127.0.0.1:0", "dflockd://127.0.0.1:0"]
    async with serving(folder, "--auth-token-file", str(tokens), *options, listen=listen) as server:
        yield server


def url(server: Served, listener: str, token: str) -> str:
    native, ydb, _ = server.addresses
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
                    states = await stack.enter_async_context(pool.watch(data=True))
                    await anext(states)  # refused here at the latest
            except TenureError as error:
                refused.put_nowait(str(error))
            await asyncio.sleep(0)


async def take_all_locks(server: Served, refused: asyncio.Queue[str]) -> None:
    """Open connections to the dflockd listener, and lock keys on each, until it is cancelled."""
    host, _, port = server.addresses[2].partition("://")[2].rpartition(":")
    async with contextlib.AsyncExitStack() as stack:
        open_ones: list[object] = []  # one that is collected closes its connection
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.transport.abort)
            open_ones.append((reader, writer))
            requests = [("auth", "_", GREEDY)]
            requests += [("l", f"k{len(open_ones)}-{each}", "0 600") for each in range(20)]
            for request in requests:
                with contextlib.suppress(ConnectionError):
                    writer.write("".join(f"{line}\n" for line in request).encode())
                    reply = (await reader.readline()).decode().strip()
                    if not reply.startswith("ok"):
                        refused.put_nowait(reply)
                        break
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def taking_all(
    server: Served, listener: str, refused: asyncio.Queue[str]
) -> AsyncIterator[None]:
    """The greedy identity at work; some refusals are in the queue already."""
    async with contextlib.AsyncExitStack() as stack:
        if listener == "dflockd":
            work = take_all_locks(server, refused)
        else:
            greedy = tenure.connect(url(server, listener, GREEDY))
            work = take_all(await stack.enter_async_context(greedy), refused)
        attack = asyncio.create_task(work)
        try:
            for _ in range(REFUSALS):
                async with asyncio.timeout(PATIENCE):
                    reason = await refused.get()
                    assert listener == "dflockd" or "reached its limit" in reason
            yield
            assert not attack.done()
        finally:
            attack.cancel()
            await asyncio.wait({attack})


@pytest.mark.parametrize("listener", ["tenure", "ydb", "dflockd"])
async def test_an_identity_at_its_limits_costs_no_other_one_anything(
    listener: str, tmp_path: Path
) -> None:
    if listener == "ydb":
        pytest.importorskip("ydb")
    async with (
        shared(tmp_path) as server,
        tenure.connect(url(server, "tenure", HONEST)) as honest,
        honest.session(recovery_window=WINDOW) as session,
        session.mutex("held").lock(timeout=PATIENCE) as lease,
        taking_all(server, listener, asyncio.Queue()),
    ):
        for number in range(10):  # the attack goes on
            async with honest.session(recovery_window=WINDOW) as more:
                await honest.create_node(f"/honest/{number}")
                async with more.mutex(f"m{number}").lock(timeout=PATIENCE):
                    pool = more.semaphore("own")
                    await pool.create(1, b"x" * 1000, exist_ok=True)
                    async with pool.watch(data=True) as states:
                        state = await anext(states)
                        assert state is not None
                        assert state.data == b"x" * 1000
        mine = await session.semaphore("held").describe(owners=True)
        assert [each.order_id for each in mine.owners] == [lease.fencing_token]
        assert lease.held


@pytest.mark.parametrize("listener", ["tenure", "ydb"])
async def test_an_identity_creates_no_node_of_another_one(listener: str, tmp_path: Path) -> None:
    if listener == "ydb":
        pytest.importorskip("ydb")
    async with (
        shared(tmp_path) as server,
        tenure.connect(url(server, listener, GREEDY)) as greedy,
    ):
        with pytest.raises(tenure.AuthenticationFailed):
            await greedy.create_node("/honest/taken")
