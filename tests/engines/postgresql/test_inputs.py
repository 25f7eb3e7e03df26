"""Names, descriptions and data: every text is one key, whatever the encodings, and a bad one fails
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import tenure
from tenure.engines import diagnose
from tenure.engines.contract import Attach
from tenure.engines.postgresql.schema import initialize
from tenure.engines.postgresql.url import parse
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import an_engine, backends, enqueue, until
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_schema, a_server

NAMES = [
    *("m\u00fcller", "\u00e9", "e\u0301", "\u00c3\u00a9", "\\u00e9"),
    *("nul\0", "esc\x1b0", "esc\x1b", "'; --", 'a","b', "NULL"),
]
"""Different names, some of which are the same bytes in some encoding."""


@pytest.fixture(scope="module")
def databases() -> Iterator[PostgresServer]:
    """A server with databases of several encodings, named after them."""
    with a_server("fsync=off") as running:
        for each in ("SQL_ASCII", "LATIN1", "EUC_JP"):
            running.execute(
                f"CREATE DATABASE {each} ENCODING '{each}' TEMPLATE template0 LOCALE 'C'"
            )
        yield running


def in_database(server: PostgresServer, name: str) -> str:
    return server.url.replace("/postgres?", f"/{name.lower()}?")


@contextlib.contextmanager
def client_encoding(how: str, encoding: str, url: str, folder: Path) -> Iterator[str]:
    """Request an encoding in the environment, the URL, or a service file; yield the URL."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "environment":
            patch.setenv("PGCLIENTENCODING", encoding)
        elif how == "service":
            (folder / "services").write_text(f"[coded]\nclient_encoding={encoding}\n")
            patch.setenv("PGSERVICEFILE", str(folder / "services"))
            url += "&service=coded"
        elif how == "options":
            url += f"&options=-c%20client_encoding%3D{encoding}"
        else:
            url += f"&client_encoding={encoding}"
        yield url


async def is_one_lock(one: tenure.Client, other: tenure.Client, name: str) -> None:
    """Check that all ways to a name lead to one lock."""
    # The second request of a known name is another statement than the first, and so is a batch.
    for _ in range(2):
        async with one.mutex(name).lock(timeout=10):
            assert await other.mutex(name).try_lock() is None
            again, third = await asyncio.gather(
                other.mutex(name).try_lock(), other.mutex("another").try_lock()
            )
            assert again is None
            assert third is not None
            await third.release()
    async with one.session() as session:
        semaphore = session.semaphore(f"{name}+")
        await semaphore.create(limit=1)
        assert (await semaphore.describe()).name == f"{name}+"
        await semaphore.delete()


@pytest.mark.parametrize("database", ["postgres", "LATIN1"])
@pytest.mark.parametrize("how", ["environment", "URL", "service", "options"])
async def test_an_encoding_that_a_client_requests_leaves_keys_as_they_are(
    databases: PostgresServer, database: str, how: str, tmp_path: Path
) -> None:
    plain = in_database(databases, database)
    with client_encoding(how, "LATIN1", plain, tmp_path) as url:
        async with tenure.connect(plain) as one, tenure.connect(url) as other:
            for name in ("m\u00fcller", "\u00c3\u00a9"):
                await is_one_lock(one, other, name)
                await is_one_lock(other, one, name)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("database", ["postgres", "LATIN1"])
async def test_every_name_is_one_lock_and_no_other_ones(
    databases: PostgresServer, database: str, pooled: bool
) -> None:
    with contextlib.ExitStack() as stack:
        url = in_database(databases, database)
        if pooled:
            url = stack.enter_context(a_pooler(databases))
            url = url.replace("/postgres", f"/{database.lower()}")
        names = [each for each in NAMES if database == "postgres" or max(each) < "\u0100"]
        async with tenure.connect(url) as one, tenure.connect(url) as other:
            for name in names:
                await is_one_lock(one, other, name)
            async with contextlib.AsyncExitStack() as held:
                for name in names:  # all at once
                    await held.enter_async_context(one.mutex(name).lock(timeout=0))
                assert {each.name for each in await one.list_semaphores("/default")} == {*names}


async def test_a_name_that_the_encoding_lacks_fails_alone(databases: PostgresServer) -> None:
    async with (
        tenure.connect(in_database(databases, "LATIN1")) as client,
        an_engine(in_database(databases, "LATIN1"), client.clock) as engine,
    ):
        session = await engine.attach(Attach("/default", 30), Recorder())
        names = [f"n{at}" if at % 7 else f"\u0416{at}" for at in range(40)]
        answers = await enqueue(
            session, [(name, b"") for name in names], timeout=0.0, return_exceptions=True
        )
        for name, answer in zip(names, answers, strict=True):
            assert isinstance(answer, tenure.EngineError) == (name[0] == "\u0416"), answer
        with pytest.raises(tenure.EngineError, match=r"lacks a character\. Create a database"):
            await session.create_semaphore("\u0416", 1, b"", exist_ok=False)
        await session.create_semaphore("after", 1, b"", exist_ok=False)


async def test_a_description_that_the_encoding_lacks_is_refused(databases: PostgresServer) -> None:
    async with tenure.connect(in_database(databases, "LATIN1")) as client:
        with pytest.raises(tenure.EngineError, match="lacks a character"):
            await client.session(description="\u0416")
        async with client.session(description="m\u00fcller\0") as session:
            (found,) = await client.list_sessions("/default")
            assert (found.id, found.description) == (session.id, "m\u00fcller\0")


async def test_a_database_that_keeps_no_texts_is_refused(databases: PostgresServer) -> None:
    url = in_database(databases, "SQL_ASCII")
    with pytest.raises(tenure.EngineError, match=r"encoding is SQL_ASCII.*ENCODING 'UTF8'"):
        async with tenure.connect(url):
            pass
    with pytest.raises(tenure.EngineError, match="encoding is SQL_ASCII"):
        await asyncio.to_thread(initialize, parse(url))
    findings = {each.what: each for each in diagnose(url)}
    assert findings["encoding"].level == "failure"
    assert findings["encoding"].remedy == "Create the database with ENCODING 'UTF8'"
    with psycopg.connect(url) as connection:
        schemas = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'tenure'")
        assert schemas.fetchone() == (0,)
    await until(lambda: not backends(databases))  # a server process ends after its connection


def test_an_encoding_that_lacks_characters_is_a_warning(databases: PostgresServer) -> None:
    findings = {each.what: each for each in diagnose(in_database(databases, "EUC_JP"))}
    assert (findings["encoding"].level, findings["encoding"].found[:6]) == ("warning", "EUC_JP")


async def test_a_fence_finds_the_lock_of_a_name_in_every_encoding(
    databases: PostgresServer,
) -> None:
    url = in_database(databases, "LATIN1")
    async with (
        tenure.connect(url) as client,
        client.mutex("m\u00fcller").lock() as lease,
        await psycopg.AsyncConnection.connect(url, client_encoding="LATIN1") as connection,
    ):
        await connection.execute(
            "SELECT tenure.guard('/default', %s, %s)", ("m\u00fcller", lease.fencing_token)
        )


@pytest.mark.parametrize("data", [b"\0", b"\xff\xfe\0", bytes(range(256)), b"\0" * 1024 * 1024])
async def test_all_bytes_are_data(data: bytes) -> None:
    with a_schema() as url:
        async with tenure.connect(url) as client, client.session() as session:
            await session.semaphore("s").create(limit=1, data=data)
            async with session.semaphore("s").acquire(data=data):
                found = await session.semaphore("s").describe(owners=True)
            assert (found.data, found.owners[0].data) == (data, data)
