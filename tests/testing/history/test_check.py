"""Hand-made histories, good and bad, rule by rule."""

from __future__ import annotations

import pytest

from tenure.testing.history import History, check
from tests.testing.history.tales import broken

HANDED_OVER = """
    0.0 p asks a
    0.1 a granted 1 until 30
    1.0 q asks b
    1.1 b queued 2
    5.0 a leaves
    5.1 b granted 2 until 35
    5.2 a gone released until 33
    6.0 b held until 36
    7.0 b leaves
    7.1 b gone released until 36
    9.0 - truth nothing none none
"""


def test_a_lock_that_is_handed_over_is_in_order() -> None:
    assert broken(HANDED_OVER) == []


def test_nothing_has_no_contradiction() -> None:
    assert check(History([])) == []


# limit


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 30
            2 q asks b
            3 b granted 2 until 30
            4 a leaves
            """,
            ["limit", "order"],
            id="two hold a mutex",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 3
            2 q asks b
            3 b granted 2 until 30
            9 a gone lost until 3
            """,
            ["loss"],
            id="one's deadline had passed",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 3
            2 a held until 9
            2 q asks b
            4 b granted 2 until 30
            5 a gone lost until 9
            """,
            ["limit", "order"],
            id="it had been renewed",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 30
            2 p crashed
            2 q asks b
            3 b granted 2 until 30
            """,
            [],
            id="who is dead believes nothing",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 30
            2 p paused
            3 q asks b
            4 b granted 2 until 40
            5 p crashed
            """,
            [],
            id="nor from the pause that it died in",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 30
            2 p paused
            3 q asks b
            4 b granted 2 until 40
            5 p continued
            """,
            ["limit", "order"],
            id="who goes on after a pause has believed meanwhile",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 30
            2 - revokes a
            3 q asks b
            4 b granted 2 until 40
            5 a gone lost until 30
            """,
            [],
            id="who is evicted believes until the news arrives",
        ),
        pytest.param(
            """
            0 p asks a
            1 - revokes all
            2 q asks b
            3 q asks c
            4 b granted 2 until 40
            5 - revokes all since 1
            6 c granted 3 until 40
            """,
            [],
            id="so does who was granted while it was done",
        ),
        pytest.param(
            """
            0 p asks a 2/3
            0 p asks b 1/3
            1 a granted 1
            1 b granted 2
            2 a shrinks 1
            2 q asks c 1/3
            3 c granted 3
            """,
            [],
            id="a part is given back",
        ),
        pytest.param(
            """
            0 p asks a 2/3
            0 p asks b 1/3
            1 a granted 1
            1 b granted 2
            2 a shrinks 1
            2 q asks c 2/3
            3 c granted 3
            """,
            ["limit", "order"],
            id="more is granted than was given back",
        ),
        pytest.param(
            """
            0 p asks a
            0 p asks b @other
            1 a granted 1
            1 b granted 2
            """,
            [],
            id="two semaphores are two",
        ),
    ],
)
def test_what_is_believed_stays_within_the_limit(text: str, rules: list[str]) -> None:
    assert broken(text) == rules
