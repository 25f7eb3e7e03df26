"""Replies to commands that may have been executed before."""

from __future__ import annotations

import pytest

from tenure.engines._kit.commands.replies import REPEATED, repeated


@pytest.mark.parametrize(
    ("command", "reply", "expected"),
    [
        ("create_node", ["exists"], ["exists", REPEATED]),
        ("create_node", ["ok"], ["ok"]),
        ("drop_node", ["no node"], ["ok"]),
        ("drop_node", ["busy", 1], ["busy", 1]),
        ("end_session", ["ok", False], ["ok", True]),
        ("end_session", ["no node"], ["no node"]),
        ("evict", ["missing"], ["ok", True]),
        ("describe", ["missing"], ["missing"]),
    ],
)
def test_what_a_repeated_command_does_not_find_was_removed_by_the_first_one(
    command: str, reply: list[object], expected: list[object]
) -> None:
    assert repeated(command, reply) == expected


def test_the_refusal_of_a_repeated_command_stays_one() -> None:
    refusal = RuntimeError("out of memory")
    assert repeated("evict", refusal) is refusal
