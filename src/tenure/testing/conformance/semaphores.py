"""Operations on semaphores: create, update, describe, list, delete."""

from __future__ import annotations

from tenure.engines.contract import Place, Removal
from tenure.errors import (
    InvalidArgument,
    LeaseReleased,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
)
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.stage import Stage

EXACT = 2**53 - 1


async def _held(program: Program, name: str = "pool") -> int:
    return (await program.describe(name)).held


@behaviour("lasting")
async def requests_are_granted_as_long_as_they_fit(stage: Stage) -> None:
    one, two = await stage.programs(2)
    await one.create("pool", 4)
    places = [(await program.enqueue("pool", 2)).place for program in (one, two, one)]
    assert places == [Place.GRANTED, Place.GRANTED, Place.WAITING]
    assert await _held(one) == 4
    assert await stage.queue("pool") == ([one.id, two.id], [one.id])


@behaviour("lasting")
async def nobody_goes_past_a_request_that_waits(stage: Stage) -> None:
    owner, large, small = await stage.programs(3)
    await owner.create("pool", 3)
    held = await owner.enqueue("pool", 2)
    waiting = await large.enqueue("pool", 2)
    behind = await small.enqueue("pool", 1)
    assert behind.place is Place.WAITING
    assert await _held(owner) == 2
    assert await stage.queue("pool") == ([owner.id], [large.id, small.id])
    await owner.withdraw(held)
    await waiting.granted()
    await behind.granted()
    assert await stage.queue("pool") == ([large.id, small.id], [])


@behaviour("lasting")
async def a_release_that_is_too_small_for_the_next_grants_nobody(stage: Stage) -> None:
    one, two, large, small = await stage.programs(4)
    await one.create("pool", 4)
    held = [await program.enqueue("pool", 2) for program in (one, two)]
    waiting = await large.enqueue("pool", 3)
    behind = await small.enqueue("pool", 1)
    await one.withdraw(held[0])
    assert await stage.queue("pool") == ([two.id], [large.id, small.id])
    await two.withdraw(held[1])
    await waiting.granted()
    await behind.granted()


@behaviour("lasting")
async def one_release_grants_all_that_fit(stage: Stage) -> None:
    owner, *others = await stage.programs(6)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 4)
    waiting = [await other.enqueue("pool") for other in others]
    await owner.withdraw(held)
    for request in waiting[:4]:
        await request.granted()
    assert await stage.queue("pool") == (
        [other.id for other in others[:4]],
        [others[4].id],
    )
    assert not others[4].recorder.grants


@behaviour("lasting")
async def a_waiter_that_leaves_makes_way_for_those_behind_it(stage: Stage) -> None:
    owner, large, *small = await stage.programs(4)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 1)
    blocking = await large.enqueue("pool", 3)
    waiting = [await program.enqueue("pool", 1) for program in small]
    await large.withdraw(blocking)
    for request in waiting:
        await request.granted()
    assert await _held(owner) == 3


@behaviour("lasting")
async def what_is_owned_is_never_taken_back(stage: Stage) -> None:
    first, second, third = await stage.programs(3)
    await first.create("pool", 3)
    held = await first.enqueue("pool", 1)
    await second.enqueue("pool", 2)
    await third.enqueue("pool", 2)
    await first.withdraw(held)
    assert await stage.queue("pool") == ([second.id], [third.id])
    assert await _held(first) == 2


@behaviour("lasting")
async def the_whole_is_granted_only_when_nothing_is_held(stage: Stage) -> None:
    owner, whole, behind = await stage.programs(3)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 1)
    exclusive = await whole.enqueue("pool", 4)
    shared = await behind.enqueue("pool", 1)
    assert (exclusive.place, shared.place) == (Place.WAITING, Place.WAITING)
    await owner.withdraw(held)
    await exclusive.granted()
    assert await stage.queue("pool") == ([whole.id], [behind.id])
    await whole.withdraw(exclusive)
    await shared.granted()


@behaviour()
async def a_mutex_is_shared_by_ones_and_owned_by_the_whole(stage: Stage) -> None:
    one, two, whole, last = await stage.programs(4)
    readers = [await program.enqueue("m", ephemeral=True) for program in (one, two)]
    assert [reader.place for reader in readers] == [Place.GRANTED] * 2
    assert await _held(one, "m") == 2
    writer = await whole.lock("m")
    late = await last.enqueue("m", ephemeral=True)
    assert (writer.place, late.place) == (Place.WAITING, Place.WAITING)
    for program, reader in zip((one, two), readers, strict=True):
        await program.withdraw(reader)
    await writer.granted()
    assert await _held(one, "m") == EPHEMERAL_LIMIT
    assert await stage.queue("m") == ([whole.id], [last.id])
    await whole.withdraw(writer)
    await late.granted()


@behaviour("lasting")
async def sums_are_exact_up_to_two_to_the_53_less_one(stage: Stage) -> None:
    one, two = await stage.programs(2)
    await one.create("pool", EXACT)
    large = await one.enqueue("pool", EXACT - 1)
    fits = await two.enqueue("pool", 1)
    too_much = await two.enqueue("pool", 1)
    assert [each.place for each in (large, fits, too_much)] == [
        Place.GRANTED,
        Place.GRANTED,
        Place.WAITING,
    ]
    assert await _held(one) == EXACT
    await two.withdraw(fits)
    await too_much.granted()
    assert await _held(one) == EXACT


@behaviour("lasting")
async def above_two_to_the_53_a_limit_is_no_bound_but_for_the_whole(stage: Stage) -> None:
    one, two, three = await stage.programs(3)
    for limit in (2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1):
        name = f"of {limit}"
        await one.create(name, limit)
        owned = [await one.enqueue(name, EXACT) for _ in range(3)]
        owned.append(await one.enqueue(name, 1))
        assert [each.place for each in owned] == [Place.GRANTED] * 4
        assert await _held(one, name) == 3 * EXACT + 1
        whole = await two.enqueue(name, limit)
        behind = await three.enqueue(name, 1)
        assert (whole.place, behind.place) == (Place.WAITING, Place.WAITING)
        for each in owned:
            await one.withdraw(each)
        await whole.granted()
        assert await _held(one, name) == limit
        assert await stage.queue(name) == ([two.id], [three.id])
        await two.withdraw(whole)
        await behind.granted()


@behaviour("lasting")
async def above_two_to_the_53_only_the_whole_may_be_requested(stage: Stage) -> None:
    program = await stage.program()
    for limit in (2**53 + 1, 2**64 - 1):
        name = f"of {limit}"
        await program.create(name, limit)
        for count in (2**53, limit - 1):
            with raises(InvalidArgument, f"{count} of {limit}"):
                await program.enqueue(name, count)
        assert await stage.queue(name) == ([], [])
    with raises(InvalidArgument):
        await program.enqueue("m", 2**64 - 2, ephemeral=True)


@behaviour("lasting")
async def a_count_may_be_anything_from_one_to_the_limit(stage: Stage) -> None:
    program = await stage.program()
    await program.create("pool", 3)
    for count in (1, 2, 3):
        request = await program.enqueue("pool", count)
        assert request.place is Place.GRANTED
        assert await _held(program) == count
        await program.withdraw(request)
    for count in (0, -1, 4, 2**64):
        with raises(InvalidArgument, f"count {count}"):
            await program.enqueue("pool", count)
    assert await stage.queue("pool") == ([], [])


async def _is_empty(stage: Stage) -> bool:
    return not await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)


@behaviour()
async def an_ephemeral_semaphore_comes_with_its_first_request(stage: Stage) -> None:
    program, other = await stage.programs(2)
    await program.enqueue("m", 3, ephemeral=True)
    found = await other.describe("m")
    assert (found.name, found.limit, found.data) == ("m", EPHEMERAL_LIMIT, b"")
    assert (found.held, found.ephemeral) == (3, True)


@behaviour()
async def an_ephemeral_semaphore_goes_with_its_last_request(stage: Stage) -> None:
    one, two = await stage.programs(2)
    held, waiting = await one.lock("m"), await two.lock("m")
    await one.withdraw(held)
    await waiting.granted()
    assert (await one.describe("m")).ephemeral
    await two.withdraw(waiting)
    with raises(SemaphoreNotFound):
        await one.describe("m")
    assert await _is_empty(stage)


@behaviour()
async def an_ephemeral_semaphore_goes_with_the_session_that_used_it(stage: Stage) -> None:
    closed, ended, expired = await stage.programs(2) + [await stage.program(window=1.0)]
    for number, program in enumerate((closed, ended, expired)):
        await program.lock(f"m{number}")
        await program.lock(f"m{number}")
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    await expired.ended()
    if not stage.capabilities.one_step:
        await stage.until(lambda: _is_empty(stage), "all of a session goes")
    assert await _is_empty(stage)


@behaviour()
async def an_ephemeral_semaphore_goes_although_a_waiter_was_the_last_to_leave(
    stage: Stage,
) -> None:
    owner, waiter = await stage.programs(2)
    held = await owner.lock("m")
    waiting = await waiter.lock("m")
    await waiter.withdraw(waiting)
    assert (await owner.describe("m")).ephemeral
    await owner.withdraw(held)
    assert await _is_empty(stage)


@behaviour()
async def a_new_ephemeral_semaphore_knows_nothing_of_the_old_one(stage: Stage) -> None:
    program = await stage.program()
    held = await program.lock("m")
    if stage.capabilities.data:
        await program.session.update_semaphore("m", b"old")
        assert (await program.describe("m")).data == b"old"
    await program.withdraw(held)
    await program.lock("m")
    assert (await program.describe("m")).data == b""


@behaviour()
async def an_ephemeral_semaphore_in_use_cannot_be_used_as_a_lasting_one(
    stage: Stage,
) -> None:
    owner, other = await stage.programs(2)
    await owner.lock("m")
    for timeout in (None, 0):
        with raises(InvalidArgument, f"enqueue with timeout {timeout}"):
            await other.enqueue("m", timeout=timeout, ephemeral=False)
    assert await stage.queue("m") == ([owner.id], [])


@behaviour("lasting")
async def an_ephemeral_semaphore_in_use_cannot_be_created_as_a_lasting_one(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    held = await owner.lock("m")
    for exist_ok in (False, True):
        for limit in (1, EPHEMERAL_LIMIT):
            with raises(InvalidArgument, f"create with limit {limit}"):
                await other.session.create_semaphore("m", limit, b"", exist_ok=exist_ok)
    assert (await other.describe("m")).ephemeral
    await owner.withdraw(held)
    await other.create("m", 1)
    assert not (await other.describe("m")).ephemeral


@behaviour("lasting")
async def a_lasting_semaphore_cannot_be_used_as_an_ephemeral_one(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    for name, limit in (("pool", 1), ("wide", EPHEMERAL_LIMIT)):
        await maker.create(name, limit)
        for timeout in (None, 0):
            with raises(InvalidArgument, f"{name} with timeout {timeout}"):
                await other.enqueue(name, timeout=timeout, ephemeral=True)
        assert await stage.queue(name) == ([], [])
        assert not (await maker.describe(name)).ephemeral


@behaviour()
async def an_ephemeral_semaphore_admits_one_owner_of_the_whole(stage: Stage) -> None:
    programs = await stage.programs(3)
    requests = [await program.lock("m") for program in programs]
    assert [each.place for each in requests] == [Place.GRANTED, Place.WAITING, Place.WAITING]
    assert (await programs[0].describe("m")).held == EPHEMERAL_LIMIT


@behaviour()
async def an_ephemeral_semaphore_admits_any_number_of_ones(stage: Stage) -> None:
    programs = await stage.programs(4)
    for number, program in enumerate(programs):
        request = await program.enqueue("services", data=b"%d" % number, ephemeral=True)
        assert request.place is Place.GRANTED
    found = await programs[0].describe("services")
    assert found.held == 4
    assert [each.session_id for each in found.owners] == [program.id for program in programs]
    if stage.capabilities.data:
        assert [each.data for each in found.owners] == [b"0", b"1", b"2", b"3"]


MIB = 1024 * 1024
EVERY_BYTE = bytes(range(256))
AWKWARD_NAMES = [
    *("a", "A", "a ", " a", "ä", "a\u0308", "%", "_", "*", "?", "[a]", "\\", "'", '"', ";", ":"),
    *("a/b", "/", "//", ".", "..", "a\nb", "a\0b", "\0", "\u202e", "🦉", "-1", "0", "None"),
    *("x" * 1024, "🦉" * 256),
]


@behaviour("lasting")
async def a_semaphore_is_as_it_was_created(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    await maker.create("pool", 4, b"how many")
    found = await other.describe("pool")
    assert (found.name, found.limit, found.data) == ("pool", 4, b"how many")
    assert (found.held, found.ephemeral) == (0, False)
    assert (found.owners, found.waiters) == ((), ())
    assert found.waiting in {0, None}


@behaviour("lasting")
async def a_semaphore_stays_when_nobody_uses_it(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    await maker.create("pool", 4)
    used = await maker.enqueue("pool")
    await maker.withdraw(used)
    await maker.close()
    assert (await other.describe("pool")).limit == 4


@behaviour("lasting")
async def creating_a_semaphore_that_exists_fails_with_its_limit(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    await maker.create("pool", 4, b"first")
    for limit in (4, 5):
        with raises(SemaphoreExists) as caught:
            await other.create("pool", limit, b"second")
        assert (caught.error.node, caught.error.name) == (DEFAULT_NODE, "pool")
        assert caught.error.limit == 4
    found = await maker.describe("pool")
    assert (found.limit, found.data) == (4, b"first")


@behaviour("lasting")
async def creating_a_semaphore_that_may_exist_accepts_one_of_equal_limit(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    for program, data in ((maker, b"first"), (other, b"second")):
        await program.session.create_semaphore("pool", 4, data, exist_ok=True)
    assert (await maker.describe("pool")).data == b"first"
    with raises(SemaphoreExists):
        await other.session.create_semaphore("pool", 5, b"", exist_ok=True)
    assert (await maker.describe("pool")).limit == 4


@behaviour("lasting")
async def a_limit_may_be_as_small_and_as_large_as_the_rules_allow(stage: Stage) -> None:
    program = await stage.program()
    for limit in (1, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1):
        await program.create(f"of {limit}", limit)
        found = await program.describe(f"of {limit}")
        assert (found.limit, found.ephemeral) == (limit, False)


@behaviour("lasting", "data")
async def data_is_kept_byte_for_byte_up_to_a_mebibyte(stage: Stage) -> None:
    writer, reader = await stage.programs(2)
    for number, data in enumerate([b"", b"\0", EVERY_BYTE, EVERY_BYTE * (MIB // 256)]):
        name = f"config {number}"
        await writer.create(name, 1, data)
        assert (await reader.describe(name)).data == data
        await writer.session.update_semaphore(name, data[::-1])
        assert (await reader.describe(name)).data == data[::-1]
        request = await writer.enqueue(name, data=data)
        [owner] = (await reader.describe(name)).owners
        assert owner.data == data
        await writer.alter(request, data=data[::-1])
        [owner] = (await reader.describe(name)).owners
        assert owner.data == data[::-1]


@behaviour("lasting")
async def updating_replaces_the_data_and_needs_no_ownership(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    await owner.create("pool", 1, b"first")
    await owner.enqueue("pool")
    await other.session.update_semaphore("pool", b"second")
    found = await owner.describe("pool")
    assert (found.data, found.limit, found.held) == (b"second", 1, 1)


@behaviour()
async def operations_on_a_missing_semaphore_are_refused(stage: Stage) -> None:
    program = await stage.program()
    session = program.session
    with raises(SemaphoreNotFound, "describe"):
        await program.describe("missing")
    with raises(SemaphoreNotFound, "update"):
        await session.update_semaphore("missing", b"")
    for force in (False, True):
        with raises(SemaphoreNotFound, "delete"):
            await session.delete_semaphore("missing", force=force)
    for timeout in (None, 0, 5.0):
        with raises(SemaphoreNotFound, f"enqueue with timeout {timeout}"):
            await program.enqueue("missing", timeout=timeout)
    assert not await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)


@behaviour()
async def an_error_says_on_which_semaphore_of_which_node(stage: Stage) -> None:
    program = await stage.program()
    with raises(SemaphoreNotFound) as caught:
        await program.describe("missing")
    assert (caught.error.node, caught.error.name) == (DEFAULT_NODE, "missing")
    assert "missing" in str(caught.error)
    assert DEFAULT_NODE in str(caught.error)


@behaviour("lasting")
async def names_are_compared_byte_by_byte(stage: Stage) -> None:
    writer, reader = await stage.programs(2)
    for number, name in enumerate(AWKWARD_NAMES):
        await writer.create(name, number + 1, name.encode())
    for number, name in enumerate(AWKWARD_NAMES):
        found = await reader.describe(name)
        assert (found.name, found.limit, found.data) == (name, number + 1, name.encode())
    listed = await stage.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False)
    assert [each.name for each in listed] == sorted(AWKWARD_NAMES)
    for name in AWKWARD_NAMES:
        request = await writer.enqueue(name)
        assert await reader.queue(name) == ([writer.id], [])
        await writer.withdraw(request)
        await reader.session.delete_semaphore(name, force=False)
    assert not await stage.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False)


@behaviour()
async def ephemeral_semaphores_may_have_awkward_names_too(stage: Stage) -> None:
    holder, other = await stage.programs(2)
    for name in AWKWARD_NAMES:
        assert (await holder.lock(name)).place is Place.GRANTED
        assert (await other.lock(name, timeout=0)).place is Place.REFUSED
    listed = await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=False)
    assert [each.name for each in listed] == sorted(AWKWARD_NAMES)


@behaviour("lasting")
async def semaphores_are_listed_by_name_with_owners_and_waiters_if_requested(stage: Stage) -> None:
    one, two = await stage.programs(2)
    for name in ("b", "a", "C"):
        await one.create(name, 1, name.encode())
    await one.lock("m")
    for program in (one, two):
        await program.enqueue("a")
    for owners in (False, True):
        for waiters in (False, True):
            found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=owners, waiters=waiters)
            assert [each.name for each in found] == ["C", "a", "b", "m"]
            assert [each.data for each in found] == [b"C", b"a", b"b", b""]
            assert [each.limit for each in found] == [1, 1, 1, EPHEMERAL_LIMIT]
            assert [each.held for each in found] == [0, 1, 0, EPHEMERAL_LIMIT]
            assert [each.ephemeral for each in found] == [False, False, False, True]
            in_a = found[1]
            assert [each.session_id for each in in_a.owners] == [one.id] * owners
            assert [each.session_id for each in in_a.waiters] == [two.id] * waiters


@behaviour("lasting")
async def an_unused_semaphore_is_deleted(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    await maker.create("pool", 4)
    await other.session.delete_semaphore("pool", force=False)
    with raises(SemaphoreNotFound):
        await maker.describe("pool")
    await maker.create("pool", 5)
    assert (await other.describe("pool")).limit == 5


@behaviour("lasting")
async def a_semaphore_in_use_is_not_deleted(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    await owner.create("pool", 1)
    held = await owner.enqueue("pool")
    await waiter.enqueue("pool")
    with raises(SemaphoreBusy):
        await other.session.delete_semaphore("pool", force=False)
    assert await other.queue("pool") == ([owner.id], [waiter.id])
    await owner.withdraw(held)
    with raises(SemaphoreBusy):
        await other.session.delete_semaphore("pool", force=False)


@behaviour("lasting")
async def deleting_by_force_notifies_owners_and_waiters(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    await owner.create("pool", 1)
    held = await owner.enqueue("pool")
    waiting = await waiter.enqueue("pool")
    await other.session.delete_semaphore("pool", force=True)
    assert await held.removed() is Removal.DELETED
    assert await waiting.removed() is Removal.DELETED
    assert not waiter.recorder.grants
    with raises(SemaphoreNotFound):
        await owner.describe("pool")
    for program, request in ((owner, held), (waiter, waiting)):
        with raises(LeaseReleased):
            await program.alter(request, data=b"still here?")
        await program.withdraw(request)
        assert program.recorder.end is None


@behaviour()
async def a_mutex_can_be_deleted_by_force_and_only_so(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    with raises(SemaphoreBusy):
        await other.session.delete_semaphore("m", force=False)
    await other.session.delete_semaphore("m", force=True)
    assert await held.removed() is Removal.DELETED
    assert await waiting.removed() is Removal.DELETED
    assert (await other.lock("m")).place is Place.GRANTED


@behaviour("lasting")
async def who_deletes_by_force_may_be_an_owner_itself(stage: Stage) -> None:
    owner = await stage.program()
    await owner.create("pool", 1)
    held = await owner.enqueue("pool")
    await owner.session.delete_semaphore("pool", force=True)
    assert await held.removed() is Removal.DELETED


@behaviour("lasting")
async def a_semaphore_that_is_created_again_knows_nothing_of_the_old_one(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    await owner.create("pool", 2, b"old")
    held = await owner.enqueue("pool", 2)
    await other.session.delete_semaphore("pool", force=True)
    await other.create("pool", 1)
    renewed = await other.enqueue("pool")
    assert renewed.place is Place.GRANTED
    await held.removed()
    await owner.withdraw(held)
    found = await owner.describe("pool")
    assert (found.limit, found.data, found.held) == (1, b"", 1)


@behaviour("lasting")
async def the_limit_of_a_semaphore_is_not_a_matter_of_opinion(stage: Stage) -> None:
    """Check that a request for more than the limit is rejected, for any limit that the program
    expects."""
    program = await stage.program()
    await program.create("pool", 4)
    with raises(InvalidArgument):
        await program.enqueue("pool", 5)


@behaviour("lasting", "durable")
async def what_lasts_outlives_the_last_connection(stage: Stage) -> None:
    first = await stage.program()
    await first.create("pool", 4, b"kept")
    session_id = first.id
    order_id = (await first.enqueue("pool")).order_id
    await stage.disconnect(first.engine)
    await stage.disconnect(stage.eye)
    second = await stage.program()
    stage.eye = await stage.engine()
    found = await second.describe("pool")
    assert (found.limit, found.data, found.held) == (4, b"kept", 0)
    assert second.id > 0
    assert second.id != session_id
    if stage.capabilities.fencing:
        again = (await second.enqueue("pool")).order_id
        assert order_id is not None
        assert again is not None
        assert again > order_id
