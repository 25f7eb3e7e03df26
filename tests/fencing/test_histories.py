"""Any history of writes: those of older tokens are refused, and what is visible never goes back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenure.errors import StaleToken
from tenure.fencing import Fence, RedisFence, SQLFence
from tests.fencing.plants import PLANTS

History = list[int]

# Few tokens, so that they meet, and some of other lengths, which as text have another order.
HISTORIES = st.lists(st.sampled_from([0, 1, 2, 9, 10, 11, 100, 2**31, 2**53 - 1]), max_size=12)


class Resource(Protocol):
    def write(self, token: int) -> None: ...

    def visible(self) -> list[int]:
        """The tokens of the writes, in their order."""
        ...


class Local:
    def __init__(self) -> None:
        self.fence, self.written = Fence("notes"), list[int]()

    def write(self, token: int) -> None:
        with self.fence.writing(token):
            self.written.append(token)

    def visible(self) -> list[int]:
        return self.written


class SQL:
    fence = SQLFence("notes")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.fence.create_table(connection)
        connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, token INTEGER)")

    def write(self, token: int) -> None:
        with self.connection:
            self.fence.admit(self.connection, token)
            self.connection.execute("INSERT INTO notes (token) VALUES (?)", [token])

    def visible(self) -> list[int]:
        return [t for (t,) in self.connection.execute("SELECT token FROM notes ORDER BY id")]


class Redis:
    fence = RedisFence("notes")

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def write(self, token: int) -> None:
        self.fence.write(self.client, token, ["RPUSH", "{notes}", token])

    def visible(self) -> list[int]:
        return [int(each) for each in self.client.lrange("{notes}", 0, -1)]


Open = Callable[[], AbstractContextManager[Resource]]


@pytest.fixture(params=["local", "sql", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new(kind: str, request: pytest.FixtureRequest) -> Open:
    """Opens a resource that nobody has written to yet."""
    url = request.getfixturevalue("redis_url") if kind == "redis" else ""

    @contextmanager
    def opened() -> Iterator[Resource]:
        if kind == "local":
            yield Local()
        elif kind == "sql":
            with closing(sqlite3.connect(":memory:")) as connection:
                yield SQL(connection)
        else:
            with redis.Redis.from_url(url) as client:
                client.flushall()
                yield Redis(client)

    return opened


def check(resource: Resource, history: History) -> None:
    admitted = list[int]()
    for token in history:
        try:
            resource.write(token)
        except StaleToken as error:
            refusal = error
        else:
            assert token >= max(admitted, default=0), "a stale write is visible"
            admitted.append(token)
            continue
        assert admitted, "nobody has written, and it is refused"
        assert token < admitted[-1] == refusal.newest, "it is not stale, and is refused"
    assert resource.visible() == admitted == sorted(admitted)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # `new` opens a new one
@given(history=HISTORIES)
def test_in_any_history_the_stale_writes_are_refused(new: Open, history: History) -> None:
    with new() as resource:
        check(resource, history)


@pytest.mark.parametrize(
    ("kind", "defect"), [(kind, defect) for kind in PLANTS for defect in PLANTS[kind]]
)
def test_the_check_fails_on_a_fence_with_a_defect(
    new: Open, kind: str, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTS[kind][defect](monkeypatch)
    with pytest.raises(AssertionError, match="stale"), new() as resource:
        check(resource, [9, 9, 10, 10, 9, 100, 11])


# Transactions between one another's steps

STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # who
        st.sampled_from(["admit", "write", "commit", "rollback"]),
        st.integers(1, 5),  # the token to be admitted with
    ),
    max_size=40,
)


class Writer:
    """A holder, with a connection of its own."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, timeout=0)
        self.token: int | None = None

    def take(self, action: str, token: int) -> None:
        try:
            if action == "admit":
                SQL.fence.admit(self.connection, token)
                self.token = token
            elif action == "write":
                if self.token is not None:
                    self.connection.execute("INSERT INTO notes (token) VALUES (?)", [self.token])
            else:
                getattr(self.connection, action)()
                self.token = None
        except (StaleToken, sqlite3.OperationalError):  # the other is refused, or finds it locked
            self.connection.rollback()
            self.token = None


@given(steps=STEPS)
def test_however_transactions_interleave_what_is_visible_never_goes_back(
    steps: list[tuple[int, str, int]],
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "data.db"
        writers = [Writer(path) for _ in range(3)]
        with writers[0].connection as connection:
            connection.execute("PRAGMA synchronous = OFF")
            resource = SQL(connection)
        for who, action, token in steps:
            writers[who].take(action, token)
        for writer in writers[1:]:
            writer.connection.close()
        writers[0].connection.rollback()
        notes = resource.visible()
        writers[0].connection.close()
    assert notes == sorted(notes)


def test_a_fence_and_a_write_in_two_transactions_are_no_fence(tmp_path: Path) -> None:
    older, newer = Writer(tmp_path / "data.db"), Writer(tmp_path / "data.db")
    with older.connection:
        resource = SQL(older.connection)
    for writer, token in ((older, 33), (newer, 34)):
        writer.take("admit", token)
        writer.connection.commit()  # too early
    for writer in (newer, older):
        writer.take("write", 0)
        writer.connection.commit()
    notes = resource.visible()
    for writer in (newer, older):
        writer.connection.close()
    assert notes == [34, 33], "the stale write is there, as the documentation warns"
