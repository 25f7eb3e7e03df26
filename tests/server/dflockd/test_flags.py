"""The flags and variables of dflockd's own server, and what they amount to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tenure.server.dflockd.flags import FLAGS, settings_of
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import Limits
from tenure.server.settings import Settings, Wrong


def told(flags: Mapping[str, str] | None = None, /, **environment: str) -> Settings:
    return settings_of(
        flags or {}, environment, store="memory://", node="/dflockd", log_format=None
    )


def test_without_a_word_it_is_as_dflockds_own() -> None:
    settings = told()
    assert settings.dflockd == DflockdOptions(max_locks=1024, max_waiters=0, shutdown_time=30)
    (address,) = settings.listen
    assert address.url == "dflockd://127.0.0.1:6388"
    assert settings.drain_time > 30
    for name in ("connections", "connections_per_source", "connections_per_second", "greetings"):
        assert getattr(settings.limits, name) >= 1_000_000
    assert settings.tokens == {}


@pytest.mark.parametrize(
    ("flag", "variable", "value", "field", "wanted"),
    [
        ("default-lease-ttl", "DEFAULT_LEASE_TTL_S", "9", "default_lease", 9),
        ("lease-sweep-interval", "LEASE_SWEEP_INTERVAL_S", "2", "sweep_interval", 2),
        ("gc-interval", "GC_LOOP_SLEEP", "9", "gc_interval", 9),
        ("gc-interval", "GC_INTERVAL_S", "9", "gc_interval", 9),
        ("gc-max-idle", "GC_MAX_UNUSED_TIME", "9", "gc_max_idle", 9),
        ("gc-max-idle", "GC_MAX_IDLE_S", "0", "gc_max_idle", 0),
        ("max-locks", "MAX_LOCKS", "9", "max_locks", 9),
        ("max-waiters", "MAX_WAITERS", "9", "max_waiters", 9),
        ("read-timeout", "READ_TIMEOUT_S", "9", "read_timeout", 9),
        ("write-timeout", "WRITE_TIMEOUT_S", "9", "write_timeout", 9),
        ("shutdown-timeout", "SHUTDOWN_TIMEOUT_S", "9", "shutdown_time", 9),
        ("shutdown-timeout", "SHUTDOWN_TIMEOUT_S", "0", "shutdown_time", None),
        ("auto-release-on-disconnect", "AUTO_RELEASE_ON_DISCONNECT", "0", "auto_release", False),
        ("auto-release-on-disconnect", "AUTO_RELEASE_ON_DISCONNECT", "YES", "auto_release", True),
    ],
)
def test_a_flag_and_its_variable_say_the_same(
    flag: str, variable: str, value: str, field: str, wanted: object
) -> None:
    assert getattr(told({flag: value}).dflockd, field) == wanted
    assert getattr(told(**{f"DFLOCKD_{variable}": value}).dflockd, field) == wanted
    assert getattr(told({flag: value}, **{f"DFLOCKD_{variable}": "7"}).dflockd, field) == wanted


def test_where_it_listens() -> None:
    (address,) = told({"host": "::1", "port": "0"}).listen
    assert (address.host, address.port) == ("::1", 0)
    (address,) = told(DFLOCKD_HOST="0.0.0.0", DFLOCKD_PORT="1234").listen
    assert address.url == "dflockd://0.0.0.0:1234"
    (address,) = told({"tls-cert": "cert.pem", "tls-key": "key.pem"}).listen
    assert address.url == "dflockds://127.0.0.1:6388"
    assert told({"max-connections": "3"}).limits.connections == 3
    assert told({"max-connections": "3"}).limits.greetings == Limits().greetings
    assert told({"max-connections": "5000"}).limits.greetings == 5000
    assert told({"debug": "true"}).log_level == "debug"


def test_which_token_counts(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from the file\n")
    path = str(file)
    assert list(told({"auth-token": "one"}).tokens) == ["one"]
    assert list(told({"auth-token-file": path}).tokens) == ["from the file"]
    assert list(told({"auth-token": "one", "auth-token-file": path}).tokens) == ["one"]
    assert list(told(DFLOCKD_AUTH_TOKEN="two", DFLOCKD_AUTH_TOKEN_FILE=path).tokens) == ["two"]
    assert list(told({"auth-token-file": path}, DFLOCKD_AUTH_TOKEN="two").tokens) == [
        "from the file"
    ]
    assert "a secret" not in repr(told({"auth-token": "a secret"}))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": "x"}, "--port is a whole number, 0 or more, not 'x'"),
        ({"port": "65536"}, "--port is"),
        ({"max-locks": "0"}, "--max-locks is a whole number, 1 or more"),
        ({"read-timeout": "-1"}, "--read-timeout is"),
        ({"debug": "maybe"}, "--debug is true or false, not 'maybe'"),
        ({"tls-cert": "x"}, "TLS needs both --tls-cert and --tls-key"),
        ({"auth-token": "two\nlines"}, "a token is one line"),
        ({"auth-token-file": "/nowhere"}, "the token file /nowhere cannot be read"),
        ({"host": "no host"}, "'no host' is not the name or the address of a host"),
    ],
)
def test_what_is_wrong_is_told(flags: dict[str, str], said: str) -> None:
    with pytest.raises(Wrong) as wrong:
        told(flags)
    assert said in str(wrong.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PORT", "x"),
        ("PORT", "1_0"),
        ("PORT", " 7000"),
        ("MAX_LOCKS", "12.5"),
        ("READ_TIMEOUT_S", "5s"),
        ("GC_LOOP_SLEEP", "often"),
        ("GC_INTERVAL_S", "often"),
        ("AUTO_RELEASE_ON_DISCONNECT", "off"),
        ("DEBUG", "on"),
    ],
)
def test_a_variable_that_cannot_be_parsed_is_ignored_with_a_warning(name: str, text: str) -> None:
    ignored: list[str] = []
    settings = settings_of(
        {},
        {f"DFLOCKD_{name}": text},
        store="memory://",
        node="/dflockd",
        log_format=None,
        ignore=ignored.append,
    )
    default = told()
    assert (settings.dflockd, settings.listen, settings.log_level) == (
        default.dflockd,
        default.listen,
        default.log_level,
    )
    (sentence,) = ignored
    assert sentence.startswith(f"DFLOCKD_{name} is ignored: it is ")
    assert repr(text) in sentence


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_LOCKS", "0"), ("PORT", "65536"), ("PORT", "-1"), ("PORT", "9" * 19)]
)
def test_a_variable_that_is_out_of_range_is_a_fault(name: str, text: str) -> None:
    with pytest.raises(Wrong, match=f"DFLOCKD_{name} is a whole number"):
        told(**{f"DFLOCKD_{name}": text})


def test_every_flag_has_a_variable() -> None:
    assert all(each.variables for each in FLAGS)
    assert len({each.name for each in FLAGS}) == 18
