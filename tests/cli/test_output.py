"""How things are shown: what fits, what is shortened, what is escaped."""

from __future__ import annotations

import pytest

from tenure.cli.output import Column, data_json, duration, fitted, safe, shown_data

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
