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
from tenure.testing.program import raises
from tenure.testing.stage import Stage

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
    assert await held.removed() == Removal.DELETED
    assert await waiting.removed() == Removal.DELETED
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
    assert await held.removed() == Removal.DELETED
    assert await waiting.removed() == Removal.DELETED
    assert (await other.lock("m")).place is Place.GRANTED


@behaviour("lasting")
async def who_deletes_by_force_may_be_an_owner_itself(stage: Stage) -> None:
    owner = await stage.program()
    await owner.create("pool", 1)
    held = await owner.enqueue("pool")
    await owner.session.delete_semaphore("pool", force=True)
    assert await held.removed() == Removal.DELETED


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
