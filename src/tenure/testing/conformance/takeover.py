"""Takeover of sessions: a program resumes the session of another one."""

from __future__ import annotations

import asyncio
import contextlib

from tenure.engines.contract import Attach, Place
from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.recorder import Recorder
from tenure.testing.stage import WINDOW, Stage


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
