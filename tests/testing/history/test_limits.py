"""Rules of rates, and of semaphores in which each key has a limit."""

from __future__ import annotations

import pytest

from tenure.testing.history import Takes
from tests.testing.history.tales import broken, found, tale

KEYED = """
0 p asks a/key 1/1 @m/key/a
0 p asks a 1/2 key a/key
0 p asks b/key 1/1 @m/key/a
0 p asks b 1/2 key b/key
0 p asks c/key 1/1 @m/key/c
0 p asks c 1/2 key c/key
"""
"""Two requests of one key, and one of another, of which each has one token."""

HELD = """
1 a/key granted 1 @m/key/a
1 a granted 2
1 c/key granted 3 @m/key/c
1 c granted 4
"""

NEXT = """
2 a leaves
2 a/key leaves
2 a gone released
2 a/key gone released
3 b/key granted 5 @m/key/a
3 b granted 6
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(KEYED + HELD, [], id="each key has its tokens"),
        pytest.param(
            KEYED + HELD + NEXT,
            [],
            id="one after the other",
        ),
        pytest.param(
            KEYED + HELD + "2 b/key granted 5 @m/key/a\n2 b granted 6",
            ["limit", "limit", "order", "order"],
            id="a key has more than its limit",
        ),
        pytest.param(
            KEYED + HELD + "1.5 p finds 2,4 none" + NEXT,
            [],
            id="a description shows one of each",
        ),
        pytest.param(
            KEYED + HELD + "1.5 p finds 2,4 6" + NEXT,
            ["turns"],
            id="a description shows a key twice",
        ),
        pytest.param(
            KEYED + HELD + NEXT + "4 - truth x 2,6 none",
            ["end", "end"],
            id="what has left, and what is held, is judged as everywhere",
        ),
        pytest.param(
            KEYED + HELD + "1.2 - revokes a/key\n1.5 p finds 2,4 6" + NEXT,
            [],
            id="who evicts the tokens of a key alone frees a place",
        ),
        pytest.param(
            """
            0 p asks a/key 1/2 @m/key/a
            0 p asks a 1/9 key a/key
            0 p asks b/key 1/2 @m/key/a
            0 p asks b 1/9 key b/key
            1 a/key granted 1 @m/key/a
            1 a granted 8
            1 b/key granted 2 @m/key/a
            1 b granted 7
            """,
            [],
            id="two that are in the key at once may race",
        ),
        pytest.param(
            """
            0 p asks a/key 1/2 @m/key/a
            0 p asks a 1/9 key a/key
            0 p asks b/key 2/2 @m/key/a
            0 p asks b 2/9 key b/key
            1 b/key granted 2 @m/key/a
            1 b granted 7
            1.5 b leaves
            1.5 b/key leaves
            2 a/key granted 1 @m/key/a
            2 a granted 8
            """,
            ["order", "turns"],
            id="the order within a key",
        ),
    ],
)
def test_keys_have_limits_and_take_turns(text: str, rules: list[str]) -> None:
    assert sorted(broken(text)) == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        pytest.param(
            """
            0 p takes a 6 10/1
            1 a took 5
            1 p takes b 4 10/1
            1 b took 5.1
            1 p takes c 1 10/1
            2 c took 6 waited 0.9
            """,
            [],
            id="the window is full, and then not any more",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            1 a took 5
            9 p takes b 5 10/1
            9 b took 5.9
            """,
            ["rate"],
            id="too many by the clock of the store",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            0.1 a took 5
            0.2 p takes b 5 10/1
            0.3 b took 7
            """,
            ["rate"],
            id="too many by the clock of the programs",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            0.1 a took 5
            9 p takes b 5 10/1
            9 b refused
            9 p takes c 5 10/1
            """,
            [],
            id="what was refused, or not answered, does not count",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            1 a took 5
            2 a refunds 2
            2 p takes b 5 10/1
            2 b took 5.9
            """,
            [],
            id="nor does what was refunded",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            1 a took 5
            2 p takes b 5 10/1
            2 b took 5.9
            3 a refunds 1
            """,
            [],
            id="it is refunded when it is said, or was before",
        ),
        pytest.param(
            """
            0 p takes a 5 10/1/5
            1 a took 5
            2 p takes b 1 10/1/5
            2 b took 5.4
            """,
            ["rate"],
            id="a burst within the limit",
        ),
        pytest.param(
            """
            0 p takes a 5 10/1/5
            1 a took 5
            2 p takes b 5 10/1/5
            2 b took 5.5
            3 p takes c 1 10/1/5
            3 c took 6
            """,
            [],
            id="two bursts are the limit",
        ),
        pytest.param(
            """
            0 p takes a 1 10/1
            1 a took 9
            2 q takes b 1 10/1
            3 b took 8
            """,
            ["rate"],
            id="the order of the calls",
        ),
        pytest.param(
            """
            0 p takes a 1 10/1
            2 a took 9
            1 q takes b 1 10/1
            3 b took 8
            """,
            [],
            id="two at once have no order",
        ),
        pytest.param(
            """
            0 p takes a 1 10/1
            9 a took 9 waited 8
            2 q takes b 1 10/1
            3 b took 8
            """,
            ["rate"],
            id="the answer came before the wait",
        ),
        pytest.param(
            """
            0 p takes a 1 10/1
            1 a took 9
            2 a refunds 1
            2 q takes b 1 10/1
            3 b took 8
            """,
            [],
            id="what was refunded as a whole has no place in the order",
        ),
        pytest.param(
            """
            0 p takes a 1 10/1
            1 a took 9 waited 2
            """,
            ["rate"],
            id="a program begins before its grant",
        ),
        pytest.param(
            """
            0 p takes a 6 10/1
            1 a took 5
            2 p takes b 6 20/1
            2 b took 5.5
            """,
            [],
            id="a rate that was resized is not judged",
        ),
    ],
)
def test_rates_have_limits_in_every_window(text: str, rules: list[str]) -> None:
    assert broken(text) == rules


def test_clocks_that_disagree_get_their_leeway() -> None:
    text = """
    0 p takes a 6 10/1
    0.4 a took 5
    0.8 q takes b 5 10/1
    0.9 b took 7
    """
    assert broken(text) == ["rate"]
    assert broken(text, skew=0.5) == []
    order = """
    0 p takes a 1 10/1
    1 a took 9
    1.2 q takes b 1 10/1
    2 b took 8
    """
    assert broken(order) == ["rate"]
    assert broken(order, skew=0.5) == []


def test_the_timeline_tells_of_takes() -> None:
    [violation] = found(
        """
        0 p takes a 5 10/1/5
        1 a took 5 waited 0.5
        2 p takes b 1 10/1/5
        2 b took 5.4
        2 b refunds 0
        3 p takes c 1 10/1/5
        3 c refused
        """
    )
    text = str(violation)
    assert "rate: 6 tokens of 'm' on /n were granted within 0.5 s, and 5 may be" in text
    assert "p  a takes 5 of 'm' (10 per 1 s, in bursts of 5)" in text
    assert ">    1.000000 s  p  a is granted for 5000000 us, after 0.500000 s" in text
    assert "p  b may have 0 fewer from here" in text


def test_the_timeline_tells_of_descriptions() -> None:
    [violation] = found(KEYED + HELD + "1.5 q finds 2,4 6" + NEXT)
    assert (
        "turns: a (order id 2) and b (order id 6) of 'm/key/a' are in the queue of 'm' at once, "
        in (str(violation))
    )
    assert "q  'm' has the owners [2, 4] and the waiters [6]" in str(violation)


def test_a_take_is_made_once_and_before_its_answer() -> None:
    with pytest.raises(ValueError, match="two takes of this history are called 'a'"):
        broken("0 p takes a 1 10/1\n1 p takes a 1 10/1")
    with pytest.raises(ValueError, match="there is no take for this record"):
        broken("0 a refused")
    assert isinstance(tale("0 p takes a 1 10/1").records[0], Takes)
