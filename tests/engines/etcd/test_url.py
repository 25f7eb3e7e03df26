"""What an etcd:// URL says."""

from __future__ import annotations

import pytest

from tenure.clock import SystemClock
from tenure.engines.etcd import connect
from tenure.engines.etcd.url import parse
from tenure.errors import InvalidArgument


def test_a_host_suffices() -> None:
    address = parse("etcd://one.example.org")
    assert address.endpoints == ("one.example.org:2379",)
    assert (address.tls, address.prefix, address.user) == (None, "tenure/", "")


def test_several_members_may_be_named() -> None:
    address = parse("etcd://a:1,b,[::1]:2,[::1]")
    assert address.endpoints == ("a:1", "b:2379", "[::1]:2", "[::1]:2379")


@pytest.mark.parametrize(
    "url",
    ["etcd://anna:p%40ss%3Aword@a,b", "etcd://a,b?user=anna&password=p%40ss%3Aword"],
)
def test_a_user_and_a_password_are_for_the_members_alone(url: str) -> None:
    address = parse(url)
    assert (address.user, address.password) == ("anna", "p@ss:word")
    assert "ss%3Aword" not in address.url
    assert "p@ss" not in repr(address)


def test_a_prefix_ends_in_one_slash() -> None:
    assert parse("etcd://a?prefix=/apps/billing").prefix == "/apps/billing/"
    assert parse("etcd://a?prefix=x%2F").prefix == "x/"


def test_times_may_be_chosen() -> None:
    address = parse("etcd://a?timeout=1.5&connect_timeout=3")
    assert (address.timeout, address.connect_timeout) == (1.5, 3.0)


def test_a_slash_behind_the_members_means_nothing() -> None:
    assert parse("etcd://a:2379/").endpoints == parse("etcd://a:2379").endpoints


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("etcd://a/path", "prefix=path"),
        ("etcd://a?timeout=never", "socket_timeout"),
        ("etcd://a?timeout=0", "socket_timeout"),
        ("etcd://a?prefix=", "prefix"),
        ("etcd://a?prefix=%0A", "prefix"),
        ("etcd://anna@a", "go together"),
        ("etcd://anna:b@a?user=c", "given twice"),
    ],
)
def test_what_means_nothing_is_refused(url: str, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        connect(url, SystemClock())
