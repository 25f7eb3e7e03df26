"""End of a session: by its program, by an administrator, or with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenure.engines.contract import Place
from tenure.errors import SessionExpired
from tenure.model import DEFAULT_NODE
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.stage import Stage


@behaviour()
async def a_closed_session_is_gone_and_holds_nothing(stage: Stage) -> None:
    leaver, stayer = await stage.programs(2)
    await leaver.lock("m")
    waiting = await stayer.lock("m")
    await leaver.close()
    await waiting.granted()
    assert [each.id for each in await stage.eye.list_sessions(DEFAULT_NODE)] == [stayer.id]
    assert await stayer.queue("m") == ([stayer.id], [])


@behaviour()
async def a_closed_session_leaves_every_queue_it_waits_in(stage: Stage) -> None:
    owner, leaver, last = await stage.programs(3)
    held = await owner.lock("m")
    await leaver.lock("m")
    waiting = await last.lock("m")
    await leaver.close()
    assert await last.queue("m") == ([owner.id], [last.id])
    await owner.withdraw(held)
    await waiting.granted()


@behaviour()
async def closing_twice_is_no_error(stage: Stage) -> None:
    program = await stage.program()
    await program.lock("m")
    await program.close()
    await program.close()
    assert not await stage.eye.list_sessions(DEFAULT_NODE)


@behaviour()
async def closing_a_session_that_has_ended_by_itself_is_no_error(stage: Stage) -> None:
    program = await stage.program()
    await stage.eye.end_session(DEFAULT_NODE, program.id)
    await program.ended()
    await program.close()


@behaviour()
async def a_program_that_closes_its_session_gets_no_end(stage: Stage) -> None:
    program, other = await stage.programs(2)
    await program.lock("m")
    waiting = await other.lock("m")
    await program.close()
    await waiting.granted()
    assert program.recorder.end is None
    assert not program.recorder.removals


@behaviour()
async def a_session_that_is_closed_or_ended_takes_no_more_requests(stage: Stage) -> None:
    closed, ended = await stage.programs(2)
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    await ended.ended()
    for program in (closed, ended):
        with raises(SessionExpired, "enqueue"):
            await program.lock("m")
        with raises(SessionExpired, "try"):
            await program.lock("m", timeout=0)
    assert await stage.queue("m") == ([], [])


@behaviour("data", "lasting")
async def a_session_that_is_closed_or_ended_changes_no_data(stage: Stage) -> None:
    closed, ended, other = await stage.programs(3)
    await other.create("pool", 1, b"kept")
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    for program in (closed, ended):
        with raises(SessionExpired, "update"):
            await program.session.update_semaphore("pool", b"late")
    assert (await other.describe("pool")).data == b"kept"


@behaviour()
async def a_session_closes_although_its_caller_is_cancelled(stage: Stage) -> None:
    engine = await stage.engine()
    other = await stage.program()
    for turns in range(1, 8):
        leaver = await stage.program(engine=engine)
        await leaver.lock("m")
        closing = asyncio.create_task(leaver.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        mine = await other.lock("m")
        await mine.granted()
        await other.withdraw(mine)


async def _leaves_in_one_step(stage: Stage, leave: Callable[[Program], Awaitable[object]]) -> None:
    """Check that an observer sees all the requests of a leaving session, or none.

    Also check that no request of the session is granted because another one was removed first.
    """
    leaver, follower = await stage.programs(2)
    names = [f"m{number}" for number in range(5)]
    for name in names:
        assert (await leaver.lock(name)).place is Place.GRANTED
    own = [await leaver.lock(name) for name in names if stage.capabilities.one_step]
    following = [await follower.lock(name) for name in names]

    leaving = asyncio.ensure_future(leave(leaver))
    while not leaving.done():
        found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)
        of_leaver = [
            request.session_id == leaver.id
            for each in found
            for request in (*each.owners, *each.waiters)
        ]
        assert of_leaver.count(True) in {0, len(names) + len(own)}, "all of its requests, or none"
        await asyncio.sleep(0)
    await leaving
    for name, request in zip(names, following, strict=True):
        await request.granted()
        assert await follower.queue(name) == ([follower.id], [])
    assert not [request for request in own if request.request_id in leaver.recorder.grants]


@behaviour()
async def a_closed_session_leaves_all_its_queues_in_one_step(stage: Stage) -> None:
    await _leaves_in_one_step(stage, Program.close)


@behaviour()
async def a_session_ended_by_an_administrator_leaves_all_its_queues_in_one_step(
    stage: Stage,
) -> None:
    await _leaves_in_one_step(
        stage, lambda program: stage.eye.end_session(DEFAULT_NODE, program.id)
    )


@behaviour()
async def a_closed_connection_takes_its_session_out_of_all_queues(stage: Stage) -> None:
    await _leaves_in_one_step(stage, lambda program: stage.disconnect(program.engine))


@behaviour()
async def an_ended_session_is_notified_and_the_next_is_granted(stage: Stage) -> None:
    doomed, other = await stage.programs(2)
    await doomed.lock("m")
    waiting = await other.lock("m")
    assert await stage.eye.end_session(DEFAULT_NODE, doomed.id) is True
    await doomed.ended()
    await waiting.granted()
    assert [each.id for each in await stage.eye.list_sessions(DEFAULT_NODE)] == [other.id]


@behaviour()
async def ending_a_missing_session_returns_false(stage: Stage) -> None:
    program = await stage.program()
    await program.close()
    assert await stage.eye.end_session(DEFAULT_NODE, program.id) is False
    assert await stage.eye.end_session(DEFAULT_NODE, 2**52) is False


@behaviour()
async def ending_one_session_does_not_touch_the_others_of_its_connection(stage: Stage) -> None:
    engine = await stage.engine()
    doomed = await stage.program(engine=engine)
    spared = await stage.program(engine=engine)
    await spared.lock("m")
    await stage.eye.end_session(DEFAULT_NODE, doomed.id)
    await doomed.ended()
    assert (await spared.lock("another")).place is Place.GRANTED
    assert spared.recorder.end is None


@behaviour()
async def a_connection_may_be_closed_twice(stage: Stage) -> None:
    engine = await stage.engine()
    program = await stage.program(engine=engine)
    await program.lock("m")
    await stage.disconnect(engine)
    await stage.disconnect(engine)
    assert not await stage.eye.list_sessions(DEFAULT_NODE)


@behaviour()
async def a_connection_without_sessions_closes_and_others_stay(stage: Stage) -> None:
    idle, busy = await stage.engine(), await stage.engine()
    program = await stage.program(engine=busy)
    await program.lock("m")
    await stage.disconnect(idle)
    assert await program.queue("m") == ([program.id], [])


@behaviour()
async def a_closed_connection_leaves_alone_what_was_detached_from(stage: Stage) -> None:
    program, other = await stage.programs(2)
    await program.lock("m")
    await program.detach()
    await stage.disconnect(program.engine)
    assert (await other.lock("m", timeout=0)).place is Place.REFUSED
    assert await stage.queue("m") == ([program.id], [])


@behaviour()
async def closing_a_session_on_one_connection_leaves_its_neighbours_alone(stage: Stage) -> None:
    engine = await stage.engine()
    leaver, stayer = [await stage.program(engine=engine) for _ in range(2)]
    await leaver.lock("m")
    waiting = await stayer.lock("m")
    await leaver.close()
    await waiting.granted()
