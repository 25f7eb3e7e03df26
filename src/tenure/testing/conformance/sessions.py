"""Sessions: attaching, renewing with proofs, and descriptions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tenure.engines.contract import Attach, Engine, Place
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program
from tenure.testing.recorder import Recorder
from tenure.testing.stage import WINDOW, Stage


@behaviour()
async def attaching_proves_the_session(stage: Stage) -> None:
    engine = await stage.engine()
    before = stage.clock.now()
    program = await stage.program(engine=engine)
    after = stage.clock.now()
    assert program.recorder.proofs
    assert before <= program.recorder.proofs[0] <= after


async def _proof_after(program: Program, renew: Callable[[], object]) -> float:
    """Return the first proof that is received after calling `renew`."""
    known = len(program.recorder.proofs)
    renew()
    await program.recorder.wait_for(lambda recorder: len(recorder.proofs) > known, "a proof")
    return program.recorder.proofs[known]


@behaviour()
async def a_renewal_proves_the_session_from_the_time_it_was_sent(stage: Stage) -> None:
    program = await stage.program()
    for _ in range(3):
        before = stage.clock.now()
        proof = await _proof_after(program, program.session.renew)
        assert before <= proof <= stage.clock.now()


@behaviour()
async def a_renewal_may_come_from_any_thread_while_the_loop_stands_still(stage: Stage) -> None:
    program = await stage.program()

    def renew_in_a_thread() -> None:
        thread = threading.Thread(target=program.session.renew)
        thread.start()
        thread.join()  # blocks the event loop

    before = stage.clock.now()
    assert await _proof_after(program, renew_in_a_thread) >= before


@behaviour()
async def a_renewal_of_a_session_that_is_over_proves_nothing_and_does_not_raise(
    stage: Stage,
) -> None:
    closed, ended, other = await stage.programs(3)
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    await ended.ended()
    proofs = [len(program.recorder.proofs) for program in (closed, ended)]
    for program in (closed, ended):
        program.session.renew()
    await _proof_after(other, other.session.renew)
    assert [len(program.recorder.proofs) for program in (closed, ended)] == proofs


@behaviour()
async def session_ids_are_positive_and_never_used_twice(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    seen: list[int] = []
    engines = [await stage.engine(), await stage.engine()]
    for _ in range(3):
        for engine in engines:
            for node in (DEFAULT_NODE, "/n"):
                program = await stage.program(node, engine=engine)
                seen.append(program.id)
                await program.close()
    await stage.eye.drop_node("/n", force=True)
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    seen.append((await stage.program("/n")).id)
    assert all(each > 0 for each in seen)
    assert len(set(seen)) == len(seen)


@behaviour()
async def the_attach_number_of_a_session_is_positive(stage: Stage) -> None:
    program = await stage.program()
    assert program.session.attach_number > 0


@behaviour()
async def sessions_are_listed_by_id_with_what_they_said_of_themselves(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    engine = await stage.engine()
    here = [
        await stage.program("/n", window=60, description="one"),
        await stage.program("/n", window=1.5, description="ü" * 512, engine=engine),
        await stage.program("/n", window=1800, engine=engine),
    ]
    await stage.program(DEFAULT_NODE, description="other_program")
    found = await stage.eye.list_sessions("/n")
    assert [each.id for each in found] == sorted(program.id for program in here)
    by_id = {each.id: each for each in found}
    for program, window, description in zip(
        here, [60, 1.5, 1800], ["one", "ü" * 512, ""], strict=True
    ):
        described = by_id[program.id]
        assert described.node == "/n"
        assert described.recovery_window == window
        assert described.description == description
        assert described.attached in {True, None}
        assert described.silent_for is None or described.silent_for >= 0


@behaviour()
async def a_detached_session_is_listed_as_such_where_that_is_known(stage: Stage) -> None:
    program = await stage.program()
    await program.detach()
    [described] = await stage.eye.list_sessions(DEFAULT_NODE)
    assert described.id == program.id
    assert described.attached in {False, None}


@behaviour()
async def a_session_may_have_a_window_of_a_second_or_of_half_an_hour(stage: Stage) -> None:
    for window in (1.0, 1800.0):
        program = await stage.program(window=window)
        assert (await program.lock(f"for {window}")).place is Place.GRANTED


@behaviour()
async def a_cancelled_attach_leaves_no_session_behind(stage: Stage) -> None:
    async def attach(engine: Engine, wait: float, turns: int) -> None:
        attaching = asyncio.create_task(
            engine.attach(Attach(DEFAULT_NODE, WINDOW), Recorder()), name="attaching"
        )
        await asyncio.sleep(wait)
        for _ in range(turns):
            await asyncio.sleep(0)
        attaching.cancel()
        await asyncio.wait([attaching])
        if not attaching.cancelled():
            await attaching.result().close()

    engine = await stage.engine()
    for turns in range(12):
        await attach(engine, 0, turns)
    for step in range(12):
        await attach(engine, 0.0005 * step, 0)
    for turns in range(12):
        closed_at_once = await stage.engine()
        await attach(closed_at_once, 0, turns)
        await stage.disconnect(closed_at_once)

    async def no_session() -> bool:
        return not await stage.eye.list_sessions(DEFAULT_NODE)

    await stage.until(no_session, "no session is left of an attach that was cancelled")


# Takeover
