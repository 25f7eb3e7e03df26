"""What a tenure:// URL says, and that no message shows its token."""

from __future__ import annotations

import pytest

from tenure.clock import SystemClock
from tenure.engines._kit.url import Endpoint, Tls
from tenure.engines.native import connect
from tenure.engines.native.url import parse
from tenure.errors import InvalidArgument


@pytest.mark.parametrize(
    ("url", "endpoints", "shown"),
    [
        ("tenure://coord", (Endpoint("coord", 7070),), "tenure://coord:7070"),
        ("tenure://coord:81/", (Endpoint("coord", 81),), "tenure://coord:81"),
        ("TENURE://10.0.0.1", (Endpoint("10.0.0.1", 7070),), "tenure://10.0.0.1:7070"),
        (
            "tenure://a,b:7071,[::1],[::1]:9",
            (Endpoint("a", 7070), Endpoint("b", 7071), Endpoint("::1", 7070), Endpoint("::1", 9)),
            "tenure://a:7070,b:7071,[::1]:7070,[::1]:9",
        ),
        (
            "tenure+unix:///run/a%20b.sock",
            (Endpoint(path="/run/a b.sock"),),
            "tenure+unix:///run/a%20b.sock",
        ),
    ],
)
def test_a_url_names_one_server_or_several(
    url: str, endpoints: tuple[Endpoint, ...], shown: str
) -> None:
    address = parse(url)
    assert (address.endpoints, address.url) == (endpoints, shown)
    assert address.tls is None
    assert address.token == ""


def test_a_url_for_tls_has_its_files_and_the_servers_name() -> None:
    address = parse("tenures://a?tls-ca=/ca%20.pem&tls-cert=c&tls-key=k&tls-server-name=coord")
    assert address.url == "tenures://a:7070"
    assert address.tls == Tls("/ca .pem", "c", "k", "coord")
    assert parse("tenures://a").tls == Tls()


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


@pytest.mark.parametrize("rest", ["", "a/b"])
def test_a_server_has_a_host_and_no_path(rest: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(f"tenure://{rest}")


@pytest.mark.parametrize(
    "url",
    [
        *("tenure+unix://run/x.sock", "tenure+unix:///", "tenure+unix:///run/", "tenure+unix://"),
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


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        (Endpoint("localhost", 1), True),
        (Endpoint("127.0.0.9", 1), True),
        (Endpoint("::1", 1), True),
        (Endpoint(path="/x"), True),
        (Endpoint("10.0.0.1", 1), False),
        (Endpoint("coord", 1), False),
    ],
)
def test_it_is_known_what_stays_on_this_machine(endpoint: Endpoint, local: bool) -> None:
    assert endpoint.local is local
