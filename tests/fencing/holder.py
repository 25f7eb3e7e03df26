"""A program that holds a lease and writes to fenced resources under it, told what to do line by
line; see `tests.engines.sqlite.worker`. It never looks whether it still holds before it writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
import redis
import sqlalchemy
from sqlalchemy.orm import Session

import tenure
from tenure.errors import StaleToken
from tenure.fencing import RedisFence, SQLFence
from tests.engines.sqlite.worker import Worker, serve
from tests.fencing.plants import PLANTS

SQL = SQLFence("notes")
REDIS = RedisFence("notes")

Write = Callable[[str, tenure.Lease, str], None]


class Holder(Worker):
    """A process of this module, as a test sees it."""

    module = "tests.fencing.holder"

    def until_stopped(self) -> None:
        """Wait until it has stopped itself."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)


def to_local(path: str, lease: tenure.Lease, text: str) -> None:
    """To the object of another process, which has the fence: see `tests.fencing.test_pause`."""
    with socket.socket(socket.AF_UNIX) as resource:
        resource.connect(path)
        resource.sendall(json.dumps({"token": lease.fencing_token, "text": text}).encode() + b"\n")
        answer = json.loads(resource.makefile().readline())
    if answer["stale"]:
        raise StaleToken("the resource says so")


def to_sqlite(path: str, lease: tenure.Lease, text: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        SQL.admit(connection, lease)
        connection.execute("INSERT INTO notes (text) VALUES (?)", [text])


def to_sqlalchemy(path: str, lease: tenure.Lease, text: str) -> None:
    notes = sqlalchemy.table("notes", sqlalchemy.column("text"))
    with Session(sqlalchemy.create_engine(f"sqlite:///{path}")) as session, session.begin():
        SQL.admit(session, lease)
        session.execute(notes.insert().values(text=text))


def to_postgres(url: str, lease: tenure.Lease, text: str) -> None:
    with psycopg.connect(url) as connection:
        SQL.admit(connection, lease)
        connection.execute("INSERT INTO notes (text) VALUES (%s)", [text])


def to_redis(url: str, lease: tenure.Lease, text: str) -> None:
    with redis.Redis.from_url(url) as client:
        REDIS.write(client, lease, ["RPUSH", "{notes}", text])


RESOURCES: dict[str, Write] = {
    "local": to_local,
    "sqlite": to_sqlite,
    "sqlalchemy": to_sqlalchemy,
    "postgres": to_postgres,
    "redis": to_redis,
}


class Program:
    """Carries out the commands."""

    lease: tenure.Lease

    def __init__(self, url: str) -> None:
        self.client = tenure.connect(url)

    async def do_lock(self, window: float) -> int:
        session = await self.client.session(recovery_window=window)
        self.lease = await session.mutex("notes").lock()
        return self.lease.fencing_token

    async def do_plant(self, kinds: list[str], defect: str) -> None:
        for kind in kinds:
            PLANTS[kind][defect](pytest.MonkeyPatch())

    async def do_write(self, where: dict[str, str], text: str, times: int) -> dict[str, list[str]]:
        """What comes of writing to each resource, so many times."""
        return {
            kind: [self._write(kind, at, text) for _ in range(times)] for kind, at in where.items()
        }

    def _write(self, kind: str, at: str, text: str) -> str:
        try:
            RESOURCES[kind](at, self.lease, text)
        except StaleToken:
            return "refused"
        return "written"

    async def do_pause_and_write(self, **arguments: Any) -> dict[str, list[str]]:
        """Stop for as long as it pleases others, between the last look at the lease and a write."""
        self.lease.check()
        os.kill(os.getpid(), signal.SIGSTOP)
        return await self.do_write(**arguments)

    async def do_believes(self) -> bool:
        return self.lease.held

    async def aclose(self) -> None:
        await self.client.aclose()


if __name__ == "__main__":
    asyncio.run(serve(Program(sys.argv[1])))
