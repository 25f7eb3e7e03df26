"""A connection is lost in the worst moment, and everything is as if it had not been.

What the server says is lost on the way (the cable is deaf), then the connection is cut, and the
session is attached again over the next one, to the server that has had it all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from tenure.engines.contract import Place, Removal, Withdrawn
from tenure.errors import EngineError, LeaseReleased, SessionExpired, Unsupported
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, NodeConfig
from tenure.testing.program import Program, answer_of, raises
from tenure.testing.recorder import Attached, Detached, Recorder
from tenure.testing.stage import Stage
from tenure.wire import messages as wire
from tests.engines.native.cable import Cable, on_a_cable
from tests.engines.stores import stores


@pytest.fixture(params=["tenure", "tenure-sqlite"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as url:
        yield url


def times(kind: type[Attached | Detached], heard: Recorder) -> int:
    """How often that was said."""
    return sum(isinstance(word, kind) for word in heard.said)


async def back(program: Program) -> None:
    """Return when it has been attached again."""
    await program.recorder.wait_for(lambda heard: times(Attached, heard) == 1, "its coming back")


async def done_and_cut(stage: Stage, cable: Cable, done: Callable[[], Awaitable[bool]]) -> None:
    """Return when the server has done it; its answer is lost, and the connection too."""
    await stage.until(done, "the server's doing it")
    cable.cut()


async def test_who_holds_and_who_waits_keep_their_places(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        held, blocking = await program.lock("m"), await other.lock("n")
        waiting, behind = await program.lock("n"), await other.lock("m")
        cable.cut()
        await back(program)
        assert await stage.queue("m") == ([program.id], [other.id])
        assert await stage.queue("n") == ([other.id], [program.id])
        assert times(Detached, program.recorder) == 1
        await other.withdraw(blocking)
        await waiting.granted()
        await program.withdraw(held)
        await behind.granted()


async def test_a_request_whose_answer_was_lost_is_in_the_queue_once(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        await other.lock("n")
        cable.deaf = True
        granted = program.send("m", EPHEMERAL_LIMIT, ephemeral=True)
        waiting = program.send("n", EPHEMERAL_LIMIT, ephemeral=True)

        async def placed() -> bool:
            return await stage.queue("n") == ([other.id], [program.id])

        await done_and_cut(stage, cable, placed)
        assert (await granted.answered()).place is Place.GRANTED
        assert (await waiting.answered()).place is Place.WAITING
        found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)
        orders = [each.order_id for one in found for each in (*one.owners, *one.waiters)]
        assert {granted.order_id, waiting.order_id} < set(orders)
        assert len(orders) == 3


async def test_a_request_that_never_arrived_is_sent_again(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        cable.cut()
        sent = program.send("m", EPHEMERAL_LIMIT, ephemeral=True)
        assert (await sent.answered()).place is Place.GRANTED


async def test_a_request_that_cannot_be_written_is_sent_on_the_next_connection(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> None:
        patch.undo()
        raise MemoryError

    async with on_a_cable(address) as (stage, _, engine):
        program = await stage.program(engine=engine)
        transport = cast("Any", engine)._reconnector.connection._transport
        with monkeypatch.context() as patch:
            patch.setattr(transport, "write", fails)
            sent = [program.send(name, EPHEMERAL_LIMIT, ephemeral=True) for name in ("m", "n")]
            assert [(await each.answered()).place for each in sent] == [Place.GRANTED] * 2


async def test_a_release_whose_answer_was_lost_is_one_release(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        held = await program.lock("m")
        waiting = await other.lock("m")
        cable.deaf = True
        release = program.send_withdrawal(held)
        await waiting.granted()
        cable.cut()
        assert await answer_of(release) is Withdrawn.LEFT
        assert await stage.queue("m") == ([other.id], [])


async def test_a_request_that_is_given_up_while_its_answer_is_lost_leaves_nothing(
    address: str,
) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        cable.deaf = True
        sent = program.send("m", EPHEMERAL_LIMIT, ephemeral=True)

        async def placed() -> bool:
            return await stage.queue("m") == ([program.id], [])

        await stage.until(placed, "the grant")
        cable.cut()
        await program.withdraw(sent)
        await sent.answered()
        assert await stage.queue("m") == ([], [])


async def test_a_creation_whose_answer_was_lost_has_created(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        cable.deaf = True
        creating = asyncio.create_task(program.create("pool", 2))

        async def created() -> bool:
            return bool(await stage.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False))

        await done_and_cut(stage, cable, created)
        await creating
        assert (await program.describe("pool")).limit == 2


async def test_a_change_whose_answer_was_lost_is_made_once(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        await other.create("pool", 4)
        held = await program.enqueue("pool", 4)
        cable.deaf = True
        changes = [
            program.session.alter(held.request_id, count=count, data=None) for count in (3, 1)
        ]

        async def changed() -> bool:
            return (await other.describe("pool")).held == 1

        await done_and_cut(stage, cable, changed)
        for each in changes:
            await answer_of(each)
        with raises(LeaseReleased):
            await answer_of(program.session.alter(12345, count=1, data=None))


async def test_a_grant_that_was_lost_on_the_way_is_told(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        held = await other.lock("m")
        waiting = await program.lock("m")
        cable.deaf = True
        await other.withdraw(held)
        cable.cut()
        await waiting.granted()
        assert await stage.queue("m") == ([program.id], [])


@pytest.mark.parametrize(
    "why", [Removal.TIMED_OUT, Removal.DELETED, Removal.EVICTED, Removal.resized(2)]
)
async def test_a_removal_that_was_lost_on_the_way_is_told_with_its_reason(
    address: str, why: Removal
) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        await other.create("pool", 3)
        await other.enqueue("pool")
        timeout = 0.3 if why == Removal.TIMED_OUT else None
        waiting = await program.enqueue("pool", 3, timeout=timeout)
        cable.deaf = True
        if why == Removal.DELETED:
            await other.session.delete_semaphore("pool", force=True)
        elif why == Removal.EVICTED:
            assert waiting.order_id is not None
            await stage.eye.evict(DEFAULT_NODE, "pool", waiting.order_id)
        elif why.limit is not None:
            await other.session.resize_semaphore("pool", why.limit)

        async def out() -> bool:
            _, waiters = await stage.queue("pool")
            return program.id not in waiters

        await done_and_cut(stage, cable, out)
        assert await waiting.removed() == why


async def test_a_limit_that_is_changed_over_a_lost_connection_is_changed(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        await other.create("pool", 3)
        cable.deaf = True
        resizing = asyncio.ensure_future(program.session.resize_semaphore("pool", 2))

        async def is_changed() -> bool:
            return (await other.describe("pool")).limit == 2

        await done_and_cut(stage, cable, is_changed)
        await resizing
        assert await is_changed()


async def test_a_server_of_an_earlier_release_is_not_asked_for_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_a_cable(address) as (stage, _, engine):
        program = await stage.program(engine=engine)
        await program.create("pool", 3)
        monkeypatch.setattr(wire, "RESIZE", "a feature of tomorrow")
        with pytest.raises(Unsupported, match="the server is of an earlier version"):
            await program.session.resize_semaphore("pool", 2)


async def test_an_owner_that_was_evicted_meanwhile_is_told(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        held = await program.lock("m")
        waiting = await other.lock("m")
        cable.deaf = True
        assert held.order_id is not None
        await stage.eye.evict(DEFAULT_NODE, "m", held.order_id)
        await waiting.granted()
        cable.cut()
        assert await held.removed() == Removal.EVICTED


async def test_what_changed_in_the_gap_is_told_to_those_who_watch(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program, other = await stage.program(engine=engine), await stage.program()
        await other.create("pool", 1, b"before")
        watching = await program.watch("pool")
        stopped = await program.watch("pool")
        stopped.stop()
        cable.deaf = True
        await other.session.update_semaphore("pool", b"after")
        cable.cut()
        await watching.called()
        assert (await program.describe("pool")).data == b"after"
        await program.fence(other)
        heard = watching.calls
        await other.session.update_semaphore("pool", b"and later")
        await watching.called()
        assert watching.calls > heard
        assert stopped.calls == 0


async def test_the_end_of_a_session_that_was_lost_on_the_way_is_told(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        await program.lock("m")
        cable.deaf = True
        await stage.eye.end_session(DEFAULT_NODE, program.id)
        cable.cut()
        await program.ended()
        with raises(SessionExpired):
            await program.lock("n")


async def test_a_close_whose_answer_was_lost_has_closed(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        await program.lock("m")
        cable.deaf = True
        closing = asyncio.create_task(program.close())

        async def closed() -> bool:
            return not await stage.eye.list_sessions(DEFAULT_NODE)

        await done_and_cut(stage, cable, closed)
        await closing
        assert program.recorder.end is None


async def test_an_attach_whose_answer_was_lost_begins_one_session(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        cable.deaf = True
        beginning = asyncio.create_task(stage.program(engine=engine))

        async def begun() -> bool:
            return len(await stage.eye.list_sessions(DEFAULT_NODE)) == 1

        await done_and_cut(stage, cable, begun)
        program = await beginning
        assert [each.id for each in await stage.eye.list_sessions(DEFAULT_NODE)] == [program.id]
        assert (await program.lock("m")).place is Place.GRANTED


async def test_an_attach_that_is_cancelled_while_nothing_arrives_leaves_no_session(
    address: str,
) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        cable.deaf = True
        beginning = asyncio.create_task(stage.program(engine=engine))

        async def sessions() -> int:
            return len(await stage.eye.list_sessions(DEFAULT_NODE))

        async def begun() -> bool:
            return await sessions() == 1

        async def over() -> bool:
            return await sessions() == 0

        await stage.until(begun, "the server's beginning it")
        beginning.cancel()
        await asyncio.wait([beginning])
        await stage.until(over, "its end")


async def test_an_attach_that_is_cancelled_after_the_connection_was_lost_leaves_no_session(
    address: str,
) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        cable.deaf = True
        beginning = asyncio.create_task(stage.program(engine=engine))

        async def sessions() -> int:
            return len(await stage.eye.list_sessions(DEFAULT_NODE))

        async def begun() -> bool:
            return await sessions() == 1

        async def over() -> bool:
            return await sessions() == 0

        await stage.until(begun, "the server's beginning it")
        cable.out = True
        cable.cut()

        async def lost() -> bool:
            return cable.plugs[-1].lost

        await stage.until(lost, "the loss of the connection")
        beginning.cancel()
        await asyncio.wait([beginning])
        assert await sessions() == 1
        cable.out = False
        await stage.until(over, "its end")


async def test_what_asks_the_server_as_a_whole_asks_again(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        cable.deaf = True
        asking = asyncio.create_task(engine.list_nodes())
        creating = asyncio.create_task(engine.create_node("/n", NodeConfig(), exist_ok=True))

        async def created() -> bool:
            return "/n" in await stage.eye.list_nodes()

        await done_and_cut(stage, cable, created)
        assert DEFAULT_NODE in await asking
        await creating


async def test_hundreds_of_operations_survive_many_cuts_in_their_order(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine)
        tokens: list[int] = []
        more = asyncio.Event()

        async def until_some(number: int) -> None:
            while len(tokens) < number:
                more.clear()
                await more.wait()

        async def go_through(name: str) -> None:
            for _ in range(60):
                request = await program.lock(name)
                assert request.place is Place.GRANTED
                assert request.order_id is not None
                tokens.append(request.order_id)
                more.set()
                await program.withdraw(request)

        work = asyncio.gather(*(go_through(f"m{number}") for number in range(8)))
        for number in range(6):
            if number % 2:
                cable.deaf = True
                await cable.loses_an_answer()
            else:
                await until_some(len(tokens) + 20)
            assert not work.done()
            cable.cut()
        await work
        assert len(set(tokens)) == len(tokens) == 480
        assert await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True) == []


async def test_a_silent_server_is_given_up_before_the_window_is_over(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine, window=6.0)
        held = await program.lock("m")
        cable.deaf = True  # from now on nothing is heard, and nothing says that it is broken

        async def another() -> bool:
            return len(cable.plugs) > 1

        await stage.until(another, "another connection")
        cable.deaf = False
        await back(program)
        assert program.recorder.end is None
        assert await stage.queue("m") == ([program.id], [])
        await program.withdraw(held)


async def test_a_session_that_cannot_be_attached_again_ends_with_its_window(address: str) -> None:
    async with on_a_cable(address) as (stage, cable, engine):
        program = await stage.program(engine=engine, window=1.0)
        sent = program.recorder.proofs[-1]
        cable.out = True
        cable.cut()
        late = program.send("m", EPHEMERAL_LIMIT, ephemeral=True)
        await program.ended()
        assert stage.clock.now() - sent >= 1.0
        with raises(SessionExpired):
            await late.answered()
        cable.out = False


async def test_without_a_server_an_administrators_question_fails_after_a_while(
    address: str,
) -> None:
    async with on_a_cable(address) as (_, cable, engine):
        assert engine._reconnector is not None
        engine._reconnector.timeout = 0.2
        cable.out = True
        cable.cut()
        with raises(EngineError):
            await engine.list_nodes()
        cable.out = False
