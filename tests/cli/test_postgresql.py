"""`tenure postgresql`: the schema is created or upgraded, or an administrator gets the SQL."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tenure import blocking
from tenure.engines.postgresql.schema import VERSION
from tests.cli.programs import Tenure
from tests.engines.postgresql.servers import a_schema, program, shared

ROLE = 'ap"p; DROP SCHEMA x'


@pytest.fixture
def url() -> Iterator[str]:
    """An empty store in the server of all tests."""
    with a_schema() as of_it:
        yield of_it


@pytest.fixture
def role() -> Iterator[str]:
    """A role that may do nothing, and whose name has to be quoted."""
    quoted = '"' + ROLE.replace('"', '""') + '"'
    shared().execute(f"CREATE ROLE {quoted} LOGIN")
    yield ROLE
    shared().execute(f"DROP OWNED BY {quoted}; DROP ROLE {quoted}")


def of_role(url: str, role: str) -> str:
    from urllib.parse import quote

    return url.replace("tenure@", f"{quote(role)}@")


def name_in(url: str) -> str:
    return url.rpartition("schema=")[2]


def locks(url: str) -> None:
    with blocking.connect(url) as client, client.mutex("m").lock(timeout=10):
        pass


def test_the_schema_is_created_and_the_role_may_use_it(tenure: Tenure, url: str, role: str) -> None:
    done = tenure.inside("postgresql", "init", "--role", role, "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"created the schema {name_in(url)} in postgresql://")
    locks(of_role(url, role))


def test_the_printed_sql_does_the_same(tenure: Tenure, url: str, role: str) -> None:
    done = tenure.inside("postgresql", "init", "--print-sql", "--role", role, "--url", url)
    assert shared().execute(f"SELECT to_regnamespace('{name_in(url)}')::text") == [(None,)]
    run = subprocess.run(
        [program("psql"), "-X", "-v", "ON_ERROR_STOP=1", shared().url],
        input=done.stdout,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    locks(of_role(url, role))


def test_the_sql_of_the_default_schema_needs_no_url(tenure: Tenure) -> None:
    done = tenure("postgresql", "init", "--print-sql", TENURE_URL="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CREATE SCHEMA tenure;" in done.stdout
    assert "GRANT" not in done.stdout


def test_an_upgrade_tells_the_version(tenure: Tenure, url: str) -> None:
    locks(url)
    done = tenure.inside("postgresql", "upgrade", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"the schema {name_in(url)} in postgresql://")
    assert done.stdout.endswith(f" has version {VERSION}\n")
    locks(url)


def test_the_printed_upgrade_replaces_the_functions(tenure: Tenure, url: str) -> None:
    locks(url)
    shared().execute(f"DROP FUNCTION {name_in(url)}.attach")
    done = tenure.inside("postgresql", "upgrade", "--print-sql", "--url", url)
    run = subprocess.run(
        [program("psql"), "-X", "-v", "ON_ERROR_STOP=1", shared().url],
        input=done.stdout,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    locks(url)


def test_a_store_that_is_not_there_is_not_upgraded(tenure: Tenure, url: str) -> None:
    assert "Create it with" in refusal(tenure, 74, "--url", url, command="upgrade")


def refusal(tenure: Tenure, code: int, *arguments: str, command: str = "init") -> str:
    """One line that says what is wrong; nothing is printed."""
    done = tenure.inside("postgresql", command, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_schema_that_exists_is_left_alone(tenure: Tenure, url: str) -> None:
    locks(url)
    assert "already exists" in refusal(tenure, 73, "--url", url)
    assert "so app got no rights" in refusal(tenure, 73, "--url", url, "--role", "app")


def test_an_account_without_the_right_needs_an_administrator(
    tenure: Tenure, url: str, role: str
) -> None:
    told = refusal(tenure, 74, "--url", of_role(url, role))
    assert "permission denied" in told
    assert "--print-sql" in told


def test_a_role_that_does_not_exist_leaves_no_schema(tenure: Tenure, url: str) -> None:
    told = refusal(tenure, 74, "--role", "nobody_knows", "--url", url)
    assert 'role "nobody_knows" does not exist. Create the role first' in told
    assert shared().execute(f"SELECT to_regnamespace('{name_in(url)}')::text") == [(None,)]


def test_a_server_that_refuses_is_an_error(tenure: Tenure, url: str) -> None:
    shared().execute("CREATE ROLE reader LOGIN SUPERUSER; ALTER ROLE reader SET search_path = ''")
    shared().execute("ALTER ROLE reader SET default_transaction_read_only = on")
    try:
        told = refusal(tenure, 74, "--url", of_role(url, "reader") + "&target_session_attrs=any")
    finally:
        shared().execute("DROP ROLE reader")
    assert "read-only transaction" in told


def test_a_server_that_is_not_there_is_an_error(tenure: Tenure) -> None:
    assert "refused" in refusal(tenure, 74, "--url", "postgresql://u:S3cr3t@127.0.0.1:1/db")


@pytest.mark.parametrize("given", ["sqlite:///jobs.db", "redis://host"])
def test_another_store_is_refused(tenure: Tenure, given: str) -> None:
    assert "works on postgresql://" in refusal(tenure, 78, "--url", given)


def test_a_role_has_a_name(tenure: Tenure, url: str) -> None:
    assert "zero bytes" in refusal(tenure, 78, "--role", "", "--url", url)
