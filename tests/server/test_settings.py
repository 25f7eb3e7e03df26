"""Where settings come from, which of them count, and what is said of those that are wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tenure.server.limits import Limits
from tenure.server.settings import SETTINGS, Settings, Wrong
from tenure.server.sources import load

HOME = {"XDG_STATE_HOME": "/state home"}


class Sources:
    """The three of them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "serve.toml"
        self.options: dict[str, Any] = {}
        self.environment = dict(HOME)

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def load(self) -> Settings:
        file = str(self.file) if self.file.exists() else None
        return load(self.options, self.environment, file)

    def faults(self) -> tuple[str, ...]:
        with pytest.raises(Wrong) as wrong:
            self.load()
        assert str(wrong.value) == "; ".join(wrong.value.faults)
        return wrong.value.faults


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


def test_the_defaults_are_a_durable_file_of_ones_own_and_this_machine_alone(
    sources: Sources,
) -> None:
    settings = sources.load()
    assert settings.store == "sqlite:///%2Fstate%20home/tenure/server.db?durability=full".replace(
        "%2F", "/"
    )
    assert [each.url for each in settings.listen] == ["tenure://127.0.0.1:7070"]
    assert settings.limits == Limits()
    assert not settings.exposed
    assert {each.origin for each in settings.given.values()} == {""}


def test_every_limit_can_be_set(sources: Sources) -> None:
    assert {each.limit for each in SETTINGS if each.limit} == {x.name for x in fields(Limits)}
    sources.options = {"max-connections": "7"}
    sources.environment["TENURE_SERVE_MAX_OUTPUT_TIME"] = "1.5"
    sources.write("max-kept-answers = 9\n")
    assert sources.load().limits == Limits(connections=7, output_time=1.5, kept_answers=9)


@pytest.mark.parametrize(
    ("name", "text", "toml", "value"),
    [
        ("store", "memory://", '"memory://"', "memory://"),
        ("drain-time", "2.5", "2.5", 2.5),
        ("drain-time", "3", "3", 3.0),
        ("busy-poll", "0", "0", 0),
        ("busy-poll", "50", "50", 50),
        ("loop", "asyncio", '"asyncio"', "asyncio"),
        ("log-format", "json", '"json"', "json"),
        ("log-level", "debug", '"debug"', "debug"),
        ("max-sessions", "12", "12", 12),
    ],
)
def test_each_source_sets_the_same(
    name: str, text: str, toml: str, value: object, sources: Sources
) -> None:
    variable = "TENURE_SERVE_" + name.upper().replace("-", "_")
    sources.write(f"{name} = {toml}\n")
    by_file = sources.load().given[name]
    sources.environment[variable] = text
    by_environment = sources.load().given[name]
    sources.options[name] = text
    by_option = sources.load().given[name]
    assert by_file.value == by_environment.value == by_option.value == value
    assert type(by_file.value) is type(by_option.value)
    assert by_file.origin == str(sources.file)
    assert by_environment.origin == variable
    assert by_option.origin == f"--{name}"


def test_an_option_counts_more_than_the_environment_and_that_more_than_the_file(
    sources: Sources,
) -> None:
    sources.write('store = "memory://file"\nmax-sessions = 1\nmax-connections = 1\n')
    sources.environment |= {"TENURE_SERVE_STORE": "memory://env", "TENURE_SERVE_MAX_SESSIONS": "2"}
    sources.options = {"store": "memory://option"}
    settings = sources.load()
    assert settings.store == "memory://option"
    assert (settings.limits.sessions, settings.limits.connections) == (2, 1)


def test_several_addresses_come_from_each_source(sources: Sources) -> None:
    def listening() -> list[str]:
        return [each.url for each in sources.load().listen]

    sources.write('listen = ["tenure://127.0.0.1:1", "ydb://127.0.0.1:2"]\n')
    assert listening() == ["tenure://127.0.0.1:1", "ydb://127.0.0.1:2"]
    sources.environment["TENURE_SERVE_LISTEN"] = "tenure://127.0.0.1:3 ydb://127.0.0.1:4"
    assert listening() == ["tenure://127.0.0.1:3", "ydb://127.0.0.1:4"]
    sources.options["listen"] = ("tenure://127.0.0.1:0", "tenure://127.0.0.1:0")
    assert listening() == ["tenure://127.0.0.1:0", "tenure://127.0.0.1:0"]


def test_the_file_may_be_named_by_the_environment_and_its_paths_count_from_it(
    sources: Sources, tmp_path: Path
) -> None:
    sources.write('auth-token-file = "tokens"\n')
    environment = {**HOME, "TENURE_SERVE_CONFIG": str(sources.file)}
    assert load({}, environment).auth_token_file == str(tmp_path / "tokens")


def test_an_empty_variable_says_nothing(sources: Sources) -> None:
    sources.environment |= {"TENURE_SERVE_STORE": "", "TENURE_SERVE_CONFIG": ""}
    assert "server.db" in sources.load().store


# What is wrong


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "max-conections = 1",
            "there is no setting 'max-conections'; did you mean max-connections?",
        ),
        ("whatever = 1", "there is no setting 'whatever'; 'tenure serve --help' lists all"),
        ("[limits]\nconnections = 1", "there is no setting 'limits'"),
        ('max-connections = "many"', "max-connections is a whole number, one or more, not 'many'"),
        ("max-connections = true", "max-connections is a whole number, one or more, not True"),
        ("max-connections = 0", "max-connections is a whole number, one or more, not 0"),
        ("max-connections = 1.5", "max-connections is a whole number, one or more, not 1.5"),
        ('drain-time = "1"', "drain-time is a number of seconds, more than zero, not '1'"),
        (f"drain-time = {10**400}", "drain-time is a number of seconds, more than zero, not 1000"),
        ("drain-time = inf", "drain-time is a number of seconds, more than zero, not inf"),
        ("drain-time = nan", "drain-time is a number of seconds, more than zero, not nan"),
        (
            "busy-poll = -1",
            "busy-poll is a whole number of microseconds from 0 to 10000, not -1",
        ),
        (
            "busy-poll = 0.0001",
            "busy-poll is a whole number of microseconds from 0 to 10000, not 0.0001",
        ),
        ("store = 1", "store is a text, not 1"),
        ('store = ""', "store is a text, not ''"),
        ('listen = "tenure://:1"', "listen is a list of texts, not 'tenure://:1'"),
        ("listen = []", "listen is a list of texts, not []"),
        ("listen = [1]", "listen is a list of texts, not [1]"),
        ('listen = ["gopher://:1"]', "'gopher://:1' is not an address to listen at"),
        ('log-format = "xml"', "log-format is one of text, json, not 'xml'"),
        ("loop = 1", "loop is one of auto, asyncio, uvloop, not 1"),
        ("max-data-bytes = 99999999", "the limit data_bytes is at most 1048576"),
        ("max-message-bytes = 1000", "leaves no room for data"),
        ("store = memory", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_the_file_the_key_and_what_is_right(
    line: str, said: str, sources: Sources
) -> None:
    sources.write(line + "\n")
    (fault,) = sources.faults()
    assert fault.startswith(str(sources.file))
    assert said in fault


def test_a_file_that_is_not_there_or_no_text_is_a_mistake(sources: Sources, tmp_path: Path) -> None:
    with pytest.raises(Wrong, match=r"the file /missing.toml cannot be read: No such file"):
        load({}, HOME, "/missing.toml")
    sources.file.write_bytes(b"store = '\xff'")
    assert "is not TOML" in sources.faults()[0]


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("MAX_CONECTIONS", "1", "no such setting; did you mean TENURE_SERVE_MAX_CONNECTIONS?"),
        ("MAX_CONNECTIONS", "1e3", "is a whole number, one or more, not '1e3'"),
        ("DRAIN_TIME", "-1", "is a number of seconds, more than zero, not -1.0"),
        ("LOG_LEVEL", "loud", "is one of debug, info, warning, error, not 'loud'"),
        ("LISTEN", "127.0.0.1:7070", "is not an address to listen at"),
    ],
)
def test_a_mistake_in_the_environment_is_told_with_the_variable(
    variable: str, text: str, said: str, sources: Sources
) -> None:
    sources.environment["TENURE_SERVE_" + variable] = text
    (fault,) = sources.faults()
    assert "TENURE_SERVE_" + variable in fault
    assert said in fault


def test_a_mistake_in_an_option_is_told_with_the_option(sources: Sources) -> None:
    sources.options = {"max-connections": "many", "listen": ("ftp://x",)}
    faults = sources.faults()
    assert faults[0] == "--max-connections is a whole number, one or more, not 'many'"
    assert faults[1].startswith("--listen: 'ftp://x' is not an address")


def test_all_mistakes_are_told_at_once(sources: Sources) -> None:
    sources.write('max-sessions = "x"\nlop = "auto"\n')
    sources.environment["TENURE_SERVE_LOOP"] = "gevent"
    sources.options = {"drain-time": "soon"}
    assert len(sources.faults()) == 4


# What contradicts itself, or would have no effect


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"listen": ["tenures://:1"]},
            "has TLS, which needs --tls-cert and --tls-key: no tls-cert",
        ),
        ({"listen": ["tenures://:1"], "tls-cert": "c"}, "no tls-key"),
        (
            {"listen": ["tenures://:1?tls-cert=mine"], "tls-cert": "c", "tls-key": "k"},
            "no tls-key",
        ),
        ({"tls-client-ca": "ca"}, "tls-client-ca is set, and no listener has TLS"),
        (
            {"listen": ["tenures://:1?tls-cert=c&tls-key=k&tls-client-crl=r"]},
            "has a revocation list of client certificates and requires none; add --tls-client-ca",
        ),
        ({"advertise": "here:1"}, "advertise is for YDB's clients, and no listener is for them"),
        ({"database": "/x"}, "database is for YDB's clients"),
        ({"dflockd-node": "/x"}, "dflockd-node is for dflockd's clients"),
        ({"listen": ["dflockd://:1"], "dflockd-node": "x"}, "a node's path starts with '/'"),
        (
            {"listen": ["tenure://:1", "ydb://:1"]},
            "tenure://:1 and ydb://:1 are the same address",
        ),
        (
            {"listen": ["tenure+unix:///a", "tenure+unix:///a"]},
            "are the same address",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: dict[str, Any], said: str, sources: Sources
) -> None:
    sources.options = options
    (fault,) = sources.faults()
    assert said in fault


def test_a_listener_with_tls_has_its_own_files_or_those_of_all(sources: Sources) -> None:
    sources.options = {
        "listen": ["tenures://:1", "ydbs://:2?tls-cert=c2&tls-key=k2", "tenure://:3"],
        "tls-cert": "c1",
        "tls-key": "k1",
        "tls-client-ca": "ca",
        "tls-client-crl": "crl",
    }
    settings = sources.load()
    files = [settings.tls.get(each) for each in settings.listen]
    assert [(x.cert, x.key, x.client_ca, x.client_crl) if x else None for x in files] == [
        ("c1", "k1", "ca", "crl"),
        ("c2", "k2", "ca", "crl"),
        None,
    ]


# What is allowed, and worth a warning


@pytest.mark.parametrize(
    ("options", "exposed", "legible"),
    [
        ({}, 0, 0),
        ({"listen": ["tenure://:1"]}, 1, 0),
        ({"listen": ["tenure://:1"], "auth-token-file": "t"}, 0, 1),
        ({"listen": ["tenure://127.0.0.1:1"], "auth-token-file": "t"}, 0, 0),
        ({"listen": ["tenures://:1"], "tls-cert": "c", "tls-key": "k"}, 1, 0),
        (
            {"listen": ["tenures://:1"], "tls-cert": "c", "tls-key": "k", "tls-client-ca": "a"},
            0,
            0,
        ),
        ({"listen": ["tenure+unix:///a", "ydb://10.0.0.7"]}, 1, 0),
    ],
)
def test_what_others_can_reach_or_read_is_known(
    options: dict[str, Any], exposed: int, legible: int, sources: Sources
) -> None:
    sources.options = options
    settings = sources.load()
    assert (len(settings.exposed), len(settings.legible)) == (exposed, legible)


def test_without_a_home_a_store_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(Wrong, match="Set HOME, or name a store"):
        load({}, {})
    assert load({}, {"TENURE_SERVE_STORE": "memory://"}).store == "memory://"
