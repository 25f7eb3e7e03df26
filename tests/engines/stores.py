"""The engines of this repository and their variants: one table for all suites of tests.

An engine that is added to `VARIANTS` is tested for conformance, compared with the reference in
random histories, subject to the corpus of known defects, and has its part of the guarantee table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from tempfile import TemporaryDirectory

import pytest

from tenure.testing.conformance import Stores

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
def a_portable_file() -> Iterator[str]:
    with a_file() as url:
        yield f"{url}?portable=true"


MEMORY = Stores(a_name_in_memory, virtual=True)
MEMORY_IN_REAL_TIME = Stores(a_name_in_memory)


# Servers are imported when their stores are needed: some need an extra.


def _redis(options: str = "") -> Stores:
    from tests.engines.redis.servers import a_namespace

    return Stores(partial(a_namespace, options))


def _redis_cluster() -> Stores:
    from tests.engines.redis.clusters import a_namespace

    return Stores(a_namespace)


def _postgresql() -> Stores:
    from tests.engines.postgresql.servers import a_schema

    return Stores(a_schema)


def _postgresql_pooled() -> Stores:
    from tests.engines.postgresql.poolers import a_pooled_schema

    return Stores(a_pooled_schema)


def _etcd() -> Stores:
    from tests.engines.etcd.servers import a_prefix

    return Stores(a_prefix)


def _served(store: Stores) -> Stores:
    from tests.server.served import served

    @contextmanager
    def a_server() -> Iterator[str]:
        with store.empty() as url, served(url) as server:
            yield server.address

    return Stores(a_server)


def _dflockd() -> Stores:
    from tests.engines.dflockd.behind import stores

    return stores()


def _ydb(store: Stores, options: str = "") -> Stores:
    from tests.engines.ydb.behind import stores_of

    return stores_of(store.empty, options)


@dataclass(frozen=True)
class Histories:
    """Random histories in which an engine is compared with the reference.

    Attributes:
        number: of the usual run.
        quick: whether the engine is quick enough for long histories, which are shrunk.
        make: the stores, if they are other ones.
    """

    number: int
    quick: bool = True
    make: Callable[[], Stores] | None = None


@dataclass(frozen=True)
class Variant:
    """An engine under one configuration.

    Attributes:
        name: in the names of tests, and in marks.
        engine: the folder of its code.
        make: returns its stores.
        title: in the guarantee table; empty for a variant that is like another one there.
        inapplicable: the faults that cannot befall it, and why.
        shows: the engine whose guarantees its conformance shows, if any.
        behaviours: modules of the conformance suite to which it can make a difference; empty: all;
            ``None``: its conformance has a test module of its own.
        histories: how it is compared with the reference.
        in_real_time: its stores for checks that stall a loop, if they are other ones.
        behind: of a server, the engine of its store, whose code may have the defects as well.
        like: a variant that has the same defects.
        repeats: the variant whose code this one runs too; its tests are left to `make test-all`.
    """

    name: str
    engine: str
    make: Callable[[], Stores]
    title: str = ""
    inapplicable: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
    behaviours: frozenset[str] | None = frozenset()
    histories: Histories | None = None
    in_real_time: Stores | None = None
    behind: str = ""
    like: str = ""
    repeats: str = ""

    @property
    def label(self) -> str:
        """The name, as a part of a class name."""
        return self.name.title().replace("-", "")

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Marks of every test that runs on it."""
        return [pytest.mark.exhaustive] if self.repeats else []

    @cached_property
    def stores(self) -> Stores:
        """The stores, in virtual time where that is possible."""
        return self.make()

    @property
    def slow_stores(self) -> Stores:
        """The stores, in real time."""
        return self.in_real_time or self.stores


_ONE_PROCESS = "all who take part are in that process, and so is the store"
_GONE = "the store is gone with its last user, and with it everything that could have been kept"
_ONE_HOST = {"clocks drift": "all who take part are on one host, and have one clock"}

VARIANTS = (
    Variant(
        "memory",
        "memory",
        lambda: MEMORY,
        title="`memory://`",
        inapplicable={
            "killed": _ONE_PROCESS,
            "stopped": _ONE_PROCESS,
            "stuck peer": _ONE_PROCESS,
            "disk full": "it writes nothing",
            "restarted": _GONE,
            "power cut": _GONE,
            "clocks drift": _ONE_PROCESS,
        },
        shows="memory",
        histories=Histories(30),
        in_real_time=MEMORY_IN_REAL_TIME,
    ),
    Variant(
        "sqlite",
        "sqlite",
        lambda: Stores(a_file),
        title="`sqlite://`",
        inapplicable=_ONE_HOST,
        shows="sqlite",
        histories=Histories(25),
    ),
    Variant(
        "sqlite-full",
        "sqlite",
        lambda: Stores(a_file_on_disk),
        title="`sqlite://`, `durability=full`",
        inapplicable=_ONE_HOST,
        shows="sqlite-full",
        histories=Histories(30),
        repeats="sqlite",
    ),
    Variant(
        "sqlite-portable",
        "sqlite",
        lambda: Stores(a_portable_file),
        title="`sqlite://`, `portable=true`",
        inapplicable=_ONE_HOST,
        shows="sqlite-portable",
        histories=Histories(12),
        repeats="sqlite",
    ),
    Variant("redis", "redis", _redis, "`redis://`", shows="redis", histories=Histories(25)),
    Variant(  # pushes on a second connection: only the order of answers and pushes is another one
        "redis-resp2",
        "redis",
        lambda: _redis("&protocol=2"),
        behaviours=frozenset({"queue", "requests", "resizing", "timeouts", "watches"}),
        histories=Histories(10),
        repeats="redis",
    ),
    Variant("redis-cluster", "redis", _redis_cluster, histories=Histories(10), repeats="redis"),
    Variant(
        "postgresql",
        "postgresql",
        _postgresql,
        "`postgresql://`",
        shows="postgresql",
        histories=Histories(12),
    ),
    Variant(  # no notification arrives: it polls
        "postgresql-pooled",
        "postgresql",
        _postgresql_pooled,
        behaviours=frozenset({"ending", "queue", "requests", "resizing", "timeouts", "watches"}),
        repeats="postgresql",
    ),
    Variant("etcd", "etcd", _etcd, "`etcd://`", shows="etcd", histories=Histories(10, quick=False)),
    Variant(  # its conformance tests say themselves what can be seen through its protocol
        "dflockd",
        "dflockd",
        _dflockd,
        title="`dflockd://`",
        inapplicable={
            "disk full": "a dflockd server writes nothing; of tenure's see its store",
            "administrator": "dflockd's protocol has no such operations",
            "taken over": "its sessions cannot be resumed",
        },
        behaviours=None,
        behind="memory",
    ),
    Variant(
        "tenure",
        "native",
        lambda: _served(MEMORY_IN_REAL_TIME),
        title="`tenure://`: the server, over its native protocol",
        histories=Histories(12),
        behind="memory",
        repeats="tenure-sqlite",
    ),
    Variant(
        "tenure-sqlite",
        "native",
        lambda: _served(stores("sqlite")),
        shows="tenure",
        histories=Histories(12),
    ),
    Variant(
        "ydb",
        "ydb",
        lambda: _ydb(MEMORY_IN_REAL_TIME),
        title="`ydb://`: the server, over YDB's API",
        inapplicable={
            "taken over": "no session can be resumed: the API does not report when the former "
            "program has detected it",
        },
        shows="ydb",
        histories=Histories(6, False, lambda: _ydb(MEMORY_IN_REAL_TIME, "?siblings=1000")),
        behind="memory",
        like="tenure",
    ),
    Variant(  # a store that answers later can change the order of answers and pushes alone
        "ydb-sqlite",
        "ydb",
        lambda: _ydb(stores("sqlite")),
        behaviours=frozenset({"ending", "queue", "requests", "timeouts"}),
        histories=Histories(6, False, lambda: _ydb(stores("sqlite"), "?siblings=1000")),
        repeats="ydb",
    ),
)

BY_NAME = {each.name: each for each in VARIANTS}


def stores(name: str) -> Stores:
    """The stores of a variant, in real time."""
    return BY_NAME[name].slow_stores


def at_once() -> dict[str, Stores]:
    """The stores of all variants that administrators reach by the URL alone, in real time."""
    return {
        each.name: each.slow_stores for each in VARIANTS if each.engine not in {"dflockd", "ydb"}
    }
