"""The search for the node of a namespace, among servers that are wrong, gone or slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import tenure
from tenure.engines.redis.connecting import Server as Greeted
from tenure.engines.redis.connecting import connect_once
from tenure.engines.redis.locating import ClusterNodes, Sentinels
from tenure.engines.redis.url import parse
from tenure.errors import TenureError
from tenure.events import SessionDetached
from tests.engines.redis import clusters
from tests.engines.redis.helpers import PATIENCE, until
from tests.engines.redis.servers import a_server, free_port

Answer = Callable[[list[bytes]], bytes]


class Speaker:
    """What speaks the protocol, and answers as it is told.

    Attributes:
        port: on which it listens.
        heard: the first word of each command.
        open: its open connections.
    """

    def __init__(self, answer: Answer) -> None:
        self.port = 0
        self.heard: list[bytes] = []
        self.open = 0
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    await reader.readline()
                    words.append((await reader.readline()).strip())
                self.heard.append(words[0].upper())
                writer.write(self._answer(words))
        except OSError:
            return
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def speaking(answer: Answer) -> AsyncIterator[Speaker]:
    speaker = Speaker(answer)
    listener = await asyncio.start_server(speaker.serve, "127.0.0.1", 0)
    speaker.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield speaker
        await until(lambda: speaker.open == 0)


def text(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def bulk(word: str) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word.encode())


async def test_nodes_that_name_each_other_do_not_hold_a_client() -> None:
    ports: list[int] = []

    def answer(me: int) -> Answer:
        def say(words: list[bytes]) -> bytes:
            word = words[0].upper()
            if word == b"HELLO":
                return b"%1\r\n+proto\r\n:3\r\n"
            if word == b"ROLE":
                return text("master")
            if word == b"INFO":
                return bulk("redis_version:7.2.0\r\ncluster_enabled:1\r\nrun_id:x\r\n")
            return b"-MOVED 1 127.0.0.1:%d\r\n" % ports[1 - me]

        return say

    async with AsyncExitStack() as stack:
        left_behind = [await stack.enter_async_context(speaking(answer(me))) for me in range(2)]
        ports += [each.port for each in left_behind]
        with clusters.a_cluster() as cluster:
            url = cluster.url("", parameters="&max_window=30")
            nodes = ClusterNodes(parse(url))
            nodes.moved(("127.0.0.1", ports[0]))
            async with tenure.connect(url) as client:
                await client.list_nodes()
                reconnector = client._core.engine.reconnector  # type: ignore[attr-defined]
                reconnector._locator.moved(("127.0.0.1", ports[0]))
                reconnector.drop("the server closed the connection")
                async with asyncio.timeout(PATIENCE):
                    await client.list_nodes()
            assert left_behind[0].heard
            assert left_behind[1].heard


async def test_addresses_that_no_node_has_any_more_are_forgotten() -> None:
    gone = [free_port() for _ in range(12)]
    reports = {"here": gone, "there": list[int]()}

    def slots(me: int, ports: list[int], *, epoch: int, of_slots: int) -> Answer:
        def server(port: int) -> bytes:
            return b"*3\r\n" + bulk("127.0.0.1") + b":%d\r\n" % port + bulk(f"{port:040x}")

        def say(words: list[bytes]) -> bytes:
            if words[:2] == [b"CLUSTER", b"SLOTS"]:
                servers = [of_slots, *(each for each in ports if each != of_slots)]
                return b"*1\r\n*%d\r\n:0\r\n:16383\r\n" % (2 + len(servers)) + b"".join(
                    map(server, servers)
                )
            if words[:2] == [b"CLUSTER", b"NODES"]:
                flags = {me: "myself,master"}
                return bulk(
                    "".join(
                        f"{port:040x} 127.0.0.1:{port}@1 {flags.get(port, 'master')} - 0 0 {epoch} "
                        "connected 0-16383\n"
                        for port in [me, *ports]
                    )
                )
            return b"+OK\r\n"

        return say

    def here(words: list[bytes]) -> bytes:
        return slots(first.port, reports["here"], epoch=1, of_slots=first.port)(words)

    def there(words: list[bytes]) -> bytes:
        return slots(other.port, [first.port], epoch=2, of_slots=other.port)(words)

    async with speaking(here) as first, speaking(there) as other:
        address = parse(f"redis+cluster://127.0.0.1:{first.port}/?fresh=true")
        nodes = ClusterNodes(address)
        place = ("127.0.0.1", first.port)
        server = Greeted(place, 2, "", clustered=True)
        connection = await connect_once(address, place, _ignore, _ignore)
        try:
            await nodes.serve(connection, server)
            found = []
            for _ in range(2):
                try:
                    found.append(await nodes.newer(server))
                except TenureError:
                    found.append(None)
            assert found == [None, None]
            reports["here"] = [other.port]
            await nodes.serve(connection, server)
            assert await nodes.newer(server) == ("127.0.0.1", other.port)
        finally:
            connection.drop("it is not needed")
            nodes.disconnect()


async def test_two_queries_of_one_server_leave_no_connection_behind() -> None:
    def answer(words: list[bytes]) -> bytes:
        if words[1] == b"MASTER":
            return text("config-epoch", "1")
        return text("127.0.0.1", "1")

    async with speaking(answer) as sentinel:
        sentinels = Sentinels(parse(f"redis+sentinel://127.0.0.1:{sentinel.port}/jobs?fresh=true"))
        places = await asyncio.gather(*(sentinels.locate() for _ in range(3)))
        assert places == [("127.0.0.1", 1)] * 3
        sentinels.disconnect()


async def test_scripts_that_may_not_be_loaded_are_an_outage() -> None:
    with a_server("--user", *"anna on >word ~* &* +@all".split()) as server:
        url = f"{server.url}&username=anna&password=word"
        async with tenure.connect(url) as client, client.session(recovery_window=30) as session:
            events = client.events()
            async with session.mutex("m").lock():
                pass
            server.tell("ACL", "SETUSER", "anna", "-script")
            server.tell("SCRIPT", "FLUSH")
            locking = asyncio.ensure_future(session.mutex("m").lock())
            async with asyncio.timeout(PATIENCE):
                async for event in events:
                    if isinstance(event, SessionDetached):
                        break
                await events.aclose()
                server.tell("ACL", "SETUSER", "anna", "+@all")
                async with await locking as lease:
                    assert lease.held


def _ignore(*_: object) -> None:
    """Ignore pushes and the end of a connection."""
