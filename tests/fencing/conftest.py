"""The servers that fences are tried on, each started once, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fencing.servers import a_postgres, a_redis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with a_redis() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with a_postgres() as url:
        yield url
