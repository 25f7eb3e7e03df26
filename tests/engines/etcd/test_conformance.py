"""`etcd://` keeps the contract, on one member."""

from __future__ import annotations

from tenure.testing.conformance import Stores, conformance_tests
from tests.engines.etcd.servers import a_prefix

ETCD = Stores(a_prefix)

TestEtcd = conformance_tests(ETCD)
