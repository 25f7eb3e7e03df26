"""Rates on real stores: decisions as in the reference, histories of processes, and no leaks."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.core.rates import RateState, decide
from tenure.engines import connect_engine
from tenure.engines.contract import Engine, RateAnswer, RateCall, RateRule, rate_answered
from tenure.engines.sqlite.store import Store
from tenure.errors import EngineUnavailable
from tenure.model import DEFAULT_NODE
from tenure.testing.rates import most_in_window
from tests.engines.outages import NETWORKED, Afar
from tests.engines.stores import stores

ENGINES = ("sqlite", "redis", "postgresql", "tenure-sqlite")
LONG = pytest.mark.exhaustive


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as found:
        yield found


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Engine]:
    engine = connect_engine(url, SystemClock())
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


class Reference:
    """The reference's state of a rate, at the times of a store's clock that its answers show."""

    def __init__(self) -> None:
        self.state: RateState | None = None
        self.now = 0

    def agrees(self, call: RateCall, answer: RateAnswer) -> bool:
        """Return true if the reference gives this answer."""
        if call.kind == "refund":  # the answer shows no time
            if answer.granted:
                self.state, expected = decide(self.state, call, self.now)
                return expected.granted
            return True
        if answer.granted:
            self.now = answer.at - answer.wait
        elif answer.wait:
            _, guess = decide(self.state, call, self.now)
            self.now += guess.wait - answer.wait
        else:
            return call.kind == "peek" and answer.free >= call.count
        self.state, expected = decide(self.state, call, self.now)
        return expected == answer


async def test_a_store_decides_as_the_reference(url: str) -> None:
    generator = random.Random(7)
    rule = RateRule(20, 200_000, 10)
    reference, grants, shown = Reference(), list[tuple[int, int]](), 0
    async with opened(url) as engine:
        for _ in range(250):
            kind = generator.choice(("take", "take", "take", "peek", "refund"))
            count = generator.randint(1, 10)
            if kind == "refund":
                if not grants:
                    continue
                at, counted = grants.pop(generator.randrange(len(grants)))
                call = RateCall("refund", rule, min(count, counted), at=at)
            else:
                longest = generator.choice((0, 0, 50_000, None))
                call = RateCall(kind, rule, count, longest)  # type: ignore[arg-type]
            answer = await rate_answered(engine.rate(DEFAULT_NODE, "r", call))
            assert reference.agrees(call, answer), (call, answer, reference.state)
            if answer.at:
                grants.append((answer.at, count))
                shown += 1
            await asyncio.sleep(generator.choice((0, 0.002, 0.02)))
    assert shown > 30


PROGRAM = """
import asyncio, random, sys
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import RateCall, RateRule, rate_answered

async def main(url, seconds):
    clock = SystemClock()
    engine = connect_engine(url, clock)
    await engine.open()
    rule = RateRule(30, 300_000, 10)
    until = clock.now() + seconds

    async def work(seed):
        choose = random.Random(seed)
        while clock.now() < until:
            count = choose.randint(1, 10)
            call = RateCall("take", rule, count, choose.choice((None, 0, 200_000)))
            answer = await rate_answered(engine.rate("/default", "r", call))
            if answer.granted:
                print(answer.at, count, flush=True)
            await asyncio.sleep(min(answer.wait / 1e6, 0.2))

    await asyncio.gather(*map(work, range(3)))
    await engine.aclose()

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


def history(url: str, seconds: float, *, kills: int = 0) -> list[tuple[int, int]]:
    """The grants to several processes, of which some are killed and replaced."""
    command = [sys.executable, "-c", PROGRAM, url, str(seconds)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    running = [start() for _ in range(3)]
    for number in range(kills):
        time.sleep(seconds / (kills + 1))
        running[number].send_signal(signal.SIGKILL)
        running.append(start())
    found = []
    for number, each in enumerate(running):
        said, _ = each.communicate(timeout=60 + 2 * seconds)
        assert each.returncode == (-signal.SIGKILL if number < kills else 0)
        lines = said[: said.rfind("\n") + 1].splitlines()
        found += [(int(at), int(count)) for at, count in map(str.split, lines)]
    return found


def check_history(grants: list[tuple[int, int]], seconds: float) -> None:
    assert most_in_window(grants, 100_000) <= 10
    assert most_in_window(grants, 300_000) <= 30
    assert sum(count for _, count in grants) > 10 * seconds  # of the 100 that are possible


@pytest.mark.parametrize("name", ["sqlite", "redis"])
def test_processes_never_exceed_the_limit_together(name: str) -> None:
    with stores(name).empty() as url:
        check_history(history(url, 2), 2)


@LONG
@pytest.mark.parametrize("name", ENGINES)
def test_processes_that_are_killed_never_exceed_the_limit(name: str) -> None:
    with stores(name).empty() as url:
        check_history(history(url, 20, kills=6), 20)


async def test_a_program_on_each_store_waits_for_its_tokens(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        await client.rate("api", limit=10, per=2).take(10)
        began = time.monotonic()
        taken = await other.rate("api", limit=10, per=2).take(1, timeout=10)
        assert time.monotonic() - began >= taken.waited > 0.1
        with pytest.raises(tenure.RateExceeded) as caught:
            await client.rate("api", limit=10, per=2).take(10, timeout=0.01)
        assert 0.01 < caught.value.retry_after < 2.1


# What is over leaves nothing behind


async def many_rates(url: str) -> None:
    async with tenure.connect(url) as client:
        for number in range(30):
            await client.rate(f"user {number}", limit=1, per=0.01).take()
        for number in range(5):
            await asyncio.sleep(0.02)
            await client.rate(f"later {number}", limit=1, per=3600).take()


async def test_rates_that_are_over_are_removed_from_a_file() -> None:
    with stores("sqlite").empty() as url:
        await many_rates(url)
        with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as shell:
            (left,) = shell.execute("SELECT count(*) FROM rates").fetchone()
    assert left == 5


async def test_rates_that_are_over_are_removed_from_a_database() -> None:
    from tests.engines.postgresql.servers import shared

    with stores("postgresql").empty() as url:
        await many_rates(url)
        ((left,),) = shared().execute(f"SELECT count(*) FROM {url.rpartition('schema=')[2]}.rates")
    assert left == 5


async def test_rates_that_are_over_are_removed_from_redis() -> None:
    from tests.engines.redis.servers import shared

    with stores("redis").empty() as url:
        await many_rates(url)
        prefix = url.partition("prefix=")[2].partition("&")[0]
        mine = f"{{{prefix}}}:r:"
        keys = {key: lives for key, lives in shared().all_keys().items() if key.startswith(mine)}
    assert len(keys) == 5
    assert all(keys.values())


@pytest.mark.parametrize("name", ["etcd", "dflockd", "ydb"])
async def test_a_store_without_rates_names_those_that_have_them(name: str) -> None:
    with stores(name).empty() as url:
        async with tenure.connect(url) as client:
            assert not client.capabilities.rates
            with pytest.raises(tenure.Unsupported, match="Use memory://, sqlite://, redis://"):
                await client.rate("api", limit=1, per=60).take()


# Clocks and outages


async def test_a_rate_in_a_file_survives_a_reboot_which_restarts_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(SystemClock):
        def __init__(self, ahead: float) -> None:
            self.now = lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + ahead

    async def take(ahead: float, call: RateCall) -> RateAnswer:
        engine = connect_engine(f"sqlite:///{tmp_path}/store.db", Clock(ahead))
        await engine.open()
        try:
            return await rate_answered(engine.rate(DEFAULT_NODE, "r", call))
        finally:
            await engine.aclose()

    rule = RateRule(10, 60_000_000, 10)
    assert (await take(1000, RateCall("take", rule, 10))).granted
    monkeypatch.setattr(Store, "boot", lambda _: "another boot")
    refused = await take(0, RateCall("take", rule, 1))
    assert not refused.granted
    assert 55_000_000 < refused.wait <= 60_600_000
    with closing(sqlite3.connect(tmp_path / "store.db")) as shell:
        ((seen, expires),) = shell.execute("SELECT seen, expires FROM rates").fetchall()
    assert expires - seen == 60_000_000
    assert abs(seen / 1e6 - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60


async def test_a_restored_file_has_forgotten_its_rates(tmp_path: Path) -> None:
    from tenure.engines.sqlite.restore import backup, restore

    url = f"sqlite:///{tmp_path}/store.db"
    async with tenure.connect(url) as client:
        await client.rate("api", limit=1, per=3600).take()
    backup(url, str(tmp_path / "backup"))
    restore(url, str(tmp_path / "backup"), force=True)
    async with tenure.connect(url) as client:
        assert await client.rate("api", limit=1, per=3600).try_take()


@pytest.fixture(
    params=["redis", pytest.param("postgresql", marks=LONG), pytest.param("native", marks=LONG)]
)
def afar(request: pytest.FixtureRequest) -> Iterator[Afar]:
    with NETWORKED[request.param]() as found:
        yield found


async def test_a_refund_whose_answer_is_lost_is_not_carried_out_twice(afar: Afar) -> None:
    async with tenure.connect(afar.url) as client, tenure.connect(afar.direct) as other:
        api, direct = (each.rate("api", limit=10, per=3600) for each in (client, other))
        taken = await api.take(9)
        afar.network.lose_answers()
        refunding = asyncio.create_task(taken.refund(3))
        async with asyncio.timeout(30):
            while (await direct.peek()).free == 1:  # noqa: ASYNC110  no store says so
                await asyncio.sleep(0.01)
        afar.network.cut()
        async with asyncio.timeout(60):
            await refunding
            await api.peek()  # over the next connection, behind everything that is sent again
        assert (await direct.peek()).free == 4


async def test_a_rate_during_an_outage_raises_within_the_answer_timeout(afar: Afar) -> None:
    url = f"{afar.url}{'&' if '?' in afar.url else '?'}answer_timeout=1"
    async with tenure.connect(url) as client:
        api = client.rate("api", limit=10, per=60)
        await api.take()
        afar.network.refuse()
        for call in (api.take, api.try_take, api.peek):
            began = time.monotonic()
            with pytest.raises(EngineUnavailable, match="no answer within 1 s"):
                await call()
            assert time.monotonic() - began < 10
        afar.network.flow()
        afar.network.start()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await api.try_take()
                except EngineUnavailable:
                    continue
                break
