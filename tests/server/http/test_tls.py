"""HTTP inside TLS, with certificates of clients too."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tenure.server.auth import Authenticator, Credentials
from tenure.server.auth.accounts import certificate_id
from tenure.server.auth.identity import Permissions
from tenure.server.auth.tokens import Rights
from tenure.server.limits import Limits
from tenure.server.tls import TlsFiles, server_context
from tests.server.certificates import Authority, Pair
from tests.server.http.asking import READER, ask, called, hosted
from tests.server.http.test_answers import tokens


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server_tls(authority: Authority, *, clients: bool = False) -> ssl.SSLContext:
    pair = authority.signs("server.test")
    return server_context(TlsFiles(pair.cert, pair.key, authority.cert if clients else None))


def client_tls(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.cert)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


async def test_all_is_answered_inside_tls(authority: Authority) -> None:
    async with hosted(tls=server_tls(authority), authenticator=tokens()) as server:
        assert server.address.startswith("https://")
        tls = client_tls(authority)
        assert (await ask(server.address, tls=tls)).status == 200
        async with called(server.address, tls) as client:
            for _ in range(3):
                assert (await client.ask("/metrics", token=READER)).status == 200
            (connection,) = server.http.connections
            assert connection.scheme == "https"


async def test_a_client_without_tls_gets_nothing(authority: Authority) -> None:
    async with hosted(tls=server_tls(authority)) as server, called(server.address) as client:
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/1.1 200" not in await client.rest()
        assert (await ask(server.address, tls=client_tls(authority))).status == 200


async def test_a_silent_client_is_cut_off(authority: Authority) -> None:
    limits = Limits(greeting_time=0.5)
    async with (
        hosted(tls=server_tls(authority), limits=limits) as server,
        called(server.address, client_tls(authority)) as client,
    ):
        client.say(b"GET / HTTP/1.1\r\nslow: ")
        assert await client.rest() == b""


async def test_a_client_certificate_that_is_required_must_be_there(authority: Authority) -> None:
    async with hosted(tls=server_tls(authority, clients=True)) as server:
        pair = authority.signs("client.test")
        assert (await ask(server.address, tls=client_tls(authority, pair))).status == 200
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await ask(server.address, tls=client_tls(authority))


async def test_the_identity_of_a_certificate_decides_about_the_metrics(
    authority: Authority,
) -> None:
    reader, other = authority.signs("reader.test"), authority.signs("other.test")
    authenticator = Authenticator()
    rights = {
        "CN=reader.test": Rights(Permissions.parse({"/": "read"})),
        "CN=other.test": Rights(Permissions.parse({"/billing": "hold"})),
    }
    authenticator.replace(Credentials(certificates=rights))
    tls = server_tls(authority, clients=True)
    async with hosted(tls=tls, authenticator=authenticator) as server:
        for pair, status in ((reader, 200), (other, 403)):
            found = await ask(server.address, "/metrics", tls=client_tls(authority, pair))
            assert found.status == status
        assert b"CN=other.test has not" in found.body


async def test_the_owner_of_a_revoked_certificate_is_sent_away(authority: Authority) -> None:
    pair = authority.signs("client.test")
    authenticator = Authenticator()
    tls = server_tls(authority, clients=True)
    async with (
        hosted(tls=tls, authenticator=authenticator) as server,
        called(server.address, client_tls(authority, pair)) as client,
    ):
        assert (await client.ask()).lasts
        (connection,) = server.http.connections
        assert connection.shown.certificate is not None
        authenticator.revoke([certificate_id(connection.shown.certificate.der)])
        assert await server.http.end_connections(authenticator.verdict) == 1
        assert await client.rest() == b""
        refused = await ask(server.address, tls=client_tls(authority, pair))
        assert refused.status == 403
        assert b"revoked" in refused.body


async def test_new_certificates_are_used_for_new_connections(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    later = Authority(tmp_path / "new", "later")
    async with (
        hosted(tls=server_tls(authority)) as server,
        called(server.address, client_tls(authority)) as client,
    ):
        await client.ask()
        server.http.renew_tls(server_tls(later), cut_handshakes=False)
        assert (await ask(server.address, tls=client_tls(later))).status == 200
        assert (await client.ask()).status == 200
