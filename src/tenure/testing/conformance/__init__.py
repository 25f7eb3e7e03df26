"""Conformance suite: checks an engine against `tenure.engines.contract` and the model's rules.

In a test module for pytest, one line defines one test for each behaviour.

Example::

    from contextlib import contextmanager
    from tempfile import TemporaryDirectory
    from tenure.testing.conformance import Stores, conformance_tests

    @contextmanager
    def an_empty_store():
        with TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/store.db"

    TestMyStore = conformance_tests(Stores(an_empty_store))

The tests need no plugin: each is a plain function that creates its own event loop. To use
fixtures, derive from `Conformance` and set `stores` in a fixture::

    class TestMyStore(Conformance):
        @pytest.fixture(autouse=True)
        def on_a_server(self, server):
            self.stores = Stores(server.empty_store)

Without pytest, `run_conformance` returns a report. Tests of missing capabilities (`Capabilities`)
are skipped, with the reason.

The suite does not test events outside of the contract: the death of processes, cut connections,
restarts.
"""

from __future__ import annotations

import traceback
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tenure.testing.conformance import (  # noqa: F401  each adds its behaviours
    counts,
    ending,
    ephemeral,
    expiry,
    facts,
    inputs,
    nodes,
    queue,
    rates,
    releases,
    requests,
    resizing,
    semaphores,
    sessions,
    takeover,
    timeouts,
    watches,
)
from tenure.testing.conformance.behaviour import BEHAVIOURS, Behaviour
from tenure.testing.stage import Stores

__all__ = [
    "BEHAVIOURS",
    "Conformance",
    "Report",
    "Result",
    "Stores",
    "conformance_tests",
    "run_conformance",
]


class Conformance:
    """Test class with one method for each behaviour, each on a new store.

    Attributes:
        stores: the factory of stores and engines; set by the class or a fixture.
    """

    stores: Stores


def _method(behaviour: Behaviour) -> Callable[[Conformance], None]:
    def test(self: Conformance) -> None:
        behaviour.check(self.stores)

    test.__name__ = f"test_{behaviour.name}"
    test.__qualname__ = f"Conformance.{test.__name__}"
    test.__doc__ = behaviour.sentence
    return test


for _behaviour in BEHAVIOURS.values():
    setattr(Conformance, f"test_{_behaviour.name}", _method(_behaviour))


def conformance_tests(stores: Stores) -> type[Conformance]:
    """Return a test class, which pytest collects if its name begins with ``Test``."""
    return type("Conformance", (Conformance,), {"stores": stores})


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one behaviour; `reason` says why it was skipped or failed."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all checked behaviours."""

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """True if no behaviour failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Result, ...]:
        """The behaviours that failed."""
        return tuple(each for each in self.results if each.outcome == "failed")

    def __str__(self) -> str:
        """Return a line for each behaviour, then the reason of each failure."""
        lines = [
            f"{each.outcome:8}{each.name.replace('_', ' ')}"
            + (f" ({each.reason})" if each.outcome == "skipped" else "")
            for each in self.results
        ]
        return "\n".join(lines + [f"\n{each.name}\n{each.reason}" for each in self.failed])


def run_conformance(stores: Stores, names: Iterable[str] = BEHAVIOURS) -> Report:
    """Check all behaviours, or those named, one after another, and return a report.

    This is not a coroutine, because each behaviour has its own event loop, and perhaps its own
    virtual time. Call it outside of event loops.

    Args:
        stores: the factory of stores and engines.
        names: the names of the behaviours.

    Raises:
        RuntimeError: Python runs with ``-O``, which removes the assertions of the suite.
    """
    if not __debug__:
        raise RuntimeError("the suite reports by assertions, and python -O removes them")
    return Report(tuple(_result(BEHAVIOURS[name], stores) for name in names))


def _result(behaviour: Behaviour, stores: Stores) -> Result:
    try:
        behaviour.check(stores)
    except unittest.SkipTest as skip:
        return Result(behaviour.name, "skipped", str(skip))
    except Exception:  # every failure is reported
        return Result(behaviour.name, "failed", traceback.format_exc())
    return Result(behaviour.name, "passed")
