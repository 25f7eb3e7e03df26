"""Ways to a server: TLS, Unix sockets, tokens; servers that do not answer, or are none."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.advice import on_connecting
from tenure.engines.contract import Attach
from tenure.engines.native import connect
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    InvalidArgument,
    SemaphoreNotFound,
    TenureError,
    Unsupported,
)
from tenure.server.auth import Authenticator
from tenure.server.limits import Limits
from tenure.server.tls import TlsFiles, server_context
from tenure.testing.program import raises
from tenure.testing.recorder import Recorder
from tenure.wire.errors import WireError
from tenure.wire.frames import FrameWriter
from tenure.wire.messages import Bye, Welcome
from tenure.wire.values import Abilities
from tests.engines.native.cable import on_a_cable
from tests.server.certificates import Authority
from tests.server.served import served

TOKEN = "a-token-that-is-long-enough"


async def fails_with(url: str, kind: type[TenureError]) -> str:
    """What opening fails with, which never shows the token."""
    engine = connect(url, SystemClock())
    with raises(kind) as caught:
        await engine.open()
    await engine.aclose()
    assert TOKEN not in str(caught.error)
    return str(caught.error)


async def works(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("m").lock() as lease:
        assert lease.held


async def test_a_unix_socket_is_a_way(tmp_path: Path) -> None:
    with served("memory://", url=f"tenure+unix://{tmp_path}/t.sock") as server:
        await works(server.address)
    await fails_with(f"tenure+unix://{tmp_path}/none.sock", EngineUnavailable)


async def test_tls_is_not_for_a_server_without_it() -> None:
    with served("memory://") as server:
        url = server.address.replace("tenure", "tenures")
        assert "write tenure://" in await fails_with(url, EngineUnavailable)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (socket.gaierror(), "; check the name of the host"),
        (
            PermissionError(),
            "; let this user use the socket (the server's ?mode=0660 lets its group)",
        ),
        (ConnectionResetError(), ""),
        (None, ""),
    ],
)
def test_what_to_do_follows_from_what_the_system_says(error: OSError | None, advice: str) -> None:
    assert on_connecting(error, "tenure") == advice


async def test_tls_is_a_way_for_who_trusts_the_authority(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.signs("coord.example")
    context = server_context(TlsFiles(pair.cert, pair.key))
    with served("memory://", url="tenures://127.0.0.1:0", tls=context) as server:
        await works(f"{server.address}?tls-ca={authority.cert}")
        await works(f"{server.address}?tls-ca={authority.cert}&tls-server-name=coord.example")
        for parameters, advice in (
            (f"?tls-ca={other.cert}", "tls_ca=FILE"),
            (f"?tls-ca={authority.cert}&tls-server-name=another.example", "tls_server_name=NAME"),
            ("", "tls_ca=FILE"),
        ):
            said = await fails_with(f"{server.address}{parameters}", EngineUnavailable)
            assert said.endswith(advice)
        plain = server.address.replace("tenures", "tenure")
        assert "TLS" in await fails_with(plain, EngineUnavailable)


async def test_a_client_shows_its_certificate_where_one_is_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, mine = authority.signs("coord.example"), authority.signs("client")
    context = server_context(TlsFiles(pair.cert, pair.key, authority.cert))
    with served("memory://", url="tenures://127.0.0.1:0", tls=context) as server:
        trusted = f"{server.address}?tls-ca={authority.cert}"
        await works(f"{trusted}&tls-cert={mine.cert}&tls-key={mine.key}")
        assert "tls_cert=FILE&tls_key=FILE" in await fails_with(trusted, EngineUnavailable)
        keyless = await fails_with(f"{trusted}&tls-cert={mine.cert}", InvalidArgument)
        assert keyless.endswith("is the key in a file of its own? ?tls_key=FILE")


async def test_a_token_opens_the_server_and_is_shown_nowhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with served("memory://", authenticator=Authenticator({TOKEN: "me"})) as server:
        place = server.address.partition("://")[2]
        await works(f"tenure://{TOKEN}@{place}")
        await fails_with(f"tenure://{place}", AuthenticationFailed)
        await fails_with(f"tenure://{TOKEN}x@{place}", AuthenticationFailed)
        monkeypatch.setenv("TENURE_TOKEN", TOKEN)
        await works(f"tenure://{place}")
    assert TOKEN not in caplog.text


@contextmanager
def that_says(*words: bytes) -> Iterator[str]:
    """Something that accepts connections and says these, one to each; then it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        loop = asyncio.get_running_loop()
        accepted: list[socket.socket] = []
        listening.setblocking(False)
        left = list(words)

        def accept() -> None:
            connection, _ = listening.accept()
            accepted.append(connection)
            if left:
                connection.sendall(left.pop(0))

        loop.add_reader(listening, accept)
        try:
            yield f"tenure://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            loop.remove_reader(listening)
            for each in accepted:
                each.close()


def said(*messages: Welcome | Bye) -> bytes:
    writer = FrameWriter(1 << 20)
    for message in messages:
        writer.add(message)
    return bytes(writer.take())


async def test_what_is_no_server_is_told_so() -> None:
    for words in (b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x00\x00\x02hi", b"\x15\x03\x01\x00\x02\x02"):
        with that_says(words) as url:
            assert "tenure server" in await fails_with(url, EngineUnavailable)


async def test_a_server_that_says_nothing_is_given_up() -> None:
    with that_says() as url:
        assert "did not answer" in await fails_with(url, EngineUnavailable)


async def test_a_server_that_speaks_another_version_is_told_apart() -> None:
    welcome = Welcome(99, [], 5.0, Abilities(), 1 << 20, 100, 100)
    with that_says(said(welcome)) as url:
        assert "99" in await fails_with(url, Unsupported)
    with that_says(said(Bye(WireError("Unsupported", "only version 7"), again=False))) as url:
        assert "version 7" in await fails_with(url, Unsupported)


async def test_a_message_that_the_server_would_not_read_is_refused_by_itself() -> None:
    small = Limits(data_bytes=1000, message_bytes=1000 + 64 * 1024)
    with served("memory://", limits=small) as server:
        async with on_a_cable(server.address) as (stage, _, engine):
            program = await stage.program(engine=engine)
            with raises(InvalidArgument):
                await program.lock("m", data=bytes(200_000))
            await program.lock("m", data=bytes(1000))
            assert program.recorder.end is None


async def test_more_than_the_server_reads_at_a_time_waits_here() -> None:
    few = Limits(operations_in_flight=2, kept_answers=4)
    with served("memory://", limits=few) as server:
        async with on_a_cable(server.address) as (stage, cable, engine):
            program = await stage.program(engine=engine)
            requests = [await program.lock(f"{number}") for number in range(3)]
            sent = [program.send(f"m{number}", ephemeral=True) for number in range(300)]
            program.session.renew()
            cable.cut()
            for each in sent:
                await each.answered()
            for each in (*requests, *sent):
                await program.withdraw(each)
            assert await stage.eye.list_semaphores("/default", owners=True, waiters=True) == []


async def test_a_server_that_cannot_describe_one_semaphore_lists_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure.server.native.connection.FEATURES", frozenset())
    with served("memory://") as server:
        async with (
            tenure.connect(server.address) as client,
            client.session(description="mine") as session,
            session.mutex("m").lock(data=b"data"),
            session.mutex("n").lock(),
        ):
            found = await client.describe_semaphore("m")
            assert (found.name, found.owners[0].data) == ("m", b"data")
            assert found.owners[0].session_description == "mine"
            with raises(SemaphoreNotFound) as caught:
                await client.describe_semaphore("missing")
            assert (caught.error.node, caught.error.name) == ("/default", "missing")


async def test_an_engine_that_is_opened_again_is_another_program() -> None:
    with served("memory://") as server:
        engine = connect(server.address, SystemClock())
        numbers = set()
        for _ in range(3):
            await engine.open()
            session = await engine.attach(Attach("/default", 30.0), Recorder())
            numbers.add(session.id)
            await session.detach()
            await engine.aclose()
            with raises(EngineUnavailable):
                await engine.list_nodes()
        assert len(numbers) == 3
