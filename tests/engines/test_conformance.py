"""Every engine keeps the contract: one test for each behaviour that the suite knows.

Some engines look at their requests now and then, in case an event was missed. Here they do not, so
an event that is missed is a test that fails, and not one that takes seconds.
"""

from __future__ import annotations

from unittest import mock

from tenure.engines._kit.commands.session import CommandSession
from tenure.engines.etcd.requests import EtcdRequests
from tenure.testing.conformance import BEHAVIOURS, Conformance, conformance_tests
from tests.engines.stores import VARIANTS, Variant
from tests.guarantees.conformance import conformance_of


def _no_look(*_: object) -> None:
    """Find nothing."""


LOOKS = {
    "etcd": mock.patch.object(EtcdRequests, "look_up_soon", _no_look),
    "postgresql": mock.patch.object(CommandSession, "look_up", _no_look),
    "redis": mock.patch.object(CommandSession, "look_up", _no_look),
}


def _suite(variant: Variant, modules: frozenset[str]) -> type[Conformance]:
    if variant.shows:
        suite = conformance_of(variant.shows, variant.stores)
    else:
        suite = conformance_tests(variant.stores)
    for behaviour in BEHAVIOURS.values():
        if modules and behaviour.play.__module__.rpartition(".")[2] not in modules:
            setattr(suite, f"test_{behaviour.name}", None)
    for mark in variant.marks:
        mark(suite)
    return LOOKS[variant.name](suite) if variant.name in LOOKS else suite


for _each in VARIANTS:
    if _each.behaviours is not None:
        globals()[f"Test{_each.label}"] = _suite(_each, _each.behaviours)
