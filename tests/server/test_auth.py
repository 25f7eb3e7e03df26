"""Who is let in, and what a token file may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tenure import AuthenticationFailed, InvalidArgument
from tenure.server.auth import (
    ANONYMOUS,
    Authenticator,
    Credentials,
    Identity,
    Peer,
    PeerCertificate,
    Token,
    read_tokens,
    readable_by_others,
)
from tenure.server.auth.authenticator import subject_of

ONE, TWO = "0123456789abcdef", "fedcba9876543210"


def test_without_tokens_everybody_is_let_in() -> None:
    nobody_asks = Authenticator()
    assert not nobody_asks.required
    assert nobody_asks.authenticate("") == nobody_asks.authenticate("anything") == ANONYMOUS


def test_each_of_several_tokens_opens_and_says_whose_it_is() -> None:
    authenticator = Authenticator({ONE: "line 1", TWO: "line 4"})
    assert authenticator.required
    assert len(authenticator) == 2
    assert authenticator.authenticate(ONE) == Identity("line 1", "token")
    assert authenticator.authenticate(TWO) == Identity("line 4", "token")


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("", "requires a token"),
        (ONE[:-1], "does not know this token"),
        (ONE + "0", "does not know this token"),
        (ONE.upper(), "does not know this token"),
        ("\udcff\x00ü", "does not know this token"),
    ],
)
def test_anything_else_is_refused_and_not_repeated(shown: str, said: str) -> None:
    authenticator = Authenticator({ONE: "line 1"})
    with pytest.raises(AuthenticationFailed, match=said) as refused:
        authenticator.authenticate(shown)
    assert not shown or shown not in str(refused.value)
    assert ONE not in str(refused.value) + repr(authenticator)


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        (Peer(), ANONYMOUS),
        (Peer(uid=1000), Identity("uid 1000", "uid")),
        (Peer(PeerCertificate("CN=billing", b"")), Identity("CN=billing", "certificate")),
    ],
)
def test_without_tokens_the_identity_is_what_the_transport_shows(
    peer: Peer, identity: Identity
) -> None:
    assert Authenticator().authenticate("", peer) == identity
    with_tokens = Authenticator({ONE: "line 1"})
    assert with_tokens.authenticate(ONE, peer).name == "line 1"
    with pytest.raises(AuthenticationFailed):
        with_tokens.authenticate("", peer)


@pytest.mark.parametrize(
    ("shown", "subject"),
    [
        ({"subject": ((("commonName", "billing"),),)}, "CN=billing"),
        (
            {"subject": ((("organizationName", "A, B"),), (("commonName", "x"), ("userId", "7")))},
            "CN=x+UID=7,O=A\\, B",
        ),
        ({"subject": ((("commonName", "a,O=b"),),)}, "CN=a\\,O\\=b"),
        ({"subject": ((("commonName", " # "),),)}, "CN=\\ #\\ "),
        ({"subject": (), "subjectAltName": (("DNS", "a.example"),)}, "DNS:a.example"),
        ({"subject": (), "serialNumber": "0F"}, "serial 0F"),
    ],
)
def test_a_subject_has_one_text_and_no_other_subject_has_the_same(
    shown: dict[str, object], subject: str
) -> None:
    assert subject_of(shown) == subject


def test_replaced_tokens_count_from_then_on() -> None:
    authenticator = Authenticator({ONE: "line 1"})
    authenticator.replace(Credentials((Token.plain(TWO, "line 1"),)))
    assert authenticator.authenticate(TWO).name == "line 1"
    with pytest.raises(AuthenticationFailed):
        authenticator.authenticate(ONE)


def test_a_token_file_has_one_a_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# the backup host\n{ONE}\n\n   # and the other\n  {TWO}\t\n")
    one, two = Token.plain(ONE, "line 2"), Token.plain(TWO, "line 5")
    unnamed = tuple(dataclasses.replace(each, unnamed=True) for each in (one, two))
    assert read_tokens(str(file)) == Credentials(unnamed)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no token"),
        ("# none\n\n", "has no token"),
        ("short-secret\n", "line 1: the token has 12 characters, and fewer than 16"),
        (f"{ONE}\nsecret word of more than 16\n", "line 2: the token has a character other"),
        (f"{ONE}-secret-ü\n", "line 1: the token has a character other"),
        (f"{ONE}\n{TWO}\n{ONE}\n", "line 3: the token is that of line 1 again"),
        ("secret" * 1000, "line 1: the token has 6000 characters, more than 4096"),
    ],
)
def test_what_is_wrong_in_a_token_file_is_said_without_the_token(
    content: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match=said) as refused:
        read_tokens(str(file))
    assert str(file) in str(refused.value)
    assert "secret" not in str(refused.value).replace(str(file), "")


def test_a_token_file_that_cannot_be_read_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="missing cannot be read: No such file"):
        read_tokens(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o600, None),
        (0o400, None),
        (0o640, None),  # of a group that the server's administrator chose
        (0o644, "everybody may read"),
        (0o620, "others may write"),
        (0o602, "others may write"),
    ],
)
def test_a_secret_that_others_may_read_is_noticed(
    mode: int, said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(mode)
    found = readable_by_others(str(file))
    assert found is None if said is None else said in str(found)
