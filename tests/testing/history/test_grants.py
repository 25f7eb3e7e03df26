"""Hand-made histories, good and bad: what is granted, to whom, in which order."""

from __future__ import annotations

import pytest

from tests.testing.history.tales import broken

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
            0 p crashed
            1 p asks a
            2 a granted 1 until 30
            3 q asks b
            4 b granted 2 until 30
            """,
            [],
            id="nor does who lived for a moment more, after it was said to be killed",
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
        pytest.param(
            """
            0 p asks a 18446744073709551614/18446744073709551615
            1 a granted 1
            2 q asks b 18446744073709551614/18446744073709551615
            3 b granted 2
            """,
            [],
            id="a limit that stands for unbounded bounds nobody",
        ),
        pytest.param(
            """
            0 p asks a 1/18446744073709551615
            1 a granted 1
            2 q asks b
            3 b granted 2
            """,
            ["limit", "order"],
            id="but who wants the whole of it is alone",
        ),
        pytest.param(
            """
            0 p asks a 2/2
            1 a granted 1
            2 r calls c resize 3
            3 c returns ok
            4 q asks b 1/2
            5 b granted 2
            """,
            [],
            id="a limit was raised",
        ),
        pytest.param(
            """
            0 p asks a 2/2
            1 a granted 1
            2 q asks b 1/2
            3 b granted 2
            4 r calls c resize 3
            5 c returns ok
            """,
            ["limit", "order"],
            id="a limit was raised too late",
        ),
        pytest.param(
            """
            0 p asks a 2/2
            1 a granted 1
            2 r calls c resize 3
            3 c returns missing
            4 q asks b 1/2
            5 b granted 2
            """,
            ["limit", "order"],
            id="a limit was not raised",
        ),
        pytest.param(
            """
            0 p asks a 2/4
            0 q asks b 2/4
            1 a granted 1
            1 b granted 2
            2 r calls c resize 3
            3 c returns ok
            """,
            [],
            id="a lower limit takes nothing away",
        ),
        pytest.param(
            """
            0 p asks a 2/4
            1 a granted 1
            2 r calls c resize 3
            3 c returns ok
            4 q asks b 2/4
            5 b granted 2
            """,
            ["limit", "order"],
            id="a lower limit holds for those who come later",
        ),
        pytest.param(
            """
            0 p asks a 2/4
            1 a granted 1
            2 r calls c resize 3
            3 q asks b 2/4
            4 b granted 2
            """,
            [],
            id="nobody knows whether a limit was lowered yet",
        ),
        pytest.param(
            """
            0 p asks a 2/4
            1 a granted 1
            2 r calls c resize 2
            3 c returns ok
            4 r calls d resize 4
            5 d returns ok
            6 q asks b 2/4
            7 b granted 2
            """,
            [],
            id="a limit was lowered and raised again",
        ),
        pytest.param(
            """
            0 p asks a 2/4
            0 q asks b 4/4
            1 a granted 1
            1 b queued 2
            2 r calls c resize 3
            3 q asks d 1/4
            4 c returns ok
            5 d granted 3
            """,
            [],
            id="a waiter that is too large makes way",
        ),
    ],
)
def test_what_is_believed_stays_within_the_limit(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


def test_clocks_that_disagree_get_their_leeway() -> None:
    early = """
        0 p asks a
        1 a granted 1
        5.00 a leaves
        2 q asks b
        4.95 b granted 2
        """
    assert broken(early) == ["limit", "order"]
    assert broken(early, skew=0.1) == []
    assert broken(early, skew=0.01) == ["limit", "order"]


# order


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p asks a 2/3
            1 a granted 1
            2 q asks b 2/3
            2 b queued 2
            3 r asks c 1/3
            4 c granted 3
            """,
            ["order"],
            id="a small request passes a large one",
        ),
        pytest.param(
            """
            0 p asks a 2/3
            1 a granted 1
            2 q asks b 2/3 for 1
            2 b queued 2
            3 r asks c 1/3
            4 c granted 3
            """,
            [],
            id="the large one had timed out",
        ),
        pytest.param(
            """
            0 p asks a 2/3
            1 a granted 1
            2 q asks b 1/3 for 1
            3 b granted 2
            4 r asks c 1/3
            5 c granted 3
            """,
            ["limit", "order"],
            id="a timeout ends with the grant",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 p paused
            2 q asks b
            8 p continued
            9 b granted 2
            10 a gone failed until 30
            """,
            ["order"],
            id="a short pause keeps the place",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 p paused
            2 q asks b
            12 p continued
            13 b granted 2
            14 a gone failed until 20
            """,
            [],
            id="a long pause may end the session",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 p paused
            2 q asks b
            7 p continued
            8 p paused
            13 p continued
            14 b granted 2
            15 a gone failed until 20
            """,
            [],
            id="so may several close to each other",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 q asks b
            5 b granted 2
            9 a gone failed until 4
            """,
            [],
            id="the session had no proof any more",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 q asks b
            5 b granted 2
            9 a gone failed
            """,
            [],
            id="what has failed may never have been there",
        ),
        pytest.param(
            """
            0 p asks a
            0 a queued 1
            1 q asks b
            3 a leaves
            5 b granted 2
            6 a gone withdrawn until 30
            """,
            [],
            id="who gives up makes room",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1
            2 p crashed
            3 q asks b
            3 b queued 2
            4 r asks c recovers a
            4 c queued 1
            5 c granted 1
            6 c leaves
            6 b granted 2
            """,
            [],
            id="a resumed session keeps its place",
        ),
        pytest.param(
            """
            0 p asks a
            1 a granted 1
            2 p crashed
            3 q asks b
            4 b granted 2 until 4.5
            5 r asks c recovers a
            5 c queued 1
            6 c granted 1
            """,
            ["order"],
            id="nobody is granted what a resumed session still has",
        ),
    ],
)
def test_grants_follow_the_order_of_the_queue(text: str, rules: list[str]) -> None:
    assert broken(text) == rules
