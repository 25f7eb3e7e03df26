"""Histories written by hand, one record a line: ``at who does what``.

    0 p asks a              for a mutex; ``asks a 2/5`` for 2 tokens of a limit of 5; then perhaps
                            ``for 3`` (a timeout), ``window 1``, ``recovers b``, ``key b``
    1 a queued 7
    1 a granted 7 until 30  ``until`` may be left out: for ever
    2 a held until 31
    2 a shrinks 1
    3 a leaves
    3 a gone released until 31
    3 - revokes a           a request; ``revokes process p``; ``since 2`` when it is done
    4 p paused              continued, crashed
    5 p calls c update x    create, ensure, update, delete, read; ``resize 4``
    6 c returns ok x
    7 p sees w 7,8          the owners (``none``: nobody); ``sees w 'x'`` data; ``sees w nothing``
    7 p unobserved w
    9 - truth x 7 8         data (``nothing``: it does not exist), owners, waiters; ``none``: nobody
    9 p finds 7 8           owners and waiters that a description shows
    0 p takes t 2 10/1      tokens of a rate of 10 a second; ``10/1/5``: in bursts of 5
    1 t took 0.5 waited 0.2 the second of the grant by the store's clock; ``refused``; ``refunds 1``

Everything is about ``m`` on ``/n``, unless the line ends with another name, as in ``@other``.
"""

from __future__ import annotations

from math import inf
from typing import cast

from tenure.core.rates import MICROSECONDS
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.history import History, Record, Violation, check
from tenure.testing.history.records import (
    Called,
    Continued,
    Crashed,
    Described,
    Gone,
    Granted,
    Held,
    Leaves,
    Observed,
    Operation,
    Outcome,
    Paused,
    Queued,
    Refunds,
    Requested,
    Returned,
    Revokes,
    Shrinks,
    Takes,
    Took,
    Truth,
    Unobserved,
    Why,
)

WINDOW = 30.0


def tale(text: str, skew: float = 0.0, slack: float = 0.0) -> History:
    """The history that a text tells."""
    return History([record(line) for line in text.splitlines() if line.strip()], skew, slack)


def found(text: str, skew: float = 0.0, slack: float = 0.0) -> list[Violation]:
    return check(tale(text, skew, slack))


def broken(text: str, skew: float = 0.0, slack: float = 0.0) -> list[str]:
    """The rules that a text breaks."""
    return [violation.rule for violation in found(text, skew, slack)]


def record(line: str) -> Record:
    told, _, name = line.partition("@")
    moment, who, verb, *words = told.split()
    at, name = float(moment), name.strip() or "m"
    match verb:
        case "asks":
            return _asks(at, who, name, words)
        case "queued":
            return Queued(at, who, int(words[0]))
        case "granted":
            return Granted(at, who, int(words[0]), _after("until", words) or inf)
        case "held":
            return Held(at, who, _after("until", words) or inf)
        case "shrinks":
            return Shrinks(at, who, int(words[0]))
        case "leaves":
            return Leaves(at, who)
        case "gone":
            return Gone(at, who, cast(Why, words[0]), _after("until", words))
        case "revokes":
            since = _after("since", words)
            if words[0] == "process":
                return Revokes(at, session_of=words[1], since=since)
            if words[0] == "all":
                return Revokes(at, node="/n", name=name, since=since)
            return Revokes(at, words[0], since=since)
        case "paused":
            return Paused(at, who)
        case "continued":
            return Continued(at, who)
        case "crashed":
            return Crashed(at, who)
        case "calls":
            argument = words[2].encode() if len(words) > 2 else None
            return Called(at, who, words[0], "/n", name, cast(Operation, words[1]), argument)
        case "returns":
            result = words[1].encode() if len(words) > 1 else None
            return Returned(at, who, cast(Outcome, words[0]), result)
        case "sees":
            return Observed(at, who, words[0], "/n", name, _value(words[1]))
        case "unobserved":
            return Unobserved(at, who, words[0])
        case "truth":
            data = None if words[0] == "nothing" else words[0].encode()
            return Truth(at, "/n", name, data, _ids(words[1]), _ids(words[2]))
        case "finds":
            return Described(at, who, "/n", name, _ids(words[0]), _ids(words[1]))
        case "takes":
            return _takes(at, who, name, words)
        case "took":
            granted = round(float(words[0]) * MICROSECONDS)
            return Took(at, who, granted, _after("waited", words) or 0.0)
        case "refused":
            return Took(at, who)
        case "refunds":
            return Refunds(at, who, int(words[0]))
    raise ValueError(line)


def _asks(at: float, who: str, name: str, words: list[str]) -> Requested:
    count = limit = EPHEMERAL_LIMIT
    if len(words) > 1 and "/" in words[1]:
        count, limit = (int(number) for number in words[1].split("/"))
    former = "".join(words[words.index("recovers") + 1 :]) if "recovers" in words else None
    window, timeout = _after("window", words) or WINDOW, _after("for", words)
    key = words[words.index("key") + 1] if "key" in words else None
    return Requested(at, who, words[0], "/n", name, count, limit, window, timeout, former, key)


def _takes(at: float, who: str, name: str, words: list[str]) -> Takes:
    limit, per, *burst = words[2].split("/")
    period = round(float(per) * MICROSECONDS)
    rule = int(limit), period, int(burst[0] if burst else limit)
    return Takes(at, who, words[0], "/n", name, int(words[1]), *rule)


def _after(word: str, words: list[str]) -> float | None:
    return float(words[words.index(word) + 1]) if word in words else None


def _ids(word: str) -> tuple[int, ...]:
    return () if word == "none" else tuple(int(number) for number in word.split(","))


def _value(word: str) -> bytes | tuple[int, ...] | None:
    if word == "nothing":
        return None
    return word.strip("'").encode() if word.startswith("'") else _ids(word)
