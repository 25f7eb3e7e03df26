"""Tools for authors of engines and for tests of programs; no program needs them in production.

- `tenure.testing.clock`: a virtual clock, and an event loop that uses it.
- `tenure.testing.conformance`: a test suite that checks an engine against the contract.
- `tenure.testing.history`: a checker of what several processes saw against the guarantees.
- `tenure.testing.random_histories`: a comparison of two engines on random histories (needs
  Hypothesis).
"""

import sys

from tenure.testing.clock import Deadlock, VirtualClock, VirtualLoop, run

__all__ = ["Deadlock", "VirtualClock", "VirtualLoop", "run"]

# The suites use plain assertions. pytest must rewrite them, so that failures are explained.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        "tenure.testing.conformance", "tenure.testing.random_histories"
    )
