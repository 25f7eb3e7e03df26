"""Rates of a server: each counts as a semaphore of the account that used it first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenure.engines.contract import Engine, RateAnswer, RateCall, RateRule, rate_answered
from tenure.errors import EngineError, InvalidArgument, Unsupported
from tenure.model import NodeConfig
from tenure.server.auth.accounts import Accounts
from tenure.server.auth.identity import Identity, Quotas
from tenure.server.auth.rates import RateCounts
from tenure.server.limits import Limits
from tenure.wire import messages as wire
from tests.server.auth.several import rights, several

HOUR = RateRule(10, 3_600_000_000, 10)
SHORT = RateRule(1, 50_000, 1)


async def take(engine: Engine, name: str, rule: RateRule = HOUR, **facts: Any) -> RateAnswer:
    return await rate_answered(engine.rate("/default", name, RateCall("take", rule, **facts)))


def test_a_rate_is_counted_until_its_tokens_have_left_the_window() -> None:
    accounts = Accounts(Limits())
    account = accounts.of(Identity("some", "token"))
    counts = RateCounts()
    counts.begin(account, "/default", "r", 0.0)
    counts.begin(account, "/default", "r", 0.0)
    assert account.semaphores.used == 1
    counts.end("/default", "r", 60.0)
    counts.begin(account, "/default", "other", 100.0)  # the first is still under way
    assert account.semaphores.used == 2
    counts.end("/default", "r", 50.0)
    counts.end("/default", "other", 100.0)
    counts.extend("/default", "r", 300.0)
    counts.extend("/default", "unknown", 300.0)
    counts.begin(account, "/n", "r", 200.0)
    assert (len(counts), account.semaphores.used) == (2, 2)
    counts.dropped("/n")
    counts.end("/n", "r", 900.0)
    counts.begin(account, "/default", "third", 400.0)
    assert (len(counts), account.semaphores.used) == (1, 1)


async def test_rates_beyond_the_quota_of_semaphores_are_refused() -> None:
    limited = rights(quotas=Quotas.parse({"semaphores": 2}))
    async with (
        several({"some": limited, "other": rights()}) as server,
        server.client("tenure", "some") as client,
        server.client("tenure", "other") as other,
    ):
        for name in ("a", "b", "a"):
            assert (await take(client, name)).granted
        with pytest.raises(EngineError, match="quota semaphores = 2"):
            await take(client, "c")
        assert (await take(other, "c")).granted
        assert (await take(client, "c")).granted  # it is counted for the other one


async def test_a_rate_that_is_over_is_counted_no_more() -> None:
    limited = rights(quotas=Quotas.parse({"semaphores": 1}))
    async with several({"some": limited}) as server, server.client("tenure", "some") as client:
        assert (await take(client, "a", SHORT)).granted
        async with asyncio.timeout(10):
            while True:
                try:
                    assert (await take(client, "b", SHORT)).granted
                except EngineError:
                    continue
                break
        assert len(server.context.guard.rates) == 1


async def test_a_refused_take_leaves_no_count() -> None:
    async with several({"some": rights()}) as server, server.client("tenure", "some") as client:
        with pytest.raises(LookupError):
            await rate_answered(client.rate("/missing", "r", RateCall("take", HOUR)))
        assert (await take(client, "a")).granted  # looks through the counts
        (account,) = server.accounts()
        assert account.semaphores.used == 1


async def test_a_dropped_node_frees_the_counts_of_its_rates() -> None:
    async with several({"some": rights()}) as server, server.client("tenure", "some") as client:
        await client.create_node("/n", NodeConfig(), exist_ok=False)
        await rate_answered(client.rate("/n", "r", RateCall("take", HOUR)))
        await rate_answered(client.rate("/n", "r", RateCall("resize", HOUR)))
        (account,) = server.accounts()
        assert account.semaphores.used == 1
        await client.drop_node("/n", force=False)
        assert account.semaphores.used == 0


@pytest.mark.parametrize(
    "call",
    [
        RateCall("take", RateRule(0, 1_000_000, 1)),
        RateCall("take", RateRule(10, 1, 10)),
        RateCall("peek", RateRule(10, 1_000_000, 3)),
        RateCall("take", HOUR, 11),
        RateCall("take", HOUR, 0),
        RateCall("refund", HOUR, 1, at=2**60),
        RateCall("take", HOUR, 1, 2**60),
    ],
    ids=str,
)
async def test_values_that_no_client_sends_are_refused(call: RateCall) -> None:
    async with several({"some": rights()}) as server, server.client("tenure", "some") as client:
        with pytest.raises(InvalidArgument):
            await rate_answered(client.rate("/default", "r", call))
        with pytest.raises(InvalidArgument):
            await rate_answered(client.rate("/default", "", RateCall("take", HOUR)))


async def test_a_server_without_rates_is_not_sent_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure.server.native.connection.FEATURES", frozenset({wire.DESCRIBE}))
    async with several({"some": rights()}) as server, server.client("tenure", "some") as client:
        with pytest.raises(Unsupported, match="upgrade it"):
            await take(client, "r")
