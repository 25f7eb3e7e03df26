"""For the authors of engines, and for tests of programs: not needed by a program that runs.

- `tenure.testing.clock`: a clock that jumps, and an event loop that lives by it.
- `tenure.testing.conformance`: whether an engine does what the contract says.
- `tenure.testing.history`: whether what several processes saw can have happened.
- `tenure.testing.random_histories`: whether two engines answer alike, whatever is asked of them
  (needs Hypothesis).
"""

import sys

from tenure.testing.clock import Deadlock, VirtualClock, VirtualLoop, run

__all__ = ["Deadlock", "VirtualClock", "VirtualLoop", "run"]

# The suites speak through plain assertions. Where pytest runs them it is to explain those.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        "tenure.testing.conformance", "tenure.testing.random_histories"
    )
