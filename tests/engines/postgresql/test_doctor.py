"""`tenure doctor` on a PostgreSQL: what it finds, and what it says to do about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psycopg
import pytest

from tenure import blocking
from tenure.doctor import Finding, examine, healthy
from tenure.engines import diagnose
from tenure.engines.postgresql import doctor, schema
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_schema, a_server, shared


@pytest.fixture
def url() -> Iterator[str]:
    """An empty store in the server of all tests."""
    with a_schema() as of_it:
        yield of_it


def name_in(url: str) -> str:
    return url.rpartition("schema=")[2]


def findings(url: str) -> dict[str, Finding]:
    """By what was examined; nothing twice."""
    found = list(diagnose(url))
    assert len({each.what for each in found}) == len(found)
    return {each.what: each for each in found}


def failure(url: str) -> Finding:
    """The one there is; it says what to do."""
    (found,) = [each for each in diagnose(url) if each.level == "failure"]
    assert found.remedy
    return found


def as_role(url: str, role: str) -> str:
    return url.replace("tenure@", f"{role}@")


@pytest.fixture
def stranger() -> Iterator[str]:
    """A role without any rights of its own."""
    shared().execute("CREATE ROLE stranger LOGIN")
    yield "stranger"
    shared().execute("DROP OWNED BY stranger; DROP ROLE stranger")


def test_a_server_that_works_is_described(url: str) -> None:
    with blocking.connect(url) as client, client.session() as session:
        session.semaphore("pool").create(limit=3)
        with session.mutex("m").lock():
            found = findings(url)
    assert {each.level for each in found.values() if each.what != "durability"} == {"ok"}
    assert found["contents"].found == "nodes: 1, sessions: 1, semaphores: 2"
    assert found["schema"].found == f"{name_in(url)}, version {schema.VERSION}"
    assert found["server"].found.startswith("PostgreSQL ")
    everything = list(examine(url))
    assert healthy(everything)
    assert "hand-over" in {each.what for each in everything}


def test_a_schema_that_is_not_there_is_not_created(url: str) -> None:
    found = findings(url)
    assert found["schema"].absent
    assert healthy(list(examine(url)))
    assert shared().execute(f"SELECT to_regnamespace('{name_in(url)}')::text") == [(None,)]


def test_an_account_that_may_not_create_the_schema_needs_an_administrator(
    url: str, stranger: str
) -> None:
    found = failure(as_role(url, stranger))
    assert "may not create it" in found.found
    assert "init --print-sql" in found.remedy


def test_an_account_needs_the_schema_and_its_functions_and_nothing_else(
    url: str, stranger: str
) -> None:
    with blocking.connect(url) as client:
        client.list_nodes()
    found = failure(as_role(url, stranger))
    assert "may not use" in found.found
    shared().execute(found.remedy.partition("run: ")[2].replace("ACCOUNT", stranger))
    assert healthy(list(examine(as_role(url, stranger))))


def test_a_schema_of_another_program_is_refused(url: str) -> None:
    shared().execute(f"CREATE SCHEMA {name_in(url)}")
    assert "is not one of tenure's" in failure(url).found


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(99, "upgrade tenure here"), (0, "have an administrator run 'tenure postgresql upgrade'")],
)
def test_a_schema_of_another_version_is_refused(url: str, version: int, remedy: str) -> None:
    with blocking.connect(url) as client:
        client.list_nodes()
    shared().execute(f"UPDATE {name_in(url)}.meta SET version = {version}, serves = {version}")
    found = failure(url)
    assert f"has version {version}" in found.found
    assert found.remedy == remedy


def test_a_quarantine_and_its_reason_are_shown(url: str) -> None:
    with blocking.connect(url) as client:
        client.list_nodes()
    shared().execute(f"UPDATE {name_in(url)}.meta SET longest_window = 60")
    shared().execute(f"SELECT {name_in(url)}.data_was_restored()")
    with blocking.connect(url) as client:
        client.list_nodes()
    found = failure(url)
    assert found.what == "quarantine"
    assert " s: the database was restored" in found.found


def test_an_examination_after_a_crash_changes_nothing(url: str) -> None:
    with blocking.connect(url) as client:
        client.list_nodes()
    witness = f"{name_in(url)}.witness"
    shared().execute(f"TRUNCATE {witness}")  # what a crash does
    assert findings(url)["quarantine"].level == "warning"
    assert shared().execute(f"SELECT count(*) FROM {witness}") == [(0,)]


def test_an_old_server_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST", 99)
    assert "is too old" in failure(url).found


@pytest.mark.parametrize(
    ("wrong", "found", "remedy"),
    [
        ("postgresql://tenure@127.0.0.1:1/postgres", "refused", "start the server"),
        ("{nobody}", "does not exist", "createuser"),
        ("{database}", "does not exist", "createdb"),
    ],
)
def test_a_server_that_cannot_be_used_is_reported_with_what_to_do(
    url: str, wrong: str, found: str, remedy: str
) -> None:
    given = wrong.format(
        nobody=as_role(url, "nobody_knows"), database=url.replace("/postgres?", "/elsewhere?")
    )
    failed = failure(given)
    assert found in failed.found
    assert remedy in failed.remedy


def test_a_refused_password_is_reported_as_such() -> None:
    found = doctor.unreachable('FATAL: password authentication failed for user "tenure"')
    assert "check the user and the password" in found.remedy


@pytest.fixture(scope="module")
def careless() -> Iterator[PostgresServer]:
    """A server that loses data in a crash, removes no dead rows and accepts no writes."""
    with a_server(
        "fsync=off",
        "full_page_writes=off",
        "synchronous_commit=off",
        "autovacuum=off",
        "default_transaction_read_only=on",
    ) as server:
        yield server


def test_settings_that_may_lose_grants_are_warnings(careless: PostgresServer) -> None:
    found = findings(careless.url)
    assert found["durability"].level == found["autovacuum"].level == "warning"
    assert found["durability"].found == "fsync and full_page_writes and synchronous_commit are off"
    relaxed = findings(f"{careless.url}&durability=process")
    assert relaxed["durability"].found == "fsync and full_page_writes are off"


def test_a_server_that_accepts_no_writes_is_a_failure(careless: PostgresServer) -> None:
    assert "read-only" in findings(careless.url)["role"].found
    assert findings(careless.url)["role"].level == "failure"


def test_a_standby_is_a_failure() -> None:
    found = doctor.role(standby=True, read_only=False)
    assert found.level == "failure"
    assert "standby" in found.found


def test_a_pooler_in_front_of_the_server_is_noticed(url: str) -> None:
    with a_pooler(shared()) as pooled:
        found = findings(f"{pooled}?schema={name_in(url)}")
        direct = findings(f"{pooled}?schema={name_in(url)}&listen=127.0.0.1")
    assert found["pooler"].level == "warning"
    assert direct["pooler"].level == "ok"
    assert findings(url)["pooler"].level == "ok"


def test_a_server_that_stops_answering_is_given_a_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT", 0.5)
    with a_server("fsync=off") as server:
        findings_of_it = iter(diagnose(server.url))
        assert next(findings_of_it).what == "connection"
        server.signal(signal.SIGSTOP)
        try:
            before = time.monotonic()
            (found,) = findings_of_it
            assert found.level == "failure"
            assert found.found == "no answer within 0.5 s"
            assert time.monotonic() - before < 20
        finally:
            server.signal(signal.SIGCONT)


def test_a_server_that_hangs_up_is_reported() -> None:
    with a_server("fsync=off") as server:
        findings_of_it = iter(diagnose(server.url))
        assert next(findings_of_it).what == "connection"
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        (found,) = findings_of_it
        assert found.level == "failure"
        assert found.found.startswith("failed: ")
