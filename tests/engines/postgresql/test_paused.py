"""A holder that is stopped (SIGSTOP) past its window cannot write late through the guard."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import psycopg
import pytest

import tenure
from tests.engines.postgresql.servers import a_schema, shared
from tests.guarantees import POSTGRESQL, guarantee

pytestmark = pytest.mark.exhaustive

LOCKS = 100

HOLDER = """
import asyncio, sys, psycopg, tenure

url, guard, locks = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])

def write(token, name):  # what the holder was about to do when it was stopped
    try:
        with psycopg.connect(url.partition("&schema")[0]) as transaction:
            transaction.execute(guard, ("/default", name, token))
            transaction.execute("INSERT INTO written VALUES (%s, %s)", (name, token))
    except psycopg.Error:
        return False
    return True

async def main():
    async with tenure.connect(url) as client:
        session = await client.session(recovery_window=1)
        leases = {f"m{n}": await session.mutex(f"m{n}").lock() for n in range(locks)}
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        written = [write(lease.fencing_token, name) for name, lease in leases.items()]
        print(sum(written), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def url() -> Iterator[str]:
    with a_schema() as url:
        shared().execute("CREATE TABLE IF NOT EXISTS written (name text, token bigint)")
        shared().execute("TRUNCATE written")
        yield url


@guarantee("stopped", "one owner", "fenced", on=POSTGRESQL)
async def test_a_paused_holder_writes_nothing_late(url: str) -> None:
    guard = f"SELECT {url.rpartition('schema=')[2]}.guard(%s, %s, %s)"
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, url, guard, str(LOCKS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"ready\n"
        async with tenure.connect(url) as client:
            os.kill(holder.pid, signal.SIGSTOP)
            async with client.session() as session:
                leases = [await session.mutex(f"m{n}").lock(timeout=30) for n in range(LOCKS)]
                with psycopg.connect(shared().url) as transaction:
                    for number, lease in enumerate(leases):
                        where = ("/default", f"m{number}", lease.fencing_token)
                        transaction.execute(guard.encode(), where)
                        transaction.execute("INSERT INTO written VALUES (%s, %s)", where[1:])
                os.kill(holder.pid, signal.SIGCONT)
                holder.stdin.write(b"\n")
                assert await holder.stdout.readline() == b"0\n"
                assert shared().execute("SELECT count(*) FROM written") == [(LOCKS,)]
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.wait()
