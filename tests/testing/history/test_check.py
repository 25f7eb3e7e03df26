"""The checker as a whole, and how it tells of what it finds."""

from __future__ import annotations

import pytest

from tenure.testing.history import Called, Granted, History, Revokes, Violation, check
from tenure.testing.history.timeline import MOST_LINES
from tests.testing.history.tales import broken, found, tale
from tests.testing.history.test_ends import WRITTEN

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


def test_a_history_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="two requests of this history are called 'a'"):
        broken("0 p asks a\n 1 q asks a")
    with pytest.raises(ValueError, match="there is no request for this record: Leaves"):
        broken("0 a leaves")


def test_a_violation_is_a_timeline_that_a_person_can_read() -> None:
    [violation, _] = found(
        """
        0.5 p asks a 2/3 for 5
        0.6 a granted 1 until 30
        1.0 q asks b 2/3
        1.5 b granted 2 until 30
        2.0 p asks c 1/3
        2.5 a leaves
        2.6 a gone released until 31
        """
    )
    assert violation.rule == "limit"
    assert violation.what == (
        "a (order id 1) and b (order id 2) hold 'm' on /n at once, 4 tokens of a limit of 3"
    )
    assert str(violation).splitlines() == [
        f"limit: {violation.what}",
        "     0.000000 s  p  a requests 2 of 'm' (limit 3), for 5 s",
        ">    0.100000 s  p  a is granted, fencing token 1, held until 29.500000 s",
        "     0.500000 s  q  b requests 2 of 'm' (limit 3)",
        ">    1.000000 s  q  b is granted, fencing token 2, held until 29.500000 s",
        "     2.000000 s  p  a may leave from here",
        "     2.100000 s  p  a is released, was held until 30.500000 s",
    ]


def test_a_timeline_leaves_out_its_middle() -> None:
    samples = "".join(f"{1 + number / 100} a held until 99\n" for number in range(100))
    [violation, _] = found(
        f"""
        0 p asks a
        1 a granted 1 until 30
        {samples}
        3 q asks b
        4 b granted 2 until 30
        """
    )
    lines = str(violation).splitlines()
    assert len(lines) <= MOST_LINES + 2
    assert "  ... 64 records ..." in lines
    assert len([line for line in lines if line.startswith(">")]) == 2


def test_what_is_broken_for_good_is_told_a_few_times() -> None:
    lines = [f"{number} p asks r{number}\n{number} r{number} granted 7" for number in range(100)]
    rules = broken("\n".join(lines))
    assert {rules.count(rule) for rule in rules} <= {1, 5}


def test_of_calls_that_nothing_explains_those_are_told_that_matter() -> None:
    many = "".join(
        f"{10 + n} p calls v{n} update z{n}\n {10.5 + n} v{n} returns ok\n" for n in range(40)
    )
    [violation] = found(
        f"{WRITTEN}{many} 60 q calls r read\n 61 r returns ok z38\n 70 q calls s read"
    )
    assert violation.rule == "data"
    assert violation.what == "no order of the calls on 'm' on /n explains what it answered"
    assert str(violation).splitlines()[-4:] == [
        "     7.000000 s  p  v39: update 'm' b'z39' ...",
        "     7.500000 s  p  ... v39: ok",
        "    18.000000 s  q  r: read 'm' ...",
        ">   19.000000 s  q  ... r: ok b'z38'",
    ]


def test_every_record_is_told_in_words() -> None:
    records = tale(
        """
        0.0 p asks a recovers b
        0.1 p asks c recovers
        0.2 a queued 7
        0.3 a granted 7
        0.4 a held until 9
        0.5 a shrinks 1
        0.6 - revokes a
        0.7 - revokes process p
        0.8 - revokes all
        1.0 p paused
        1.1 p continued
        1.2 p crashed
        2.0 q calls d update x
        2.1 d returns ok
        2.2 q calls e read
        3.0 o sees w 'x'
        3.1 o sees w 7,8
        3.2 o sees w nothing
        3.3 o unobserved w
        4.0 - truth x 7 8
        4.1 - truth nothing none none
        """
    ).records
    records += (
        Granted(5.0, "a", None, 9.0),
        Revokes(5.1),
        Called(5.2, "q", "f", "/n", "m", "update", b"x" * 99),
    )
    violation = Violation("limit", "/n", "m", "what", records)
    assert [line[17:] for line in violation.timeline()[1:]] == [
        "p  a requests all of 'm', continuing b",
        "p  c requests all of 'm', continuing a former request",
        "p  a has its place, order id 7",
        "p  a is granted, fencing token 7, held until the end",
        "p  a is held until 9.000000 s",
        "p  a may have only 1 from here",
        "   an administrator revokes a",
        "   an administrator revokes the requests of p",
        "   an administrator revokes 'm'",
        "p  is paused",
        "p  continues",
        "p  crashes",
        "q  d: update 'm' b'x' ...",
        "q  ... d: ok",
        "q  e: read 'm' ...",
        "o  w is shown b'x'",
        "o  w is shown the owners [7, 8]",
        "o  w is shown that there is none",
        "o  w has ended",
        "   in the store 'm' has b'x', owners [7], waiters [8]",
        "   in the store 'm' has no data, owners [], waiters []",
        "p  a is granted, held until 9.000000 s",
        "   an administrator revokes everything",
        "q  f: update 'm' b'" + "x" * 55 + "... ...",
    ]


def test_a_violation_of_no_record_is_a_sentence() -> None:
    assert str(Violation("error", "/n", "m", "it hangs", ())) == "error: it hangs"
