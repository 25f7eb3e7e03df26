"""What a URL may say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.sqlite import connect
from tenure.engines.sqlite.url import parse
from tenure.errors import InvalidArgument


def test_three_slashes_are_relative_and_four_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("sqlite:///jobs.db").path == f"{tmp_path}/jobs.db"
    assert parse("sqlite:///a/../b/jobs.db").path == f"{tmp_path}/b/jobs.db"
    assert parse("sqlite:////var/lib/jobs.db").path == "/var/lib/jobs.db"


def test_a_relative_path_counts_from_where_the_program_was_when_it_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = parse("sqlite:///jobs.db")
    monkeypatch.chdir("/")
    assert address.path == f"{tmp_path}/jobs.db"


def test_the_url_that_is_shown_has_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shown = f"sqlite:///{tmp_path}/a%20b/jobs.db"
    assert parse("sqlite:///jobs.db").url == shown
    assert parse("sqlite:///jobs.db?mode=0660").url == f"{shown}?mode=0660"
    assert parse(shown).url == shown
    assert parse(parse("sqlite:///50%25%FF.db").url) == parse("sqlite:///50%25%FF.db")
    assert tenure.connect("sqlite:///jobs.db").url == shown


@pytest.mark.parametrize(
    ("written", "meant"),
    [("a%20b", "a b"), ("a%23b%3Fc", "a#b?c"), ("%C3%A9", "é"), ("é", "é"), ("50%25", "50%")],
)
def test_a_path_is_percent_decoded(written: str, meant: str) -> None:
    assert parse(f"sqlite:////x/{written}").path == f"/x/{meant}"


def test_a_path_that_is_not_utf8_is_kept_byte_for_byte() -> None:
    assert os.fsencode(parse("sqlite:////x/%FF").path) == b"/x/\xff"


@pytest.mark.parametrize(
    ("query", "mode"), [("", 0o600), ("?mode=0600", 0o600), ("?mode=660", 0o660), ("?", 0o600)]
)
def test_the_mode_is_octal_and_private_by_default(query: str, mode: int) -> None:
    address = parse(f"sqlite:////x/y{query}")
    assert address.mode == mode
    assert address.shared == (mode != 0o600)


def test_durability_is_process_unless_it_is_full() -> None:
    assert parse("sqlite:////x/y").durability == "process"
    assert parse("sqlite:////x/y?durability=process").durability == "process"
    assert parse("sqlite:////x/y?mode=0660&durability=full").durability == "full"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:////", "names no file"),
        ("sqlite:///?mode=0600", "names no file"),
        ("sqlite://jobs.db", "names a host"),
        ("sqlite://data/jobs.db", "sqlite:////data/jobs.db for an absolute one"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://:memory:", "memory://"),
        ("sqlite:////var/lib/", "names a folder"),
        ("sqlite:///~/jobs.db", "not expanded"),
        ("sqlite:///jobs#1.db", "%23"),
        ("sqlite:///a%00b", "NUL"),
        ("sqlite:///a?cache=shared", "mode, durability"),
        ("sqlite:///a?mode=0660&mode=0600", "twice"),
        ("sqlite:///a?mode=0777", "not '0777'"),
        ("sqlite:///a?mode=rw", "not 'rw'"),
        ("sqlite:///a?mode=", "no value"),
        ("sqlite:///a?durability=none", "one of process, full"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_before_anything_is_touched(url: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        connect(url, SystemClock())
