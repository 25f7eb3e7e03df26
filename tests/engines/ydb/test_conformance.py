"""`ydb://` keeps the contract, through tenure's own server, on two stores."""

from __future__ import annotations

from tenure.testing.conformance import BEHAVIOURS, conformance_tests
from tests.engines.ydb.behind import in_a_file, in_memory, stores_of
from tests.guarantees.conformance import conformance_of

TestInMemory = conformance_of("ydb", stores_of(in_memory))
TestInAFile = conformance_tests(stores_of(in_a_file))

# What a store that answers later can change: the order of what is answered and pushed. The rest is
# the same on every store, and random histories are compared on this one too.
for behaviour in BEHAVIOURS.values():
    about = behaviour.play.__module__.rpartition(".")[2]
    if about not in {"ending", "queue", "requests", "timeouts"}:
        setattr(TestInAFile, f"test_{behaviour.name}", None)
