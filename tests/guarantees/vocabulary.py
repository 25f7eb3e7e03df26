"""Vocabulary of the guarantee table: engines, faults and promises, and the marks made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

import pytest

from tests.engines.stores import VARIANTS

Engine: TypeAlias = str
"""The name of a variant that has a title, or "simulated"."""

MEMORY, SQLITE, DURABLE_SQLITE, REDIS, ETCD = "memory", "sqlite", "sqlite-full", "redis", "etcd"
PORTABLE_SQLITE, POSTGRESQL = "sqlite-portable", "postgresql"
DFLOCKD, SERVED, YDB, SIMULATED = "dflockd", "tenure", "ydb", "simulated"

ENGINES: dict[Engine, str] = {
    **{each.name: each.title for each in VARIANTS if each.title},
    SIMULATED: "Simulated: drifting clocks, a bad network, and `memory://` behind it",
}

Promise: TypeAlias = Literal[
    "one owner",
    "in order",
    "tokens rise",
    "loss reported",
    "kept",
    "nothing leaks",
    "others proceed",
    "answers stand",
    "fenced",
]

PROMISES: dict[Promise, str] = {
    "one owner": "no more requests are held at once than the limit allows",
    "in order": "requests are granted in the order of their arrival",
    "tokens rise": "a later grant has a higher fencing token",
    "loss reported": "a program that loses a lease or its place in a queue detects that by the "
    "deadline at the latest, and is notified at once when the store can reach it",
    "kept": "a program that works, or works again within its recovery window, loses nothing; a "
    "resumed session has everything",
    "nothing leaks": "what was withdrawn, or belonged to an ended session, is free",
    "others proceed": "the next waiter is granted: at once, or after the recovery window where the "
    "store cannot detect the end sooner",
    "answers stand": "what the store has answered to a program is still true",
    "fenced": "late writes of a former holder are refused, where the data has a fence",
}

Fault: TypeAlias = Literal[
    "none",
    "killed",
    "stopped",
    "stalled",
    "suspended",
    "cancelled",
    "cut off",
    "stuck peer",
    "disk full",
    "restarted",
    "power cut",
    "wall clock",
    "clocks drift",
    "fork",
    "administrator",
    "taken over",
]

FAULTS: dict[Fault, str] = {
    "none": "contention alone",
    "killed": "a holder's or waiter's process is killed (`kill -9`)",
    "stopped": "a process is stopped (`SIGSTOP`), for less or more than its window",
    "stalled": "an event loop is stuck",
    "suspended": "the machine is suspended",
    "cancelled": "a task is cancelled, at any step",
    "cut off": "the store is out of reach, or its answers are lost",
    "stuck peer": "another process is stopped or hangs while it uses the store",
    "disk full": "the disk is full",
    "restarted": "a program is restarted, or no program has it open for a while",
    "power cut": "the machine crashes or is restarted",
    "wall clock": "the wall clock jumps",
    "clocks drift": "the clocks of the clients disagree",
    "fork": "a process forks",
    "administrator": "a session is ended, a request evicted, a semaphore deleted by force, a limit "
    "changed",
    "taken over": "a session is resumed by another process while its own still runs",
}

CONCERNS: dict[Fault, tuple[Promise, ...]] = {
    "none": ("one owner", "in order", "tokens rise", "nothing leaks", "others proceed"),
    "killed": ("one owner", "in order", "tokens rise", "nothing leaks", "others proceed"),
    "stopped": ("one owner", "tokens rise", "loss reported", "kept", "others proceed", "fenced"),
    "stalled": ("one owner", "loss reported", "kept", "others proceed"),
    "suspended": ("one owner", "loss reported", "kept", "others proceed"),
    "cancelled": ("one owner", "in order", "kept", "nothing leaks", "others proceed"),
    "cut off": ("one owner", "loss reported", "kept", "nothing leaks", "others proceed"),
    "stuck peer": ("in order", "kept", "others proceed"),
    "disk full": ("kept", "nothing leaks", "others proceed", "answers stand"),
    "restarted": ("tokens rise", "kept", "nothing leaks", "answers stand"),
    "power cut": ("tokens rise", "kept", "nothing leaks", "others proceed", "answers stand"),
    "wall clock": ("tokens rise", "loss reported", "kept"),
    "clocks drift": ("one owner", "loss reported", "kept"),
    "fork": ("one owner", "kept", "nothing leaks", "others proceed"),
    "administrator": (
        *("one owner", "in order", "tokens rise", "loss reported", "nothing leaks"),
        *("others proceed", "fenced"),
    ),
    "taken over": ("one owner", "in order", "tokens rise", "loss reported", "others proceed"),
}
"""Promises that a fault could break. The other cells of its line are blank."""

_NO_DISK = "a simulated machine has no disk, and its processes do not fork"

INAPPLICABLE: dict[tuple[Engine, Fault], str] = {
    **{
        (each.name, cast("Fault", fault)): why
        for each in VARIANTS
        for fault, why in each.inapplicable.items()
    },
    **{
        (SIMULATED, fault): _NO_DISK
        for fault in ("stuck peer", "disk full", "restarted", "power cut", "fork")
    },
}
"""Faults that an engine cannot have, with the reason."""


@dataclass(frozen=True)
class Claim:
    """A promise that holds, or is known not to hold, under a fault on an engine."""

    engine: Engine
    fault: Fault
    promise: Promise
    holds: bool = True


def guarantee(
    fault: Fault, *promises: Promise, on: Engine | tuple[Engine, ...], place: str = ""
) -> pytest.MarkDecorator:
    """Mark a test as showing that these promises hold.

    Args:
        on: the engines. Of a test whose parameter ``url`` or ``query`` chooses between
            kinds of SQLite, each is named, and each run counts for its own.
        place: where the test is, for people; what pytest says, when left out.
    """
    return _mark(fault, promises, on, place, holds=True)


def broken(
    fault: Fault, *promises: Promise, on: Engine | tuple[Engine, ...], place: str = ""
) -> pytest.MarkDecorator:
    """Mark a test as showing that these do *not* hold, as the documents say."""
    return _mark(fault, promises, on, place, holds=False)


def _mark(
    fault: Fault,
    promises: tuple[Promise, ...],
    on: Engine | tuple[Engine, ...],
    place: str,
    *,
    holds: bool,
) -> pytest.MarkDecorator:
    engines = (on,) if isinstance(on, str) else on
    assert fault in FAULTS, fault
    assert promises, f"what holds when it comes to {fault!r}?"
    for promise in promises:
        assert promise in CONCERNS[fault], f"{promise!r} is not at stake in {fault!r}"
    for engine in engines:
        assert engine in ENGINES, engine
        assert (engine, fault) not in INAPPLICABLE, f"{fault!r} is said not to concern {engine}"
    claims = [Claim(engine, fault, promise, holds) for engine in engines for promise in promises]
    return pytest.mark.guarantee(claims=claims, place=place)


assert tuple(FAULTS) == get_args(Fault) == tuple(CONCERNS)
assert tuple(PROMISES) == get_args(Promise)
assert {fault for _, fault in INAPPLICABLE} <= {*FAULTS}
