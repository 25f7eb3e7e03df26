"""Quotas: each one, on each listener, and over several listeners at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tenure.engines.contract import Engine, EngineSession
from tenure.engines.memory.session import MemorySession
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT, NodeConfig
from tenure.server.auth.identity import Quotas
from tenure.server.limits import Limits
from tests.server.auth.several import Several, attached, rights, several, token_of

QUOTA = 3
"""Of what is counted one by one, and as many times `SIZE` bytes."""
SIZE = 1000


class Filler:
    """Takes one more of something, and gives it back, with a client's engine."""

    def __init__(self, engine: Engine, stack: contextlib.AsyncExitStack) -> None:
        self.engine = engine
        self.stack = stack
        self.taken: list[Any] = []
        self._session: EngineSession | None = None

    async def session(self) -> EngineSession:
        if self._session is None:
            self._session = await self.stack.enter_async_context(attached(self.engine, "/default"))
        return self._session


async def more_sessions(filler: Filler) -> Callable[[], Any]:
    holds = contextlib.AsyncExitStack()
    await holds.enter_async_context(attached(filler.engine, "/default"))
    return holds.aclose


async def request(filler: Filler, data: bytes) -> Callable[[], Any]:
    session, hold = await filler.session(), len(filler.taken) + 1
    answer: Any = session.enqueue(
        hold, f"m{hold}", EPHEMERAL_LIMIT, data, timeout=None, ephemeral=True
    )
    if isinstance(answer, asyncio.Future):
        await answer
    return lambda: session.withdraw(hold)


async def more_requests(filler: Filler) -> Callable[[], Any]:
    return await request(filler, b"")


async def more_semaphores(filler: Filler) -> Callable[[], Any]:
    session, name = await filler.session(), f"s{len(filler.taken)}"
    await session.create_semaphore(name, 1, b"", exist_ok=False)
    return lambda: session.delete_semaphore(name, force=False)


async def more_watches(filler: Filler) -> Callable[[], Any]:
    session, name = await filler.session(), f"w{len(filler.taken)}"
    stop = session.watch(name, data=True, owners=False, changed=lambda: None)
    with contextlib.suppress(LookupError):  # behind it: the watch is in place, or was refused
        await session.describe_semaphore(name, owners=False, waiters=False)
    return stop


async def more_nodes(filler: Filler) -> Callable[[], Any]:
    path = f"/new{len(filler.taken)}"
    await filler.engine.create_node(path, NodeConfig(), exist_ok=False)
    return lambda: filler.engine.drop_node(path, force=False)


async def more_bytes(filler: Filler) -> Callable[[], Any]:
    session, name = await filler.session(), f"s{len(filler.taken)}"
    if len(filler.taken) % 2:
        return await request(filler, b"x" * SIZE)
    await session.create_semaphore(name, 1, b"x" * SIZE, exist_ok=False)
    return lambda: session.delete_semaphore(name, force=False)


TABLE = (
    ("tenure", "sessions", more_sessions, QUOTA),
    ("tenure", "requests", more_requests, QUOTA),
    ("tenure", "semaphores", more_requests, QUOTA),
    ("tenure", "semaphores", more_semaphores, QUOTA),
    ("tenure", "nodes", more_nodes, QUOTA),
    ("tenure", "stored_bytes", more_bytes, QUOTA * SIZE),
    ("ydb", "sessions", more_sessions, QUOTA),
    ("ydb", "requests", more_requests, QUOTA),
    ("ydb", "semaphores", more_requests, QUOTA),
    ("ydb", "semaphores", more_semaphores, QUOTA),
    ("ydb", "nodes", more_nodes, QUOTA),
    ("ydb", "stored_bytes", more_bytes, QUOTA * SIZE),
)


async def finish(answer: Any) -> None:
    if answer is not None and hasattr(answer, "__await__"):
        await answer


@pytest.mark.parametrize(("listener", "quota", "more", "most"), TABLE)
async def test_a_quota_is_refused_by_name_and_free_again_after_giving_back(
    listener: str, quota: str, more: Any, most: int
) -> None:
    if listener == "ydb":
        pytest.importorskip("ydb")
    limited = rights(quotas=Quotas.parse({quota: most}))
    async with (
        several({"some": limited, "other": rights()}) as server,
        server.client(listener, "some") as client,
        server.client(listener, "other") as neighbour,
        contextlib.AsyncExitStack() as stack,
    ):
        filler = Filler(client, stack)
        for _ in range(QUOTA):
            filler.taken.append(await more(filler))
        for _ in range(2):
            with pytest.raises(TenureError, match=f"quota {quota} = {most}"):
                await more(filler)
        beside = Filler(neighbour, stack)
        beside.taken = [None] * 10
        await finish((await more(beside))())  # another identity works on
        last = filler.taken.pop()
        await finish(last())
        filler.taken.append(await more(filler))
        while filler.taken:
            await finish(filler.taken.pop()())
        await stack.aclose()
        left = [each for each in server.accounts() if each.identity == "some"]
        assert all(each.shares[quota].used == 0 for each in left)


async def test_watches_beyond_the_quota_are_refused() -> None:
    async with (
        several({"some": rights(quotas=Quotas(watches=QUOTA))}) as server,
        server.client("tenure", "some") as client,
        contextlib.AsyncExitStack() as stack,
    ):
        filler = Filler(client, stack)
        for _ in range(2 * QUOTA):
            filler.taken.append(await more_watches(filler))
        (account,) = server.accounts()
        assert account.watches.used == QUOTA
        for stop in filler.taken:
            stop()
        await more_watches(filler)  # behind what stops the others
        assert account.watches.used == 1


async def test_watches_of_a_ydb_client_beyond_the_quota_are_refused() -> None:
    pytest.importorskip("ydb")
    from tenure.server.ydb.messages import Status
    from tests.server.ydb import raw

    async with (
        several({"some": rights(quotas=Quotas(watches=QUOTA)), "other": rights()}) as server,
        raw.channel(f"127.0.0.1:{server.port('ydb')}") as over,
    ):
        some, other = [
            await raw.stream(over, metadata=[("x-ydb-auth-ticket", token_of(each))])
            for each in ("some", "other")
        ]
        for client in (some, other):
            await client.start()
        for number in range(QUOTA + 1):
            await other.create(f"w{number}", 1)
            assert (await other.described(f"w{number}", watch_data=True)).limit == 1
            if number < QUOTA:
                assert (await some.described(f"w{number}", watch_data=True)).limit == 1
        asked = await some.describe(f"w{QUOTA}", watch_data=True)
        refusal = await some.expect("describe_semaphore_result")
        assert (refusal.req_id, refusal.status) == (asked, Status.OVERLOADED)
        assert f"quota watches = {QUOTA}" in refusal.issues[0].message
        again = await some.describe("w0", watch_data=True)  # replaces the one of before
        assert await some.changed(1) == (False, False)
        assert (await some.expect("describe_semaphore_result")).watch_added
        await other.refused(await other.update("w0", b"new"), "update_semaphore_result")
        assert await some.changed(again) == (True, False)
        await some.call.cancel()
        (account,) = [each for each in server.accounts() if each.identity == "some"]

        async def are_over() -> bool:
            return not account.watches.used

        await raw.eventually(are_over)


@pytest.mark.parametrize(
    ("quota", "requests"),
    [
        ("sessions", [("l", "a", "1 10")]),
        ("requests", [("l", "a", "1 10"), ("l", "b", "1 10")]),
        ("semaphores", [("l", "a", "1 10"), ("sl", "b", "1 2 10")]),
    ],
)
async def test_a_dflockd_client_is_refused_beyond_its_quota(
    quota: str, requests: list[tuple[str, ...]]
) -> None:
    limited = rights(quotas=Quotas.parse({quota: 1}))
    async with several({"some": limited, "other": rights()}) as server:
        async with server.lines("some") as first, server.lines("some") as second:
            assert (await first("l", "mine", "1 10")).startswith("ok ")
            replies = [await second(*each) for each in requests]
            assert all(each.startswith("error") for each in replies), replies
        async with server.lines("other") as other:
            assert (await other("l", "theirs", "1 10")).startswith("ok ")


class CutOff:
    """A store that creates semaphores, and whose answer never comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created, self.cancelled = asyncio.Event(), asyncio.Event()
        create = MemorySession.create_semaphore

        async def create_without_answer(*arguments: Any, **named: Any) -> None:
            await create(*arguments, **named)
            self.created.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cancelled.set()

        monkeypatch.setattr(MemorySession, "create_semaphore", create_without_answer)


async def is_refused_another_semaphore(server: Several) -> None:
    async with server.lines("some") as ask:
        assert await ask("sl", "more", "1 2 10") == "error_max_locks"


async def test_a_semaphore_whose_dflockd_client_is_cut_off_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with several({"some": rights(quotas=Quotas(semaphores=1))}) as server:
        with monkeypatch.context() as patched:
            store = CutOff(patched)
            async with server.lines("some") as ask:
                asking = asyncio.ensure_future(ask("sl", "a", "1 2 10"))
                await store.created.wait()
                asking.cancel()
            await store.cancelled.wait()
        await is_refused_another_semaphore(server)


async def test_a_semaphore_whose_ydb_client_is_cut_off_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ydb")
    from tests.server.ydb import raw

    async with (
        several({"some": rights(quotas=Quotas(semaphores=1))}) as server,
        raw.channel(f"127.0.0.1:{server.port('ydb')}") as over,
    ):
        ticket = [("x-ydb-auth-ticket", token_of("some"))]
        client = await raw.stream(over, metadata=ticket)
        await client.start()
        with monkeypatch.context() as patched:
            store = CutOff(patched)
            asking = asyncio.ensure_future(client.create("a", 1))
            await store.created.wait()
            asking.cancel()
            await client.call.cancel()
            await store.cancelled.wait()
        await is_refused_another_semaphore(server)


async def test_a_quota_is_one_for_all_listeners_and_connections() -> None:
    pytest.importorskip("ydb")
    limited = rights(quotas=Quotas(sessions=3))
    async with (
        several({"some": limited}) as server,
        server.client("tenure", "some") as one,
        server.client("tenure", "some") as another,
        server.client("ydb", "some") as ydb,
        attached(one, "/default"),
        attached(another, "/default"),
        attached(ydb, "/default"),
    ):
        for client in (one, ydb):
            with pytest.raises(TenureError, match="quota sessions = 3"):
                async with attached(client, "/default"):
                    pass
        async with server.lines("some") as ask:
            assert (await ask("l", "a", "1 10")).startswith("error")


async def test_one_identity_cannot_take_what_is_reserved_for_another() -> None:
    async with (
        several({"greedy": rights(), "modest": rights()}, Limits(sessions=16)) as server,
        server.client("tenure", "greedy") as greedy,
        server.client("tenure", "modest") as modest,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(8 + 4):
            await stack.enter_async_context(attached(greedy, "/default"))
        with pytest.raises(TenureError, match="more than its reserved share"):
            await stack.enter_async_context(attached(greedy, "/default"))
        for _ in range(4):
            await stack.enter_async_context(attached(modest, "/default"))


async def test_a_detached_session_is_counted_as_long_as_it_lives() -> None:
    async with (
        several({"some": rights(quotas=Quotas(sessions=1))}) as server,
        server.client("tenure", "some") as client,
    ):
        async with attached(client, "/default") as session:
            await session.detach()
            with pytest.raises(TenureError, match="quota sessions = 1"):
                async with attached(client, "/default"):
                    pass
        assert await client.end_session("/default", session.id)
        async with attached(client, "/default"):
            pass


async def test_one_identity_with_many_names_leaves_others_theirs() -> None:
    async with (
        several({"greedy": rights(), "modest": rights()}, Limits(semaphores=16)) as server,
        server.client("tenure", "greedy") as greedy,
        server.client("tenure", "modest") as modest,
        contextlib.AsyncExitStack() as stack,
    ):
        takes, leaves = Filler(greedy, stack), Filler(modest, stack)
        for _ in range(8 + 4):
            takes.taken.append(await more_requests(takes))
        with pytest.raises(TenureError, match="limit semaphores = 16"):
            await more_requests(takes)
        leaves.taken = [None] * 100  # other names
        for _ in range(4):
            leaves.taken.append(await more_requests(leaves))
