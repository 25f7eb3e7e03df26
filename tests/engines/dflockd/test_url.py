"""What a URL of dflockd servers may be, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.engine import crc32_shard
from tenure.engines.dflockd.url import parse
from tenure.errors import InvalidArgument


def test_a_host_alone_is_a_server_at_the_usual_port() -> None:
    address = parse("dflockd://lock.example")
    assert address.endpoints == (Endpoint("lock.example", 6388),)
    assert (address.url, address.token, address.tls) == ("dflockd://lock.example:6388", "", None)


def test_servers_keep_their_order_for_keys_are_divided_by_it() -> None:
    address = parse("dflockd://b:7000,a,[::1]:7001")
    assert address.endpoints == (Endpoint("b", 7000), Endpoint("a", 6388), Endpoint("::1", 7001))
    assert address.url == "dflockd://b:7000,a:6388,[::1]:7001"


def test_a_token_is_used_and_never_shown() -> None:
    address = parse("dflockd://to%2Fken@h")
    assert address.token == "to/ken"
    assert "ken" not in repr(address)
    assert "ken" not in address.url


def test_a_token_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert parse(f"dflockd://h?auth-token-file={file}").token == "from a file"


def test_parameters_say_how_the_servers_are_set_up() -> None:
    address = parse(
        "dflockd://h?connect-timeout=1&socket-timeout=2&read-timeout=60&renew-ratio=0.2"
        "&connections=8"
    )
    assert (address.connect_timeout, address.answer_timeout, address.read_timeout) == (1, 2, 60)
    assert (address.renew_ratio, address.connections) == (0.2, 8)
    assert parse("dflockd://h").renew_ratio is None


def test_tls_has_a_scheme_of_its_own() -> None:
    address = parse("dflockds://h?tls-server-name=other")
    assert address.tls is not None
    assert address.server_name == "other"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("dflockd://", "not a host"),
        ("dflockd://h/path", "remove the path"),
        ("dflockd://h?connections=1", "from 2 to"),
        ("dflockd://h?read-timeout=soon", "from 1 to"),
        ("dflockds://h?tls-ca=/does/not/exist", "No such file"),
        ("dflockd://s@h?auth-token-file=/x", "given twice"),
        ("dflockd://h?auth-token-file=/does/not/exist", "cannot be read"),
        ("dflockd://se%0Acret@h", "one line"),
        (f"dflockd://{'x' * 65537}@h", "at most 65536 bytes"),
    ],
)
def test_what_is_wrong_is_said_without_the_token(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why.replace("(", r"\(")) as caught:
        parse(url)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "servers", "shard"),
    # CRC-32 (IEEE) mod n, computed by hand from the published check values:
    # crc32("123456789") is 0xCBF43926, crc32("a") is 0xE8B7BE43.
    [
        ("123456789", 1, 0),
        ("123456789", 3, 0xCBF43926 % 3),
        ("123456789", 16, 6),
        ("a", 2, 1),
        ("a", 7, 0xE8B7BE43 % 7),
    ],
)
def test_keys_are_divided_as_clients_in_other_languages_do(
    key: str, servers: int, shard: int
) -> None:
    assert crc32_shard(key, servers) == shard
