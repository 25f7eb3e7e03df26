"""What is shown by histories that `tenure.testing.history` has checked: simulated ones, and chaos.

Each run has all of the faults named here, and breaks none of the checker's rules: ``limit`` (one
owner), ``order``, ``fencing`` (tokens rise), ``loss`` (told in time) and ``end`` (nothing leaks,
others go on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.guarantees.vocabulary import SIMULATED, SQLITE, Engine, Fault, Promise, guarantee

T = TypeVar("T", bound=Callable[..., object])

_SIMULATED: dict[Fault, tuple[Promise, ...]] = {
    "none": ("one owner", "in order", "tokens rise", "nothing leaks", "others proceed"),
    "killed": ("one owner", "in order", "tokens rise", "nothing leaks", "others proceed"),
    "stopped": ("one owner", "tokens rise", "loss reported", "others proceed"),
    "stalled": ("one owner", "loss reported", "others proceed"),
    "cancelled": ("one owner", "in order", "nothing leaks", "others proceed"),
    "cut off": ("one owner", "loss reported", "nothing leaks", "others proceed"),
    "wall clock": ("tokens rise", "loss reported"),
    "clocks drift": ("one owner", "loss reported"),
    "administrator": (
        "in order",
        "tokens rise",
        "loss reported",
        "nothing leaks",
        "others proceed",
    ),
    "taken over": ("one owner", "in order", "tokens rise", "loss reported", "others proceed"),
}

_CHAOS: dict[Fault, tuple[Promise, ...]] = {
    "killed": ("one owner", "in order", "tokens rise", "nothing leaks", "others proceed"),
    "stopped": ("one owner", "tokens rise", "loss reported", "others proceed"),
    "stalled": ("one owner", "loss reported", "others proceed"),
    "restarted": ("tokens rise", "nothing leaks"),
    "administrator": (
        "in order",
        "tokens rise",
        "loss reported",
        "nothing leaks",
        "others proceed",
    ),
    "taken over": ("one owner", "in order", "tokens rise", "loss reported", "others proceed"),
}
"""Those of its faults that come in every run, on every machine."""


def by_simulation(test: T) -> T:
    """Mark a test of many simulated histories."""
    return _all(test, _SIMULATED, SIMULATED)


def by_chaos(test: T) -> T:
    """Mark a test of real processes on `sqlite://`, under every fault that chaos has."""
    return _all(test, _CHAOS, SQLITE)


def _all(test: T, shown: dict[Fault, tuple[Promise, ...]], engine: Engine) -> T:
    for fault, promises in shown.items():
        test = guarantee(fault, *promises, on=engine)(test)
    return test
