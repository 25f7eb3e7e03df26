"""A credential that is revoked ends the connections that use it, on every listener."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from grpclib.const import Status

import tenure
from tenure.server.auth import REFUSAL_DELAY, Authenticator, Peer, PeerCertificate, Verdict
from tenure.server.auth.accounts import certificate_id, read_revoked
from tenure.server.auth.tokens import hash_of, parse_tokens
from tenure.server.listener import end_in_slices
from tenure.wire.messages import Bye, Hello, Ping, Pong
from tests.server.certificates import Authority, Pair
from tests.server.serving import PATIENCE, Served, serving
from tests.server.talking import Caller
from tests.server.ydb.raw import channel, stream

LEAVING, STAYING = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"


class Lines:
    """A client of dflockd's protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, *words: str) -> str:
        self._writer.write("".join(f"{word}\n" for word in words).encode())
        return await self.read()

    async def read(self) -> str:
        """Read a line; empty at the end."""
        async with asyncio.timeout(PATIENCE):
            return (await self._reader.readline()).decode().strip()


@contextlib.asynccontextmanager
async def lines_of(address: str, token: str, **more: Any) -> AsyncIterator[Lines]:
    """A dflockd client that has shown its token."""
    host, _, port = address.partition("://")[2].partition("/")[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), **more)
    client = Lines(reader, writer)
    try:
        if token:
            assert await client.ask("auth", "_", token) == "ok"
        yield client
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def caller_of(address: str, token: str = "", **more: Any) -> AsyncIterator[Caller]:
    """A client of the native protocol that has been greeted."""
    caller = Caller()
    await caller.dial("127.0.0.1", int(address.rpartition(":")[2]), **more)
    try:
        await caller.greet(token)
        yield caller
    finally:
        caller.close()
        await caller.until_lost()


async def answers(caller: Caller) -> None:
    """Check that the connection is served."""
    caller.say(Ping())
    await caller.hear(Pong)


async def reload(server: Served) -> dict[str, Any]:
    server.send(signal.SIGHUP)
    return await server.until("reloaded")


def target_of(address: str) -> str:
    return address.partition("://")[2].partition("/")[0]


def named(**tokens: str) -> str:
    """A token file with these secrets."""
    return "[tokens]\n" + "".join(
        f'[tokens.{name}]\nhash = "{hash_of(secret)}"\n' for name, secret in tokens.items()
    )


def plain(**tokens: str) -> str:
    return "".join(f"{secret}\n" for secret in tokens.values())


@pytest.mark.parametrize("form", [plain, named])
async def test_a_revoked_token_ends_its_connections_on_every_listener_and_no_session(
    form: Callable[..., str], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(form(leaving=LEAVING, staying=STAYING))
    listen = ["tenure://127.0.0.1:0", "ydb://127.0.0.1:0", "dflockd://127.0.0.1:0"]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serving(tmp_path, "--auth-token-file", str(tokens), listen=listen)
        )
        native, grpc, line = server.addresses
        enter = stack.enter_async_context
        staying = await enter(
            tenure.connect(native.replace("://", f"://{STAYING}@"))  # also the eye on the store
        )
        kept = await staying.mutex("kept").lock()
        loses = await enter(caller_of(native, LEAVING))
        keeps = await enter(caller_of(native, STAYING))
        attached = await loses.attach(window=60.0)
        over = await enter(channel(target_of(grpc)))
        streams = [
            await stream(over, metadata=[("x-ydb-auth-ticket", token)])
            for token in (STAYING, LEAVING)
        ]
        await staying.create_node("/n", exist_ok=True)
        for each in streams:
            await each.start("/local/n", timeout=60)
        lines = await enter(lines_of(line, LEAVING))
        others = await enter(lines_of(line, STAYING))
        assert (await lines.ask("l", "key", "0 30")).startswith("ok ")
        assert (await others.ask("l", "theirs", "0 30")).startswith("ok ")

        tokens.write_text(form(staying=STAYING))
        assert (await reload(server))["connections_ended"] == 3

        bye = await loses.hear(Bye)
        assert (bye.error.kind, bye.again) == ("AuthenticationFailed", False)
        await loses.until_lost()
        assert await streams[1].status() is Status.UNAUTHENTICATED
        assert await lines.read() == "error_auth"
        assert await lines.read() == ""

        await answers(keeps)
        kept.check()
        # What the dflockd client had is kept for its lease: it may not know yet.
        assert await others.ask("l", "key", "0 30") == "timeout"
        sessions = {each.id for each in await staying.list_sessions("/default")}
        assert attached.session_id in sessions
        assert streams[1].session_id in {each.id for each in await staying.list_sessions("/n")}
        with pytest.raises(tenure.AuthenticationFailed):
            async with tenure.connect(native.replace("://", f"://{LEAVING}@")) as late:
                await late.list_nodes()
        await kept.release()


async def test_a_token_ends_its_connections_when_it_expires(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(named(soon=LEAVING, staying=STAYING))
    async with (
        serving(tmp_path, "--auth-token-file", str(tokens)) as server,
        caller_of(server.address, LEAVING) as loses,
        caller_of(server.address, STAYING) as keeps,
    ):
        soon = datetime.now(UTC) + timedelta(seconds=1.5)
        expiring = named(soon=LEAVING) + f"expires = {soon:%Y-%m-%dT%H:%M:%S.%fZ}\n"
        tokens.write_text(expiring + named(staying=STAYING).removeprefix("[tokens]\n"))
        server.send(signal.SIGHUP)
        assert "has expired" in (await server.until("connection ended"))["why"]
        await loses.hear(Bye)
        await answers(keeps)


async def test_changed_rights_end_a_connection_and_a_new_name_does_not(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(named(one=LEAVING, two=STAYING))
    async with (
        serving(tmp_path, "--auth-token-file", str(tokens)) as server,
        caller_of(server.address, LEAVING) as loses,
        caller_of(server.address, STAYING) as keeps,
    ):
        tokens.write_text(
            named(two=STAYING, one=LEAVING).replace("two", "renamed")
            + 'permissions = {"/a" = "read"}\n'
        )
        assert (await reload(server))["connections_ended"] == 1
        await loses.hear(Bye)
        await answers(keeps)


# Certificates


def tls_of(authority: Authority, pair: Pair) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.cert)
    context.load_cert_chain(pair.cert, pair.key)
    return context


LISTEN = ["tenures://127.0.0.1:0", "ydbs://127.0.0.1:0", "dflockds://127.0.0.1:0"]


def tls_options(authority: Authority, own: Pair, authorities: str) -> list[str]:
    return ["--tls-cert", own.cert, "--tls-key", own.key, "--tls-client-ca", authorities]


async def test_a_revoked_certificate_ends_its_connections_on_every_listener(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    own, bad, good = (authority.signs(name) for name in ("server.test", "bad", "good"))
    options = tls_options(authority, own, authority.cert)
    options += ["--tls-client-crl", authority.revokes()]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(tmp_path, *options, listen=LISTEN))
        native, grpc, line = server.addresses
        enter = stack.enter_async_context
        loses = await enter(caller_of(native, ssl=tls_of(authority, bad)))
        keeps = await enter(caller_of(native, ssl=tls_of(authority, good)))
        async with tenure.connect(
            f"{native}?tls-ca={authority.cert}&tls-cert={good.cert}&tls-key={good.key}"
        ) as client:
            await client.create_node("/n")
        h2 = tls_of(authority, bad)
        h2.set_alpn_protocols(["h2"])
        over = await enter(channel(target_of(grpc), ssl=h2))
        ended = await stream(over)
        await ended.start("/local/n", timeout=60)
        lines = await enter(lines_of(line, "", ssl=tls_of(authority, bad)))
        assert (await lines.ask("l", "key", "0 30")).startswith("ok ")

        authority.revokes(bad)
        assert (await reload(server))["connections_ended"] == 3

        await loses.hear(Bye)
        assert await ended.status() is Status.UNAUTHENTICATED
        assert await lines.read() == "error_auth"
        await answers(keeps)
        async with caller_of(native, ssl=tls_of(authority, good)) as another:
            await answers(another)
        with pytest.raises((AssertionError, OSError)):  # refused by the handshake
            async with caller_of(native, ssl=tls_of(authority, bad)):
                pass
        failed = await server.until("handshake failed")
        assert failed["peer"].startswith("127.0.0.1:")


def resumed(
    context: ssl.SSLContext, port: int, session: ssl.SSLSession | None
) -> tuple[ssl.SSLSession | None, bool | None]:
    """Connect; the TLS session of the connection, and whether it is the former one."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE) as plain_socket,
        context.wrap_socket(plain_socket, server_hostname="localhost", session=session) as secured,
    ):
        return secured.session, secured.session_reused


async def test_a_tls_session_from_before_does_not_spare_a_revoked_certificate_its_check(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    own, bad = authority.signs("server.test"), authority.signs("bad")
    options = tls_options(authority, own, authority.cert)
    options += ["--tls-client-crl", authority.revokes()]
    async with serving(tmp_path, *options, listen=LISTEN[:1]) as server:
        context = tls_of(authority, bad)
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # its sessions are there at once
        port = int(server.address.rpartition(":")[2])
        session, reused = await asyncio.to_thread(resumed, context, port, None)
        assert (session is not None, reused) == (True, False)
        assert (await asyncio.to_thread(resumed, context, port, session))[1]
        authority.revokes(bad)
        await reload(server)
        with pytest.raises(OSError, match=r"revoked|reset|closed|EOF"):
            await asyncio.to_thread(resumed, context, port, session)


def join(path: Path, *authorities: Authority) -> None:
    """Write the certificates of these authorities."""
    path.write_text("".join(Path(each.cert).read_text() for each in authorities))


async def test_an_authority_that_is_removed_ends_the_connections_of_its_clients(
    tmp_path: Path,
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own, old, new = authority.signs("server.test"), authority.signs("old"), other.signs("new")
    trusted = tmp_path / "trusted.pem"
    join(trusted, authority)
    options = tls_options(authority, own, str(trusted))
    async with (
        serving(tmp_path, *options, listen=["tenures://127.0.0.1:0"]) as server,
        caller_of(server.address, ssl=tls_of(authority, old)) as first,
    ):
        join(trusted, authority, other)
        assert (await reload(server))["connections_ended"] == 0
        await answers(first)
        async with caller_of(server.address, ssl=tls_of(authority, new)) as second:
            await answers(second)
        join(trusted, other)
        assert (await reload(server))["connections_ended"] >= 1
        await first.hear(Bye)
        with pytest.raises((AssertionError, OSError)):
            async with caller_of(server.address, ssl=tls_of(authority, old)):
                pass
        async with caller_of(server.address, ssl=tls_of(authority, new)) as second:
            await answers(second)


async def test_a_reload_that_fails_changes_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, good = authority.signs("server.test"), authority.signs("good")
    tokens, crl = tmp_path / "tokens", authority.revokes()
    tokens.touch(0o600)
    tokens.write_text(named(one=LEAVING))
    options = [*tls_options(authority, own, authority.cert), "--tls-client-crl", crl]
    options += ["--auth-token-file", str(tokens)]
    async with (
        serving(tmp_path, *options, listen=["tenures://127.0.0.1:0"]) as server,
        caller_of(server.address, LEAVING, ssl=tls_of(authority, good)) as client,
    ):
        tokens.write_text(named(two=STAYING))
        (tmp_path / "authority.crl").write_text("nothing\n")
        server.send(signal.SIGHUP)
        told = await server.until("not reloaded, settings kept")
        assert "no list in PEM form" in told["why"]
        await answers(client)
        async with caller_of(server.address, LEAVING, ssl=tls_of(authority, good)) as another:
            await answers(another)


class Endless:
    """A connection that notes the turn of the loop in which it is ended."""

    def __init__(self, turns: list[int], ended: list[int]) -> None:
        self._turns = turns
        self._ended = ended

    def end_unless_valid(self, verdict: Verdict) -> bool:
        why = verdict(None, Peer())
        if why is not None:
            self._ended.append(self._turns[0])
        return why is not None

    def cut_off(self) -> None:
        raise AssertionError("it is ended in order")


async def test_many_connections_are_ended_a_few_at_a_time() -> None:
    turns, ended = [0], list[int]()
    loop = asyncio.get_running_loop()

    def turn() -> None:
        turns[0] += 1
        ticking[0] = loop.call_soon(turn)

    ticking = [loop.call_soon(turn)]
    connections = [Endless(turns, ended) for _ in range(100)]
    assert await end_in_slices(connections, lambda *_: "revoked") == len(ended) == 100
    ticking[0].cancel()
    assert max(ended.count(each) for each in set(ended)) <= 16


async def test_a_refused_token_is_answered_late_and_once(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(named(one=STAYING))
    async with serving(tmp_path, "--auth-token-file", str(tokens)) as server:
        caller = Caller()
        await caller.dial("127.0.0.1", int(server.address.rpartition(":")[2]))
        began = time.monotonic()
        hello = Hello(1, 1, [], "wrong", caller.program)
        right = Hello(1, 1, [], STAYING, caller.program)
        caller.say(hello, right)  # the second guess of one connection does not count
        bye = await caller.hear(Bye)
        assert bye.error.kind == "AuthenticationFailed"
        assert time.monotonic() - began >= REFUSAL_DELAY
        await caller.until_lost()
        assert not caller.unread


# What decides


def test_a_revocation_list_names_certificates_as_they_name_themselves(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    one, two, theirs = authority.signs("one"), authority.signs("two"), other.signs("theirs")
    ids = {
        each: certificate_id(ssl.PEM_cert_to_DER_cert(Path(each.cert).read_text()))
        for each in (one, two, theirs)
    }
    assert len(set(ids.values())) == 3
    lists = tmp_path / "lists.pem"
    first, second = Path(authority.revokes(one)), Path(other.revokes(theirs))
    lists.write_text(first.read_text() + second.read_text())
    found = read_revoked(str(lists))
    assert found.revoked == {ids[one], ids[theirs]}
    assert found.ends is not None
    assert timedelta(days=29) < found.ends - datetime.now(UTC) <= timedelta(days=30)
    assert read_revoked(authority.revokes()).revoked == frozenset()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no list in PEM form"),
        ("-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "is damaged"),
        ("-----BEGIN X509 CRL-----\nMAIwgA==\n-----END X509 CRL-----\n", "is damaged"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "other objects"),
    ],
)
def test_a_file_that_is_no_revocation_list_is_refused(
    content: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "crl"
    path.write_text(content)
    with pytest.raises(tenure.InvalidArgument, match=said):
        read_revoked(str(path))


def test_a_missing_revocation_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tenure.InvalidArgument, match="cannot be read: No such file"):
        read_revoked(str(tmp_path / "missing"))


def test_a_listed_certificate_or_uid_needs_no_token() -> None:
    text = '[certificates."CN=a"]\npermissions = {"/a" = "hold"}\n[uids.7]\nquotas = {nodes = 1}'
    authenticator = Authenticator()
    authenticator.replace(parse_tokens(text, "tokens"))
    listed = authenticator.authenticate("", Peer(PeerCertificate("CN=a", b"")))
    assert (listed.name, listed.kind) == ("CN=a", "certificate")
    assert authenticator.verdict(listed, Peer(PeerCertificate("CN=a", b""))) is None
    user = authenticator.authenticate("", Peer(uid=7))
    assert (user.name, user.quotas.nodes) == ("uid 7", 1)
    for stranger in (Peer(), Peer(uid=8), Peer(PeerCertificate("CN=b", b""))):
        with pytest.raises(tenure.AuthenticationFailed):
            authenticator.authenticate("", stranger)
    authenticator.replace(parse_tokens("[tokens]\n[uids.7]\n", "tokens"))
    assert authenticator.verdict(user, Peer(uid=7)) == "permissions or quotas of uid 7 were changed"
    assert "revoked" in str(authenticator.verdict(listed, Peer(PeerCertificate("CN=a", b""))))


def test_a_revoked_certificate_opens_nothing_also_with_a_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("bad")
    shown = x509.load_pem_x509_certificate(Path(pair.cert).read_bytes())
    der = ssl.PEM_cert_to_DER_cert(Path(pair.cert).read_text())
    peer = Peer(PeerCertificate(shown.subject.rfc4514_string(), der))
    authenticator = Authenticator({STAYING: "line 1"})
    assert authenticator.authenticate(STAYING, peer).name == "line 1"
    authenticator.revoke(read_revoked(authority.revokes(pair)).revoked)
    with pytest.raises(tenure.AuthenticationFailed, match="certificate is revoked"):
        authenticator.authenticate(STAYING, peer)
