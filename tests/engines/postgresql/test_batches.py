"""Batches against the same operations one by one: the answers and the queues are alike."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tenure.core import rules
from tests.engines.postgresql.stepping import Actor, a_store

_NAMES = ("a", "b")
_WHOLE = "18446744073709551615"
_BATCHES = 120


def _operations(
    chosen: random.Random, requests: list[tuple[int, str]], first: int
) -> list[list[Any]]:
    """Return random operations, of which some are on earlier requests."""
    found: list[list[Any]] = []
    for number in range(first, first + chosen.randint(1, 5)):
        if requests and chosen.random() < 0.55:
            request = requests[0] if chosen.random() < 0.5 else chosen.choice(requests)
            found.append([1, "w", *request])
            if chosen.random() < 0.9:  # or else it is withdrawn twice
                requests.remove(request)
            continue
        name = chosen.choice(_NAMES) if chosen.random() < 0.3 else "a"
        words: list[Any] = [1, "m", number, name]
        if chosen.random() < 0.4:
            count, wait = chosen.choice(("1", "2", _WHOLE)), chosen.choice(("", "0", "60000000"))
            words = [1, "e", number, name, count, "", wait, "1"]
        found.append(words)
        requests.append((number, name))
    return found


def _kind(operation: list[Any], answer: Any) -> Any:
    """Return what an answer says, without its order id.

    A request that joins may be granted by its answer, or by an event that follows.
    """
    if isinstance(answer, list):
        return "joined" if isinstance(answer[0], int) else answer
    return "joined" if operation[1] != "w" and answer > 0 else answer


async def _queues(actor: Actor) -> list[tuple[Any, ...]]:
    return await actor.execute(
        "SELECT x.name, y.request_id, y.count, y.order_id <= x.last_owner "
        "FROM SCHEMA.requests y JOIN SCHEMA.queues x ON x.id = y.queue "
        "ORDER BY x.name, y.order_id"
    )


async def _turn_over(actor: Actor, operations: list[list[Any]]) -> list[Any] | None:
    """Return the answers of the function for one mutex, if it is for these operations.

    It brings the operations into the order of the answers.
    """
    kinds = {each[1] for each in operations}
    numbers, names = {each[2] for each in operations}, {each[3] for each in operations}
    if len(names) > 1 or not {"w"} <= kinds <= {"m", "w"} or len(numbers) < len(operations):
        return None
    operations.sort(key=lambda each: each[1] == "m")
    leaving, joining = ([each[2] for each in operations if each[1] == kind] for kind in "wm")
    return await actor.turn_over(names.pop(), leaving, joining)


@pytest.mark.parametrize("seed", range(4))
async def test_a_batch_does_what_its_operations_do_one_by_one(seed: int) -> None:
    chosen = random.Random(seed)
    async with a_store() as one, a_store() as other:
        # Nothing renews their sessions, however long a busy machine takes.
        batch, single = [await each.actor(window=rules.MAX_WINDOW) for each in (one, other)]
        for actor in (batch, single):
            for number, name in enumerate(_NAMES):
                await actor.lock(name)
                await actor.release(name, number + 1)
        requests: list[tuple[int, str]] = []
        for at in range(_BATCHES):
            operations = _operations(chosen, requests, 10 * (at + 1))
            answers = await _turn_over(batch, operations) or await batch.operate(*operations)
            alone = [(await single.operate(each))[0] for each in operations]
            together = [*map(_kind, operations, answers)]
            assert together == [*map(_kind, operations, alone)], operations
            assert await _queues(batch) == await _queues(single), operations
            await one.check()
