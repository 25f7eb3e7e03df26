"""How things are shown: what fits, what is shortened, what is escaped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tenure import RequestDescription, SemaphoreDescription
from tenure.cli.look import describe_program
from tenure.cli.output import Column, data_json, duration, fitted, safe, shortened, shown_data
from tenure.shown import kind

COLUMNS = [
    Column("Name", text=True, keep=True),
    Column("Held", keep=True),
    Column("Session"),
    Column("Owner", text=True),
]
NATURAL = [20, 6, 7, 40]


@pytest.mark.parametrize(
    ("room", "widths"),
    [
        (200, {0: 20, 1: 6, 2: 7, 3: 40}),
        (79, {0: 20, 1: 6, 2: 7, 3: 40}),
        (60, {0: 20, 1: 6, 2: 7, 3: 21}),
        (39, {0: 10, 1: 6, 2: 7, 3: 10}),
        (38, {0: 20, 1: 6, 2: 7}),
        (28, {0: 11, 1: 6, 2: 7}),
        (26, {0: 18, 1: 6}),
        (20, {0: 12, 1: 6}),
        (5, {0: 10, 1: 6}),  # there is no room for less
    ],
)
def test_a_table_is_fitted(room: int, widths: dict[int, int]) -> None:
    assert fitted(COLUMNS, NATURAL, room) == widths


def test_columns_of_a_high_rank_are_omitted_first() -> None:
    columns = [replace(each, rank=rank) for each, rank in zip(COLUMNS, [0, 0, 2, 1], strict=True)]
    assert list(fitted(columns, NATURAL, 38)) == [0, 1, 3]
    assert list(fitted(columns, NATURAL, 20)) == [0, 1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0.0 s"),
        (9.96, "10.0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (7384, "2 h 3 min"),
        (86400 * 3 + 3600 * 4, "3 d 4 h"),
    ],
)
def test_a_duration_is_told_in_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain żółw 🐢", "plain żółw 🐢"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\U000e0001", r"\U000e0001"),
        ("\udcff", r"\xff"),
        ("\x7f\x9b", r"\x7f\x9b"),
    ],
)
def test_nothing_invisible_is_shown(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_data_is_shown_as_far_as_there_is_room() -> None:
    assert shown_data(b"ab\xffc") == r"ab\xffc"
    assert shown_data(b"x" * 60) == "x" * 60
    assert shown_data(b"x" * 61) == "x" * 60 + "… (61 bytes)"
    assert shown_data(b"x" * 1_000_000, 10) == "x" * 10 + "… (1,000,000 bytes)"


def test_data_in_json_is_text_or_base64() -> None:
    assert data_json("żółw".encode()) == {"data": "żółw", "data_base64": None}
    assert data_json(b"\xff") == {"data": None, "data_base64": "/w=="}
    assert data_json(b"abc", 2) == {"data": "ab", "data_base64": None, "data_bytes": 3}
    assert data_json(b"\xffbc", 1) == {"data": None, "data_base64": "/w==", "data_bytes": 3}


@pytest.mark.parametrize(
    ("numbers", "common", "rest"),
    [
        ([], "", []),
        ([7, 12], "", ["7", "12"]),
        ([1795367972252788, 1795367972310021], "1795367972", ["…252788", "…310021"]),
        ([1795367972252788], "179536797225", ["…2788"]),
        ([1795367972252788, 1795367972252789], "179536797225", ["…2788", "…2789"]),
        ([1795367972252788, 17953679722527880], "", ["1795367972252788", "17953679722527880"]),
        ([1795367972252788, 2795367972252788], "", ["1795367972252788", "2795367972252788"]),
    ],
)
def test_fencing_tokens_lose_the_digits_that_all_of_them_share(
    numbers: list[int], common: str, rest: list[str]
) -> None:
    assert shortened(numbers) == (common, rest)


@pytest.mark.parametrize(
    ("limit", "data", "held", "waiting", "name"),
    [
        (4, b"", 0, 0, "semaphore"),
        (1, b"", 0, 0, "election?"),
        (1, b"", 1, 0, "election?"),
        (1, b"{}", 0, 0, "config"),
        (1, b"{}", 1, 0, "semaphore"),
        (1, b"{}", 0, 1, "semaphore"),
    ],
)
def test_a_lasting_semaphore_is_called_what_it_looks_like(
    limit: int, data: bytes, held: int, waiting: int, name: str
) -> None:
    assert kind(SemaphoreDescription("x", data, limit, held, False, (), (), waiting)) == name


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"program": "backup.py", "pid": 4242, "host": "db-1"}, "backup.py, pid 4242 on db-1"),
        (
            {"program": "backup.py", "pid": 4242, "session_description": "nightly"},
            "backup.py, pid 4242 (nightly)",
        ),
        (
            {"program": "tenure", "pid": 4242, "session_description": "tenure run sh"},
            "tenure run sh, pid 4242",
        ),
        ({"pid": 4242, "session_description": "nightly"}, "nightly, pid 4242"),
        ({}, "session 7"),
        ({"program": "a\x1b[2J", "host": "\x9b"}, r"a\x1b[2J, session 7 on \x9b"),
    ],
)
def test_a_holder_is_called_by_its_program(facts: dict[str, Any], name: str) -> None:
    assert describe_program(RequestDescription(7, 1, 1, b"", **facts)) == name
