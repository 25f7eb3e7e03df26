"""Every engine keeps the contract: one test for each behaviour that the suite knows."""

from __future__ import annotations

from tenure.testing.conformance import BEHAVIOURS, Conformance, conformance_tests
from tests.engines.stores import VARIANTS, Variant
from tests.guarantees.conformance import conformance_of


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
    return suite


for _each in VARIANTS:
    if _each.behaviours is not None:
        globals()[f"Test{_each.label}"] = _suite(_each, _each.behaviours)
