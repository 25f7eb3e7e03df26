"""Sessions: attaching, renewing with proofs, and descriptions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

from tenure.engines.contract import Attach, Engine, Place
from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.recorder import Recorder
from tenure.testing.stage import WINDOW, Stage


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


async def _predecessor(stage: Stage, key: bytes | None = None) -> Program:
    return await stage.program(liveness="window", key=key)


@behaviour("resume")
async def a_resumed_session_finds_every_request_in_its_place(stage: Stage) -> None:
    predecessor, other = await _predecessor(stage), await stage.program()
    owned = await predecessor.lock("owned")
    blocking = await other.lock("awaited")
    waiting = await predecessor.lock("awaited")
    behind = await other.lock("owned")
    await predecessor.detach()
    successor = await stage.program(liveness="window", resume=predecessor)
    assert successor.id == predecessor.id
    assert successor.session.attach_number > predecessor.session.attach_number
    assert await other.queue("owned") == ([successor.id], [other.id])
    assert await other.queue("awaited") == ([other.id], [successor.id])
    assert [
        (each.request_id, each.order_id, each.granted) for each in successor.recorder.found
    ] == [
        (owned.request_id, owned.order_id, True),
        (waiting.request_id, waiting.order_id, False),
    ]
    await other.withdraw(blocking)
    await successor.recovered("awaited").granted()
    await successor.withdraw(successor.recovered("owned"))
    await behind.granted()


@behaviour("resume")
async def a_resumed_session_is_its_new_program_s_and_keeps_its_own_text(stage: Stage) -> None:
    former = await stage.program(
        liveness="window", description="nightly [host=one pid=1 program=before.py]"
    )
    await former.lock("m")
    await former.detach()
    successor = await stage.program(
        liveness="window", resume=former, description="[host=two pid=2 program=after.py]"
    )
    text = "nightly [host=two pid=2 program=after.py]"
    [session] = await stage.eye.list_sessions(DEFAULT_NODE)
    assert session.description == text
    [owner] = (await successor.describe("m")).owners
    assert owner.session_description in {text, None}
    await successor.detach()
    await stage.program(liveness="window", resume=successor)
    [session] = await stage.eye.list_sessions(DEFAULT_NODE)
    assert session.description == "nightly"


@behaviour("resume", "adopt")
async def a_session_that_is_taken_over_can_get_another_window_and_description(
    stage: Stage,
) -> None:
    former = await stage.program(liveness="window", window=30.0, description="first")
    lease = await former.lock("m")
    for window in (60.0, 20.0, 45.0):
        text = f"for {window:g} s"
        successor = await stage.program(
            liveness="window",
            window=window,
            resume=former,
            description=text,
            assume_dead=True,
            adopt=True,
        )
        [session] = await stage.eye.list_sessions(DEFAULT_NODE)
        assert (session.description, session.recovery_window) == (text, window)
        assert successor.recovered("m").request_id == lease.request_id
        former = successor
    kept = await stage.program(liveness="window", window=9.0, resume=former, assume_dead=True)
    [session] = await stage.eye.list_sessions(DEFAULT_NODE)
    assert session.recovery_window == 45.0
    await kept.detach()


@behaviour("resume", "adopt", "virtual")
async def a_session_lives_for_the_window_that_it_has_adopted(stage: Stage) -> None:
    for windows, lives in (((30.0, 5.0), 5.0), ((5.0, 30.0), 30.0), ((30.0, 4.0, 12.0), 12.0)):
        program = await stage.program(liveness="window", window=windows[0])
        for window in windows[1:]:
            program = await stage.program(
                liveness="window", window=window, resume=program, assume_dead=True, adopt=True
            )
        await program.detach()
        await asyncio.sleep(lives - 1.0)
        assert len(await stage.eye.list_sessions(DEFAULT_NODE)) == 1
        await asyncio.sleep(2.0)
        assert await stage.eye.list_sessions(DEFAULT_NODE) == []


@behaviour("resume")
async def a_resumed_session_is_proven_again(stage: Stage) -> None:
    predecessor = await _predecessor(stage)
    await predecessor.detach()
    engine = await stage.engine()
    before = stage.clock.now()
    successor = await stage.program(engine=engine, liveness="window", resume=predecessor)
    assert successor.recorder.proofs
    assert before <= successor.recorder.proofs[0]


@behaviour("resume")
async def of_two_attachments_the_earlier_one_is_ended(stage: Stage) -> None:
    predecessor = await _predecessor(stage)
    owned = await predecessor.lock("m")
    successor = await stage.program(liveness="window", resume=predecessor)
    await predecessor.ended()
    assert predecessor.recorder.end is not None
    assert predecessor.recorder.end.taken_over
    with raises(SessionExpired):
        await predecessor.lock("another")
    with contextlib.suppress(SessionExpired):
        await predecessor.withdraw(owned)
    await predecessor.session.close()
    assert await successor.queue("m") == ([successor.id], [])
    await successor.withdraw(successor.recovered("m"))


@behaviour("resume")
async def a_request_says_what_it_was_when_its_session_is_resumed(stage: Stage) -> None:
    predecessor = await _predecessor(stage)
    await predecessor.create("pool", 5)
    await predecessor.enqueue("pool", 2, data=b"two")
    shrunk = await predecessor.enqueue("pool", 3, data=b"three")
    await predecessor.alter(shrunk, count=1, data=b"one")
    await predecessor.lock("m", data=b"whole")
    successor = await stage.program(liveness="window", resume=predecessor)
    found = successor.recorder.found
    assert [(each.name, each.count, each.data, each.ephemeral) for each in found] == [
        ("pool", 2, b"two", False),
        ("pool", 1, b"one", False),
        ("m", EPHEMERAL_LIMIT, b"whole", True),
    ]
    assert all(each.granted for each in found)


@behaviour("resume")
async def a_takeover_is_complete_when_the_former_program_is_notified(stage: Stage) -> None:
    for _ in range(5):
        predecessor = await _predecessor(stage)
        successor = await stage.program(liveness="window", resume=predecessor)
        assert predecessor.recorder.end is not None
        await successor.close()


@behaviour("resume")
async def who_takes_over_in_turn_is_cut_off_in_turn(stage: Stage) -> None:
    first = await _predecessor(stage)
    await first.lock("m")
    second = await stage.program(liveness="window", resume=first)
    third = await stage.program(liveness="window", resume=second)
    await second.ended()
    assert await third.queue("m") == ([third.id], [])
    assert third.session.attach_number > second.session.attach_number
    with raises(SessionExpired):
        await second.lock("another")
    await third.withdraw(third.recovered("m"))


@behaviour("resume")
async def of_many_that_take_over_at_once_one_has_the_session(stage: Stage) -> None:
    predecessor = await _predecessor(stage)
    await predecessor.lock("m")
    found = await asyncio.gather(
        *(stage.program(liveness="window", resume=predecessor) for _ in range(6)),
        return_exceptions=True,
    )
    successors = [each for each in found if isinstance(each, Program)]
    assert all(isinstance(each, Program | SessionExpired) for each in found), found
    last = max(successors, key=lambda each: each.session.attach_number)
    for other in successors:
        if other is not last:
            await other.ended()
    assert await last.queue("m") == ([last.id], [])
    await last.withdraw(last.recovered("m"))


@behaviour("resume")
async def a_cancelled_take_over_leaves_the_session_to_the_next(stage: Stage) -> None:
    key = b"0123456789abcdef"
    predecessor = await _predecessor(stage, key=key)
    await predecessor.lock("m")
    engine = await stage.engine()
    how = Attach(DEFAULT_NODE, WINDOW, liveness="window", key=key, session_id=predecessor.id)
    for turns in range(8):
        attaching = asyncio.create_task(engine.attach(how, Recorder()), name="attaching")
        for _ in range(turns):
            await asyncio.sleep(0)
        attaching.cancel()
        await asyncio.wait([attaching])
        if not attaching.cancelled():
            await attaching.result().detach()
    await engine.aclose()  # a cancelled attach takes effect until then, and the last one wins
    successor = await stage.program(liveness="window", resume=predecessor, key=key)
    assert await successor.queue("m") == ([successor.id], [])


@behaviour("resume")
async def watches_end_with_the_attachment_that_began_them(stage: Stage) -> None:
    predecessor, writer = await _predecessor(stage), await stage.program()
    await writer.create("pool", 1)
    watching = await predecessor.watch("pool")
    successor = await stage.program(liveness="window", resume=predecessor)
    recorder = watching.calls
    seen = await successor.watch("pool")
    await writer.session.update_semaphore("pool", b"new")
    await seen.called()
    await successor.fence(writer)
    assert watching.calls == recorder


@behaviour("resume")
async def a_session_that_ends_with_its_process_cannot_be_taken_over(stage: Stage) -> None:
    program = await stage.program()
    with raises(InvalidArgument):
        await stage.program(liveness="window", resume=program, key=b"")
    assert (await program.lock("m")).place is Place.GRANTED


@behaviour("resume")
async def a_session_is_taken_over_by_who_has_its_key(stage: Stage) -> None:
    predecessor = await _predecessor(stage, key=b"0123456789abcdef")
    await predecessor.detach()
    successor = await stage.program(liveness="window", resume=predecessor, key=b"0123456789abcdef")
    assert successor.id == predecessor.id


@behaviour("resume")
async def a_wrong_key_takes_nothing_over_and_disturbs_nobody(stage: Stage) -> None:
    predecessor = await _predecessor(stage, key=b"0123456789abcdef")
    await predecessor.lock("m")
    for key in (b"", b"0123456789abcdeF"):
        with raises(AuthenticationFailed, f"attach with {key!r}"):
            await stage.program(liveness="window", resume=predecessor, key=key)
    assert (await predecessor.lock("another")).place is Place.GRANTED
    assert predecessor.recorder.end is None


@behaviour("resume")
async def a_session_that_is_over_cannot_be_taken_over(stage: Stage) -> None:
    predecessor = await _predecessor(stage)
    await predecessor.close()
    with raises(SessionExpired):
        await stage.program(liveness="window", resume=predecessor)


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
