"""What the engine says on the wire, byte by byte, and what it makes of what it is told.

The server here is a script: it replies what a table says to each request, and keeps what it heard.
What servers make of these bytes is asked of real ones, in `test_engine` and `test_faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

import tenure
from tenure.wire.lines import RawRequest, RequestReader

TOKEN = f"{77:016x}{1:016x}"
OTHER = f"{78:016x}{1:016x}"
OK = f"ok {TOKEN} 30\n"

Script = Callable[[RawRequest], str | None]
"""What is replied to a request; ``None`` closes the connection without a word."""


class Scripted:
    """A server that does as it is told.

    Attributes:
        heard: what each connection has said, without pings; the first is the shared one.
    """

    def __init__(self, script: Script) -> None:
        self.heard: list[list[str]] = []
        self.port = 0
        self._script = script
        self._writers: list[asyncio.StreamWriter] = []
        self._serving: list[asyncio.Task[None]] = []
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Scripted:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.create_task(self._serve(reader, writer)))

    @property
    def url(self) -> str:
        return f"dflockd://127.0.0.1:{self.port}"

    def push(self, connection: int, reply: str) -> None:
        """Reply to what waits."""
        self._writers[connection].write(reply.encode())

    async def until(self, connection: int, request: str) -> None:
        """Return when that connection has said this."""
        async with asyncio.timeout(30):
            while (  # noqa: ASYNC110  what it hears is a list
                len(self.heard) <= connection or request not in self.heard[connection]
            ):
                await asyncio.sleep(0.002)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard: list[str] = []
        self.heard.append(heard)
        self._writers.append(writer)
        requests = RequestReader()
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                for request in requests.feed(data):
                    if request[0] != "ping":
                        heard.append("|".join(request))
                    reply = self._script(request)
                    if reply is None:
                        writer.close()
                        return
                    writer.write(reply.encode())
        writer.close()


def scripted(**replies: str) -> Scripted:
    """A server that replies the same to each command; nothing to those that are not named."""
    usual = {"ping": "ok\n", "r": "ok\n", "sr": "ok\n", "n": "ok 30\n", "sn": "ok 30\n"}
    known = usual | replies
    return Scripted(lambda request: known.get(request[0], ""))


def in_turn(*answers: str | None) -> Scripted:
    """A server that replies so to tries, and then grants."""
    left = list(answers)

    def script(request: RawRequest) -> str | None:
        if request[0] == "l":
            return left.pop(0) if left else OK
        return "ok\n"

    return Scripted(script)


# What is said


async def test_what_is_free_costs_a_try_and_a_release() -> None:
    async with scripted(l=OK) as server, tenure.connect(server.url) as client:
        async with client.mutex("m").lock() as lease:
            assert lease.fencing_token == 77
        assert server.heard == [["l|m|0 30", f"r|m|{TOKEN}"]]


async def test_the_lease_is_the_window_in_whole_seconds() -> None:
    async with scripted(l=OK) as server, tenure.connect(server.url) as client:
        async with client.session(recovery_window=10.2) as session:
            _held = await session.mutex("m").lock()
        assert server.heard == [["l|m|0 11", f"r|m|{TOKEN}"]]


async def test_who_waits_enters_the_queue_elsewhere_and_proves_the_grant() -> None:
    async with (
        scripted(l="timeout\n", e="queued\n") as server,
        tenure.connect(server.url) as client,
    ):
        waiting = asyncio.create_task(_hold(client, "m"))
        await server.until(1, "w|m|1000000000")
        session = next(iter(client._core.sessions))
        session.renew()  # so that the proof of what was sent before is not fresh
        server.push(1, f"ok {OTHER} 30\n")
        await waiting
        assert server.heard == [
            ["l|m|0 30"],
            ["e|m|30", "w|m|1000000000", f"n|m|{OTHER} 30", f"r|m|{OTHER}"],
        ]


async def test_a_semaphore_says_its_limit() -> None:
    stats = 'ok {"locks":[],"semaphores":[],"idle_locks":[],"idle_semaphores":[]}\n'
    async with (
        scripted(sl="timeout\n", se="queued\n", stats=stats) as server,
        tenure.connect(server.url) as client,
    ):
        pool = client.semaphore("p")
        await pool.create(4)
        waiting = asyncio.create_task(pool_use(pool))
        await server.until(1, "sw|p|1000000000")
        next(iter(client._core.sessions)).renew()
        server.push(1, OK)
        await waiting
        assert server.heard == [
            ["stats|_|_", "sl|p|0 4 30"],
            ["se|p|4 30", "sw|p|1000000000", f"sn|p|{TOKEN} 30", f"sr|p|{TOKEN}"],
        ]


async def pool_use(pool: tenure.Semaphore) -> None:
    async with pool.acquire():
        pass


async def _hold(client: tenure.Client, name: str) -> None:
    async with client.mutex(name).lock():
        pass


async def test_a_cancelled_wait_says_nothing_and_closes_its_connection() -> None:
    async with (
        scripted(l="timeout\n", e="queued\n") as server,
        tenure.connect(server.url) as client,
    ):
        waiting = asyncio.create_task(_hold(client, "m"))
        await server.until(1, "w|m|1000000000")
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(30):
            while not server._writers[1].is_closing():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert server.heard[1] == ["e|m|30", "w|m|1000000000"]


async def test_a_token_is_shown_first() -> None:
    async with scripted(auth="ok\n", l=OK) as server:
        async with (
            tenure.connect(f"dflockd://secret@127.0.0.1:{server.port}") as client,
            client.mutex("m").lock(),
        ):
            pass
        assert server.heard == [["auth|_|secret", "l|m|0 30", f"r|m|{TOKEN}"]]


async def test_what_a_server_is_shows_in_what_it_knows() -> None:
    async with (
        scripted(ping="error\n", stats="ok {}\n", l=OK) as server,
        tenure.connect(server.url) as client,
    ):
        assert not client.capabilities.fencing
        async with client.mutex("m").lock() as lease:
            with pytest.raises(tenure.Unsupported):
                _ = lease.fencing_token
    async with (
        scripted(ping="error\n", stats="error\n", l=OK) as server,
        tenure.connect(server.url) as client,
    ):
        with pytest.raises(tenure.Unsupported, match=r"runs dflockd 0\.x"):
            await client.semaphore("p").create(2)


# What is made of replies


@pytest.mark.parametrize(
    ("reply", "error", "why"),
    [
        ("error_max_locks\n", tenure.EngineError, "--max-locks"),
        ("error_max_waiters\n", tenure.EngineError, "--max-waiters"),
        ("error_limit_mismatch\n", tenure.InvalidArgument, "another limit"),
        ("error\n", tenure.EngineError, "replied 'error'"),
    ],
)
@pytest.mark.parametrize("queues", [False, True])
async def test_a_refusal_is_told_to_who_asked(
    reply: str, error: type[Exception], why: str, *, queues: bool
) -> None:
    replies = (
        {"l": "timeout\n", "e": reply, "w": "error_not_enqueued\n"} if queues else {"l": reply}
    )
    async with scripted(**replies) as server, tenure.connect(server.url) as client:
        with pytest.raises(error, match=why):
            await client.mutex("m").lock(timeout=30)


@pytest.mark.parametrize(
    "nonsense", ["HTTP/1.1 400 Bad Request\n", "\n", "ok 1 2 3 4\n", "caf\xe9 \n", None]
)
async def test_nonsense_costs_the_connection_and_is_asked_again(nonsense: str | None) -> None:
    async with (
        in_turn(nonsense) as server,
        tenure.connect(server.url) as client,
        client.mutex("m").lock(timeout=30) as lease,
    ):
        assert lease.held
    assert [[said for said in heard if said[0] == "l"] for heard in server.heard] == [
        ["l|m|0 30"],
        ["l|m|0 30"],
    ]


async def test_a_grant_that_is_over_before_it_is_told_is_asked_for_again() -> None:
    async with (
        scripted(l="timeout\n", e="queued\n", n="error\n") as server,
        tenure.connect(server.url) as client,
    ):
        waiting = asyncio.create_task(_hold(client, "m"))
        await server.until(1, "w|m|1000000000")
        next(iter(client._core.sessions)).renew()
        server.push(1, OK)
        async with asyncio.timeout(30):
            while server.heard[1].count("e|m|30") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_what_the_server_has_forgotten_is_lost() -> None:
    async with scripted(l=OK, n="error\n") as server, tenure.connect(server.url) as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        session._core.renew()
        assert "forgotten by the store" in str(await lease.wait_lost())
        await session.aclose()


async def test_a_server_that_shuts_down_is_asked_again() -> None:
    async with (
        in_turn("error_draining\n") as server,
        tenure.connect(server.url) as client,
        client.mutex("m").lock(timeout=30),
    ):
        pass
    assert server.heard == [["l|m|0 30", "l|m|0 30", f"r|m|{TOKEN}"]]
