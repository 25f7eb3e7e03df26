"""Every engine keeps the contract: one test for each behaviour that the suite knows."""

from __future__ import annotations

from tenure.testing.conformance import conformance_tests
from tests.engines.stores import DURABLE_SQLITE, MEMORY, SQLITE

TestMemory = conformance_tests(MEMORY)
TestSQLite = conformance_tests(SQLITE)
TestDurableSQLite = conformance_tests(DURABLE_SQLITE)
