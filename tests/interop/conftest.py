"""A Redis for all of them, emptied after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import redis
import redis.asyncio

from tests.fencing.servers import a_redis

Connecting = Callable[[], AbstractAsyncContextManager["redis.asyncio.Redis"]]


@pytest.fixture(scope="session")
def running_redis() -> Iterator[str]:
    with a_redis() as url:
        yield url


@pytest.fixture
def redis_url(running_redis: str) -> Iterator[str]:
    yield running_redis
    with redis.Redis.from_url(running_redis) as client:
        client.flushall()


@pytest.fixture
def connected(redis_url: str) -> Connecting:
    """``async with connected() as redis``: a client of its own, for the block."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[redis.asyncio.Redis]:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            yield client

    return connect
