"""TLS with a checked certificate, and a password that is never sent (SCRAM)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tenure
from tests.engines.postgresql.servers import PostgresServer, a_server
from tests.ports import free_port
from tests.server.certificates import Authority


@dataclass(frozen=True)
class Secured:
    """A server that accepts nothing but TLS and SCRAM on its port.

    Attributes:
        place: its host and port.
        authority: the file of the authority to trust.
    """

    place: str
    authority: str

    def url(self, password: str = "p%C3%A4ss", parameters: str = "") -> str:
        """URL of the account that may use it."""
        return f"postgresql://app:{password}@{self.place}/postgres?{parameters}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """The server of these tests."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    pair = authority.signs("localhost")
    port = free_port()
    with a_server("fsync=off") as server:
        if not server.execute(
            "SELECT true FROM pg_config WHERE name = 'LIBS' AND setting ~ '-lssl'"
        ):
            pytest.skip("this PostgreSQL is built without TLS")
        server.stop()
        place = f"port={port}", "listen_addresses=127.0.0.1"
        server.settings = ("fsync=off", "ssl=on", "password_encryption=scram-sha-256", *place)
        _give(server, pair.cert, "server.crt")
        _give(server, pair.key, "server.key")
        rules = server.data / "pg_hba.conf"
        rules.write_text("local all all trust\nhostssl all app 127.0.0.1/32 scram-sha-256\n")
        server.port = port
        server.start()
        server.execute("CREATE ROLE app LOGIN PASSWORD 'päss'")
        server.execute("GRANT CREATE ON DATABASE postgres TO app")
        yield Secured(f"localhost:{port}", authority.cert)


def _give(server: PostgresServer, file: str, name: str) -> None:
    copy = Path(shutil.copy(file, server.data / name))
    copy.chmod(0o600)
    if server.user is not None:
        shutil.chown(copy, server.user)


async def test_a_lock_is_acquired_over_tls_with_scram(secured: Secured) -> None:
    url = secured.url(parameters=f"tls_ca={secured.authority}")
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=10) as lease:
        assert lease.held


async def test_a_wrong_password_is_refused(secured: Secured) -> None:
    url = secured.url("wrong", f"tls_ca={secured.authority}")
    with pytest.raises(tenure.AuthenticationFailed, match="refused the login") as error:
        async with tenure.connect(url):
            pass
    assert "wrong" not in str(error.value)


async def test_a_certificate_of_another_authority_is_refused(
    secured: Secured, tmp_path: Path
) -> None:
    url = secured.url(parameters=f"tls_ca={Authority(tmp_path).cert}")
    with pytest.raises(tenure.EngineUnavailable, match="certificate verify failed"):
        async with tenure.connect(url):
            pass


async def test_a_connection_without_tls_is_refused(secured: Secured) -> None:
    with pytest.raises(tenure.TenureError, match=r"no encryption|SSL off"):
        async with tenure.connect(secured.url(parameters="sslmode=disable")):
            pass
