"""What a URL may say, and what is refused before anything is sent."""

from __future__ import annotations

import ssl
from dataclasses import replace

import pytest

import tenure
from tenure.engines.redis.url import parse


def test_a_plain_url_means_what_redis_py_takes_it_to_mean() -> None:
    address = parse("redis://user:p%40ss@db.example:7000/3?client_name=jobs&socket_timeout=2.5")
    assert address.places == (("db.example", 7000),)
    assert (address.db, address.username, address.password) == (3, "user", "p@ss")
    assert (address.client_name, address.socket_timeout, address.tls) == ("jobs", 2.5, None)


def test_what_is_left_out_has_its_usual_value() -> None:
    address = parse("redis://")
    assert address.places == (("localhost", 6379),)
    assert (address.db, address.password, address.protocol) == (0, "", 3)
    assert address.prefix == "{tenure}:"
    assert not address.fresh
    assert address.busy_poll == 0.0002
    assert parse("redis://localhost?busy_poll=0").busy_poll == 0


def test_a_socket_is_named_by_its_path() -> None:
    address = parse("redis+unix:///run/redis.sock?db=2&password=secret")
    assert address.places == ("/run/redis.sock",)
    assert (address.db, address.password) == (2, "secret")


def test_sentinels_are_named_with_the_service() -> None:
    address = parse("redis+sentinel://one,two:26380/mymaster/1?sentinel_password=x")
    assert address.places == (("one", 26379), ("two", 26380))
    assert (address.service, address.db, address.sentinel_password) == ("mymaster", 1, "x")


def test_nodes_of_a_cluster_are_named_as_sentinels_are() -> None:
    address = parse("redis+cluster://user:p@one,two:7001?ssl=true&tls_server_name=db")
    assert address.places == (("one", 6379), ("two", 7001))
    assert (address.cluster, address.service, address.password) == (True, "", "p")
    assert (address.tls is not None, address.server_name) == (True, "db")
    assert not parse("redis://one").cluster


def test_secrets_are_not_in_the_url_that_is_shown() -> None:
    address = parse("redis://user@localhost/0?password=secret&sentinel_password=secret&db=0")
    assert "secret" not in address.url
    assert "secret" not in repr(replace(address, username=""))
    assert address.url == "redis://user@localhost/0?db=0"


def test_a_plus_in_a_parameter_is_a_space_as_in_redis_py() -> None:
    address = parse("redis://user:a+b@localhost?prefix=a+b&sentinel_password=c%2Bd")
    assert address.prefix == parse("redis://localhost?prefix=a%20b").prefix == "{a b}:"
    assert (address.password, address.sentinel_password) == ("a+b", "c+d")


def test_tls_checks_the_server_unless_told_otherwise() -> None:
    strict, lax = (
        parse("rediss://localhost").tls,
        parse("rediss://localhost?ssl_cert_reqs=none").tls,
    )
    assert strict is not None
    assert strict.check_hostname
    assert strict.verify_mode is ssl.CERT_REQUIRED
    assert lax is not None
    assert not lax.check_hostname
    assert lax.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://one,two", r"Write redis\+cluster://host1,host2"),
        ("redis://localhost?colour=red", "no parameter 'colour'"),
        ("redis://localhost?fresh=perhaps", "true or false"),
        ("redis://localhost?protocol=4", "one of 3, 2"),
        ("redis://localhost/zero", "a database is a number"),
        ("redis://localhost/1?db=2", "two databases"),
        ("redis://[::1", r"as in \[::1\]:6379"),
        ("redis://localhost?prefix={a}", "no braces"),
        ("redis://localhost?quarantine=9999", "a number from 1 to 1800"),
        ("redis://localhost?min_replicas=some", "a whole number from 0 to 100"),
        ("redis+unix://", "names no socket"),
        ("redis+unix://host/run/redis.sock", "names no socket"),
        ("redis+sentinel://one,two", "names no service"),
        ("rediss://localhost?ssl_ca_certs=/no/such/file", "cannot be used"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, why: str) -> None:
    with pytest.raises(tenure.InvalidArgument, match=why):
        tenure.connect(url)
