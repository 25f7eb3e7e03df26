"""Hand-made histories, good and bad: losses, data, observers, and the end."""

from __future__ import annotations

import pytest

from tests.testing.history.tales import broken

# loss


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            11.4 a gone lost until 10
            """,
            [],
            id="within the grace",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            11.6 a gone lost until 10
            """,
            ["loss"],
            id="too late",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            8 p paused
            15 p continued
            16 a gone lost until 10
            """,
            [],
            id="it was paused",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            8 p paused
            9 p paused
            12 p continued
            15 p continued
            16 a gone lost until 10
            """,
            [],
            id="it was paused twice over",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            2 p paused
            7 p continued
            16 a gone lost until 10
            """,
            ["loss"],
            id="it was paused before that",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            12 a held until 10
            """,
            ["loss"],
            id="held after its deadline",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            12 a leaves
            12 a gone released until 10
            """,
            ["loss"],
            id="released after its deadline",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1 until 10
            12 a leaves
            12 a gone released until 20
            """,
            [],
            id="released before",
        ),
    ],
)
def test_a_loss_is_known_in_time(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


def test_a_busy_machine_gets_its_slack() -> None:
    text = """
        0 p asks a window 1
        1 a granted 1 until 10
        10.3 a gone lost until 10
        """
    assert broken(text) == ["loss"]
    assert broken(text, slack=0.5) == []


# data, observers

WRITTEN = """
    0 p calls c create x
    1 c returns ok
    2 p calls u update y
    3 u returns ok
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("4 q calls r read\n 5 r returns ok y", []),
        ("4 q calls r read\n 5 r returns ok x", ["data"]),
        ("2.5 q calls r read\n 5 r returns ok x", []),
        ("4 q calls r read\n 5 r returns missing", ["data"]),
        ("4 q calls d delete\n 5 d returns ok\n 6 q calls r read\n 7 r returns missing", []),
        ("4 q calls d delete\n 6 q calls r read\n 7 r returns missing", []),
        ("4 q calls d delete\n 5 d returns busy\n 6 q calls r read\n 7 r returns ok y", []),
        ("9 - truth y none none", []),
        ("9 - truth x none none", ["data"]),
        ("9 - truth nothing none none", ["data"]),
        ("4 q sees w 'y'\n 9 - truth y none none", []),
        ("4 q sees w 'x'\n 9 - truth y none none", ["observers"]),
        ("4 q sees w 'x'\n 5 q unobserved w\n 9 - truth y none none", []),
        ("4 q sees w 'x'\n 5 q crashed\n 9 - truth y none none", []),
        (
            "4 q sees w 'x'\n 5 q unobserved w\n 6 q sees w 'x'\n 9 - truth y none none",
            ["observers"],
        ),
        ("4 q sees w 'z'\n 5 q sees w 'y'", ["observers"]),
        ("0.5 q sees w nothing\n 1.5 q sees w 'y'", ["observers"]),
        ("4 q sees w nothing\n 9 - truth y none none", ["observers"]),
    ],
)
def test_data_is_what_somebody_wrote_last(text: str, rules: list[str]) -> None:
    assert broken(WRITTEN + text) == rules


# end

BELIEVING = """
    0 p asks a 2/3
    1 a granted 1
    2 q asks b 2/3
    2 b queued 2
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("9 - truth x 1 2", []),
        ("9 - truth x 1 none", ["end"]),
        ("9 - truth x none 2", ["end", "end"]),
        ("9 - truth x 1,2 none", ["end"]),
        ("9 - truth x 1 2,3", ["end"]),
        ("3 q asks c 1/3\n 9 - truth x 1 2,3", []),
        ("3 q asks c 1/3\n 9 - truth x 1 2,3,4", ["end"]),
        ("3 a leaves\n 9 - truth x 1 2", []),
        ("3 a leaves\n 9 - truth x 2 none", []),
        ("3 a leaves\n 9 - truth x none 2", ["end"]),
        ("3 a leaves\n 4 a gone released\n 9 - truth x 2 none", []),
        ("3 a leaves\n 4 a gone released\n 9 - truth x 1 2", ["end"]),
        ("3 p crashed\n 9 - truth x 1 2", []),
        ("3 p crashed\n 99 - truth x 1 2", ["end"]),
        ("3 p crashed\n 98 r asks c 2/3 recovers a\n 98 c granted 1\n 99 - truth x 1 2", []),
        ("3 - revokes a\n 3 a gone lost\n 9 - truth x 2 none", []),
        ("3 - revokes a\n 9 - truth x 2 none", []),
        ("4 o sees w 1\n 9 - truth x 1 2", []),
        ("4 o sees w 1\n 4 o sees w none\n 9 - truth x 1 2", ["observers"]),
    ],
)
def test_the_store_ends_with_what_is_believed(text: str, rules: list[str]) -> None:
    assert broken(BELIEVING + text) == rules
