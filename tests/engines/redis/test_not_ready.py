"""A server that is there, and does not serve: it loads its data, runs a script, or is a replica.

Connections may stay open while a server becomes one: in a failover of a managed Redis, and behind a
proxy. Its errors are an outage then, and not answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest
import redis

import tenure
from tenure.engines.redis.commands import UNSERVED, code_of
from tenure.engines.redis.lua import SCRIPTS
from tests.engines.redis.helpers import PATIENCE, queue_of, replicates, until
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server, a_folder, a_server, free_port


def fill(server: Server) -> None:
    """Give a server data that takes seconds to load, at the pace of `slow_loading`."""
    with redis.Redis(unix_socket_path=server.socket) as client:
        for number in range(400):
            client.set(f"filler-{number}", os.urandom(20_000))
        client.save()


async def test_a_server_that_loads_its_data_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with a_folder() as folder:
        # Slow on purpose: a pause for each key, and clients are served every few kilobytes.
        pace = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "4096")
        server = Server(folder, *pace)
        server.start()
        fill(server)
        server.kill()
        try:
            starting = threading.Thread(target=server.start)
            starting.start()
            await until(lambda: _is_loading(server))
            async with asyncio.timeout(PATIENCE):
                client = tenure.connect(server.url)
                async with client, client.mutex("m").lock():
                    pass
        finally:
            starting.join()
            server.kill()
    said = [each for each in caplog.records if each.levelno >= logging.WARNING]
    (waiting,) = [each.getMessage() for each in said if "loading" in each.getMessage()]
    assert "is loading its data" in waiting
    assert "% done" in waiting
    assert "TLS" not in caplog.text


def _is_loading(server: Server) -> bool:
    try:
        told = server.tell("INFO", "persistence")
    except redis.ConnectionError:
        return False  # it does not listen yet
    assert isinstance(told, dict)
    return bool(told["loading"])


async def test_that_a_server_is_busy_with_a_script_is_said(server: Server) -> None:
    server.tell("CONFIG", "SET", "busy-reply-threshold", "50")
    endless = threading.Thread(target=_run_for_ever, args=(server,))
    endless.start()
    try:
        await until(lambda: _is_busy(server))
        with pytest.raises(tenure.EngineUnavailable, match="SCRIPT KILL") as raised:
            async with tenure.connect(server.url):
                pytest.fail("nothing can be asked of it")
    finally:
        server.tell("SCRIPT", "KILL")
        endless.join()
    assert "TLS" not in str(raised.value)


def _run_for_ever(server: Server) -> None:
    with pytest.raises(redis.ResponseError, match="Script killed"):
        server.tell("EVAL", "while true do end", "0")


def _is_busy(server: Server) -> bool:
    try:
        server.tell("GET", "x")
    except redis.ResponseError as busy:
        return "BUSY" in str(busy)
    return False


async def test_a_replica_that_has_lost_its_master_is_called_one() -> None:
    port = free_port()
    options = ("--replicaof", "localhost", str(port), "--replica-serve-stale-data", "no")
    with a_server(port=port) as master, a_server(*options) as replica:
        await replicates(replica)
        master.kill()
        with pytest.raises(tenure.EngineUnavailable, match="is a replica"):
            async with tenure.connect(replica.url):
                pytest.fail("it takes no writes")


FORMS = {
    "": "-{code} of the server\r\n",
    "-of-an-operation": "*1\r\n*2\r\n$5\r\nerror\r\n${size}\r\n{code} of the server\r\n",
    "-among-results": "*2\r\n:7\r\n-{code} of the server\r\n",
    "-as-redis-6-reports-it": "-ERR Error running script (call to f_1): @user_script:1: "
    "@user_script: 1: -{code} of the server\r\n",
    "-of-an-operation-in-redis-6": "*1\r\n*2\r\n$5\r\nerror\r\n${long}\r\n@user_script: 1: "
    "-{code} of the server\r\n",
}


@pytest.mark.parametrize(
    ("code", "form"),
    [*((code, "") for code in sorted(UNSERVED)), *(("READONLY", form) for form in FORMS if form)],
)
async def test_calls_wait_while_a_connected_server_cannot_serve(
    server: Server, code: str, form: str
) -> None:
    error = FORMS[form].format(code=code, size=len(code) + 14, long=len(code) + 32)
    async with (
        Proxy(server.socket, f"{server.folder}/proxy.sock") as proxy,
        tenure.connect(proxy.url) as client,
        tenure.connect(server.url) as eye,
        client.session() as session,
    ):
        held = await session.mutex("held").lock()
        proxy.error = error.encode()
        proxy.refused_script = SCRIPTS["operate"].digest.encode() if form else b"EVALSHA"
        waiting = asyncio.ensure_future(session.mutex("free").lock())
        trying = asyncio.ensure_future(session.mutex("tried").try_lock())
        releasing = asyncio.ensure_future(held.release())
        creating = asyncio.ensure_future(session.semaphore("s").create(1))
        await proxy.refused.wait()
        with pytest.raises(tenure.AcquireTimeout, match="because"):
            await session.mutex("late").lock(timeout=0.1)
        assert not any(each.done() for each in (waiting, trying, releasing))
        proxy.error = b""
        async with asyncio.timeout(PATIENCE):
            async with await waiting as lease:
                assert lease.held
                assert await trying is not None
                await asyncio.gather(releasing, creating)
                assert await queue_of(eye, "free") == (1, 0)
            assert await queue_of(eye, "late") == (0, 0)


async def test_a_master_that_becomes_a_replica_and_keeps_its_connections_is_an_outage(
    server: Server,
) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        events = client.events()
        lease = await session.mutex("held").lock()
        server.tell("REPLICAOF", "127.0.0.1", "1")
        waiting = asyncio.ensure_future(session.mutex("free").lock())
        async with asyncio.timeout(PATIENCE):
            async for event in events:
                if isinstance(event, tenure.events.SessionDetached):
                    break
        assert not waiting.done()
        server.tell("REPLICAOF", "NO", "ONE")
        async with asyncio.timeout(PATIENCE), await waiting as granted:
            assert lease.held
            assert granted.fencing_token > lease.fencing_token
        await events.aclose()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        ("ERR Error running script (call to f_1): @user_script:1: -MISCONF x", "MISCONF"),
        ("ERR no such key", "ERR"),
        ("ERR the key '-READONLY x'", "ERR"),
        ("upstream failure", ""),
        ("OOM", "OOM"),
    ],
)
def test_the_code_of_an_error_is_found_wherever_a_server_puts_it(error: str, code: str) -> None:
    assert code_of(error) == code
