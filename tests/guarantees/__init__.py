"""Guarantees by engine and fault, as tests show them: docs/evidence/guarantee-table.md.

A test says what it shows, beside its name::

    @guarantee("killed", "others proceed", "nothing leaks", on=SQLITE)
    async def test_a_killed_holder_is_followed_at_once(workers): ...

`python -m tests.guarantees` runs all tests that say so, and writes the table of what came of it.
What no test shows is told as such, and what cannot be asked of an engine with the reason
(`vocabulary`). `make check` examines whether the table is of the tests as they are, and runs none.
"""

from tests.guarantees.vocabulary import (
    DFLOCKD,
    DURABLE_SQLITE,
    ETCD,
    MEMORY,
    PORTABLE_SQLITE,
    POSTGRESQL,
    REDIS,
    SERVED,
    SQLITE,
    broken,
    guarantee,
)

__all__ = [
    "DFLOCKD",
    "DURABLE_SQLITE",
    "ETCD",
    "MEMORY",
    "PORTABLE_SQLITE",
    "POSTGRESQL",
    "REDIS",
    "SERVED",
    "SQLITE",
    "broken",
    "guarantee",
]
