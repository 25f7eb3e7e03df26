"""Whether an engine does what `tenure.engines.contract` and the rules of the model say.

In a file of tests, for pytest, one line gives one test for each behaviour::

    from contextlib import contextmanager
    from tempfile import TemporaryDirectory
    from tenure.testing.conformance import Stores, conformance_tests

    @contextmanager
    def an_empty_store():
        with TemporaryDirectory() as folder:
            yield f"mystore://{folder}/store"

    TestMyStore = conformance_tests(Stores(an_empty_store))

The tests need no plugin: each is a plain function that brings its own event loop. Whoever needs
fixtures derives from `Conformance` and sets `stores` in one::

    class TestMyStore(Conformance):
        @pytest.fixture(autouse=True)
        def on_a_server(self, server):
            self.stores = Stores(server.empty_store)

Without pytest, `run_conformance` returns a report. What an engine says that it cannot do
(`Capabilities`) is not asked of it: those tests are skipped, and say why.

What cannot be seen through the contract alone is not tested here: the death of processes, cut
connections, restarts.
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
    releases,
    requests,
    semaphores,
    sessions,
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
    """One test method for each behaviour, on a store of its own.

    Attributes:
        stores: how to come by stores; set by the class or a fixture.
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
    """A class of tests; pytest finds them when its name in the module begins with ``Test``."""
    return type("Conformance", (Conformance,), {"stores": stores})


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one behaviour; `reason` tells why it was skipped or has failed."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of all of them."""

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(each for each in self.results if each.outcome == "failed")

    def __str__(self) -> str:
        lines = [
            f"{each.outcome:8}{each.name.replace('_', ' ')}"
            + (f" ({each.reason})" if each.outcome == "skipped" else "")
            for each in self.results
        ]
        return "\n".join(lines + [f"\n{each.name}\n{each.reason}" for each in self.failed])


def run_conformance(stores: Stores, names: Iterable[str] = BEHAVIOURS) -> Report:
    """Check the behaviours, all or those named, one after the other.

    It is not a coroutine, because each behaviour has an event loop, and perhaps a time, of its
    own: call it where no loop runs.
    """
    if not __debug__:
        raise RuntimeError("the suite speaks through assertions, and python -O removes them")
    return Report(tuple(_result(BEHAVIOURS[name], stores) for name in names))


def _result(behaviour: Behaviour, stores: Stores) -> Result:
    try:
        behaviour.check(stores)
    except unittest.SkipTest as skip:
        return Result(behaviour.name, "skipped", str(skip))
    except Exception:  # whatever it is, it is reported
        return Result(behaviour.name, "failed", traceback.format_exc())
    return Result(behaviour.name, "passed")
