"""What a ydb:// URL says."""

from __future__ import annotations

import pytest

from tenure.clock import SystemClock
from tenure.engines._kit.url import Tls
from tenure.engines.ydb import connect
from tenure.engines.ydb.url import parse
from tenure.errors import InvalidArgument


def test_a_host_and_a_database_suffice() -> None:
    address = parse("ydb://db.example.org/local")
    assert address.endpoints == ("db.example.org:2136",)
    assert (address.database, address.tls) == ("/local", None)
    assert (address.credentials, address.fencing, address.discovery) == ("environment", True, True)


def test_with_tls_the_port_is_another() -> None:
    address = parse("ydbs://db.example.org/ru/my.db/")
    assert address.endpoints == ("db.example.org:2135",)
    assert address.tls == Tls()
    assert address.database == "/ru/my.db"


def test_several_hosts_may_be_named() -> None:
    address = parse("ydb://a:1,b,[::1]:2,[::1]/local")
    assert address.endpoints == ("a:1", "b:2136", "[::1]:2", "[::1]:2136")


def test_a_user_and_a_password_are_for_the_driver_alone() -> None:
    address = parse("ydb://anna:p%40ss%3Aword@host/local")
    assert (address.credentials, address.user, address.password) == ("static", "anna", "p@ss:word")
    assert address.url == "ydb://anna@host/local"
    assert "p@ss" not in repr(address)


def test_a_token_is_for_the_driver_alone() -> None:
    address = parse("ydb://host/local?token=t%2Bsecret&fencing=off")
    assert (address.credentials, address.token, address.fencing) == ("token", "t+secret", False)
    assert address.url == "ydb://host/local?fencing=off"
    assert "secret" not in repr(address)


@pytest.mark.parametrize("kind", ["environment", "anonymous", "metadata"])
def test_the_kind_of_credentials_may_be_named(kind: str) -> None:
    assert parse(f"ydb://host/local?credentials={kind}").credentials == kind


def test_grpc_needs_a_certificate_and_its_key() -> None:
    address = parse("ydbs://host/local?tls_cert=c&tls_key=k")
    assert address.tls == Tls(cert="c", key="k")
    with pytest.raises(InvalidArgument, match="go together"):
        parse("ydbs://host/local?tls_cert=c")


def test_numbers_and_switches_are_understood() -> None:
    address = parse("ydb://host/local?siblings=0&connect_timeout=2.5&discovery=off")
    assert (address.siblings, address.connect_timeout, address.discovery) == (0, 2.5, False)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("ydb://host", "names no database"),
        ("ydb://host/", "names no database"),
        ("ydb://host//local", "names no database"),
        ("ydb://host/lo cal", "names no database"),
        ("ydb:///local", "is not a host"),
        ("ydb://host/local?fencing=perhaps", "true or false"),
        ("ydb://host/local?siblings=-1", "a whole number"),
        ("ydb://host/local?siblings=1.5", "a whole number"),
        ("ydb://host/local?connect_timeout=0", "from 0.1 to 600"),
        ("ydb://host/local?connect_timeout=inf", "from 0.1 to 600"),
        ("ydb://host/local?credentials=static", "user:password@host"),
        ("ydb://:hunter2@host/local", "no user"),
        ("ydb://user:hunter2@host/local?token=t", "given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(url: str, what: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(url)
    assert what in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_engine_shows_its_url_without_secrets() -> None:
    engine = connect("ydb://anna:secret@host/local", SystemClock())
    assert engine.url == "ydb://anna@host/local"
