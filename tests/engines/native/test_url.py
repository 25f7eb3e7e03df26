"""What a tenure:// URL says, and that no message shows its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.clock import SystemClock
from tenure.engines.native import connect
from tenure.engines.native.url import Target, TlsFiles, parse
from tenure.errors import InvalidArgument


@pytest.mark.parametrize(
    ("url", "targets", "shown"),
    [
        ("tenure://coord", (Target("coord", 7070),), "tenure://coord:7070"),
        ("tenure://coord:81/", (Target("coord", 81),), "tenure://coord:81"),
        ("TENURE://10.0.0.1", (Target("10.0.0.1", 7070),), "tenure://10.0.0.1:7070"),
        (
            "tenure://a,b:7071,[::1],[::1]:9",
            (Target("a", 7070), Target("b", 7071), Target("::1", 7070), Target("::1", 9)),
            "tenure://a:7070,b:7071,[::1]:7070,[::1]:9",
        ),
        (
            "tenure+unix:///run/a%20b.sock",
            (Target(path="/run/a b.sock"),),
            "tenure+unix:///run/a%20b.sock",
        ),
    ],
)
def test_a_url_names_one_server_or_several(
    url: str, targets: tuple[Target, ...], shown: str
) -> None:
    address = parse(url)
    assert (address.targets, address.url) == (targets, shown)
    assert address.tls is None
    assert address.token == ""


def test_a_url_for_tls_has_its_files_and_the_servers_name() -> None:
    address = parse("tenures://a?tls-ca=/ca%20.pem&tls-cert=c&tls-key=k&tls-server-name=coord")
    assert address.url == "tenures://a:7070"
    assert address.tls == TlsFiles("/ca .pem", "c", "k")
    assert address.server_name == "coord"
    assert parse("tenures://a").tls == TlsFiles()


@pytest.mark.parametrize("place", ["tenure://a", "tenures://a", "tenure+unix:///run/x.sock"])
def test_a_url_says_for_how_long_an_answer_is_waited_for_awake(place: str) -> None:
    assert parse(place).busy_poll == 0.0002
    assert parse(f"{place}?busy-poll=0").busy_poll == 0
    assert parse(f"{place}?busy-poll=10000").busy_poll == 0.01
    for wrong in ("-1", "10001", "1.5", "much"):
        with pytest.raises(InvalidArgument, match="whole number of microseconds from 0 to 10000"):
            parse(f"{place}?busy-poll={wrong}")


def test_the_token_is_in_the_url_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_TOKEN", "from the environment")
    assert parse("tenure://a").token == "from the environment"
    assert parse("tenure://s%40cret%2F@a").token == "s@cret/"
    assert parse("tenure+unix://token@/run/x.sock").token == "token"


@pytest.mark.parametrize(
    "rest",
    [
        *(
            "",
            "a/b",
            "a b",
            "a:b",
            "a:0",
            "a:65536",
            "a:1:2",
            "[::1",
            "[a]",
            "::1",
            "a,",
            ",a",
            "a,a",
        ),
        *("a#b", "a?tls-ca=x", "a?unknown=x", "-a", "a..b", 64 * "a", "a?tls-ca"),
    ],
)
def test_what_is_wrong_with_a_url_is_told_without_its_token(rest: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        connect(f"tenure://S3cr3t@{rest}", SystemClock())
    assert "S3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("tenure+unix://run/x.sock", "tenure+unix:///", "tenure+unix:///run/", "tenure+unix://"),
        *("tenures://a?tls-key=k", "tenures://a?tls-ca=", "tenures://a?tls-ca=a&tls-ca=b"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(url)


@pytest.mark.parametrize("token", ["x" * 5000, "line%0Abreak"])
def test_what_is_no_token_is_refused_unseen(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(f"tenure://{token}@a")
    assert "xxx" not in str(caught.value)
    assert "break" not in str(caught.value)


def test_no_description_of_an_address_shows_the_token() -> None:
    address = parse("tenure://S3cr3t@a")
    engine = connect("tenure://S3cr3t@a", SystemClock())
    for text in (repr(address), str(address), address.url, engine.url, repr(engine)):
        assert "S3cr3t" not in text


def test_a_file_for_tls_that_is_not_there_is_told_when_it_is_needed(tmp_path: Path) -> None:
    address = parse(f"tenures://a?tls-ca={tmp_path}/none.pem")
    assert address.tls is not None
    with pytest.raises(InvalidArgument, match=r"none\.pem"):
        address.tls.context()


@pytest.mark.parametrize(
    ("target", "local"),
    [
        (Target("localhost", 1), True),
        (Target("127.0.0.9", 1), True),
        (Target("::1", 1), True),
        (Target(path="/x"), True),
        (Target("10.0.0.1", 1), False),
        (Target("coord", 1), False),
    ],
)
def test_it_is_known_what_stays_on_this_machine(target: Target, local: bool) -> None:
    assert target.local is local
