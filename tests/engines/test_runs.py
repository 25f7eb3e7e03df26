"""`once` on real stores: the last run is remembered, by the store's clock."""

from __future__ import annotations

from contextlib import closing, suppress

import pytest

import tenure
from tenure import blocking
from tenure.clock import SystemClock
from tenure.testing.conformance import Stores
from tests.engines.stores import at_once


class Skewed(SystemClock):
    """The clock of a machine whose wall clock is an hour ahead."""

    @staticmethod
    def wall() -> float:
        return SystemClock.wall() + 3600.0


@pytest.mark.parametrize("stores", at_once().values(), ids=at_once())
async def test_programs_that_start_one_after_the_other_run_a_job_once(stores: Stores) -> None:
    with stores.empty() as url:
        ran = 0
        async with tenure.connect(url) as first, tenure.connect(url) as second:
            for client in (first, second) * 3:
                async with client.once("job", per=60) as run:
                    ran += run is not None
            last = await second.last_run("job")
            assert last is not None
            assert last.succeeded
            assert 0 <= last.since < 60
            with suppress(ZeroDivisionError):
                async with second.once("other", per=60) as run:
                    assert run is not None
                    raise ZeroDivisionError
            async with first.once("other", per=60) as run:
                assert run is not None
        assert ran == 1


@pytest.mark.parametrize("engine", ["redis", "tenure-sqlite"])
async def test_the_clock_that_counts_is_the_store_s(engine: str) -> None:
    with at_once()[engine].empty() as url:
        here, ahead = tenure.connect(url), tenure.connect(url, clock=Skewed())
        async with here, ahead:
            assert here.capabilities.store_time
            async with here.once("job", per=600) as run:
                assert run is not None
            # By its own clock, the run was an hour ago.
            assert await ahead.once("job", per=600) is None
            last = await ahead.last_run("job")
            assert last is not None
            assert last.since < 600


async def test_where_a_store_has_no_clock_the_caller_s_counts() -> None:
    with at_once()["etcd"].empty() as url:
        async with tenure.connect(url) as here, tenure.connect(url, clock=Skewed()) as ahead:
            assert not here.capabilities.store_time
            async with here.once("job", per=7200) as run:
                assert run is not None
            last = await ahead.last_run("job")
            assert last is not None
            assert 3600 <= last.since < 7200


def test_threads_run_a_job_once() -> None:
    with at_once()["sqlite"].empty() as url, closing(blocking.connect(url)) as client:
        ran = 0
        for _ in range(3):
            if run := client.once("job", per=60):
                with run:
                    assert isinstance(run, blocking.RunLease)
                    ran += 1
        assert ran == 1
        run = client.once("other", per=60)
        assert run is not None
        run.succeed()
        run.release()
        with client.session() as session:
            assert session.once("other", per=60) is None
            last = session.last_run("other")
            assert last is not None
            assert last.succeeded
