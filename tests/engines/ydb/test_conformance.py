"""`ydb://` keeps the contract, through tenure's own server, on two stores."""

from __future__ import annotations

from tenure.testing.conformance import conformance_tests
from tests.engines.ydb.behind import in_a_file, in_memory, stores_of

TestInMemory = conformance_tests(stores_of(in_memory))
TestInAFile = conformance_tests(stores_of(in_a_file))
