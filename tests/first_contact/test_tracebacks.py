"""Tracebacks that people read: few frames of tenure, and no cause that says nothing new."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tenure import blocking
from tenure.errors import AcquireTimeout, EngineUnavailable, SemaphoreNotFound, TenureError
from tests.engines.stores import stores

FRAMES = 8
LINES = 40
OURS = str(Path(tenure.__file__).parent)
REFUSED = [
    "redis://127.0.0.1:1",
    pytest.param("etcd://127.0.0.1:1", marks=pytest.mark.exhaustive),  # 10 s for each
    "tenure://127.0.0.1:1",
    "dflockd://127.0.0.1:1",
    "sqlite:////proc/none/jobs.db",
]


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as url:
        yield url


def check(error: BaseException) -> None:
    """Count the frames of tenure, and the lines, of what the interpreter would print."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    assert len([line for line in lines if f'File "{OURS}' in line]) <= FRAMES, "\n".join(lines)
    assert len(lines) <= LINES, "\n".join(lines)


CASES: list[tuple[str, type[TenureError]]] = [
    ("client.mutex('held').lock(timeout=0.05)", AcquireTimeout),
    ("client.semaphore('none').acquire()", SemaphoreNotFound),
    ("client.semaphore('none').try_acquire()", SemaphoreNotFound),
    ("client.semaphore('none').enqueue()", SemaphoreNotFound),
    ("client.semaphore('none').describe()", SemaphoreNotFound),
    ("client.semaphore('none').delete()", SemaphoreNotFound),
    ("client.session('/none')", tenure.NodeNotFound),
    ("client.describe_node('/none')", tenure.NodeNotFound),
]


@pytest.mark.parametrize(("typed", "kind"), CASES)
async def test_an_error_of_an_asynchronous_call(
    typed: str, kind: type[TenureError], url: str
) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        async with other.mutex("held"):
            with pytest.raises(kind) as error:
                await eval(typed)
        assert client is not other
    check(error.value)


@pytest.mark.parametrize(("typed", "kind"), CASES)
def test_an_error_of_a_synchronous_call(typed: str, kind: type[TenureError], url: str) -> None:
    with blocking.connect(url) as client, blocking.connect(url) as other:
        with other.mutex("held"), pytest.raises(kind) as error:
            eval(typed)
        assert client is not other
    check(error.value)


@pytest.mark.parametrize("refused", REFUSED)
async def test_a_store_that_refuses(refused: str) -> None:
    def in_a_thread() -> None:
        with blocking.connect(refused):
            raise AssertionError

    async def used() -> None:
        client = tenure.connect(refused)
        try:
            await client.mutex("a").lock(timeout=30)
        finally:
            await client.aclose()

    async def entered() -> None:
        async with tenure.connect(refused):
            raise AssertionError

    for connecting in (entered, used, lambda: asyncio.to_thread(in_a_thread)):
        with pytest.raises((TenureError, OSError)) as error:
            await connecting()
        check(error.value)
        if "://127" in refused:
            assert isinstance(error.value, EngineUnavailable)


async def test_a_nested_lock_with_a_timeout_names_the_caller_and_the_line(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        assert not await other.mutex("a").locked()  # attaches its session
        async with client.mutex("a"):
            for mutex in (client.mutex("a"), other.mutex("a")):
                with pytest.raises(AcquireTimeout) as error:
                    await mutex.lock(timeout=0.05)
                assert_names_the_caller(error.value)
        kept = await client.mutex("a").lock()
        with pytest.raises(AcquireTimeout, match=r"this session, acquired at .*\.py:\d+"):
            await client.mutex("a").lock(timeout=0.05)
        await kept.release()


def test_a_nested_lock_of_a_thread_does_so_too(url: str) -> None:
    with blocking.connect(url) as client, client.mutex("a"):
        with pytest.raises(AcquireTimeout) as error:
            client.mutex("a").lock(timeout=0.05)
        assert_names_the_caller(error.value)


def assert_names_the_caller(error: AcquireTimeout) -> None:
    assert "the calling task or thread holds it itself" in str(error)
    assert len(re.findall(r"acquired at \S*test_tracebacks\.py:\d+", str(error))) == 1, error
