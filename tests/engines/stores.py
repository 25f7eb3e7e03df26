"""The engines of this repository, as the suites of `tenure.testing` get at them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

from tenure.testing.conformance import Stores
from tests.engines.etcd.servers import a_prefix
from tests.engines.redis.servers import a_namespace
from tests.server.served import served

__all__ = [
    "DURABLE_SQLITE",
    "ENGINES",
    "ETCD",
    "MEMORY",
    "MEMORY_IN_REAL_TIME",
    "REDIS",
    "REDIS_RESP2",
    "SERVED_MEMORY",
    "SERVED_SQLITE",
    "SQLITE",
]

_numbers = itertools.count(1)


@contextmanager
def a_name_in_memory() -> Iterator[str]:
    yield f"memory://test-{next(_numbers)}"


@contextmanager
def a_file() -> Iterator[str]:
    with TemporaryDirectory(prefix="tenure-") as folder:
        yield f"sqlite:///{folder}/store.db"


@contextmanager
def a_file_on_disk() -> Iterator[str]:
    with a_file() as url:
        yield f"{url}?durability=full"


@contextmanager
def a_server_on_memory() -> Iterator[str]:
    with a_name_in_memory() as store, served(store) as server:
        yield server.address


@contextmanager
def a_server_on_a_file() -> Iterator[str]:
    with a_file() as store, served(store) as server:
        yield server.address


MEMORY = Stores(a_name_in_memory, virtual=True)
MEMORY_IN_REAL_TIME = Stores(a_name_in_memory)
SQLITE = Stores(a_file)
DURABLE_SQLITE = Stores(a_file_on_disk)
SERVED_MEMORY = Stores(a_server_on_memory)
SERVED_SQLITE = Stores(a_server_on_a_file)
REDIS = Stores(a_namespace)
ETCD = Stores(a_prefix)
REDIS_RESP2 = Stores(partial(a_namespace, "&protocol=2"))

ENGINES = {
    "memory": MEMORY_IN_REAL_TIME,
    "sqlite": SQLITE,
    "sqlite-full": DURABLE_SQLITE,
    "redis": REDIS,
    "redis-resp2": REDIS_RESP2,
    "etcd": ETCD,
    "tenure-memory": SERVED_MEMORY,
    "tenure-sqlite": SERVED_SQLITE,
}
"""Engines and their variants in real time, for tests of what is the same on all of them."""
