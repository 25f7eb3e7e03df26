"""Watches: no change is missed, none ends in a stale state, and other changes cause no call.

A fence distinguishes an unwanted call from a late one: see `Program.fence`.
"""

from __future__ import annotations

import asyncio

from tenure.errors import SemaphoreNotFound
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, Watching, raises
from tenure.testing.recorder import TIMEOUT
from tenure.testing.stage import Stage


async def _pair(stage: Stage) -> tuple[Program, Program]:
    """Return a watcher and a writer, after the semaphore ``pool`` has been created."""
    watcher, writer = await stage.programs(2)
    await writer.create("pool", 2, b"first")
    return watcher, writer


async def _silent(watching: Watching, watcher: Program, writer: Program, calls: int) -> None:
    await watcher.fence(writer)
    assert watching.calls == calls, "nothing that is watched has changed"


@behaviour("watch", "lasting")
async def new_data_is_noticed(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    watching = await watcher.watch("pool", owners=False)
    for data in (b"second", b"", b"first"):
        await writer.session.update_semaphore("pool", data)
        await watching.called()
        assert (await watcher.describe("pool")).data == data


@behaviour("watch", "lasting")
async def who_writes_notices_its_own_change(stage: Stage) -> None:
    program = await stage.program()
    await program.create("pool", 1)
    watching = await program.watch("pool")
    await program.session.update_semaphore("pool", b"mine")
    await watching.called()
    held = await program.enqueue("pool")
    await watching.called()
    await program.withdraw(held)
    await watching.called()


@behaviour("watch", "lasting")
async def a_change_while_a_watch_begins_is_read_or_noticed(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    for number in range(10):
        data = b"%d" % number
        watching = await watcher.watch("pool", owners=False)
        writing = asyncio.ensure_future(writer.session.update_semaphore("pool", data))
        if (await watcher.describe("pool")).data != data:
            await watching.called()
            await writing
            assert (await watcher.describe("pool")).data == data
        await writing


@behaviour("watch", "lasting")
async def equal_data_is_silent(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    watching = await watcher.watch("pool")
    await watcher.fence(writer)
    calls = watching.calls
    await writer.session.update_semaphore("pool", b"first")
    await _silent(watching, watcher, writer, calls)


@behaviour("watch", "lasting")
async def owners_are_noticed_as_they_come_and_go(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    watching = await watcher.watch("pool", data=False)
    held = await writer.enqueue("pool")
    await watching.called()
    assert (await watcher.describe("pool")).held == 1
    await writer.withdraw(held)
    await watching.called()
    assert (await watcher.describe("pool")).held == 0


@behaviour("watch", "lasting")
async def an_owner_that_shrinks_or_changes_its_data_is_noticed(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    held = await writer.enqueue("pool", 2, data=b"one")
    watching = await watcher.watch("pool", data=False)
    await writer.alter(held, data=b"two")
    await watching.called()
    assert (await watcher.describe("pool")).owners[0].data == b"two"
    await writer.alter(held, count=1)
    await watching.called()
    assert (await watcher.describe("pool")).owners[0].count == 1


@behaviour("watch", "lasting")
async def an_owner_that_changes_nothing_is_silent(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    held = await writer.enqueue("pool", 2, data=b"one")
    watching = await watcher.watch("pool")
    await watcher.fence(writer)
    calls = watching.calls
    await writer.alter(held, count=2, data=b"one")
    await _silent(watching, watcher, writer, calls)


@behaviour("watch", "lasting")
async def waiters_are_silent_until_they_are_granted(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    held = await writer.enqueue("pool", 2)
    watching = await watcher.watch("pool")
    await watcher.fence(writer)
    calls = watching.calls
    waiting = await writer.enqueue("pool", data=b"one")
    leaving = await writer.enqueue("pool")
    await writer.alter(waiting, data=b"two")
    await writer.withdraw(leaving)
    await writer.enqueue("pool", timeout=0)
    await _silent(watching, watcher, writer, calls)
    await writer.withdraw(held)
    await watching.called()
    await waiting.granted()


@behaviour("watch", "lasting")
async def a_watch_of_data_is_silent_about_owners_and_the_other_way_round(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    of_data = await watcher.watch("pool", owners=False)
    of_owners = await watcher.watch("pool", data=False)
    await watcher.fence(writer)
    calls = of_data.calls
    await writer.enqueue("pool")
    await of_owners.called()
    await _silent(of_data, watcher, writer, calls)
    calls = of_owners.calls
    await writer.session.update_semaphore("pool", b"second")
    await of_data.called()
    await _silent(of_owners, watcher, writer, calls)


@behaviour("watch", "lasting")
async def a_hand_over_is_noticed_in_both_its_halves(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    next_ = await stage.program()
    held = await writer.enqueue("pool", 2)
    await next_.enqueue("pool", 2)
    watching = await watcher.watch("pool", data=False)
    await writer.withdraw(held)
    while await watcher.queue("pool") != ([next_.id], []):
        await watching.called()


@behaviour("watch", "lasting")
async def many_changes_may_become_one_call_but_the_last_state_is_seen(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    watching = await watcher.watch("pool", owners=False)
    last = b"99"

    async def write() -> None:
        for number in range(100):
            for _ in range(number % 3):  # some updates in a row, others apart
                await asyncio.sleep(0)
            await writer.session.update_semaphore("pool", b"%d" % number)

    async with asyncio.timeout(2 * TIMEOUT), asyncio.TaskGroup() as group:
        group.create_task(write())
        seen = b""
        while seen != last:
            await watching.called()
            seen = (await watcher.describe("pool")).data


@behaviour("watch", "lasting")
async def a_busy_semaphore_is_seen_to_come_to_rest(stage: Stage) -> None:
    watcher, *writers = await stage.programs(4)
    await watcher.create("pool", 2)
    watching = await watcher.watch("pool", data=False)
    seen = await watcher.describe("pool")

    async def work(program: Program) -> None:
        for number in range(10):
            request = await program.enqueue("pool", 1 + number % 2, data=b"%d" % number)
            await request.granted()
            await program.alter(request, data=b"done %d" % number)
            await program.withdraw(request)

    async def look() -> None:
        nonlocal seen
        while True:
            await watching.called()
            seen = await watcher.describe("pool")

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        async with asyncio.TaskGroup() as working:
            for program in writers:
                working.create_task(work(program))
        last = await writers[0].enqueue("pool")
        await last.granted()

        async def at_rest() -> bool:
            return seen.held == 1 and seen.owners[0].session_id == writers[0].id

        await stage.until(at_rest, "the watch shows the last state")
        looking.cancel()


@behaviour("watch", "lasting")
async def deletion_is_noticed_by_every_watch(stage: Stage) -> None:
    for force in (False, True):
        watcher, writer = await stage.programs(2)
        await writer.create("pool", 2, b"first")
        if force:
            await writer.enqueue("pool")
        watches = [
            await watcher.watch("pool", owners=False),
            await watcher.watch("pool", data=False),
        ]
        await watcher.fence(writer)
        calls = [each.calls for each in watches]
        await writer.session.delete_semaphore("pool", force=force)
        for watching, before in zip(watches, calls, strict=True):
            while watching.calls == before:
                await watching.called()
        with raises(SemaphoreNotFound):
            await watcher.describe("pool")


@behaviour("watch", "lasting")
async def a_semaphore_that_is_created_again_is_noticed(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    watches = [await watcher.watch("pool", owners=False), await watcher.watch("pool", data=False)]
    await writer.session.delete_semaphore("pool", force=False)
    for watching in watches:
        await watching.called()
    await writer.create("pool", 3, b"again")
    for watching in watches:
        await watching.called()
    assert (await watcher.describe("pool")).limit == 3
    await writer.session.update_semaphore("pool", b"and changed")
    await watches[0].called()
    await writer.enqueue("pool")
    await watches[1].called()


@behaviour("watch", "lasting")
async def what_does_not_exist_yet_may_be_watched(stage: Stage) -> None:
    watcher, writer = await stage.programs(2)
    watches = [await watcher.watch("pool", owners=False), await watcher.watch("pool", data=False)]
    await writer.create("pool", 1, b"at last")
    for watching in watches:
        await watching.called()
    assert (await watcher.describe("pool")).data == b"at last"


@behaviour("watch")
async def an_ephemeral_semaphore_is_noticed_as_it_comes_and_goes(stage: Stage) -> None:
    watcher, writer = await stage.programs(2)
    watches = [await watcher.watch("m", owners=False), await watcher.watch("m", data=False)]
    for _ in range(2):
        held = await writer.lock("m")
        for watching in watches:
            await watching.called()
        await writer.withdraw(held)
        for watching in watches:
            await watching.called()


@behaviour("watch")
async def the_end_of_an_owners_session_is_noticed(stage: Stage) -> None:
    watcher, closed, ended = await stage.programs(3)
    expired = await stage.program(window=1.0)
    watches = []
    for number, program in enumerate((closed, ended, expired)):
        await program.lock(f"m{number}")
        watches.append(await watcher.watch(f"m{number}", data=False))
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    for number, watching in enumerate(watches):
        while await watcher.queue(f"m{number}") != ([], []):
            await watching.called()


@behaviour("watch", "fencing")
async def an_eviction_is_noticed(stage: Stage) -> None:
    watcher, owner = await stage.programs(2)
    held = await owner.lock("m")
    assert held.order_id is not None
    watching = await watcher.watch("m", data=False)
    await stage.eye.evict(DEFAULT_NODE, "m", held.order_id)
    while await watcher.queue("m") != ([], []):
        await watching.called()


@behaviour("watch", "lasting")
async def other_names_and_other_nodes_are_silent(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    other_program = await stage.program("/n")
    watching = await watcher.watch("pool")
    await watcher.fence(writer)
    calls = watching.calls
    await other_program.create("pool", 1)
    await other_program.enqueue("pool")
    for name in ("poo", "pool ", "pool/a", "POOL"):
        await writer.create(name, 1)
        await writer.enqueue(name)
    await _silent(watching, watcher, writer, calls)


@behaviour("watch", "lasting")
async def after_stopping_a_watch_is_silent(stage: Stage) -> None:
    watcher, writer = await _pair(stage)
    stopped, going_on = await watcher.watch("pool"), await watcher.watch("pool")
    await writer.session.update_semaphore("pool", b"second")
    stopped.stop()  # a call may be scheduled already
    calls = stopped.calls
    stopped.stop()
    await going_on.called()
    await writer.enqueue("pool")
    await going_on.called()
    await _silent(stopped, watcher, writer, calls)


@behaviour("watch", "lasting")
async def one_watch_stops_and_the_others_of_that_name_go_on(stage: Stage) -> None:
    engine = await stage.engine()
    watchers = [await stage.program(engine=engine), await stage.program(engine=engine)]
    await watchers[0].create("pool", 1)
    watches = [await watcher.watch("pool") for watcher in (*watchers, watchers[0])]
    watches[0].stop()
    await watchers[1].session.update_semaphore("pool", b"second")
    for watching in watches[1:]:
        await watching.called()
    watches[1].stop()
    await watchers[0].session.update_semaphore("pool", b"third")
    await watches[2].called()


@behaviour("watch", "lasting")
async def a_watch_may_stop_itself_when_it_is_called(stage: Stage) -> None:
    program, writer = await _pair(stage)
    calls = 0

    def changed() -> None:
        nonlocal calls
        calls += 1
        stop()

    stop = program.session.watch("pool", data=True, owners=True, changed=changed)
    going_on = await program.watch("pool")
    for data in (b"second", b"third"):
        await writer.session.update_semaphore("pool", data)
        await going_on.called()
    await program.fence(writer)
    assert calls == 1


@behaviour("watch", "lasting")
async def a_watch_ends_with_its_session(stage: Stage) -> None:
    engine = await stage.engine()
    leaver, stayer = await stage.program(engine=engine), await stage.program(engine=engine)
    await stayer.create("pool", 1)
    over, going_on = await leaver.watch("pool"), await stayer.watch("pool")
    await stayer.fence(stayer)
    await leaver.close()
    calls = over.calls
    await stayer.session.update_semaphore("pool", b"second")
    await going_on.called()
    await _silent(over, stayer, stayer, calls)
    over.stop()
