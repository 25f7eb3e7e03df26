"""Listed data, ids and tokens: none of what a client can list gives it others' locks."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket

import pytest

from tenure.engines.contract import Attach as StoreAttach
from tenure.engines.contract import Engine, Enqueued
from tenure.engines.memory import MemoryEngine
from tenure.model import EPHEMERAL_LIMIT
from tenure.server.dflockd.claims import ClaimRecord, sealed
from tenure.server.dflockd.listener import Deaf
from tenure.server.native import NativeListener
from tenure.testing import VirtualClock
from tenure.wire.lines import make_token
from tenure.wire.messages import Attach, Failed
from tests.server.dflockd.talking import Client, serving
from tests.server.talking import linked

pytestmark = pytest.mark.usefixtures("loop_factory")

_stores = itertools.count()


@pytest.fixture
def name() -> str:
    """The name of a store that outlives its servers."""
    return f"secrets-{next(_stores)}"


def token_of(reply: str) -> str:
    match = re.fullmatch(r"ok ([0-9a-f]{32}) \d+", reply)
    assert match, reply
    return match[1]


async def listed(engine: Engine, name: str) -> tuple[int, str]:
    """The order id and the data of the owner of a key, as any client can list them."""
    found = await engine.describe_semaphore("/dflockd", name, owners=True, waiters=False)
    (owner,) = found.owners
    return owner.order_id, owner.data.decode()


def guesses(order_id: int, data: str) -> list[str]:
    """Tokens that can be made from what is listed."""
    fence = make_token(order_id, "")
    digits = {word[at : at + 16] for word in data.split() for at in range(len(word))}
    return [*(fence + each for each in sorted(digits)), *data.split(), fence + data.split()[1]]


async def refuse_all_guesses(client: Client, engine: Engine) -> None:
    """Assert that no token made from listed data is accepted."""
    for guess in guesses(*await listed(engine, "job")):
        assert await client.asks("r", "job", guess) == "error"
        assert await client.asks("n", "job", f"{guess} 5") == "error"


async def test_a_listed_request_does_not_show_its_token(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        holder, other = Client(listener), Client(listener)
        token = token_of(await holder.asks("l", "job", "0 900"))
        for renewed in (False, True):
            if renewed:
                assert await holder.asks("n", "job", f"{token} 900") == "ok 900"
            assert token[16:] not in (await listed(engine, "job"))[1]
            await refuse_all_guesses(other, engine)
        assert await other.asks("r", "job", token) == "ok"


async def test_a_restarted_server_knows_tokens_and_accepts_nothing_that_is_listed(
    clock: VirtualClock, name: str
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        token = token_of(await Client(listener).asks("l", "job", "0 900"))
        place = listener.address
    again = MemoryEngine(name, clock)
    async with serving(clock, engine=again, url=place, read_timeout=1000.0) as listener:
        client = Client(listener)
        await refuse_all_guesses(client, store)
        assert await client.asks("r", "other", token) == "error"
        assert await client.asks("n", "job", f"{token} 800") == "ok 800"
        await refuse_all_guesses(client, store)
        assert await client.asks("r", "job", f" {token} ") == "ok"
        assert await client.asks("r", "job", token) == "error"
    await store.aclose()


async def test_an_inherited_lock_ends_with_its_lease(clock: VirtualClock, name: str) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        token = token_of(await Client(listener).asks("l", "job", "0 20"))
        place = listener.address
    again = MemoryEngine(name, clock)
    async with serving(clock, engine=again, url=place, read_timeout=1000.0) as listener:
        client = Client(listener)
        assert await client.asks("l", "job", "0") == "timeout"
        await asyncio.sleep(22)
        assert await client.asks("r", "job", token) == "error"
        token_of(await client.asks("l", "job", "0"))
    await store.aclose()


async def test_a_lock_of_an_older_server_is_kept_and_sealed_when_it_is_renewed(
    clock: VirtualClock, name: str
) -> None:
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        place, description = listener.address, listener.describe("somebody")
    salt = "0123456789abcdef"
    session = await store.attach(StoreAttach("/dflockd", 1000.0, description, "window"), Deaf())
    data = f"dflockd {salt} 900 {int((clock.wall() + 900) * 1000)}".encode()
    placed = session.enqueue(1, "job", EPHEMERAL_LIMIT, data, timeout=None, ephemeral=True)
    assert isinstance(placed, Enqueued)
    assert placed.order_id is not None
    await session.detach()
    again = MemoryEngine(name, clock)
    async with serving(clock, engine=again, url=place, read_timeout=1000.0) as listener:
        client = Client(listener)
        assert await client.asks("l", "job", "0") == "timeout"
        token = make_token(placed.order_id, salt)
        assert await client.asks("n", "job", f"{token} 900") == "ok 900"
        assert salt not in (await listed(store, "job"))[1]
        await refuse_all_guesses(client, store)
        assert await client.asks("r", "job", token) == "ok"
    await store.aclose()


def test_a_record_is_read_as_it_was_written() -> None:
    record = ClaimRecord(sealed("0123456789abcdef", "job"), 33, 1_700_000_000_000)
    assert ClaimRecord.of(record.to_bytes(), "job") == record
    assert ClaimRecord.of(b"dflockd 0123456789abcdef 33 1700000000000", "job") == record
    for data in (b"", b"dflockd", b"dflockd2 0123456789abcdef 33 1700000000000", b"10.0.0.7:80"):
        assert ClaimRecord.of(data, "job") is None


def test_a_seal_is_of_one_token_for_one_key() -> None:
    seals = {sealed(salt, name) for salt in ("0" * 16, "1" * 16) for name in ("job", "pool", "é")}
    assert len(seals) == 6
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in seals)


# Sessions


async def test_a_listed_session_cannot_be_resumed(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        holder = Client(listener)
        token = token_of(await holder.asks("l", "job", "0 900"))
        native = NativeListener(
            listener.context,
            "tenure://127.0.0.1:0",
            sockets=[socket.create_server(("127.0.0.1", 0))],
        )
        await native.open()
        try:
            async with linked(native) as thief:
                (number,) = [each.id for each in await engine.list_sessions("/dflockd")]
                keys = (b"", b"\0" * 16, listener.context.session_keys.of_dflockd())
                for kind in ("again", "resume"):
                    for key in keys:
                        rid = thief.next_rid()
                        thief.say(Attach(rid, 1, kind, "/dflockd", 60.0, "", key, False, number))
                        assert (await thief.hear(Failed)).error.kind == "AuthenticationFailed"
        finally:
            await native.aclose()
        assert await holder.asks("n", "job", f"{token} 900") == "ok 900"


async def test_a_session_that_looks_like_a_listeners_is_left_alone(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        how = StoreAttach("/dflockd", 900.0, listener.describe("me"), "window", b"a client's key")
        session = await engine.attach(how, Deaf())
        await session.detach()
        await asyncio.sleep(62)
        assert listener.locks.holders == set()
        assert listener.context.counts.sessions.taken == 0
        (left,) = await engine.list_sessions("/dflockd")
        assert (left.id, left.attached) == (session.id, False)
