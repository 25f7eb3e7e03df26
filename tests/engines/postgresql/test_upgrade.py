"""Versions of the schema: which programs may use one, and its upgrade while programs run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

import tenure
from tenure.engines.postgresql import schema
from tenure.engines.postgresql.schema import initialize, upgrade
from tenure.engines.postgresql.url import parse
from tests.engines.postgresql.helpers import PATIENCE, queue_of
from tests.engines.postgresql.servers import a_schema, new_name, shared

_NEXT = schema.VERSION + 1
_LATER = schema.VERSION + 2


@pytest.fixture
def url() -> Iterator[str]:
    """An empty store in the server of all tests."""
    with a_schema() as of_it:
        yield of_it


def _name(url: str) -> str:
    return url.rpartition("schema=")[2]


async def _lock(url: str) -> int:
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=PATIENCE) as lease:
        return lease.fencing_token


def _version(url: str) -> object:
    return shared().execute(f"SELECT version FROM {_name(url)}.meta")[0][0]


@pytest.fixture
def later(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store, and programs of a later version with two upgrades."""
    initialize(parse(url))
    monkeypatch.setattr(schema, "VERSION", _LATER)
    steps = {
        _NEXT: "ALTER TABLE :schema.queues ADD COLUMN added text; "
        "ALTER TABLE :schema.sessions ADD COLUMN added text DEFAULT 'x';",
        _LATER: "ALTER TABLE :schema.queues RENAME COLUMN added TO renamed;",
    }
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    return url


def _columns(url: str) -> list[object]:
    found = shared().execute(
        "SELECT attrelid::regclass::text || '.' || attname FROM pg_attribute WHERE attrelid IN "
        f"('{_name(url)}.queues'::regclass, '{_name(url)}.sessions'::regclass) "
        "AND attname IN ('added', 'renamed') ORDER BY 1"
    )
    return [column for (column,) in found]


@pytest.mark.parametrize("version", [_NEXT, 99])
async def test_a_store_of_a_later_version_is_used_by_programs_that_it_serves(
    url: str, version: int
) -> None:
    token = await _lock(url)
    shared().execute(f"UPDATE {_name(url)}.meta SET version = {version}")
    assert await _lock(url) > token
    shared().execute(f"UPDATE {_name(url)}.meta SET serves = {version}")
    with pytest.raises(tenure.EngineError, match=rf"version {version} .*upgrade tenure here"):
        await _lock(url)
    with pytest.raises(tenure.EngineError, match=rf"has version {version}, and this tenure has"):
        await asyncio.to_thread(upgrade, parse(url))
    assert _version(url) == version


async def test_a_store_of_an_earlier_version_is_refused_until_it_is_upgraded(later: str) -> None:
    with pytest.raises(tenure.EngineError, match="run 'tenure postgresql upgrade'"):
        await _lock(later)
    assert await asyncio.to_thread(upgrade, parse(later)) == (_LATER - 2, _LATER)
    assert _columns(later) == [f"{_name(later)}.queues.renamed", f"{_name(later)}.sessions.added"]
    assert await _lock(later)
    assert await asyncio.to_thread(upgrade, parse(later)) == (_LATER, _LATER)


async def test_a_store_of_version_1_gets_rates(url: str) -> None:
    initialize(parse(url))
    name = _name(url)
    shared().execute(
        f"DROP TABLE {name}.rates; DROP FUNCTION {name}.rate; DROP FUNCTION {name}.remove_rates; "
        f"UPDATE {name}.meta SET version = 1"
    )
    with pytest.raises(tenure.EngineError, match="run 'tenure postgresql upgrade'"):
        await _lock(url)
    assert (await asyncio.to_thread(upgrade, parse(url)))[0] == 1
    async with tenure.connect(url) as client:
        assert await client.rate("api", limit=1, per=60).try_take()
        assert not await client.rate("api", limit=1, per=60).try_take()


async def test_an_upgrade_that_fails_changes_nothing(
    later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schema.MIGRATIONS, _LATER, "DROP TABLE :schema.nothing_of_this_name;")
    with pytest.raises(tenure.EngineError, match=r"was not upgraded.*nothing_of_this_name"):
        await asyncio.to_thread(upgrade, parse(later))
    assert (_version(later), _columns(later)) == (_LATER - 2, [])


async def test_programs_keep_their_leases_and_places_while_a_store_is_upgraded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    turns = 0
    async with tenure.connect(url) as client, tenure.connect(url) as other:

        async def contend(of: tenure.Client) -> None:
            nonlocal turns
            async with of.session(recovery_window=5) as session:
                while turns < 400:
                    async with session.mutex("turns").lock() as lease:
                        tokens.append(lease.fencing_token)
                        turns += 1

        async with client.mutex("held").lock() as lease, asyncio.TaskGroup() as group:
            for each in (client, other, client, other):
                group.create_task(contend(each))
            for number in range(_NEXT, _NEXT + 8):
                while turns < (number - _NEXT + 1) * 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                step = f"ALTER TABLE :schema.queues ADD COLUMN c{number} integer DEFAULT {number};"
                step += f"ALTER TABLE :schema.requests ADD COLUMN c{number} text;"
                monkeypatch.setattr(schema, "VERSION", number)
                monkeypatch.setitem(schema.MIGRATIONS, number, step)
                assert await asyncio.to_thread(upgrade, parse(url)) == (number - 1, number)
                lease.check()
        assert tokens == sorted(set(tokens))
        assert await queue_of(client, "turns") == (0, 0)


async def test_accounts_that_use_the_store_may_use_its_new_functions(
    later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "CREATE FUNCTION :schema.added() RETURNS integer LANGUAGE sql AS 'SELECT 42';"
    monkeypatch.setitem(schema.MIGRATIONS, _LATER, step)
    user, stranger = (f"role_{new_name()}_{number}" for number in range(2))
    for role in (user, stranger):
        shared().execute(
            f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {_name(later)} TO {role}"
        )
    shared().execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {_name(later)} TO {user}")
    try:
        with pytest.raises(tenure.AuthenticationFailed, match="Have its owner run"):
            await asyncio.to_thread(upgrade, parse(later.replace("tenure@", f"{user}@")))
        await asyncio.to_thread(upgrade, parse(later))
        assert await _lock(later.replace("tenure@", f"{user}@"))
        call = f"SELECT {_name(later)}.added()".encode()
        for role, error in ((user, None), (stranger, psycopg.errors.InsufficientPrivilege)):
            dsn = shared().url.replace("tenure@", f"{role}@")
            with psycopg.connect(dsn, autocommit=True) as connection:
                if error is None:
                    assert connection.execute(call).fetchone() == (42,)
                else:
                    with pytest.raises(error):
                        connection.execute(call)
    finally:
        for role in (user, stranger):
            shared().execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(
    "there",
    [
        "",
        "CREATE SCHEMA {0}",
        "CREATE SCHEMA {0} CREATE TABLE meta (x integer)",
        "CREATE SCHEMA {0} CREATE TABLE meta (version text)",
        "CREATE SCHEMA {0}; CREATE TABLE {0}.meta AS SELECT true AS only_row, 0 AS version",
    ],
)
async def test_a_schema_that_is_no_store_is_not_upgraded(url: str, there: str) -> None:
    if there:
        shared().execute(there.format(_name(url)))
    with pytest.raises(tenure.EngineError, match="it is not there, or not one of tenure's"):
        await asyncio.to_thread(upgrade, parse(url))
