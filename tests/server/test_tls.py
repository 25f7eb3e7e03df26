"""The files of TLS: whether they are right, and what is said when they are not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tenure import InvalidArgument
from tenure.server.tls import TlsFiles, certificate_of, server_context
from tests.server.certificates import Authority, Pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.signs("server.test")


def test_what_a_certificate_is_for_and_until_when(pair: Pair) -> None:
    found = certificate_of(TlsFiles(pair.cert, pair.key))
    assert found.names == ("server.test", "localhost", "127.0.0.1")
    assert timedelta(days=29) < found.ends - datetime.now(UTC) <= timedelta(days=30)


def test_one_that_asks_for_client_certificates_is_examined_as_well(
    pair: Pair, authority: Authority
) -> None:
    assert certificate_of(TlsFiles(pair.cert, pair.key, authority.cert)).names


def wrong_key(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert, authority.signs("other.test").key)


def missing_cert(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert + ".missing", pair.key)


def missing_key(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert, pair.key + ".missing")


def missing_authorities(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert, pair.key, authority.cert + ".missing")


def exchanged(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.key, pair.cert)


def cert_without_key(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert, pair.cert)


def key_for_authorities(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(pair.cert, pair.key, pair.key)


def encrypted(pair: Pair, authority: Authority) -> TlsFiles:
    kept = authority.signs("kept.test", password=b"open sesame")
    return TlsFiles(kept.cert, kept.key)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (wrong_key, "other.test.key does not belong to the certificate .*server.test.pem"),
        (missing_cert, "the certificate .*missing cannot be read: No such file"),
        (missing_key, "the key .*missing cannot be read: No such file"),
        (missing_authorities, "the file of client authorities .*missing cannot be read: No such"),
        (exchanged, "server.test.key has no certificate in PEM form"),
        (cert_without_key, "server.test.pem has no private key in PEM form"),
        (key_for_authorities, "client authorities .*server.test.key has no certificate"),
        (encrypted, "kept.test.key is encrypted"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(
    files: object, said: str, pair: Pair, authority: Authority
) -> None:
    assert callable(files)
    with pytest.raises(InvalidArgument, match=said):
        server_context(files(pair, authority))


def test_a_certificate_that_has_expired_is_noticed(authority: Authority) -> None:
    old = authority.signs("old.test", days=-1)
    with pytest.raises(InvalidArgument, match=r"old.test.pem: certificate has expired"):
        certificate_of(TlsFiles(old.cert, old.key))
