"""Accounts whose transactions have a stricter isolation level than the functions need."""

from __future__ import annotations

import psycopg
import pytest

import tenure
from tenure.engines import diagnose
from tenure.engines.contract import Attach
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import PATIENCE, an_engine, until
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer

pytestmark = pytest.mark.exhaustive

_LEVELS = ("repeatable read", "serializable")
_BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE pg_blocking_pids(pid) <> '{}'"
_END_ALL = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
)


def _set_level(server: PostgresServer, level: str) -> None:
    """Give an account's connections a level, which a pooler's get when it connects again."""
    server.execute(f"ALTER ROLE tenure SET default_transaction_isolation = '{level}'")
    server.execute(_END_ALL)


@pytest.mark.parametrize("level", _LEVELS)
async def test_a_stricter_level_behind_a_pooler_is_an_error_with_a_remedy(
    server: PostgresServer, level: str
) -> None:
    async with tenure.connect(server.url):
        pass
    _set_level(server, level)
    with a_pooler(server) as url:
        expected = f"transactions are {level}.* Run ALTER ROLE ACCOUNT SET"
        with pytest.raises(tenure.EngineError, match=expected):
            async with tenure.connect(url):
                pytest.fail("the level is too strict")
        (finding,) = (each for each in diagnose(url) if each.what == "isolation")
        assert (finding.level, finding.found) == ("failure", f"transactions are {level} by default")


async def test_a_level_that_is_set_later_behind_a_pooler_stops_grants_until_it_is_reset(
    server: PostgresServer,
) -> None:
    with a_pooler(server) as url:
        async with tenure.connect(url) as client, client.session() as session:
            async with session.mutex("m").lock():
                pass
            _set_level(server, "serializable")
            with pytest.raises(tenure.AcquireTimeout, match="transactions are serializable"):
                await session.mutex("m").lock(timeout=2)
            _set_level(server, "read committed")
            async with session.mutex("m").lock(timeout=PATIENCE):
                pass


@pytest.mark.parametrize("level", _LEVELS)
async def test_statements_beside_a_direct_listener_have_the_level_that_they_need(
    server: PostgresServer, level: str
) -> None:
    async with tenure.connect(server.url):
        pass
    _set_level(server, level)
    url = f"{server.url}&listen={server.folder}"
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=PATIENCE):
        pass


@pytest.mark.parametrize("level", _LEVELS)
async def test_the_heartbeat_thread_renews_a_session_that_changed_while_it_waited(
    server: PostgresServer, level: str
) -> None:
    server.execute(f"ALTER ROLE tenure SET default_transaction_isolation = '{level}'")
    async with (
        tenure.connect(server.url) as client,
        an_engine(server.url, client.clock) as engine,
    ):
        assert isinstance(engine, PostgresEngine)
        events = Recorder()
        session = await engine.attach(Attach("/default", 30), events)
        proofs = len(events.proofs)
        with psycopg.connect(server.url) as changing:
            changing.execute("LOCK TABLE tenure.sessions")  # a renewal skips a row that is locked
            changing.execute("UPDATE tenure.sessions SET description = 'changed'")
            engine.heartbeat.renew(session)
            await until(lambda: server.execute(_BLOCKED) == [(1,)])
        await events.wait_for(lambda found: len(found.proofs) > proofs, "the proof")
        await session.close()
