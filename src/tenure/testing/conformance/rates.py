"""Rates: at most so many tokens in any window, in the order of the calls."""

from __future__ import annotations

import asyncio

from tenure.core.rates import RateKind
from tenure.engines.contract import Engine, RateAnswer, RateCall, RateRule, rate_answered
from tenure.errors import InvalidArgument, NodeNotFound
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import raises
from tenure.testing.rates import most_in_window
from tenure.testing.stage import Stage

HOUR = RateRule(10, 3_600_000_000, 10)
"""A rule whose window does not end during a test."""

SHORT = RateRule(10, 300_000, 10)


async def _call(
    engine: Engine,
    kind: RateKind,
    count: int = 1,
    *,
    rule: RateRule = HOUR,
    name: str = "r",
    node: str = DEFAULT_NODE,
    wait: int | None = 0,
    at: int = 0,
) -> RateAnswer:
    call = RateCall(kind, rule, count, wait, at)
    return await rate_answered(engine.rate(node, name, call))


@behaviour("rates")
async def a_rate_grants_its_limit_at_once_and_no_more(stage: Stage) -> None:
    answers = [await _call(stage.eye, "take", count) for count in (3, 3, 4, 1)]
    assert [each.granted for each in answers] == [True, True, True, False]
    assert [each.free for each in answers] == [7, 4, 0, 0]
    assert [each.wait for each in answers[:3]] == [0, 0, 0]
    assert HOUR.window * 0.9 < answers[3].wait <= HOUR.window * 1.01
    assert {each.rule for each in answers} == {HOUR}


@behaviour("rates")
async def a_take_may_reserve_tokens_for_a_later_time(stage: Stage) -> None:
    await _call(stage.eye, "take", 10)
    late = await _call(stage.eye, "take", 1, wait=None)
    assert late.granted
    assert HOUR.window * 0.9 < late.wait <= HOUR.window * 1.01
    refused = await _call(stage.eye, "take", 1, wait=late.wait // 2)
    assert not refused.granted
    assert refused.at == 0


@behaviour("rates")
async def takes_are_granted_in_the_order_of_their_calls(stage: Stage) -> None:
    other = await stage.engine()
    await _call(stage.eye, "take", 8)
    large = await _call(other, "take", 10, wait=None)
    small = await _call(stage.eye, "take", 1, wait=None)
    assert not (await _call(other, "take", 1)).granted
    assert large.granted
    assert small.granted
    assert large.at <= small.at
    assert small.wait > HOUR.window  # it waits until the large one leaves the window


@behaviour("rates")
async def no_window_has_more_than_the_limit_when_several_clients_share_a_rate(stage: Stage) -> None:
    engines = [stage.eye, await stage.engine(), await stage.engine()]
    grants: list[tuple[int, int]] = []

    async def work(number: int) -> None:
        for turn in range(6):
            count = 1 + (number + turn) % 4
            answer = await _call(engines[number % 3], "take", count, rule=SHORT, wait=None)
            assert answer.granted
            grants.append((answer.at, count))
            await asyncio.sleep(answer.wait / 1e6)

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(work(number))
    assert len(grants) == 48
    assert most_in_window(grants, SHORT.window) <= SHORT.limit


@behaviour("rates")
async def a_burst_is_the_limit_of_a_fraction_of_the_period(stage: Stage) -> None:
    rule = RateRule(100, 3_600_000_000, 10)
    assert (await _call(stage.eye, "take", 10, rule=rule)).granted
    answer = await _call(stage.eye, "peek", 1, rule=rule)
    assert (answer.granted, answer.free) == (False, 0)
    assert 0.09 * rule.per < answer.wait < 0.102 * rule.per


@behaviour("rates")
async def tokens_that_are_given_back_are_free_again(stage: Stage) -> None:
    taken = await _call(stage.eye, "take", 10)
    other = await stage.engine()
    given = await _call(other, "refund", 4, at=taken.at)
    assert (given.granted, given.free) == (True, 4)
    assert (await _call(stage.eye, "take", 4)).granted
    assert not (await _call(stage.eye, "take", 1)).granted
    assert not (await _call(other, "refund", 4, at=taken.at - HOUR.window // 50)).granted


@behaviour("rates")
async def a_reservation_that_is_given_back_delays_no_later_take(stage: Stage) -> None:
    await _call(stage.eye, "take", 5)
    late = await _call(stage.eye, "take", 10, wait=None)
    assert not (await _call(stage.eye, "take", 5)).granted
    assert (await _call(stage.eye, "refund", 10, at=late.at)).granted
    assert (await _call(stage.eye, "take", 5)).granted


@behaviour("rates")
async def a_rate_that_is_given_back_entirely_is_new(stage: Stage) -> None:
    taken = await _call(stage.eye, "take", 10)
    assert (await _call(stage.eye, "refund", 10, at=taken.at)).free == 10
    assert (await _call(stage.eye, "take", 3, rule=SHORT)).granted


@behaviour("rates")
async def a_rate_in_use_has_one_rule(stage: Stage) -> None:
    await _call(stage.eye, "take", 1)
    other = await stage.engine()
    for kind in ("take", "peek"):
        refused = await _call(other, kind, 1, rule=SHORT)
        assert (refused.granted, refused.rule) == (False, HOUR)
    assert (await _call(stage.eye, "peek")).free == 9


@behaviour("rates")
async def a_resize_replaces_the_rule_and_keeps_the_tokens(stage: Stage) -> None:
    larger = RateRule(50, HOUR.per, 25)
    await _call(stage.eye, "take", 10)
    assert (await _call(stage.eye, "resize", rule=larger)).granted
    answer = await _call(stage.eye, "take", 15, rule=larger)
    assert (answer.granted, answer.free) == (True, 0)
    assert (await _call(stage.eye, "take", 1)).rule == larger
    await _call(stage.eye, "resize")
    assert (await _call(stage.eye, "take", 1)).rule == HOUR


@behaviour("rates")
async def resizing_a_rate_that_is_not_in_use_makes_none(stage: Stage) -> None:
    await _call(stage.eye, "resize", rule=SHORT)
    assert (await _call(stage.eye, "take", 1)).granted


@behaviour("rates")
async def a_rate_vanishes_when_its_tokens_have_left_the_window(stage: Stage) -> None:
    await _call(stage.eye, "take", 10, rule=SHORT)
    assert not (await _call(stage.eye, "take", 1, rule=SHORT)).granted

    async def vanished() -> bool:
        return (await _call(stage.eye, "peek", 1)).rule == HOUR

    await stage.until(vanished, "the rate has vanished")
    assert (await _call(stage.eye, "take", 10)).granted


@behaviour("rates")
async def rates_are_separate_by_node_and_name_and_from_semaphores(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    await stage.eye.create_node("/n/r", NodeConfig(), exist_ok=False)
    program = await stage.program()
    await program.lock("r")
    places = [
        ("/default", "r"),
        ("/n", "r"),
        ("/n/r", "r"),
        ("/n", "r/r"),
        ("/n", ":r"),
        ("/n", "é"),
    ]
    for node, name in places:
        assert (await _call(stage.eye, "take", 10, node=node, name=name)).granted
    for node, name in places:
        assert not (await _call(stage.eye, "take", 1, node=node, name=name)).granted


@behaviour("rates")
async def a_dropped_node_takes_its_rates_along(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    await _call(stage.eye, "take", 10, node="/n")
    await stage.eye.drop_node("/n", force=False)
    with raises(NodeNotFound):
        await _call(stage.eye, "take", 1, node="/n")
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    assert (await _call(stage.eye, "take", 10, node="/n")).granted


@behaviour("rates")
async def a_rate_needs_a_node_and_a_valid_name(stage: Stage) -> None:
    for kind in ("take", "peek", "refund", "resize"):
        with raises(NodeNotFound, kind):
            await _call(stage.eye, kind, node="/missing")
    with raises(InvalidArgument):
        await _call(stage.eye, "take", name="")
    with raises(InvalidArgument):
        await _call(stage.eye, "take", name="x" * 1025)


@behaviour("rates")
async def the_greatest_rates_are_counted_exactly(stage: Stage) -> None:
    rule = RateRule(10**11, 366 * 24 * 3_600_000_000, 10**11)
    assert (await _call(stage.eye, "take", 10**11 - 1, rule=rule)).free == 1
    assert (await _call(stage.eye, "take", 1, rule=rule)).granted
    late = await _call(stage.eye, "take", 10**11, rule=rule, wait=None)
    assert late.granted
    assert rule.window <= late.wait + rule.window // 50
    assert (await _call(stage.eye, "refund", 10**11, rule=rule, at=late.at)).granted
