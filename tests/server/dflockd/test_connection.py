"""Bytes in any pieces, clients that do what they should not, and the end of a server."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenure.engines.contract import Attach, Engine, SessionEvents
from tenure.engines.memory import MemoryEngine
from tenure.engines.memory.session import MemorySession
from tenure.errors import AuthenticationFailed, EngineError, SessionExpired
from tenure.server.auth import Authenticator, Identity, Peer
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.context import foreign
from tenure.server.dflockd.claims import Holder
from tenure.server.dflockd.listener import Deaf
from tenure.server.limits import Limits
from tenure.testing import VirtualClock
from tenure.testing.clock import run
from tenure.testing.faults import FaultyEngine, Way
from tests.server.dflockd.talking import SOON, Client, play, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

TOKEN = "a-token-of-one's-own"


def token_of(reply: str) -> str:
    match = re.fullmatch(r"(?:ok|acquired) ([0-9a-f]{32}) \d+", reply)
    assert match, reply
    return match[1]


class Broken(Authenticator):
    """An authenticator with a defect."""

    required = True

    def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:
        if token:
            raise MemoryError
        raise AuthenticationFailed("no token")


# Bytes


async def test_a_request_that_fails_unexpectedly_ends_its_connection_with_a_line_in_the_log(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock, authenticator=Broken()) as listener:
        client = Client(listener)
        client.ask("auth", "_", "token")
        assert await client.hears() == "error\n"
        await asyncio.sleep(1)
        assert client.gone
    (failed,) = (each for each in caplog.records if each.message == "a request failed")
    assert failed.facts["error"] == "MemoryError()"  # type: ignore[attr-defined]


async def test_thousands_of_requests_at_once_are_answered_in_order_while_others_are_served(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        client.say(b"ping\n_\n_\nnone\n_\n_\n" * 5000)
        assert len(client.heard) < 5000, "the rest waits for later iterations"
        assert await other.asks("ping") == "ok"
        heard = ""
        while len(heard) < 5000 * len("ok\nerror\n"):
            heard += await client.hears()
        assert heard == "ok\nerror\n" * 5000


async def test_requests_that_come_together_are_served_in_order(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        token = token_of(await other.asks("l", "job", "0"))
        client.say(b"ping\n_\n_\nl\njob\n10\nx\ny\nz\nl\nother\n0\nping\n_\n_\n")
        assert await client.hears() == "ok\n"  # the rest waits behind the lock
        assert await other.asks("ping") == "ok"
        assert await other.asks("r", "job", token) == "ok"
        first, *rest = (await client.hears()).splitlines()
        assert token_of(first)
        assert rest[0] == "error"
        assert token_of(rest[1])
        assert rest[2:] == ["ok"]


async def test_requests_that_come_in_pieces(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        client = Client(listener)
        for byte in b"l\r\njob\r\n10 33\r\nping\n_\n":
            client.say(bytes([byte]))
            await asyncio.sleep(0.01)
        assert token_of((await client.hears())[:-1])
        client.say(b"_\n")
        assert await client.hears() == "ok\n"


async def test_many_requests_at_once_are_all_answered(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        client = Client(listener)
        client.say(b"ping\n_\n_\n" * 3000 + b"e\njob\n\n" + b"ping\n_\n_\n" * 3000)
        lines: list[str] = []
        while len(lines) < 6001:
            heard = await client.hears()
            assert heard
            lines += heard.splitlines()
        assert lines.count("ok") == 6000
        assert token_of(lines[3000])


@pytest.mark.parametrize("before", [b"", b"ping\n_\n_\n", b"l\n", b"l\njob\n"])
async def test_a_line_that_is_too_long_is_the_end(
    clock: VirtualClock, engine: Engine, before: bytes
) -> None:
    async with serving(clock, engine=engine) as listener:
        client = Client(listener)
        client.say(before + b"x" * 300)
        await client.hears()
        assert not client.is_closed()
        client.say(b"x\nping\n_\n_\n")
        assert await client.hears() == "error\n"
        assert client.is_closed()


async def test_a_line_of_256_bytes_is_a_key(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        client = Client(listener)
        assert token_of(await client.asks("l", "k" * 256, "0"))
        assert token_of(await client.asks("l", "é" * 128, "0"))
        for key in "", "a b", "a\tb":
            assert await client.asks("l", key, "0") == "error"
        client.say(b"\xff\njob\n0\nl\njob\n\xff\n")
        assert await client.hears() == "error\nerror\n"


async def test_what_was_asked_before_a_line_that_is_too_long_is_answered(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        token = token_of(await other.asks("l", "job", "0"))
        client.say(b"l\njob\n10\n" + b"x" * 300 + b"\n")
        assert await client.hears() == ""
        await other.asks("r", "job", token)
        first, last = (await client.hears()).splitlines()
        assert token_of(first)
        assert last == "error"
        assert client.is_closed()


async def test_who_dribbles_is_silent_until_a_line_ends(clock: VirtualClock) -> None:
    async with serving(clock) as listener:
        client = Client(listener)
        for _ in range(4):
            client.say(b"x")
            await asyncio.sleep(5)
        assert await client.hears() == ""
        client.say(b"\n")
        await asyncio.sleep(20)
        assert not client.is_closed()
        client.say(b"y")
        await asyncio.sleep(5)
        assert await client.hears() == "error\n"
        assert client.is_closed()


# Ends


async def test_who_says_nothing_more_is_answered_first(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        client.say(b"l\njob\n10\nping\n_\n_\n")
        client.end()
        first, last = (await client.hears()).splitlines()
        assert token_of(first)
        assert last == "ok"
        assert client.is_closed()
        assert token_of(await other.asks("l", "job", "0"))


async def test_a_client_that_ends_while_it_waits_waits_no_more(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        token = token_of(await other.asks("l", "job", "0"))
        client.ask("l", "job", "10")
        await asyncio.sleep(1.5)
        client.end()
        assert await client.hears() == ""
        assert client.is_closed()
        await other.asks("r", "job", token)
        assert token_of(await other.asks("l", "job", "0"))


HALF_CLOSED = ["l\njob\n600\n", "ping\n_\n_\ne\njob\n\nw\njob\n600\n", "l\njob\n600\nping\n_\n_\n"]


@pytest.mark.parametrize("auto_release", [True, False])
@pytest.mark.parametrize("said", HALF_CLOSED)
async def test_a_client_that_half_closes_behind_its_requests_gets_every_reply(
    clock: VirtualClock, engine: Engine, said: str, auto_release: bool
) -> None:
    async with serving(clock, engine=engine, auto_release=auto_release) as listener:
        client, other = Client(listener), Client(listener)
        token = token_of(await other.asks("l", "job", "0"))
        client.say(said.encode())
        client.end()
        before = "ok\nqueued\n" if said.startswith("ping") else ""
        assert await client.hears() == before
        await asyncio.sleep(20)
        await other.asks("r", "job", token)
        replies = (await client.hears()).splitlines()
        token = token_of(replies[0])
        assert replies[1:] == (["ok"] if said.endswith("ping\n_\n_\n") else [])
        assert client.is_closed()
        reply = await other.asks("l", "job", "0")
        assert reply.startswith("ok ") if auto_release else reply == "timeout"


async def test_a_client_that_half_closes_is_told_that_it_waited_in_vain(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        token_of(await other.asks("l", "job", "0"))
        client.say(b"l\njob\n3\nping\n_\n_\n")
        await asyncio.sleep(0.5)
        client.end()
        await asyncio.sleep(3)
        assert await client.hears() == "timeout\nok\n"
        assert client.is_closed()


@pytest.mark.parametrize("rest", ["x", "l\n", "l\njob\n", "l\njob\n1"])
@pytest.mark.parametrize("said", HALF_CLOSED)
async def test_a_client_that_ends_inside_a_request_waits_for_nothing(
    clock: VirtualClock, engine: Engine, said: str, rest: str
) -> None:
    async with serving(clock, engine=engine) as listener:
        client, other = Client(listener), Client(listener)
        token_of(await other.asks("l", "job", "0"))
        client.say((said + rest).encode())
        client.end()
        assert await client.hears() == ("ok\nqueued\n" if said.startswith("ping") else "")
        assert client.is_closed()
        assert listener.locks.keys["job"].waiting == 0


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.004, 0.005, 0.007, 0.008, 0.01, 0.02])
async def test_whatever_the_moment_a_connection_is_lost_nothing_is_left(
    clock: VirtualClock, moment: float
) -> None:
    engine = FaultyEngine(MemoryEngine("", clock), Way(delay=lambda: 0.003))
    async with serving(clock, engine=engine) as listener:
        for request in "l\njob\n10\n", "sl\njob\n10\n", "e\njob\n\n", "sl\npool\n10 2\n":
            client = Client(listener)
            client.say(request.encode())
            await asyncio.sleep(moment)
            client.abort()
            await asyncio.sleep(0.1)
            assert not listener.locks.held
            assert not listener.locks.holders
            assert await engine.list_sessions("/dflockd") == []
            for each in await engine.list_semaphores("/dflockd", owners=True, waiters=True):
                assert each.owners == each.waiters == ()


async def test_who_does_not_read_is_cut_off(clock: VirtualClock) -> None:
    async with serving(clock) as listener:
        client = Client(listener)
        for number in range(20):
            token_of(await client.asks("l", f"job-{number}", "0 600"))
        client.reads = False
        client.say(b"stats\n_\n_\n" * 700)
        await asyncio.sleep(1)
        assert not client.reading
        assert len(client._kept) < 4000  # nothing more is made while it does not read
        await asyncio.sleep(5)
        assert client.is_closed()
        await asyncio.sleep(0.1)
        assert not listener.locks.held


async def test_who_reads_late_hears_all(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        client = Client(listener)
        assert await client.asks("e", "job", "")
        client.reads = False
        client.say(b"stats\n_\n_\n" * 700)
        await asyncio.sleep(2)
        client.read_again()
        heard = await client.hears()
        while heard.count("\n") < 700:
            more = await client.hears()
            assert more
            heard += more
        assert heard.count("ok {") == 700


async def test_who_sends_without_end_while_it_waits_is_cut_off(clock: VirtualClock) -> None:
    async with serving(clock) as listener:
        client, other = Client(listener), Client(listener)
        token_of(await other.asks("l", "job", "0 600"))
        client.ask("l", "job", "600")
        await client.hears()
        for _ in range(8):
            assert client.reading
            client.say(b"ping\n_\n_\n" * 7000)
        client.say(b"ping\n_\n_\n" * 7000)
        await asyncio.sleep(0.1)
        assert client.is_closed()
        assert listener.locks.keys["job"].waiting == 0


async def test_no_more_connections_than_may_be(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock, limits=Limits(connections=2)) as listener:
        first, second = Client(listener), Client(listener)
        third = Client(listener)
        assert await third.hears() == "", "dflockd closes it without a byte"
        assert third.is_closed()
        assert await first.asks("ping") == "ok"
        second.abort()
        await asyncio.sleep(0.1)
        assert await Client(listener).asks("ping") == "ok"
    assert "connection refused" in caplog.text


async def test_a_session_for_one_connection_too_many_is_refused(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine, limits=Limits(sessions=1)) as listener:
        first, second = Client(listener), Client(listener)
        token_of(await first.asks("l", "job", "0"))
        assert await second.asks("l", "other", "0") == "error"
        first.abort()
        await asyncio.sleep(0.1)
        token_of(await second.asks("l", "other", "0"))


# Clients of other protocols

REQUEST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1:6388\r\nContent-Type: text/plain\r\n\r\n"
BODY = b"l\njob\n0\n"
LONG_URL = b"GET /" + b"x" * 4000 + b" HTTP/1.1\r\nHost: 127.0.0.1:6388\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [REQUEST + BODY],
        [REQUEST, BODY],
        [REQUEST[:2], REQUEST[2:] + BODY],
        [b"ping\n_\n_\n", REQUEST + BODY],
        [b"GET / HTTP/1.0\r\n\r\n"],
        [b"PUT / HTTP/1.1\nHost: a\n\n", BODY],
        [LONG_URL],
    ],
)
@pytest.mark.parametrize("token", [False, True])
async def test_an_http_request_is_answered_as_one_and_takes_no_lock(
    clock: VirtualClock,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    pieces: list[bytes],
    token: bool,
) -> None:
    authenticator = Authenticator({TOKEN: "test"} if token else {})
    async with serving(clock, engine=engine, authenticator=authenticator) as listener:
        client = Client(listener)
        for piece in pieces:
            if not client.reading:  # a stranger, before its next turn
                await asyncio.sleep(0.01)
            if client.connection._transport is not None and client.reading:
                client.connection.data_received(piece)
        heard = await client.hears()
        assert client.is_closed()
        if not token or pieces[0][:4] in {b"POST", b"GET ", b"PUT "}:
            assert "HTTP/1.1 400 Bad Request\r\n" in heard
            assert heard.endswith("It does not serve HTTP.\n")
            assert "an HTTP client at a port" in caplog.text
        assert not listener.locks.keys


async def test_a_tls_client_at_a_port_without_tls_is_named_in_the_log(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock) as listener:
        client = Client(listener)
        client.say(b"\x16\x03\x01\x02\x00\x01\nl\njob\n0\n")
        assert (await client.hears()).startswith("\x15\x03\x01")  # an alert
        assert client.is_closed()
        assert not listener.locks.keys
    assert "a TLS client at a port without TLS" in caplog.text


# Tokens of the server


async def test_who_shows_the_token_comes_in(clock: VirtualClock, engine: Engine) -> None:
    tokens = Authenticator({TOKEN: "test"})
    async with serving(clock, engine=engine, authenticator=tokens) as listener:
        client = Client(listener)
        assert await client.asks("auth", "_", f" {TOKEN} ") == "ok"
        token_of(await client.asks("l", "job", "0"))
        assert await client.asks("auth", "_", TOKEN) == "error"
        both = Client(listener)
        both.say(f"auth\n_\n{TOKEN}\nping\n_\n_\n".encode())
        assert await both.hears() == "ok\nok\n"


@pytest.mark.parametrize(
    "request_",
    [b"auth\n_\nwrong\n", b"auth\n_\n\n", b"ping\n_\n_\n", b"l\njob\n0\n", b"\xff\n\n\n"],
)
async def test_who_does_not_is_sent_away_after_a_pause(
    clock: VirtualClock, request_: bytes
) -> None:
    tokens = Authenticator({TOKEN: "test"})
    async with serving(clock, authenticator=tokens) as listener:
        client = Client(listener)
        client.say(request_ + f"auth\n_\n{TOKEN}\nping\n_\n_\n".encode())
        await asyncio.sleep(0.09)
        assert client.heard == b"error_auth\n"
        assert not client.is_closed()
        await asyncio.sleep(0.02)
        assert client.is_closed()
        assert client.heard == b"error_auth\n"
        assert not listener.locks.keys


async def test_who_says_nothing_at_first_is_sent_away(clock: VirtualClock) -> None:
    tokens = Authenticator({TOKEN: "test"})
    limits = Limits(greeting_time=3.0)
    async with serving(clock, authenticator=tokens, limits=limits) as listener:
        client = Client(listener)
        await asyncio.sleep(5)
        assert await client.hears() == "error\n"
        assert client.is_closed()


# The server's end, the store's, an administrator


async def test_a_server_that_ends_tells_who_waits(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine, shutdown_time=10.0) as listener:
        holder, waiter, third = Client(listener), Client(listener), Client(listener)
        token = token_of(await holder.asks("l", "job", "0"))
        waiter.ask("l", "job", "100")
        assert await third.asks("e", "job", "") == "queued"
        await waiter.hears()
        await listener.drain()
        assert await waiter.hears() == "error_draining\n"
        assert await waiter.asks("l", "other", "0") == "error_draining"
        assert await waiter.asks("e", "other", "") == "error_draining"
        assert await third.asks("w", "job", "10") == "error_draining"
        assert await holder.asks("n", "job", token) == "ok 33"
        closing = asyncio.create_task(listener.aclose())
        await asyncio.sleep(3)
        assert not closing.done()
        assert await holder.asks("r", "job", token) == "ok"
        for client in holder, waiter, third:
            client.abort()
        await closing
        assert clock.now() < 1005


async def test_a_server_that_ends_waits_no_longer_than_it_was_told(clock: VirtualClock) -> None:
    async with serving(clock, shutdown_time=4.0) as listener:
        client = Client(listener)
        token_of(await client.asks("l", "job", "0"))
        begin = clock.now()
        await listener.aclose()
        assert 4 <= clock.now() - begin < 4.5
        assert client.is_closed()


async def test_what_is_held_outlives_a_server_that_ends(clock: VirtualClock) -> None:
    store = MemoryEngine("outlived", clock)
    await store.open()
    tokens: list[str] = []
    async with serving(clock, engine=MemoryEngine("outlived", clock)) as listener:
        client, waiter = Client(listener), Client(listener)
        tokens.append(token_of(await client.asks("l", "job", "10 20")))
        tokens.append(token_of(await client.asks("sl", "pool", "10 2")))
        waiter.ask("l", "job", "100")
        await waiter.hears()
        place = listener.address
    await asyncio.sleep(3)
    again = serving(clock, engine=MemoryEngine("outlived", clock), url=place)
    async with again as listener:
        client, other = Client(listener), Client(listener)
        assert await other.asks("l", "job", "0") == "timeout"
        assert await client.asks("n", "job", f"{tokens[0]} 10") == "ok 10"
        assert await client.asks("sr", "pool", tokens[1]) == "ok"
        assert await client.asks("sr", "pool", tokens[1]) == "error"
        await asyncio.sleep(8)
        assert await other.asks("l", "job", "0") == "timeout"
        await asyncio.sleep(3)
        token_of(await other.asks("l", "job", "0"))
        assert await client.asks("n", "job", tokens[0]) == "error"
    await store.aclose()


async def test_what_a_killed_server_left_for_nobody_is_deleted_in_its_time(
    clock: VirtualClock,
) -> None:
    store = MemoryEngine("left", clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine("left", clock)) as listener:
        client = Client(listener)
        token = token_of(await client.asks("sl", "pool", "0 2"))
        assert await client.asks("sr", "pool", token) == "ok"
    async with serving(clock, engine=MemoryEngine("left", clock)) as listener:
        client = Client(listener)
        assert await client.asks("sl", "pool", "0 3") == "error_limit_mismatch"
        assert len(await store.list_semaphores("/dflockd", owners=False, waiters=False)) == 1
        await asyncio.sleep(70)
        assert await store.list_semaphores("/dflockd", owners=False, waiters=False) == []
        token_of(await Client(listener).asks("sl", "pool", "0 3"))
    await store.aclose()


async def test_a_semaphore_whose_client_is_cut_off_while_it_is_made_is_deleted_in_its_time(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, asked = MemorySession.create_semaphore, asyncio.Event()

    async def create_without_answer(self: MemorySession, *arguments: Any, **named: Any) -> None:
        if arguments[0] == "made":
            await create(self, *arguments, **named)
        asked.set()
        await asyncio.get_running_loop().create_future()

    store = MemoryEngine("cut off", clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine("cut off", clock)) as listener:
        with monkeypatch.context() as patched:
            patched.setattr(MemorySession, "create_semaphore", create_without_answer)
            for key in ("made", "not-made"):
                client = Client(listener)
                asked.clear()
                client.ask("sl", key, "0 2")
                await asked.wait()
                client.abort()
        await asyncio.sleep(SOON)
        assert len(await store.list_semaphores("/dflockd", owners=False, waiters=False)) == 1
        assert listener.context.counts.semaphores.taken == 2, "as far as the server knows"
        await asyncio.sleep(70)
        assert await store.list_semaphores("/dflockd", owners=False, waiters=False) == []
        assert listener.context.counts.semaphores.taken == 0
        for key in ("made", "not-made"):
            token_of(await Client(listener).asks("sl", key, "0 2"))
    await store.aclose()


async def test_what_somebody_else_made_is_not_deleted(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        session = await engine.attach(Attach("/dflockd", 1000.0), Deaf())
        await session.create_semaphore("pool", 2, b"", exist_ok=False)
        client = Client(listener)
        token = token_of(await client.asks("sl", "pool", "0 2"))
        assert await client.asks("sr", "pool", token) == "ok"
        await asyncio.sleep(70)
        assert "pool" not in listener.locks.keys
        (pool,) = await engine.list_semaphores("/dflockd", owners=False, waiters=False)
        assert pool.limit == 2


async def test_a_lost_session_is_the_end_of_its_connection(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine) as listener:
        holder, waiter, idle = Client(listener), Client(listener), Client(listener)
        token_of(await holder.asks("l", "job", "0"))
        waiter.ask("l", "job", "100")
        await waiter.hears()
        token = token_of(await idle.asks("l", "other", "0"))
        assert await idle.asks("r", "other", token) == "ok"
        for each in reversed(await engine.list_sessions("/dflockd")):
            await engine.end_session("/dflockd", each.id)
        assert await waiter.hears() == "error\n"
        assert waiter.is_closed()
        assert await holder.hears() == ""
        assert holder.is_closed()
        token_of(await idle.asks("l", "job", "0"))  # it had nothing, and gets another one


async def test_a_node_that_somebody_has_dropped_is_made_again(clock: VirtualClock) -> None:
    engine = MemoryEngine("", clock)
    async with serving(clock, engine=engine) as listener:
        await engine.drop_node("/dflockd", force=True)
        token_of(await Client(listener).asks("l", "job", "0"))


async def test_what_an_administrator_evicts_is_lost(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        holder, waiter = Client(listener), Client(listener)
        token = token_of(await holder.asks("l", "job", "0"))
        waiter.ask("l", "job", "100")
        await waiter.hears()
        (job,) = await engine.list_semaphores("/dflockd", owners=True, waiters=True)
        assert job.owners[0].order_id == int(token[:16], 16)
        await engine.evict("/dflockd", "job", job.waiters[0].order_id)
        assert await waiter.hears() == "error\n"
        await engine.evict("/dflockd", "job", job.owners[0].order_id)
        await asyncio.sleep(0.1)
        assert await holder.asks("n", "job", token) == "error"


async def test_what_was_evicted_cannot_be_released_before_its_holder_is_told(
    clock: VirtualClock, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(clock, engine=engine) as listener:
        monkeypatch.setattr(Holder, "removed", lambda *_: None)  # the push is still on its way
        client, other = Client(listener), Client(listener)
        token = token_of(await client.asks("l", "job", "0"))
        await engine.evict("/dflockd", "job", int(token[:16], 16))
        theirs = token_of(await other.asks("l", "job", "0"))
        assert await client.asks("r", "job", token) == "error"
        assert await other.asks("r", "job", theirs) == "ok"


async def test_what_the_store_fails_to_release_is_released_as_soon_as_it_can(
    clock: VirtualClock,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(session: MemorySession, hold: int) -> None:
        raise EngineError("the disk is full")

    async with serving(clock, engine=engine) as listener:
        with monkeypatch.context() as patch:
            client, gone, other = Client(listener), Client(listener), Client(listener)
            token = token_of(await client.asks("l", "released", "0"))
            token_of(await client.asks("l", "expired", "0 2"))
            gone_token = token_of(await gone.asks("l", "gone", "0"))
            patch.setattr(MemorySession, "withdraw", fail)
            assert await client.asks("r", "released", token) == "error"
            assert await gone.asks("r", "gone", gone_token) == "error"
            await asyncio.sleep(3)
            gone.abort()
            await asyncio.sleep(1)
        await asyncio.sleep(1.1)
        for key in ("released", "expired", "gone"):
            token_of(await other.asks("l", key, "0"))
        assert await client.asks("l", "released", "0") == "timeout"
    assert "not released yet" in caplog.text


async def test_no_lease_is_promised_when_the_store_is_out_of_reach(clock: VirtualClock) -> None:
    way = Way(delay=lambda: 0.003)
    engine = FaultyEngine(MemoryEngine("", clock), way)
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        client = Client(listener)
        token_of(await client.asks("l", "first", "0 5"))
        token = token_of(await client.asks("l", "job", "0 59"))
        way.cut()
        await asyncio.sleep(40)
        assert await client.asks("n", "job", token) == "error"
        await asyncio.sleep(10)
        assert not client.is_closed()
        await asyncio.sleep(10)
        assert client.is_closed()  # by now the store may have given it to somebody else
        way.mend()
        await asyncio.sleep(1)


# Random bytes

pieces = st.lists(
    st.one_of(
        st.binary(max_size=400),
        st.sampled_from([b"l", b"sl", b"e", b"se", b"w", b"r", b"n", b"\n", b"key\n", b"0\n"]),
        st.sampled_from([b"l\nkey\n1\n", b"e\nkey\n\n", b"w\nkey\n0\n", b"sl\nkey\n0 2\n"]),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(pieces, st.booleans())
@example([b"PRI "], False)
@example([b"\n\n\n", b"\x16\x03"], False)
def test_random_bytes_harm_nobody(sent: list[bytes], later: bool) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        inner = MemoryEngine("", clock)
        engine = FaultyEngine(inner, Way(delay=lambda: 0.003)) if later else inner
        async with serving(clock, engine=engine) as listener:
            other = Client(listener)
            token = token_of(await other.asks("l", "other", "0"))
            client = Client(listener)
            for piece in sent:
                if client.is_closed():
                    break
                client.say(piece)
                await asyncio.sleep(0.01)
            await asyncio.sleep(2)
            # Another protocol's client gets an answer in that protocol.
            assert foreign(b"".join(sent)[:4]) or all(
                re.fullmatch(r"(ok|acquired|queued|timeout|error)\b.*|error_\w+", line)
                for line in client.heard.decode().splitlines()
            )
            client.abort()
            assert await other.asks("r", "other", token) == "ok"
            await asyncio.sleep(0.1)
            assert not listener.locks.held
            assert all(not key.claims for key in listener.locks.keys.values())

    run(scenario(), clock)


async def test_a_session_that_ends_before_it_can_be_used_is_replaced(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine("", clock)
    attached = 0

    async def attach(how: Attach, events: SessionEvents) -> MemorySession:
        nonlocal attached
        attached += 1
        session = await attach_soundly(how, events)
        if attached == 1:
            await session.close()
            events.ended(SessionExpired("it was ended"))
        return session

    attach_soundly = engine.attach
    async with serving(clock, engine=engine) as listener:
        monkeypatch.setattr(engine, "attach", attach)
        client = Client(listener)
        assert (await client.asks("l", "job", "10")).startswith("ok ")
        assert attached == 2
        assert len(listener.locks.holders) == listener.context.counts.sessions.taken == 1
        client.abort()


async def test_a_defect_is_told_and_not_silent(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine("", clock)

    async def attach(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async with serving(clock, engine=engine) as listener:
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(engine, "attach", attach)
            await play(listener, "a l job 10 = error")
        await play(listener, "a l job 10 = ok $1 33")
    assert "a defect" in caplog.text
