"""A server that is there, and does not serve: it loads its data, runs a script, or is a replica."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest
import redis

import tenure
from tests.engines.redis.helpers import PATIENCE, replicates, until
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
