"""The checks that every engine applies, and the arithmetic that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenure.core import rules
from tenure.errors import InvalidArgument
from tenure.model import EPHEMERAL_LIMIT, NodeConfig

GOOD_PATHS = ["/a", "/a/b", "/A-b_c.9", "/" + "x" * 255, "/" + "/".join(["y" * 254] * 4)]
BAD_PATHS = ["", "a", "/", "/a/", "//a", "/a//b", "/ä", "/a b", "/" + "x" * 256, "/a" * 513]


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_a_path_of_good_segments_is_accepted(path: str) -> None:
    rules.check_path(path)


@pytest.mark.parametrize("path", BAD_PATHS)
def test_any_other_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument):
        rules.check_path(path)


@pytest.mark.parametrize("name", ["a", "a b", "ü" * 512, "x" * 1024, "line\nbreak", "\x00"])
def test_a_name_is_text_of_up_to_1024_bytes(name: str) -> None:
    rules.check_name(name)


@pytest.mark.parametrize("name", ["", "x" * 1025, "ü" * 513, "\ud800"])
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        rules.check_name(name)


WRONG: list[Callable[[], None]] = [
    lambda: rules.check_path(7),  # type: ignore[arg-type]
    lambda: rules.check_name(b"bytes"),  # type: ignore[arg-type]
    lambda: rules.check_data("text"),  # type: ignore[arg-type]
    lambda: rules.check_data(b"x" * (rules.DATA_BYTES + 1)),
    lambda: rules.check_description("x" * 1025),
    lambda: rules.check_key(b"x" * 17),
    lambda: rules.check_window(0.99),
    lambda: rules.check_window(1800.1),
    lambda: rules.check_window(float("nan")),
    lambda: rules.check_limit(0),
    lambda: rules.check_limit(2**64),
    lambda: rules.check_limit(1.0),  # type: ignore[arg-type]
    lambda: rules.check_count(0, 4),
    lambda: rules.check_count(5, 4),
    lambda: rules.check_count(1.5, 4),  # type: ignore[arg-type]
    lambda: rules.check_count(2**53, EPHEMERAL_LIMIT),
    lambda: rules.check_count(EPHEMERAL_LIMIT - 1, EPHEMERAL_LIMIT),
    lambda: rules.check_shrink(3, 2, 4),
    lambda: rules.check_shrink(0, 2, 4),
    lambda: rules.check_timeout(-1),
    lambda: rules.check_timeout(float("nan")),
    lambda: rules.check_kind(True, False, "/a", "x"),
    lambda: rules.check_kind(False, True, "/a", "x"),
    lambda: rules.check_droppable("/default"),
    lambda: rules.check_new_limit(0),
    lambda: rules.check_new_limit(2**53),
    lambda: rules.check_new_limit(1.5),  # type: ignore[arg-type]
    lambda: rules.check_resizable(2**53, "/a", "x", ephemeral=False),
    lambda: rules.check_resizable(EPHEMERAL_LIMIT, "/a", "x", ephemeral=True),
]


@pytest.mark.parametrize("check", WRONG)
def test_a_wrong_value_is_refused(check: Callable[[], None]) -> None:
    with pytest.raises(InvalidArgument):
        check()


def test_the_greatest_values_are_accepted() -> None:
    rules.check_data(b"x" * rules.DATA_BYTES)
    rules.check_description("x" * 1024)
    rules.check_key(b"x" * 16)
    rules.check_window(1)
    rules.check_window(1800)
    rules.check_limit(EPHEMERAL_LIMIT)
    rules.check_count(2**53 - 1, EPHEMERAL_LIMIT)
    rules.check_count(EPHEMERAL_LIMIT, EPHEMERAL_LIMIT)
    rules.check_count(2**53, 2**53)
    rules.check_new_limit(2**53 - 1)
    rules.check_resizable(2**53 - 1, "/a", "x", ephemeral=False)
    rules.check_shrink(1, 2, 4)
    rules.check_shrink(4, 5, 3)  # the limit was lowered meanwhile
    rules.check_timeout(0)
    rules.check_timeout(None)
    rules.check_kind(True, True, "/a", "x")
    rules.check_kind(False, False, "/a", "x")
    rules.check_droppable("/other")


@pytest.mark.parametrize(
    ("held", "whole", "count", "limit", "expected"),
    [
        (0, False, 1, 1, True),
        (1, True, 1, 1, False),
        (3, False, 1, 4, True),
        (3, False, 2, 4, False),
        (1, False, 4, 4, False),
        (2**53 - 2, False, 1, 2**53 - 1, True),
        (2**53 - 1, True, 1, 2**53 - 1, False),
        (2**53 - 1, False, 1, 2**53, True),  # unbounded from here on
        (2**53 - 1, False, 2**53 - 1, EPHEMERAL_LIMIT, True),
        (1, False, EPHEMERAL_LIMIT, EPHEMERAL_LIMIT, False),
        (EPHEMERAL_LIMIT, True, 1, EPHEMERAL_LIMIT, False),
        (0, False, EPHEMERAL_LIMIT, EPHEMERAL_LIMIT, True),
    ],
)
def test_what_fits(held: int, whole: bool, count: int, limit: int, expected: bool) -> None:
    assert rules.fits(held, whole, count, limit) is expected


def test_order_ids_follow_the_wall_clock_and_never_fall_behind_what_was_seen() -> None:
    assert rules.next_order_id(0, 0, 1.5) == 1_500_000
    assert rules.next_order_id(1_500_000, 0, 1.5) == 1_500_001
    assert rules.next_order_id(7, 2_000_000, 1.5) == 2_000_001
    assert rules.next_order_id(0, 0, 4e9) < 2**53


def test_altering_leaves_unset_fields_alone() -> None:
    old = NodeConfig(2.0, 20.0, "strict", "relaxed", "detailed")
    assert rules.merge_config(old, NodeConfig()) == old
    new = NodeConfig(3.0, 30.0, "relaxed", "strict", "aggregated")
    assert rules.merge_config(old, new) == new


def test_a_node_without_a_grace_period_has_the_default() -> None:
    assert rules.grace_period(NodeConfig()) == rules.DEFAULT_GRACE
    assert rules.grace_period(NodeConfig(session_grace_period=3)) == 3
