"""What can be written after ``--listen``."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tenure import EngineUnavailable, InvalidArgument
from tenure.server.addresses import bind_unix, claim, parse


@pytest.mark.parametrize(
    ("url", "clean", "protocol", "tls", "host", "port", "local"),
    [
        ("tenure://127.0.0.1:7070", None, "tenure", False, "127.0.0.1", 7070, True),
        ("tenure://127.0.0.1:0/", "tenure://127.0.0.1:0", "tenure", False, "127.0.0.1", 0, True),
        ("TENURE://localhost", "tenure://localhost:7070", "tenure", False, "localhost", 7070, True),
        ("tenure://[::1]:80", None, "tenure", False, "::1", 80, True),
        ("tenure://[::1]", "tenure://[::1]:7070", "tenure", False, "::1", 7070, True),
        ("tenure://:7071", None, "tenure", False, "", 7071, False),
        ("tenures://0.0.0.0:7070", None, "tenure", True, "0.0.0.0", 7070, False),
        ("tenures://[::]:7070", None, "tenure", True, "::", 7070, False),
        ("ydb://coord-1.test:2136", None, "ydb", False, "coord-1.test", 2136, False),
        ("dflockd://:6388", None, "dflockd", False, "", 6388, False),
        ("dflockds://[::1]", "dflockds://[::1]:6388", "dflockd", True, "::1", 6388, True),
        ("ydbs://10.0.0.7", "ydbs://10.0.0.7:2136", "ydb", True, "10.0.0.7", 2136, False),
        ("http://localhost", "http://localhost:7080", "http", False, "localhost", 7080, True),
        ("https://:443", None, "http", True, "", 443, False),
    ],
)
def test_an_address_is_understood(
    url: str, clean: str | None, protocol: str, tls: bool, host: str, port: int, local: bool
) -> None:
    address = parse(url)
    assert address.url == (clean or url)
    assert (address.protocol, address.tls) == (protocol, tls)
    assert (address.host, address.port, address.path) == (host, port, "")
    assert address.local == local


def test_a_unix_socket_has_a_path_and_permissions() -> None:
    address = parse("tenure+unix:///run/my%20app/tenure.sock?mode=0660")
    assert address.url == "tenure+unix:///run/my%20app/tenure.sock"
    assert (address.path, address.mode, address.local) == ("/run/my app/tenure.sock", 0o660, True)
    assert parse("tenure+unix:///run/t.sock").mode == 0o600


def test_a_listener_may_have_files_of_its_own() -> None:
    address = parse("ydbs://:2136?tls-cert=/etc/a%20b.pem&tls-key=key.pem")
    assert address.url == "ydbs://:2136"
    assert address.files == (("tls-cert", "/etc/a b.pem"), ("tls-key", "key.pem"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "is not an address to listen at; an example is tenure://127.0.0.1:7070"),
        ("7070", r"There are: tenure://, tenures://, tenure\+unix://, ydb://, ydbs://, dflockd://"),
        ("gopher://:8080", "is not an address to listen at"),
        ("tenure://127.0.0.1:70700", "'70700' is not a port; a port is 0 to 65535"),
        ("tenure://127.0.0.1:http", "'http' is not a port"),
        ("tenure://::1:7070", "write an IPv6 address in brackets"),
        ("tenure://[localhost]:7070", "brackets are for an IPv6 address"),
        ("tenure://[::1:7070", "brackets are for an IPv6 address"),
        ("tenure://a b:7070", "'a b' is not the name or the address of a host"),
        ("tenure://127.0.0.1:7070/node", "only parameters may follow the port"),
        ("tenure://127.0.0.1:7070?mode=0660", "there is no parameter 'mode' here"),
        ("tenure://:7070?tls-cert=a&tls-key=b", "with TLS the scheme is tenures://"),
        ("ydb://:2136?tls-cert=a&tls-key=b", "with TLS the scheme is ydbs://"),
        ("dflockd://:1?tls-cert=a&tls-key=b", "with TLS the scheme is dflockds://"),
        ("tenures://:1?tls-cert=a&tls-cert=b", "has tls-cert twice"),
        ("tenures://:1?tls-cert=", "tls-cert has no value"),
        ("tenure+unix://run/tenure.sock", "write the whole path after the two slashes"),
        ("tenure+unix:///run/", "names no socket"),
        ("tenure+unix:///" + "x" * 100, "has at most 100 bytes, this one 101"),
        ("tenure+unix:///run/t.sock?mode=0777", "mode is 0600 .* not '0777'"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(url: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse(url)


@pytest.mark.parametrize("scheme", ["tenure", "tenur", "tenure+unix"])
def test_a_token_in_an_address_is_refused_without_repeating_it(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match="tokens are in --auth-token-file") as refused:
        parse(f"{scheme}://0123456789abcdef@127.0.0.1:7070")
    assert "0123456789abcdef" not in str(refused.value)


# Unix sockets


def test_a_new_unix_socket_has_the_permissions_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    with bind_unix(str(path), 0o660):
        assert path.stat().st_mode & 0o777 == 0o660


def test_the_socket_file_of_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "t.sock")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
        gone.listen()
    with bind_unix(path, 0o600) as bound, socket.socket(socket.AF_UNIX) as client:
        bound.listen()
        client.connect(path)


def test_the_socket_of_a_server_that_lives_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "t.sock")
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as client:
        alive.bind(path)
        alive.listen()
        with pytest.raises(EngineUnavailable, match="another server listens there"):
            bind_unix(path, 0o600)
        client.connect(path)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(EngineUnavailable, match="the file is not a socket"):
        bind_unix(str(path), 0o600)
    assert path.read_text() == "data"


def test_a_folder_that_is_not_there_is_an_error_with_the_reason(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "t.sock")
    with pytest.raises(EngineUnavailable, match=re.escape(path) + ": No such file or directory"):
        bind_unix(path, 0o600)


# Sockets that systemd passes


def test_a_passed_socket_goes_to_the_listener_of_its_address(tmp_path: Path) -> None:
    path = str(tmp_path / "t.sock")
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(path)
        passed = [first, second, unix]
        port = second.getsockname()[1]
        assert claim(passed, parse(f"tenure://:{port}")) == []  # that would be all addresses
        assert claim(passed, parse(f"tenure://localhost:{port}")) == [second]
        assert claim(passed, parse(f"tenure://localhost:{port}")) == []
        assert claim(passed, parse(f"tenure+unix://{path}")) == [unix]
        assert passed == [first]
