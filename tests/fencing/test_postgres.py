"""Two transactions of PostgreSQL before one fence, at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tenure.errors import StaleToken
from tenure.fencing import SQLFence

FENCE = SQLFence("accounts")


@pytest.fixture
def url(postgres_url: str) -> Iterator[str]:
    """Of a database with the fences' table, and one of notes that are numbered as they come."""
    with psycopg.connect(postgres_url) as connection:
        FENCE.create_table(connection)
        connection.execute("CREATE TABLE notes (id SERIAL, token BIGINT)")
    yield postgres_url
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE tenure_fences, notes")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def until_it_waits(url: str, connection: psycopg.Connection[Any], outcome: Future[None]) -> None:
    """Until a connection waits for another's lock."""
    pid = connection.info.backend_pid
    with psycopg.connect(url, autocommit=True) as eye:
        while True:
            row = eye.execute("SELECT cardinality(pg_blocking_pids(%s))", [pid]).fetchone()
            assert row is not None
            if row[0]:
                return
            assert not outcome.done(), "it did not wait"


@pytest.mark.parametrize("before", [None, 5], ids=["first use", "later"])
@pytest.mark.parametrize(
    ("first", "ending", "second", "refused"),
    [
        (10, "commit", 11, False),
        (10, "commit", 10, False),
        (11, "commit", 10, True),
        (11, "rollback", 10, False),
    ],
)
def test_the_second_waits_for_the_first_and_is_judged_by_how_that_ends(
    url: str,
    pool: ThreadPoolExecutor,
    before: int | None,
    first: int,
    ending: str,
    second: int,
    refused: bool,
) -> None:
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        if before is not None:
            FENCE.admit(one, before)
            one.commit()
        FENCE.admit(one, first)
        outcome = pool.submit(FENCE.admit, two, second)
        until_it_waits(url, two, outcome)
        getattr(one, ending)()
        if refused:
            with pytest.raises(StaleToken) as caught:
                outcome.result()
            assert caught.value.newest == first
        else:
            outcome.result()
            two.execute("INSERT INTO notes (token) VALUES (%s)", [second])  # it can go on
            two.commit()
            assert FENCE.newest(one) == second


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_where_transactions_have_snapshots_the_second_is_to_be_tried_again(
    url: str, level: str
) -> None:
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        FENCE.admit(one, 5)
        one.commit()
        two.isolation_level = psycopg.IsolationLevel[level]
        two.execute("SELECT 1 FROM notes")  # from here on it sees nothing new
        FENCE.admit(one, 11)
        one.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            FENCE.admit(two, 10)
        two.rollback()
        with pytest.raises(StaleToken):
            FENCE.admit(two, 10)


@pytest.mark.parametrize("run", range(3))
def test_of_many_connections_the_writes_never_go_back(
    url: str, pool: ThreadPoolExecutor, run: int
) -> None:
    start = threading.Barrier(6)

    def work(number: int) -> int:
        chance, refused = random.Random(10 * run + number), 0
        with psycopg.connect(url) as connection:
            start.wait()
            for step in range(40):
                token = step // 4 + chance.randrange(10)
                try:
                    with connection.transaction():
                        FENCE.admit(connection, token)
                        connection.execute("INSERT INTO notes (token) VALUES (%s)", [token])
                except StaleToken:
                    refused += 1
        return refused

    refused = sum(pool.map(work, range(6)))
    with psycopg.connect(url) as connection:
        notes = [token for (token,) in connection.execute("SELECT token FROM notes ORDER BY id")]
        (writes,) = connection.execute("SELECT writes FROM tenure_fences").fetchone() or (None,)
    assert notes == sorted(notes)
    assert len(notes) == writes == 6 * 40 - refused
    assert refused > 0
