"""What docs/operate/upgrade.md claims, as far as no other test shows it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec import Struct

import tenure
from tenure._client.session_handle import ResumeToken
from tenure.engines.sqlite import schema
from tenure.wire.messages import (
    VERSION,
    ClientMessage,
    ServerMessage,
    client_message,
    server_message,
)
from tests.engines.sqlite.restored import as_of_version_2
from tests.fuzzing.samples import CLIENT_MESSAGES, SERVER_MESSAGES

PAGE = Path(__file__).parent.parent / "docs" / "operate" / "upgrade.md"


def test_the_page_has_the_versions_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert f"| `tenure://` | protocol version {VERSION} |" in text
    assert f"| `sqlite://` files | schema {schema.VERSION} |" in text
    assert f"| backups | schema {schema.VERSION} |" in text


@pytest.mark.parametrize(
    ("messages", "decode", "kinds"),
    [
        (CLIENT_MESSAGES, client_message().decode, get_args(ClientMessage)),
        (SERVER_MESSAGES, server_message().decode, get_args(ServerMessage)),
    ],
    ids=["client", "server"],
)
def test_fields_that_an_end_does_not_know_are_ignored(
    messages: tuple[bytes, ...], decode: object, kinds: tuple[type[Struct], ...]
) -> None:
    assert callable(decode)
    seen = set()
    for message in messages:
        fields = msgspec.msgpack.decode(message[4:])
        newer = msgspec.msgpack.encode([*fields, {"a field": "of a later release"}])
        assert decode(newer) == decode(message[4:])
        seen.add(type(decode(newer)))
    assert seen == set(kinds)


async def test_a_file_of_schema_2_keeps_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with tenure.connect(f"sqlite:///{path}") as client:
        await client.create_node("/billing")
        session = await client.session(resumable=True)
        await session.semaphore("pool").create(limit=3, data=b"kept")
        lease = await session.semaphore("pool").acquire(2)
        token, order_id = session.resume_token, lease.fencing_token
        await session.detach()
    as_of_version_2(path)
    async with tenure.connect(f"sqlite:///{path}") as client:
        assert "/billing" in await client.list_nodes()
        async with client.session(resume=token) as session:
            ticket = session.semaphore("pool").recover()
            assert ticket is not None
            async with await ticket.wait() as lease:
                assert lease.fencing_token == order_id
                described = await session.semaphore("pool").describe()
                assert (described.data, described.held) == (b"kept", 2)
        async with client.semaphore("pool").acquire(3) as lease:
            assert lease.fencing_token > order_id
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)


def test_a_resume_token_of_the_first_release_is_read() -> None:
    """This text is one, made when the format was decided."""
    text = str(ResumeToken("/default", 7, 30.0, bytes(range(16))))
    assert text == TOKEN
    assert ResumeToken.parse(TOKEN) == ("/default", 7, 30.0, bytes(range(16)))


TOKEN = "tenure1.AAAAAAAAAAdAPgAAAAAAAAABAgMEBQYHCAkKCwwNDg8vZGVmYXVsdFVoa-4"
