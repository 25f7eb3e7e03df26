"""Logins that fail: which errors are outages, which pass by themselves, and what the others say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import tenure
from tenure import AuthenticationFailed, EngineError, EngineUnavailable, InvalidArgument
from tenure.engines import diagnose
from tenure.engines.postgresql.schema import initialize
from tenure.engines.postgresql.url import login_failure, parse
from tests.engines.postgresql.helpers import PATIENCE, backends, until, until_detached_and_back
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_server

RULES = """local all all trust
host postgres unable,limited,app,tls 127.0.0.1/32 scram-sha-256
host closed,missing,barred app 127.0.0.1/32 trust
host all rejected 127.0.0.1/32 reject
"""


@pytest.fixture(scope="module")
def strict() -> Iterator[PostgresServer]:
    """A server with accounts that may not log in, each for another reason."""
    with a_server("fsync=off", "password_encryption=scram-sha-256") as running:
        running.stop()
        (running.data / "pg_hba.conf").write_text(RULES)
        running.listen()
        running.start()
        for sql in (
            "CREATE ROLE app LOGIN PASSWORD 'right'",
            "CREATE ROLE unable PASSWORD 'right'",
            "CREATE ROLE rejected LOGIN",
            "CREATE ROLE limited LOGIN PASSWORD 'right' CONNECTION LIMIT 0",
            "CREATE DATABASE closed ALLOW_CONNECTIONS false",
            "CREATE DATABASE barred",
            "REVOKE CONNECT ON DATABASE barred FROM PUBLIC",
        ):
            running.execute(sql)
        yield running


@pytest.mark.parametrize(
    ("login", "database", "kind", "text"),
    [
        ("app:wrong", "postgres", AuthenticationFailed, "password authentication failed.*Check"),
        ("app", "postgres", AuthenticationFailed, "no password supplied.*Check the user"),
        ("unable:right", "postgres", AuthenticationFailed, "not permitted to log in.*grant it"),
        ("rejected", "postgres", AuthenticationFailed, r"pg_hba\.conf rejects.*Have an admin"),
        ("stranger:right", "postgres", AuthenticationFailed, r"no pg_hba\.conf entry.*Have an"),
        ("app", "barred", AuthenticationFailed, "permission denied for database.*CONNECT"),
        ("app", "missing", EngineError, 'database "missing" does not exist.*Create it'),
        ("app", "closed", EngineError, "not currently accepting connections.*ALTER DATABASE"),
        ("app:right", "postgres?sslmode=require", EngineError, "not support SSL.*Turn TLS on"),
        ("limited:right", "postgres", EngineUnavailable, 'too many connections for role "limited"'),
    ],
)
async def test_a_login_that_is_refused_says_why_and_what_to_do(
    strict: PostgresServer, login: str, database: str, kind: type[Exception], text: str
) -> None:
    url = f"postgresql://{login}@127.0.0.1:{strict.port}/{database}"
    with pytest.raises(kind, match=text) as refused:
        async with tenure.connect(url):
            pass
    assert type(refused.value) is kind
    assert "right" not in str(refused.value)
    (found,) = diagnose(url)
    assert found.level == "failure"
    assert found.remedy[1:] in str(refused.value)
    with pytest.raises(kind, match=text):
        await asyncio.to_thread(initialize, parse(url))


@pytest.mark.parametrize(
    ("login", "database", "settings", "kind", "text"),
    [
        ("app:wrong", "postgres", "auth_type=scram-sha-256", AuthenticationFailed, "SASL auth"),
        ("app:wrong", "postgres", "auth_type=md5", AuthenticationFailed, "password authenticat"),
        ("stranger", "postgres", "", AuthenticationFailed, "authentication failed"),
        ("tenure", "missing", "", EngineError, "does not exist"),
        ("tenure", "postgres?sslmode=require", "", EngineError, "SSL"),
        ("tenure", "postgres", "max_client_conn=0", EngineUnavailable, "no more connections"),
    ],
)
async def test_a_login_that_a_pooler_refuses_says_why(
    strict: PostgresServer,
    login: str,
    database: str,
    settings: str,
    kind: type[Exception],
    text: str,
) -> None:
    with a_pooler(strict, settings=settings, ready=False) as url:
        place = url.rpartition("@")[2].partition("/")[0]
        with pytest.raises(kind, match=text) as refused:
            async with tenure.connect(f"postgresql://{login}@{place}/{database}"):
                pass
    assert type(refused.value) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("FATAL: the database system is starting up", EngineUnavailable),
        ("FATAL: the database system is shutting down", EngineUnavailable),
        ("FATAL: the database system is in recovery mode", EngineUnavailable),
        ("FATAL: the database system is not yet accepting connections", EngineUnavailable),
        ("FATAL: sorry, too many clients already", EngineUnavailable),
        ("FATAL: remaining connection slots are reserved for roles with ...", EngineUnavailable),
        ("FATAL: pgbouncer cannot connect to server", EngineUnavailable),
        ("FATAL: query_wait_timeout", EngineUnavailable),
        ("FATAL: server login has been failing, cached error: connect failed", EngineUnavailable),
        ("FATAL: certificate authentication failed for user", AuthenticationFailed),
        ('server certificate for "one" does not match host name "two"', EngineUnavailable),
        ("received invalid response to SSL negotiation: H", EngineUnavailable),
        ("FATAL: the server has a text that is not in the table", EngineUnavailable),
        ("FATAL: no such database: other", EngineError),
        ("FATAL: SSL required", EngineError),
        ('FATAL: role "gone" does not exist', AuthenticationFailed),
    ],
)
def test_the_text_of_a_failure_decides_whether_it_may_pass(
    text: str, kind: type[tenure.TenureError]
) -> None:
    assert login_failure(f'connection to server at "h", port 1 failed: {text}').error is kind


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("sslmode=requir", 'invalid sslmode value: "requir"'),
        ("port=600x", 'invalid integer value "600x" for connection option "port"'),
        ("target_session_attrs=any&host=/a,/b&port=1,2,3", "could not match 3 port numbers to 2"),
        ("service=missing", 'definition of service "missing" not found'),
    ],
)
async def test_a_parameter_that_libpq_refuses_is_a_mistake_and_no_outage(
    parameters: str, text: str
) -> None:
    url = f"postgresql:///jobs?{parameters}"
    with pytest.raises(InvalidArgument, match=text) as refused:
        async with tenure.connect(url):
            pass
    assert "Correct the parameter in the URL" in str(refused.value)
    with pytest.raises(InvalidArgument, match=text):
        await asyncio.to_thread(initialize, parse(url))
    (found,) = diagnose(url)
    assert found.remedy.startswith("correct the parameter")


async def test_each_server_that_cannot_be_reached_is_named_once(tmp_path: Path) -> None:
    url = f"postgresql:///jobs?host={tmp_path}/one,{tmp_path}/two"
    with pytest.raises(EngineUnavailable) as refused:
        async with tenure.connect(url):
            pass
    _, text = str(refused.value).split(": ", 1)
    failures, _, remedy = text.partition(". Start")
    assert remedy == " the server, or correct the host and the port"
    assert failures.count(f"{tmp_path}/one/") == failures.count(f"{tmp_path}/two/") == 1
    assert failures.count("No such file or directory") == 2


@contextlib.contextmanager
def occupied(url: str) -> Iterator[None]:
    """Occupy the only connection of a pool with a transaction."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1")
        yield


async def test_a_pooler_that_gives_up_a_statement_costs_no_lease(server: PostgresServer) -> None:
    settings = "query_wait_timeout = 1\ndefault_pool_size = 1"
    with a_pooler(server, settings=settings) as url:
        async with tenure.connect(url) as client:
            lease = await client.mutex("m").lock()
            async with client.events() as events:
                with occupied(url):
                    other = asyncio.ensure_future(client.mutex("other").lock(timeout=PATIENCE))
                    async with asyncio.timeout(PATIENCE):
                        async for event in events:  # the pooler has closed the connection
                            if isinstance(event, tenure.events.SessionDetached):
                                break
                async with await other as second:
                    assert second.held
            await lease.release()


async def test_a_lease_outlasts_a_login_that_is_refused_for_a_while(
    strict: PostgresServer,
) -> None:
    url = f"postgresql://app:right@127.0.0.1:{strict.port}/postgres"
    strict.execute("GRANT CREATE ON DATABASE postgres TO app")
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=30) as session,
        session.mutex("m").lock() as lease,
    ):
        async with client.events() as events:
            for refusing, allowing in (
                ("CONNECTION LIMIT 0", "CONNECTION LIMIT -1"),
                ("PASSWORD 'changed'", "PASSWORD 'right'"),
                ("NOLOGIN", "LOGIN"),
            ):
                strict.execute(f"ALTER ROLE app {refusing}")
                for pid in backends(strict):
                    strict.execute(f"SELECT pg_terminate_backend({pid})")
                await until(lambda: not backends(strict))
                refused = asyncio.ensure_future(session.mutex("other").lock(timeout=0.5))
                with pytest.raises(
                    tenure.AcquireTimeout, match=r"because .* (unreachable|refused)"
                ):
                    await refused
                strict.execute(f"ALTER ROLE app {allowing}")
                await until_detached_and_back(events)
        assert lease.held
