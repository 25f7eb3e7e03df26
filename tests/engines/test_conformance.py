"""Every engine keeps the contract: one test for each behaviour that the suite knows."""

from __future__ import annotations

from tenure.testing.conformance import conformance_tests
from tests.engines.stores import DURABLE_SQLITE, MEMORY, SERVED_MEMORY, SERVED_SQLITE, SQLITE
from tests.guarantees.conformance import conformance_of

TestMemory = conformance_of("memory", MEMORY)
TestSQLite = conformance_of("sqlite", SQLITE)
TestDurableSQLite = conformance_of("sqlite-full", DURABLE_SQLITE)
TestServedMemory = conformance_tests(SERVED_MEMORY)
TestServedSQLite = conformance_of("tenure", SERVED_SQLITE)
