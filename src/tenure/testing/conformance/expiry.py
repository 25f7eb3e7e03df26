"""Expiry of sessions that are not renewed.

The recovery windows are as short as allowed, because an engine may only support real time. The
tests assert that a session has *not* expired only if its renewals were in time by the clock, so
they do not fail on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib

from tenure.engines.contract import Place
from tenure.errors import SessionExpired
from tenure.model import DEFAULT_NODE
from tenure.testing.clock import VirtualClock
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.recorder import Recorder
from tenure.testing.stage import Stage

SHORT = 1.0
LATE = 5.0
"""Seconds after the window in which the next request is granted, on any machine."""


def _not_before(stage: Stage, program: Program, window: float = SHORT) -> None:
    silent = stage.clock.now() - program.recorder.proofs[-1]
    assert silent >= window - 1e-6, f"it ended {silent:.3f} s after its last proof, not {window:g}"


@behaviour()
async def a_session_that_is_not_renewed_expires_and_the_next_is_granted(stage: Stage) -> None:
    silent = await stage.program(window=SHORT)
    other = await stage.program()
    await silent.lock("m")
    waiting = await other.lock("m")
    await waiting.granted()
    _not_before(stage, silent)
    await silent.ended()
    with raises(SessionExpired):
        await silent.lock("another")
    assert [each.id for each in await stage.eye.list_sessions(DEFAULT_NODE)] == [other.id]


@behaviour()
async def a_session_that_holds_nothing_expires_too(stage: Stage) -> None:
    program = await stage.program(window=SHORT)
    await program.ended()
    _not_before(stage, program)


@behaviour()
async def a_waiter_expires_with_its_session_and_those_behind_it_move_up(stage: Stage) -> None:
    owner, last = await stage.program(), await stage.program()
    silent = await stage.program(window=SHORT)
    held = await owner.lock("m")
    await silent.lock("m")
    waiting = await last.lock("m")
    await silent.ended()
    assert await last.queue("m") == ([owner.id], [last.id])
    await owner.withdraw(held)
    await waiting.granted()


@behaviour()
async def renewals_keep_a_session_alive(stage: Stage) -> None:
    for _ in range(10):
        window = 1.5
        program, other = await stage.program(window=window), await stage.program()
        await program.lock("m")
        began = stage.clock.now()
        in_time = True
        while stage.clock.now() < began + 2 * window:
            await asyncio.sleep(window / 10)
            program.session.renew()
            silent = stage.clock.now() - program.recorder.proofs[-1]
            in_time = in_time and silent < window / 2
        alive = program.recorder.end is None
        if alive:
            assert await other.queue("m") == ([program.id], [])
            await program.close()
            return
        assert not in_time, "it was renewed in time, and expired"
    raise AssertionError("this machine is too busy to renew a session every second")


@behaviour()
async def a_session_expires_alone(stage: Stage) -> None:
    engine = await stage.engine()
    silent = await stage.program(engine=engine, window=SHORT)
    neighbour = await stage.program(engine=engine)
    await silent.lock("mine")
    await neighbour.lock("m")
    await silent.ended()
    assert neighbour.recorder.end is None
    assert await neighbour.queue("m") == ([neighbour.id], [])


@behaviour()
async def a_silent_session_expires_while_others_of_its_connection_are_renewed(
    stage: Stage,
) -> None:
    """A connection may have the sessions of several programs, as that of a server has."""
    engine = await stage.engine()
    silent = await stage.program(engine=engine, window=SHORT)
    busy = await stage.program(engine=engine, window=SHORT)
    other = await stage.program(engine=engine)
    await silent.lock("m")
    waiting = await other.lock("m")

    def next_is_granted(recorder: Recorder) -> bool:
        return waiting.request_id in recorder.grants

    due = silent.recorder.proofs[-1] + SHORT + LATE
    while not next_is_granted(other.recorder) and stage.clock.now() < due:
        busy.session.renew()
        await busy.withdraw(await busy.lock("another"))
        with contextlib.suppress(AssertionError):
            await other.recorder.wait_for(next_is_granted, "the grant", within=SHORT / 10)
    assert len(silent.recorder.proofs) == 1, "it was renewed without its program"
    await waiting.granted()
    _not_before(stage, silent)


@behaviour()
async def an_expired_session_leaves_all_its_queues_in_one_step(stage: Stage) -> None:
    silent, follower = await stage.program(window=SHORT), await stage.program()
    names = [f"m{number}" for number in range(5)]
    for name in names:
        assert (await silent.lock(name)).place is Place.GRANTED
    own = [await silent.lock(name) for name in names if stage.capabilities.one_step]
    following = [await follower.lock(name) for name in names]
    for name, request in zip(names, following, strict=True):
        await request.granted()
        for each in names:
            owners, waiters = await stage.queue(each)
            assert silent.id not in owners + waiters, f"{each}, when {name} has been granted"
    assert not [request for request in own if request.request_id in silent.recorder.grants]


@behaviour()
async def a_detached_session_keeps_its_places_until_its_window_is_over(stage: Stage) -> None:
    window = 2.0
    leaver, other = await stage.program(window=window), await stage.program()
    await leaver.lock("m")
    await other.lock("awaited")
    await leaver.lock("awaited")
    waiting = await other.lock("m")
    await leaver.detach()
    found = await stage.queue("m"), await stage.queue("awaited")
    if stage.clock.now() - leaver.recorder.proofs[-1] < window:  # otherwise the machine is too busy
        assert found == (([leaver.id], [other.id]), ([other.id], [leaver.id]))
    await waiting.granted()
    _not_before(stage, leaver, window)
    assert await stage.queue("awaited") == ([other.id], [])


@behaviour()
async def a_detached_session_lives_for_its_window_from_when_it_was_left(stage: Stage) -> None:
    window = 2.0
    leaver, other = await stage.program(window=window), await stage.program()
    await leaver.lock("m")
    waiting = await other.lock("m")
    await asyncio.sleep(window / 2)
    leaving = stage.clock.now()
    await leaver.detach()
    in_time = stage.clock.now() - leaver.recorder.proofs[-1] < window
    await waiting.granted()
    if in_time:  # otherwise the machine is too busy
        assert stage.clock.now() - leaving >= window


@behaviour()
async def a_detached_session_expires_although_nobody_is_left_to_see_it(stage: Stage) -> None:
    program = await stage.program(window=SHORT)
    await program.lock("m")
    await program.detach()
    await stage.disconnect(program.engine)

    async def gone() -> bool:
        sessions = await stage.eye.list_sessions(DEFAULT_NODE)
        return not sessions and await stage.queue("m") == ([], [])

    await stage.until(gone, "what expired is not shown any more")
    _not_before(stage, program)


@behaviour("virtual")
async def a_session_lives_exactly_until_its_window_is_over(stage: Stage) -> None:
    silent, other = await stage.program(window=20.0), await stage.program()
    last = silent.recorder.proofs[-1]
    await silent.lock("m")
    waiting = await other.lock("m")
    await asyncio.sleep(19.99)
    assert silent.recorder.end is None
    assert (await silent.lock("another")).place is Place.GRANTED
    last = silent.recorder.proofs[-1]
    await waiting.granted()
    assert 20.0 <= stage.clock.now() - last <= 21.1


@behaviour("virtual")
async def a_session_that_is_renewed_lives_for_as_long_as_one_likes(stage: Stage) -> None:
    program, other = await stage.program(window=SHORT), await stage.program(window=1800.0)
    await program.lock("m")
    for _ in range(1000):
        await asyncio.sleep(0.9)
        program.session.renew()
    assert program.recorder.end is None
    assert await other.queue("m") == ([program.id], [])


@behaviour("virtual")
async def a_wall_clock_that_jumps_ends_no_session(stage: Stage) -> None:
    program, other = await stage.program(window=20.0), await stage.program()
    await program.lock("m")
    waiting = await other.lock("m", timeout=10.0)
    assert isinstance(stage.clock, VirtualClock)
    for seconds in (1e6, -2e6):
        stage.clock.set_wall(stage.clock.wall() + seconds)
        await asyncio.sleep(2)
    assert program.recorder.end is None
    assert await other.queue("m") == ([program.id], [other.id])
    assert not waiting.program.recorder.removals
