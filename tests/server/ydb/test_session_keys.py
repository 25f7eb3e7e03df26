"""Sessions without a key: attached by their id within one identity, and nowhere else."""

from __future__ import annotations

import os

import pytest

from tenure.engines import connect_engine
from tenure.engines.contract import Attach as StoreAttach
from tenure.server.auth import Authenticator
from tenure.server.auth.identity import ANONYMOUS
from tenure.server.dflockd.listener import Deaf
from tenure.server.native import NativeListener
from tenure.server.sessions.keys import SessionKeys, check_new_key, check_shown_key
from tenure.server.ydb.messages import Request, Status
from tenure.testing import VirtualClock
from tenure.wire.messages import Attach, Failed
from tests.server.auth.several import rights, several, token_of
from tests.server.talking import called
from tests.server.ydb.raw import NODE, Metadata, Over, channel, serving, session, stream

TOKENS = {"token-of-billing-": "billing", "token-of-reports-": "reports"}
BILLING, REPORTS = ([("x-ydb-auth-ticket", each)] for each in TOKENS)


def again(kind: str, rid: int, number: int, key: bytes = b"") -> Attach:
    """The native protocol's message that attaches a session which exists."""
    return Attach(rid, 1, kind, "/default", 30.0, "", key, False, number)  # type: ignore[arg-type]


async def refused(over: Over, number: int, metadata: Metadata = (), key: bytes = b"") -> None:
    """Assert that the session cannot be attached over YDB's API."""
    client = await stream(over, metadata=metadata)
    start = Request.SessionStart(
        path=NODE, session_id=number, protection_key=key, timeout_millis=30_000
    )
    await client.send(session_start=start)
    await client.fails(Status.BAD_SESSION)


async def test_a_session_without_a_key_is_attached_by_its_identity_alone() -> None:
    authenticator = Authenticator(TOKENS)
    async with serving(authenticator=authenticator) as server, channel(server.target) as over:
        client = await stream(over, metadata=BILLING)
        await client.start()
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        for key in (b"", b"a guess"):
            await refused(over, client.session_id, REPORTS, key)
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        later = await stream(over, metadata=BILLING)
        await later.start(session_id=client.session_id)
        await client.fails(Status.BAD_SESSION)
        assert await later.released(await later.release("m"))


@pytest.mark.parametrize("key", [b"", b"a known key"])
async def test_a_session_is_not_attached_by_its_id_under_another_identity(key: bytes) -> None:
    identities = {"billing": rights(), "reports": rights()}
    async with several(identities) as server, channel(f"127.0.0.1:{server.port('ydb')}") as over:
        billing, reports = ([("x-ydb-auth-ticket", token_of(each))] for each in identities)
        client = await stream(over, metadata=billing)
        await client.start(protection_key=key)
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        await refused(over, client.session_id, reports, key)
        assert await client.released(await client.release("m"))
        later = await stream(over, metadata=billing)
        await later.start(session_id=client.session_id, protection_key=key)
        await client.fails(Status.BAD_SESSION)


@pytest.mark.parametrize("kind", ["again", "resume"])
async def test_a_session_without_a_key_cannot_be_resumed_natively(kind: str) -> None:
    async with serving() as server, channel(server.target) as over:
        native = NativeListener(server.context, "tenure://127.0.0.1:0")
        await native.open()
        try:
            client = await session(over)
            assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
            keys = (b"", os.urandom(16), server.context.session_keys.of_identity(ANONYMOUS))
            async with called(native) as thief:
                for key in keys:
                    thief.say(again(kind, thief.next_rid(), client.session_id, key))
                    assert (await thief.hear(Failed)).error.kind == "AuthenticationFailed"
            assert await client.released(await client.release("m"))
        finally:
            await native.aclose()


async def test_a_native_session_without_a_key_cannot_be_attached() -> None:
    async with serving() as server, channel(server.target) as over:
        native = NativeListener(server.context, "tenure://127.0.0.1:0")
        await native.open()
        try:
            async with called(native) as client:
                attached = await client.attach(key=b"", resumable=True)
                await refused(over, attached.session_id)
                async with called(native) as thief:
                    thief.say(again("resume", 1, attached.session_id))
                    assert (await thief.hear(Failed)).error.kind == "AuthenticationFailed"
                    thief.say(Attach(2, 1, "new", "/default", 30.0, "", b"\0tenure123", True))
                    assert (await thief.hear(Failed)).error.kind == "InvalidArgument"
        finally:
            await native.aclose()


async def test_no_client_chooses_a_key_of_the_server() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over)
        reserved = server.context.session_keys.of_dflockd()
        await client.send(
            session_start=Request.SessionStart(
                path=NODE, timeout_millis=30_000, protection_key=reserved
            )
        )
        await client.fails(Status.BAD_REQUEST)


async def test_a_session_that_an_older_server_stored_without_a_key_is_attached() -> None:
    async with serving() as server, channel(server.target) as over:
        store = server.context.engine
        former = await store.attach(StoreAttach("/default", 30.0, "", "window"), Deaf())
        await former.detach()
        later = await session(over, session_id=former.id)
        assert later.session_id == former.id


def test_keys_are_the_same_on_every_server_of_a_store(clock: VirtualClock) -> None:
    stores = ["sqlite:///a.db", "redis://cache", "memory://"]
    keys = {SessionKeys(connect_engine(each, clock).url).of_dflockd() for each in stores}
    assert len(keys) == 1
    (key,) = keys
    assert len(key) == 16
    assert key != SessionKeys("memory://").of_identity(ANONYMOUS)


def test_keys_are_secret_where_the_store_is_a_server() -> None:
    one, other = SessionKeys("tenure://10.0.0.7"), SessionKeys("tenure://10.0.0.7")
    assert one.of_dflockd() == one.of_dflockd()
    assert one.of_dflockd() != other.of_dflockd()
    check_new_key(one.of_dflockd(), "/default")
    check_shown_key(one.of_dflockd(), "/default", 1)
