"""`ydb://` keeps the contract, through tenure's own server, on two stores."""

from __future__ import annotations

from tenure.testing.conformance import BEHAVIOURS, conformance_tests
from tests.engines.ydb.behind import in_a_file, in_memory, stores_of

TestInMemory = conformance_tests(stores_of(in_memory))
TestInAFile = conformance_tests(stores_of(in_a_file))

# What the engine itself checks, or waits for in real time, is the same on every store.
for behaviour in BEHAVIOURS.values():
    if behaviour.play.__module__.rpartition(".")[2] in {"expiry", "facts", "inputs"}:
        setattr(TestInAFile, f"test_{behaviour.name}", None)
