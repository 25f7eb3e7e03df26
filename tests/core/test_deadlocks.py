"""The rule of deadlocks, compared with a search through everything that programs can do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.core.deadlocks import (
    DATA_BYTES,
    MOST_LEASES,
    deadlocks,
    decode,
    encode,
    relevant,
    standing,
    stuck,
    victim,
)
from tenure.model import (
    EPHEMERAL_LIMIT,
    BlockedTask,
    RequestDescription,
    SemaphoreDescription,
)

Key = tuple[str, int]


@dataclass(frozen=True)
class Entry:
    """A request in a queue, of an actor; of an actor without a number nothing is known."""

    order_id: int
    count: int
    actor: int | None


@dataclass(frozen=True)
class Situation:
    """Queues by name, and for each blocked actor the request that it waits for."""

    limits: Mapping[str, int]
    queues: Mapping[str, tuple[Entry, ...]]
    awaited: Mapping[int, Key]

    def owners(self, name: str) -> int:
        """How many requests own: the longest prefix whose counts fit."""
        return owners(self.queues[name], self.limits[name])

    def tasks(self) -> list[BlockedTask]:
        return [
            BlockedTask(
                name,
                order_id,
                tuple(
                    (other, each.order_id)
                    for other, queue in self.queues.items()
                    for each in queue
                    if each.actor == actor and each.order_id != order_id
                ),
                session_id=1,
                raises=True,
            )
            for actor, (name, order_id) in self.awaited.items()
        ]

    def described(self) -> dict[str, SemaphoreDescription]:
        found = {}
        for name, queue in self.queues.items():
            requests = tuple(
                RequestDescription(1, each.order_id, each.count, b"") for each in queue
            )
            own = self.owners(name)
            limit = self.limits[name]
            held = sum(each.count for each in queue[:own])
            found[name] = SemaphoreDescription(
                name, b"", limit, held, limit > 100, requests[:own], requests[own:]
            )
        return found


def owners(queue: Sequence[Entry], limit: int) -> int:
    held = 0
    for number, each in enumerate(queue):
        held += each.count
        if held > limit:
            return number
    return len(queue)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    names = "abc"[: draw(st.integers(2, 3))]
    limits = {name: draw(st.sampled_from([1, 1, 2, 3, EPHEMERAL_LIMIT])) for name in names}
    actors = st.sampled_from([0, 0, 1, 1, 2, 2, 3, None])
    queues: dict[str, tuple[Entry, ...]] = {}
    number = 0
    for name in names:
        entries = []
        for _ in range(draw(st.integers(1, 4))):
            number += 1
            counts = [1, 2, 3] if limits[name] > 3 else list(range(1, limits[name] + 1))
            count = draw(st.sampled_from([*counts, limits[name]]))
            entries.append(Entry(number, count, draw(actors)))
        queues[name] = tuple(entries)
    # The numbers of the order say which wait began first: mix them between the queues.
    shuffled = draw(st.permutations(range(1, number + 1)))
    renumbered: dict[str, tuple[Entry, ...]] = {}
    for name, queue in queues.items():
        ids = sorted(shuffled[each.order_id - 1] for each in queue)
        renumbered[name] = tuple(
            replace(each, order_id=new) for each, new in zip(queue, ids, strict=True)
        )
    awaited = {}
    for actor in range(4):
        waiting = [
            (name, each.order_id)
            for name, queue in renumbered.items()
            for each in queue[owners(queue, limits[name]) :]
            if each.actor == actor
        ]
        if waiting:
            chosen = draw(st.sampled_from([*waiting, *waiting, None]))
            if chosen is not None:
                awaited[actor] = chosen
    return Situation(limits, renumbered, awaited)


def granted_some_day(situation: Situation) -> set[int]:
    """The blocked actors that are granted what they wait for, in some course of events.

    All courses are tried. A request of an actor that is not blocked may leave at any time. A
    blocked one whose request is granted is blocked no longer.
    """
    granted: set[int] = set()
    seen = set()
    left = [situation]
    while left:
        now = left.pop()
        key = (tuple(now.queues.items()), tuple(now.awaited.items()))
        if key in seen:
            continue
        seen.add(key)
        blocked = dict(now.awaited)
        for actor, (name, order_id) in now.awaited.items():
            own = now.queues[name][: now.owners(name)]
            if any(each.order_id == order_id for each in own):
                del blocked[actor]
                granted.add(actor)
        if len(blocked) < len(now.awaited):
            left.append(replace(now, awaited=blocked))
            continue
        for name, queue in now.queues.items():
            for each in queue:
                if each.actor is None or each.actor not in blocked:
                    rest = tuple(other for other in queue if other is not each)
                    left.append(replace(now, queues={**now.queues, name: rest}))
    return granted


@settings(max_examples=300)
@given(situations())
def test_stuck_are_those_that_no_course_of_events_grants(situation: Situation) -> None:
    queues = situation.described()
    tasks = standing(situation.tasks(), queues)
    assert tasks == situation.tasks()
    found = {(task.name, task.order_id) for task in stuck(tasks, queues)}
    never = set(situation.awaited) - granted_some_day(situation)
    assert found == {situation.awaited[actor] for actor in never}


@settings(max_examples=300)
@given(situations())
def test_a_deadlock_is_of_tasks_that_wait_for_each_other_and_are_stuck_alone(
    situation: Situation,
) -> None:
    queues = situation.described()
    tasks = standing(situation.tasks(), queues)
    members = set(stuck(tasks, queues))
    found = deadlocks(tasks, queues)
    assert bool(found) == bool(members)
    for each in found:
        assert set(each) <= members
        # Without the others, they are as stuck as before; without one of them, not all are.
        assert set(stuck(each, queues)) == set(each)
        assert [task.order_id for task in each] == sorted(task.order_id for task in each)
        assert victim(each) is each[-1]
    assert len({task for each in found for task in each}) == sum(map(len, found))


@settings(max_examples=300)
@given(situations())
def test_names_alone_leave_out_no_member_of_a_deadlock(situation: Situation) -> None:
    queues = situation.described()
    tasks = standing(situation.tasks(), queues)
    assert set(map(frozenset, deadlocks(relevant(tasks), queues))) == set(
        map(frozenset, deadlocks(tasks, queues))
    )


def queue(
    name: str,
    owning: Iterable[tuple[int, int]],
    waiting: Iterable[tuple[int, int]],
    limit: int = 1,
    count: int = 1,
) -> SemaphoreDescription:
    """A semaphore with pairs of an order id and a session."""
    return SemaphoreDescription(
        name,
        b"",
        limit,
        0,
        False,
        tuple(RequestDescription(session, at, count, b"", pid=session) for at, session in owning),
        tuple(RequestDescription(session, at, count, b"", pid=session) for at, session in waiting),
    )


A_AND_B = {"a": queue("a", [(1, 10)], [(4, 20)]), "b": queue("b", [(2, 20)], [(3, 10)])}
FIRST = BlockedTask("b", 3, (("a", 1),), session_id=10, pid=10)
SECOND = BlockedTask("a", 4, (("b", 2),), session_id=20, pid=20, raises=True)


def found_in(tasks: Iterable[BlockedTask], queues: Mapping[str, SemaphoreDescription]) -> object:
    return deadlocks(standing(tasks, queues), queues)


def test_two_tasks_that_wait_for_each_other_are_a_deadlock() -> None:
    assert found_in([SECOND, FIRST], A_AND_B) == [(FIRST, SECOND)]
    assert victim([FIRST, SECOND]) is SECOND
    assert victim([FIRST]) is None


def test_two_tasks_of_one_session_are_two() -> None:
    """Merged into one, the session would hold what it waits for."""
    queues = {"a": queue("a", [(1, 10)], [(4, 20)]), "b": queue("b", [(2, 20)], [(3, 10)])}
    other_task_of_10 = BlockedTask("b", 3, (), session_id=10, pid=10)
    assert found_in([SECOND, other_task_of_10], queues) == []


@pytest.mark.parametrize(
    "queues",
    [
        A_AND_B | {"a": queue("a", [(4, 20)], [])},  # it has been granted
        A_AND_B | {"a": queue("a", [(1, 10)], [])},  # it has been withdrawn
        A_AND_B | {"a": queue("a", [(5, 30)], [(4, 20)])},  # the lease has been released
        A_AND_B | {"a": queue("a", [(1, 10)], [(4, 99)])},  # another session's request
        A_AND_B | {"a": queue("a", [(1, 99)], [(4, 20)])},  # another program's lease
        {"b": A_AND_B["b"]},  # the semaphore is gone, or was not described
    ],
    ids=["granted", "withdrawn", "released", "foreign request", "foreign lease", "gone"],
)
def test_what_a_later_reading_does_not_confirm_does_not_count(
    queues: Mapping[str, SemaphoreDescription],
) -> None:
    assert found_in([FIRST, SECOND], queues) == []


def test_a_lease_of_another_session_of_the_process_counts() -> None:
    lease = RequestDescription(11, 1, 1, b"", pid=10)
    queues = A_AND_B | {"a": replace(A_AND_B["a"], owners=(lease,))}
    assert found_in([FIRST, SECOND], queues) == [(FIRST, SECOND)]


def test_a_cycle_with_another_holder_who_may_release_is_none() -> None:
    queues = {
        "a": queue("a", [(1, 10), (5, 30)], [(6, 20)], limit=2),
        "b": queue("b", [(2, 20)], [(3, 10)]),
    }
    assert found_in([FIRST, replace(SECOND, order_id=6)], queues) == []


def test_a_knot_of_three_in_a_semaphore_is_one() -> None:
    queues = {
        "a": queue("a", [(1, 10), (5, 30)], [(6, 20)], limit=2),
        "b": queue("b", [(2, 20)], [(3, 10), (7, 30)]),
    }
    second = replace(SECOND, order_id=6)
    third = BlockedTask("b", 7, (("a", 5),), session_id=30, pid=30)
    assert found_in([second, third, FIRST], queues) == [(FIRST, second, third)]


def test_a_task_that_waits_behind_a_deadlock_is_no_member() -> None:
    queues = A_AND_B | {"a": queue("a", [(1, 10)], [(4, 20), (9, 40)])}
    behind = BlockedTask("a", 9, (("c", 8),), session_id=40, pid=40, raises=True)
    tasks = [FIRST, SECOND, behind]
    assert set(stuck(standing(tasks, queues), queues)) == {
        FIRST,
        SECOND,
        replace(behind, leases=()),
    }
    assert found_in(tasks, queues) == [(FIRST, SECOND)]


def test_a_deadlock_whose_tasks_wait_for_another_one_as_well_is_found() -> None:
    """Both tokens of the pool are needed, and the holder of the second one is in a deadlock."""
    pool = SemaphoreDescription(
        "pool",
        b"",
        2,
        2,
        False,
        (RequestDescription(20, 2, 1, b""), RequestDescription(30, 5, 1, b"")),
        (RequestDescription(10, 3, 2, b""),),
    )
    queues = {
        "a": queue("a", [(1, 10)], [(4, 20)]),
        "pool": pool,
        "b": queue("b", [(6, 30)], [(8, 40)]),
        "c": queue("c", [(7, 40)], [(9, 30)]),
    }
    first = [
        BlockedTask("pool", 3, (("a", 1),), session_id=10),
        BlockedTask("a", 4, (("pool", 2),), session_id=20),
    ]
    other = [
        BlockedTask("b", 8, (("c", 7),), session_id=40),
        BlockedTask("c", 9, (("b", 6), ("pool", 5)), session_id=30),
    ]
    assert found_in([*first, *other], queues) == [tuple(first), tuple(other)]
    # With one token it would be granted that of the other deadlock, once that is resolved.
    queues["pool"] = replace(pool, waiters=(RequestDescription(10, 3, 1, b""),))
    assert found_in([*first, *other], queues) == [tuple(other)]


def test_a_parked_ticket_is_in_the_way_as_a_lease_is() -> None:
    queues = {
        "a": queue("a", [(1, 30)], [(4, 10), (6, 20)]),
        "b": queue("b", [(2, 20)], [(5, 10)]),
    }
    parked = BlockedTask("b", 5, (("a", 4),), session_id=10, pid=10)
    second = BlockedTask("a", 6, (("b", 2),), session_id=20, pid=20)
    assert found_in([parked, second], queues) == [(parked, second)]


def test_a_large_request_waits_for_what_is_not_free() -> None:
    """A waiter that needs more than is free blocks those behind it, though these would fit."""
    pool = SemaphoreDescription(
        "pool",
        b"",
        3,
        1,
        False,
        (RequestDescription(10, 1, 1, b"", pid=10),),
        (RequestDescription(20, 4, 3, b"", pid=20), RequestDescription(10, 5, 1, b"", pid=10)),
    )
    queues = {"pool": pool}
    large = BlockedTask("pool", 4, (), session_id=20, pid=20)
    small = BlockedTask("pool", 5, (("pool", 1),), session_id=10, pid=10)
    assert found_in([large, small], queues) == [(large, small)]


# Publications


def owner_of(data: bytes) -> RequestDescription:
    return RequestDescription(7, 9, 1, data, host="h", pid=8, program="p", session_description="d")


def test_a_publication_is_read_as_it_was_written() -> None:
    data = encode("b", 3, [("a", 1), ("c", 2)], task="Task-1", timeout=True, raises=False)
    assert decode(owner_of(data)) == BlockedTask(
        *("b", 3, (("a", 1), ("c", 2)), 0, "Task-1", True, False, 7, "h", 8, "p", "d")
    )


@given(
    st.text(min_size=1, max_size=250),
    st.lists(st.tuples(st.text(min_size=1, max_size=250), st.integers(1, 2**53)), max_size=40),
    st.text(max_size=200),
)
def test_a_publication_is_bounded_and_says_what_it_leaves_out(
    name: str, leases: list[tuple[str, int]], task: str
) -> None:
    data = encode(name, 1, leases, task=task, timeout=False, raises=True)
    read = decode(owner_of(data))
    assert read is not None
    assert len(data) <= DATA_BYTES
    assert read.name == name
    assert list(read.leases) == leases[: len(read.leases)]
    assert read.left_out == len(leases) - len(read.leases)


def test_long_names_are_left_out_last() -> None:
    leases = [("n" * 1000, at) for at in range(10)]
    escaped = encode("\x01" * 1024, 2**53, leases, task="\x01" * 99, timeout=False, raises=False)
    assert len(escaped) <= DATA_BYTES
    read = decode(owner_of(encode("b", 99, leases, task="", timeout=False, raises=False)))
    assert read is not None
    assert (read.leases, read.left_out) == (tuple(leases[:8]), 2)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"10.0.0.1:80", b"[]", b'{"for":["a"]}', b'{"for":["a","b"],"in":[]}'),
        b"[" * DATA_BYTES,
        encode("", 1, [], task="", timeout=False, raises=False),
        encode("n" * 1025, 1, [], task="", timeout=False, raises=False),
        encode("\udc80", 1, [], task="", timeout=False, raises=False),
        encode("b", 1, [("", 2)], task="", timeout=False, raises=False),
        b'{"for":["b",1],"in":[%s1],"more":0,"task":"","timeout":false,"raise":false}'
        % (b"1," * MOST_LEASES),
        encode("b", 1, [("a", 2)], task="", timeout=False, raises=False) + b" " * DATA_BYTES,
    ],
)
def test_other_data_is_no_publication(data: bytes) -> None:
    assert decode(owner_of(data)) is None


def test_of_many_leases_the_innermost_are_published() -> None:
    leases = [("a", at) for at in range(MOST_LEASES + 20)]
    read = decode(owner_of(encode("b", 999, leases, task="", timeout=False, raises=False)))
    assert read is not None
    assert (read.leases, read.left_out) == (tuple(leases[:MOST_LEASES]), 20)


def test_a_deadlock_of_a_thousand_tasks_is_found_in_little_time() -> None:
    """Programs look for deadlocks on their event loops."""
    most = 1000
    pool = tuple(RequestDescription(1, at, 1, b"") for at in range(1, most + 2))
    waiters = tuple(RequestDescription(1, 10_000 + at, 1, b"") for at in range(1, most + 1))
    last = RequestDescription(1, 20_000, 1, b"")
    owner = RequestDescription(1, 9_000, 1, b"")
    queues = {
        "pool": SemaphoreDescription("pool", b"", most + 1, most + 1, False, pool, (last,)),
        "m": SemaphoreDescription("m", b"", 1, 1, True, (owner,), waiters),
    }
    tasks = [
        BlockedTask("m", 10_000 + at, (("pool", at),), session_id=1) for at in range(1, most + 1)
    ]
    tasks.append(BlockedTask("pool", 20_000, (("m", 9_000), ("pool", most + 1)), session_id=1))
    began = time.process_time()
    (found,) = deadlocks(standing(relevant(tasks), queues), queues)
    assert len(found) == most + 1
    assert time.process_time() - began < 2


def test_the_name_of_a_task_is_text() -> None:
    read = decode(owner_of(encode("b", 1, [], task="\ud800", timeout=False, raises=False)))
    assert read is not None
    assert read.task == "?"


def test_what_is_no_lease_is_left_out() -> None:
    fields = {"for": ["b", 3], "in": [1, ["a"], ["a", 1]], "more": 0, "task": ""}
    read = decode(owner_of(json.dumps(fields | {"timeout": False, "raise": False}).encode()))
    assert read is not None
    assert read.leases == (("a", 1),)
