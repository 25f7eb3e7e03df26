"""Hand-made histories, good and bad: fencing tokens, and what comes back."""

from __future__ import annotations

import pytest

from tests.testing.history.tales import broken

# fencing


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p asks a
            1 a granted 7
            2 a leaves
            3 q asks b @other
            4 b granted 6 @other
            """,
            ["fencing"],
            id="a token is smaller than one known before",
        ),
        pytest.param(
            """
            0 p asks a
            1 q asks b @other
            2 a granted 7
            3 b granted 6 @other
            """,
            [],
            id="which of two at once is first nobody knows",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 7
            2 a leaves
            3 q asks b @other
            4 b granted 7 @other
            """,
            ["fencing"],
            id="a token is given twice",
        ),
        pytest.param(
            """
            0 p asks a
            1 a queued 7
            2 a granted 8
            """,
            ["fencing"],
            id="a request changes its token",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 7
            2 p crashed
            3 r asks b @other
            4 b queued 8
            5 s asks c recovers a
            6 c granted 7
            7 s crashed
            8 t asks d recovers c
            9 d granted 7
            """,
            [],
            id="a resumed session keeps its tokens",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 7
            2 p crashed
            3 s asks c recovers a
            4 c granted 8
            """,
            ["fencing"],
            id="and not others",
        ),
        pytest.param(
            """
            0 p asks a @other
            0 a granted 7
            1 p crashed
            2 s asks c recovers ?
            4 c granted 6
            """,
            [],
            id="nobody knows what a process had that was killed too soon",
        ),
    ],
)
def test_fencing_tokens_rise(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


def test_tokens_rise_as_far_as_clocks_can_tell() -> None:
    text = """
        0.0 p asks a
        0.1 a granted 7
        0.2 a leaves
        0.3 q asks b @other
        0.4 b granted 6
        """
    assert broken(text, skew=0.1) == ["fencing"]
    assert broken(text, skew=0.25) == []


# never again


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p asks a
            1 a gone timeout until 30
            2 a granted 1
            """,
            ["never again"],
            id="granted after its timeout",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1
            2 a leaves
            3 a held
            """,
            ["never again"],
            id="held after it was given up",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1
            2 - revokes a
            2 a gone lost
            3 a held
            """,
            ["never again"],
            id="held after it was lost",
        ),
        pytest.param(
            """
            0 p asks a
            1 a leaves
            2 a granted 1
            3 a gone withdrawn
            """,
            [],
            id="cancelled in the instant of its grant",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1
            2 - revokes a
            3 a held
            4 a gone lost
            """,
            [],
            id="believed until the news arrives",
        ),
        pytest.param(
            """
            0 o sees w none
            1 o sees w 7
            2 o sees w 7,8
            3 o sees w 8
            4 o sees w 8,7
            """,
            ["never again"],
            id="an owner comes back",
        ),
    ],
)
def test_what_is_over_does_not_come_back(text: str, rules: list[str]) -> None:
    assert broken(text) == rules
