"""Histories of a naive model are accepted, and what is made false in them is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenure.testing.history import History, Record, check, dump, load
from tenure.testing.history.records import (
    Called,
    Gone,
    Granted,
    Held,
    Leaves,
    Observed,
    Queued,
    Requested,
    Returned,
    Truth,
    from_json,
    to_json,
)
from tests.testing.history.model import World

Records = list[Record]
R = TypeVar("R")

seeds = st.integers(0, 1 << 32)


def told(seed: int) -> tuple[Records, Random]:
    """What is recorded of a world, and the chance with which it is changed."""
    return World(Random(seed)).run().records, Random(seed)


def rules(records: Records) -> set[str]:
    return {violation.rule for violation in check(History(records))}


@given(seeds)
def test_what_a_naive_store_does_is_in_order(seed: int) -> None:
    records, _ = told(seed)
    assert [str(violation) for violation in check(History(records))] == []


@given(seeds, st.floats(0.0, 0.5))
def test_clocks_that_disagree_are_forgiven(seed: int, skew: float) -> None:
    records, random = told(seed)
    ahead = {f"{kind}{number}": random.uniform(0, skew) for kind in "pq" for number in range(25)}
    ahead["o"] = random.uniform(0, skew)
    shifted = [shift(record, ahead) for record in records]
    assert [str(violation) for violation in check(History(shifted, skew=skew))] == []


def shift(record: Any, ahead: dict[str, float]) -> Record:
    """As a process says it whose clock is ahead."""
    seconds = 0.0
    if hasattr(record, "request"):
        seconds = ahead["p" + record.request[1:]]
    elif hasattr(record, "call"):
        seconds = ahead["q" + record.call[1:]]
    elif not isinstance(record, Truth):
        seconds = ahead[record.process]
    if getattr(record, "deadline", None) is not None:
        record = replace(record, deadline=record.deadline + seconds)
    shifted: Record = replace(record, at=record.at + seconds)
    return shifted


# What is made false. Each changes the records, or finds nothing that it could change.


def of(records: Records, kind: type[R]) -> dict[str, R]:
    """The records of one kind, by their requests."""
    return {cast(Any, record).request: record for record in records if isinstance(record, kind)}


def swap(records: Records, old: Record, new: Record) -> None:
    records[next(i for i, record in enumerate(records) if record is old)] = new


def two_that_held_the_mutex(records: Records, random: Random) -> list[Granted]:
    """The grants of two that followed each other, with some time in between them."""
    asked, left = of(records, Requested), of(records, Leaves)
    grants = [
        record
        for record in records
        if isinstance(record, Granted)
        and asked[record.request].name == "mutex"
        and record.request in left
    ]
    assume(len(grants) >= 2)
    number = random.randrange(len(grants) - 1)
    return grants[number : number + 2]


def token_of(granted: Granted) -> int:
    assert granted.order_id is not None
    return granted.order_id


def grant_too_early(records: Records, random: Random) -> str:
    first, second = two_that_held_the_mutex(records, random)
    left = of(records, Leaves)[first.request].at
    at = random.uniform(first.at, left)
    asked = of(records, Requested)[second.request]
    swap(records, second, replace(second, at=at))
    swap(records, asked, replace(asked, at=min(asked.at, at)))
    records.sort(key=lambda record: record.at)
    return "limit"


def swap_order_ids(records: Records, random: Random) -> str:
    first, second = two_that_held_the_mutex(records, random)
    other = {first.request: token_of(second), second.request: token_of(first)}
    for record in list(records):
        if isinstance(record, Queued | Granted) and record.request in other:
            swap(records, record, replace(record, order_id=other[record.request]))
    return "order"


def give_a_token_twice(records: Records, random: Random) -> str:
    first, second = two_that_held_the_mutex(records, random)
    for record in list(records):
        if isinstance(record, Queued | Granted) and record.request == second.request:
            swap(records, record, replace(record, order_id=token_of(first)))
    return "fencing"


def set_tokens_back(records: Records, random: Random) -> str:
    """As a store that forgets after a restart what it has given."""
    last = max(record.at for record in records)
    records.insert(-1, Requested(last, "p", "late", "/n", "other", 1, 1, 30.0))
    records.insert(-1, Granted(last, "late", 1, last + 30.0))
    assume(any(isinstance(record, Granted) and record.request != "late" for record in records))
    return "fencing"


def hold_after_the_end(records: Records, random: Random) -> str:
    gone = [record for record in records if isinstance(record, Gone)]
    assume(gone)
    over = random.choice(gone)
    held: Record = Held(over.at, over.request, 99.0)
    if random.random() < 0.5:
        held = Granted(over.at, over.request, 1, 99.0)
    records.insert(records.index(over) + 1, held)
    return "never again"


def lose_late(records: Records, random: Random) -> str:
    lost = [record for record in records if isinstance(record, Gone) and record.why == "lost"]
    assume(lost)
    late = random.choice(lost)
    swap(records, late, replace(late, at=late.at + 0.3))
    return "loss"


def read_what_was_overwritten(records: Records, random: Random) -> str:
    """Of two updates that certainly followed each other, the first one's data, after both."""
    returned = {record.call: record for record in records if isinstance(record, Returned)}
    writes = [
        (record, returned[record.call])
        for record in records
        if isinstance(record, Called)
        and record.op == "update"
        and record.call in returned
        and returned[record.call].outcome == "ok"
    ]
    pairs = [(a, b) for a in writes for b in writes if a[1].at < b[0].at]
    assume(pairs)
    (first, _), (_, over) = random.choice(pairs)
    records += [
        Called(over.at + 0.001, "q", "stale", "/n", "data", "read"),
        Returned(over.at + 0.002, "stale", "ok", first.argument),
    ]
    records.sort(key=lambda record: record.at)
    return "data"


def miss_the_last_change(records: Records, random: Random) -> str:
    """The observer is never shown the state in which it all ends."""
    true = truth_about(records, "data").data
    seen = [record for record in records if isinstance(record, Observed)]
    assume(any(record.value != true for record in seen))
    for record in seen:
        if record.value == true:
            records.remove(record)
    return "observers"


def show_what_nobody_wrote(records: Records, random: Random) -> str:
    seen = [record for record in records if isinstance(record, Observed)]
    assume(seen)
    wrong = random.choice(seen)
    swap(records, wrong, replace(wrong, value=b"?"))
    return "observers"


def truth_about(records: Records, name: str) -> Truth:
    return next(each for each in records if isinstance(each, Truth) and each.name == name)


def drop_a_release(records: Records, random: Random) -> str:
    first, _ = two_that_held_the_mutex(records, random)
    truth = truth_about(records, "mutex")
    swap(records, truth, replace(truth, owners=(*truth.owners, token_of(first))))
    return "end"


def a_truth_with_owners(records: Records, random: Random) -> Truth:
    truths = [record for record in records if isinstance(record, Truth) and record.owners]
    assume(truths)
    return random.choice(truths)


def forget_an_owner(records: Records, random: Random) -> str:
    truth = a_truth_with_owners(records, random)
    swap(records, truth, replace(truth, owners=truth.owners[1:]))
    return "end"


def forget_to_grant(records: Records, random: Random) -> str:
    truth = a_truth_with_owners(records, random)
    *owners, last = truth.owners
    swap(records, truth, replace(truth, owners=tuple(owners), waiters=(last, *truth.waiters)))
    return "end"


@pytest.mark.parametrize(
    "make_false",
    [
        grant_too_early,
        swap_order_ids,
        give_a_token_twice,
        set_tokens_back,
        hold_after_the_end,
        lose_late,
        read_what_was_overwritten,
        miss_the_last_change,
        show_what_nobody_wrote,
        drop_a_release,
        forget_an_owner,
        forget_to_grant,
    ],
    ids=lambda each: each.__name__,
)
@given(seed=seeds)
def test_what_is_made_false_is_found(
    seed: int, make_false: Callable[[Records, Random], str]
) -> None:
    records, random = told(seed)
    rule = make_false(records, random)
    found = rules(records)
    assert rule in found or (rule == "order" and "fencing" in found)


# Files


@given(seeds)
def test_a_record_is_read_as_it_was_written(seed: int) -> None:
    records, _ = told(seed)
    assert [from_json(to_json(record)) for record in records] == records


def test_a_history_is_told_by_several_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("histories")
    records = World(Random(7)).run().records
    dump(records[::2], folder / "even")
    dump(records[1::2], folder / "odd")
    history = load([folder / "even", folder / "odd"], skew=0.5, slack=0.25)
    assert [record.at for record in history.records] == sorted(record.at for record in records)
    assert sorted(history.records, key=repr) == sorted(records, key=repr)
    assert (history.skew, history.slack) == (0.5, 0.25)
    assert repr(history) == f"<History of {len(records)} records>"


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"kind": "lost"}', '{"kind": "leaves", "of": 1}', "?"]
)
def test_another_line_is_no_record(line: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("histories") / "a"
    path.write_text(f'{{"kind": "leaves", "at": 1, "request": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a:2: "):
        load([path])
