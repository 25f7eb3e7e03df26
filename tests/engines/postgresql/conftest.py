"""Fixtures of the tests of this engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tenure.engines.postgresql.connecting import StatementSender
from tests.engines.postgresql.servers import PostgresServer, a_server


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """Run a server of the test's own, which writes every commit to the disk."""
    with a_server() as running:
        yield running


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The statements that the engines of this process send after they have connected."""
    statements: list[bytes] = []
    send = StatementSender.send

    def counted(
        self: StatementSender, sql: bytes, parameters: list[bytes | None], *, recurs: bool
    ) -> None:
        statements.append(sql)
        send(self, sql, parameters, recurs=recurs)

    monkeypatch.setattr(StatementSender, "send", counted)
    return statements
