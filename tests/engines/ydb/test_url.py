"""What a ydb:// URL says."""

from __future__ import annotations

import pytest

from tenure.clock import SystemClock
from tenure.engines.ydb import connect
from tenure.engines.ydb.url import parse
from tenure.errors import InvalidArgument


def test_a_host_and_a_database_suffice() -> None:
    address = parse("ydb://db.example.org/local")
    assert address.endpoints == ("db.example.org:2136",)
    assert (address.database, address.secure) == ("/local", False)
    assert (address.credentials, address.fencing, address.discovery) == ("environment", True, True)


def test_with_tls_the_port_is_another() -> None:
    address = parse("ydbs://db.example.org/ru/my.db/")
    assert (address.endpoints, address.secure) == (("db.example.org:2135",), True)
    assert address.database == "/ru/my.db"


def test_several_hosts_may_be_named() -> None:
    address = parse("ydb://a:1,b,[::1]:2,[::1]/local")
    assert address.endpoints == ("a:1", "b:2136", "[::1]:2", "[::1]:2136")


def test_a_user_and_a_password_are_for_the_driver_alone() -> None:
    address = parse("ydb://anna:p%40ss%3Aword@host/local")
    assert (address.credentials, address.user, address.password) == ("static", "anna", "p@ss:word")
    assert address.url == "ydb://host/local"
    assert "p@ss" not in repr(address)


def test_a_token_is_for_the_driver_alone() -> None:
    address = parse("ydb://host/local?token=t%2Bsecret&fencing=off")
    assert (address.credentials, address.token, address.fencing) == ("token", "t+secret", False)
    assert address.url == "ydb://host/local?fencing=off"
    assert "secret" not in repr(address)


@pytest.mark.parametrize("kind", ["environment", "anonymous", "metadata"])
def test_the_kind_of_credentials_may_be_named(kind: str) -> None:
    assert parse(f"ydb://host/local?credentials={kind}").credentials == kind


def test_files_of_tls_are_named_as_the_sdk_names_them() -> None:
    address = parse(
        "ydbs://host/local?root_certificates=/etc/ca%20s.pem&certificate_chain=c&private_key=k"
    )
    assert dict(address.files) == {
        "root_certificates": "/etc/ca s.pem",
        "certificate_chain": "c",
        "private_key": "k",
    }


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
        ("ydb://a,,b/local", "is not a host"),
        ("ydb://a b/local", "is not a host"),
        ("ydb://host:http/local", "is not a port"),
        ("ydb://host:0/local", "is not a port"),
        ("ydb://host:65536/local", "is not a port"),
        ("ydb://host/local#x", "'#'"),
        ("ydb://host/local?colour=red", "no parameter 'colour'"),
        ("ydb://host/local?fencing=on&fencing=off", "fencing twice"),
        ("ydb://host/local?fencing=perhaps", "on or off"),
        ("ydb://host/local?siblings=-1", "a number"),
        ("ydb://host/local?siblings=1.5", "a number"),
        ("ydb://host/local?connect_timeout=0", "seconds"),
        ("ydb://host/local?connect_timeout=inf", "seconds"),
        ("ydb://host/local?credentials=static", "user:password@host"),
        ("ydb://host/local?token=", "the token is empty"),
        ("ydb://:hunter2@host/local", "no user"),
        ("ydb://user:hunter2@host/local?token=t", "says twice who connects"),
        ("ydb://host/local?root_certificates=ca", "ydbs://"),
        ("ydbs://host/local?private_key=k", "go together"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(url: str, what: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(url)
    assert what in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_engine_shows_its_url_without_secrets() -> None:
    engine = connect("ydb://anna:secret@host/local", SystemClock())
    assert engine.url == "ydb://host/local"
