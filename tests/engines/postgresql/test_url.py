"""PostgreSQL's URLs: what libpq is given, and what is refused before it connects."""

from __future__ import annotations

import pytest

from tenure.engines.postgresql.url import parse
from tenure.errors import InvalidArgument


def test_hosts_and_account_are_libpqs() -> None:
    address = parse("postgresql://app:p%40ss@one:5433,two/jobs?sslmode=require")
    for part in ("user=app", "password=p@ss", "host=one,two", "port=5433,", "dbname=jobs"):
        assert part in address.conninfo
    assert "p@ss" not in address.url


@pytest.mark.parametrize(
    ("listen", "parts"),
    [
        ("db", ("host=db", "port=5432")),
        ("db:6432", ("host=db", "port=6432")),
        ("[::1]:6432", ("host=::1", "port=6432")),
        ("/run/postgresql", ("host=/run/postgresql", "port=5432")),
        ("/run/postgresql:6432", ("host=/run/postgresql", "port=6432")),
    ],
)
def test_notifications_come_from_another_address(listen: str, parts: tuple[str, ...]) -> None:
    address = parse(f"postgresql://app@pooler:6543/jobs?listen={listen}")
    assert set(parts) < set(address.listen.split())
    assert {"user=app", "dbname=jobs"} < set(address.listen.split())


@pytest.mark.parametrize("listen", ["db:99999", "db:x", "::1", "a b", "db:" + "9" * 400])
def test_an_address_for_notifications_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(f"postgresql://app@pooler/jobs?listen={listen}")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:%00@db/jobs",
        "postgresql://app%00@db/jobs",
        "postgresql://app@db/jobs%00",
        "postgresql://app@db/jobs?passfile=%00",
    ],
)
def test_a_text_that_libpq_would_cut_off_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="contains a NUL character"):
        parse(url)


def test_a_timeout_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="connect_timeout is a number of seconds, not 'soon'"):
        parse("postgresql://app@db/jobs?connect_timeout=soon")
