"""The server is killed, restarted, drained, or one of two: who holds holds, who waits waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Place, Removal, Withdrawn
from tenure.engines.native import connect
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    SemaphoreExists,
    SemaphoreNotFound,
)
from tenure.events import SessionAttached
from tenure.model import DEFAULT_NODE
from tenure.server.auth import Authenticator
from tenure.testing.program import Program, answer_of, raises
from tenure.testing.stage import WINDOW, Stage
from tests.corpus.subjects import SystemClockThatSteps
from tests.engines.native.cable import Cable, on_a_cable
from tests.engines.native.test_lost_connections import back
from tests.engines.stores import a_file
from tests.guarantees import guarantee
from tests.server.served import Served, served
from tests.server.serving import serving


@guarantee("restarted", "kept", "tokens rise", "answers stand", on="tenure")
@pytest.mark.parametrize("number", [SIGKILL, SIGTERM], ids=["killed", "ended"])
async def test_a_restart_of_the_server_loses_no_lease_no_place_and_no_number(
    tmp_path: Path, number: int
) -> None:
    store = ("--store", f"sqlite:///{tmp_path}/store.db?durability=full")
    async with serving(tmp_path, *store) as server:
        address = server.address
        async with (
            tenure.connect(address) as holder,
            tenure.connect(address) as waiter,
            tenure.connect(address) as last,
        ):
            await holder.semaphore("pool").create(limit=1)
            lease = await holder.semaphore("pool").acquire()
            async with (
                waiter.semaphore("pool").enqueue() as waiting,
                last.semaphore("pool").enqueue() as behind,
                holder.events() as events,
            ):
                await server.end(number)
                asked = asyncio.create_task(holder.mutex("n").lock(timeout=60))
                async with serving(tmp_path, *store, listen=[address]):
                    async for event in events:
                        if isinstance(event, SessionAttached):
                            break
                    assert lease.held
                    later = await asked
                    assert not waiting.granted
                    await lease.release()
                    first = await waiting.wait(timeout=60)
                    assert not behind.granted
                    await first.release()
                    second = await behind.wait(timeout=60)
                    tokens = [each.fencing_token for each in (lease, first, second, later)]
                    assert tokens == sorted(set(tokens))
                    await second.release()
                    await later.release()
                    for client in (holder, waiter, last):
                        await client.aclose()


@pytest.fixture
def store() -> Iterator[str]:
    with a_file() as url:
        yield url


def place_of(address: str) -> str:
    return address.rpartition("/")[2]


class Scene(NamedTuple):
    """A server, a program that reaches it through a cable, and another that does without."""

    store: str
    server: Served
    stage: Stage
    cable: Cable
    program: Program
    other: Program

    @asynccontextmanager
    async def restart(self) -> AsyncIterator[None]:
        """The server is lost, with all that was not heard of it, and another is in its place."""
        self.server.stop()
        self.cable.deaf = False
        with served(self.store, url=self.server.address):
            yield
            await self.stage.aclose()


@asynccontextmanager
async def a_scene(store: str) -> AsyncIterator[Scene]:
    with served(store) as server:
        async with on_a_cable(server.address) as (stage, cable, engine):
            program, other = await stage.program(engine=engine), await stage.program()
            yield Scene(store, server, stage, cable, program, other)


async def test_what_a_restarted_server_never_answered_is_found_in_the_queue(store: str) -> None:
    async with a_scene(store) as scene:
        _, _, stage, cable, program, other = scene
        await other.create("pool", 2)
        held = await program.enqueue("pool")
        cable.deaf = True
        granted = program.send("pool")
        waiting = program.send("pool")
        given_up = program.send("pool")
        release = program.send_withdrawal(held)
        gone = program.send_withdrawal(given_up)
        created = asyncio.create_task(other.create("another", 1))

        async def done() -> bool:
            owners, waiters = await stage.queue("pool")
            return owners == [program.id] * 2 and not waiters

        await stage.until(done, "the server's doing it all")
        await created
        async with scene.restart():
            for sent in (granted, waiting, given_up):
                await sent.answered()
            assert await answer_of(release) is Withdrawn.LEFT  # as far as anybody can know
            assert await answer_of(gone) is Withdrawn.LEFT
            assert (granted.place, waiting.place) == (Place.GRANTED, Place.GRANTED)
            await stage.settle()


async def test_changes_that_a_lost_server_had_made_and_not_answered_are_made_once(
    store: str,
) -> None:
    """Of an owner and of a waiter: to shrink again by what was asked for would be refused."""
    async with a_scene(store) as scene:
        _, _, stage, cable, program, other = scene
        await other.create("pool", 4)
        owned = await program.enqueue("pool", 4)
        waiting = await program.enqueue("pool", 3)
        cable.deaf = True
        changes = [
            program.session.alter(owned.request_id, count=3, data=None),
            program.session.alter(owned.request_id, count=2, data=b"less"),
            program.session.alter(waiting.request_id, count=2, data=None),
        ]

        async def changed() -> bool:
            return (await other.describe("pool")).held == 4

        await stage.until(changed, "the server's doing it all")
        async with scene.restart():
            for each in changes:
                await answer_of(each)
            await waiting.granted()
            found = await other.describe("pool")
            assert [(each.count, each.data) for each in found.owners] == [
                (2, b"less"),
                (2, b""),
            ]
            await stage.settle()


async def test_what_happened_while_there_was_no_server_is_told_afterwards(store: str) -> None:
    with served(store) as server:
        address = server.address
        async with on_a_cable(address) as (stage, _, engine):
            program = await stage.program(engine=engine)
            owned = await program.lock("m")
            awaited = await program.lock("m", timeout=0.5)
            watching = await program.watch("m")
            changes = watching.calls
            server.stop()
            direct = connect_engine(store, SystemClock())
            await direct.open()
            assert owned.order_id is not None
            await direct.evict(DEFAULT_NODE, "m", owned.order_id)
            await direct.aclose()
            with served(store, url=address):
                await back(program)
                assert await owned.removed() == Removal.EVICTED
                assert watching.calls > changes
                if awaited.removal is None:
                    await awaited.granted()
                await stage.aclose()


@guarantee("cut off", "kept", on="tenure")
async def test_a_client_moves_to_the_other_server_and_keeps_everything(store: str) -> None:
    with served(store) as one, served(store) as two:
        both = f"tenure://{place_of(one.address)},{place_of(two.address)}"
        async with on_a_cable(both) as (stage, cable, engine):
            program, other = await stage.program(engine=engine), await stage.program()
            held, blocking = await program.lock("m"), await other.lock("n")
            waiting = await program.lock("n")
            first = cable.plugs[-1].endpoint
            here, there = (one, two) if str(first) == place_of(one.address) else (two, one)
            here.drain()
            await back(program)
            assert str(cable.plugs[-1].endpoint) == place_of(there.address)
            assert await stage.queue("m") == ([program.id], [])
            await other.withdraw(blocking)
            await waiting.granted()
            await program.withdraw(held)
            await program.withdraw(waiting)
            here.stop()
            assert (await program.lock("m")).place is Place.GRANTED


async def test_who_comes_back_after_its_window_takes_nothing_from_its_successor(
    store: str,
) -> None:
    clock = SystemClockThatSteps()
    with served(store) as first, served(store) as second:
        async with on_a_cable(first.address, clock) as (stage, cable, engine):
            former = await stage.program(engine=engine, liveness="window")
            await former.lock("m")
            cable.out = True
            cable.cut()
            other = connect(second.address, SystemClock())
            await other.open()
            successor = await stage.program(
                engine=other, liveness="window", resume=former, assume_dead=True
            )
            clock.advance(2 * WINDOW)  # a suspension, of which the loop's timers know nothing
            cable.out = False
            await former.ended()
            assert former.recorder.end is not None
            assert not former.recorder.end.taken_over  # it has not asked
            assert await stage.queue("m") == ([successor.id], [])
            assert successor.recorder.end is None
            await stage.disconnect(other)


async def test_what_a_lost_server_has_created_and_deleted_is_created_and_deleted(
    store: str,
) -> None:
    async with a_scene(store) as scene:
        _, _, stage, cable, program, other = scene
        await other.create("old", 1)
        cable.deaf = True
        creating = asyncio.create_task(program.create("new", 2, b"data"))
        deleting = asyncio.create_task(program.session.delete_semaphore("old", force=False))

        async def done() -> bool:
            found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False)
            return [each.name for each in found] == ["new"]

        await stage.until(done, "the server's doing it")
        async with scene.restart():
            await creating
            await deleting
            with raises(SemaphoreExists):
                await program.create("new", 2, b"data")
            with raises(SemaphoreNotFound):
                await program.session.delete_semaphore("old", force=False)


async def test_of_several_servers_all_are_tried_when_one_cannot_be_reached(store: str) -> None:
    with served(store) as server:
        address = f"tenure://127.0.0.1:1,{place_of(server.address)},localhost:2"
        for _ in range(4):
            async with tenure.connect(address) as client, client.mutex("m").lock():
                assert await client.mutex("m").inspect() is not None


async def test_of_several_servers_all_are_tried_when_one_answers_and_refuses(store: str) -> None:
    with (
        served(store, authenticator=Authenticator({"a token": "someone"})) as closed,
        served(store) as open_one,
    ):
        both = f"tenure://{place_of(closed.address)},{place_of(open_one.address)}"
        for _ in range(4):
            async with on_a_cable(both) as (_, cable, engine):
                assert DEFAULT_NODE in await engine.list_nodes()
                cable.cut()
                assert DEFAULT_NODE in await engine.list_nodes()
        alone = connect(closed.address, SystemClock())
        with raises(AuthenticationFailed):
            await alone.open()


async def test_a_server_that_refuses_who_comes_back_is_told_of_in_the_log(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    with served(store) as server:
        client = tenure.connect(server.address)
        lease = await client.mutex("m").lock()
        server.stop()
    with served(store, url=server.address, authenticator=Authenticator({"a token": "someone"})):
        async with asyncio.timeout(30):
            while "the server requires a token" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with served(store, url=server.address):
        async with client.mutex("another").lock(timeout=30):
            assert lease.held
        await client.aclose()


async def test_what_is_asked_while_the_client_is_closed_fails_at_once(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tenure")
    with served(store) as server:
        client = tenure.connect(server.address)
        await client.list_nodes()
        server.stop()
    async with asyncio.timeout(30):
        while "connection lost, reconnecting" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asked = asyncio.ensure_future(client.list_nodes())
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(EngineError, match="was closed"):
        async with asyncio.timeout(5):
            await asked


async def test_without_any_server_opening_says_which_were_tried() -> None:
    engine = connect("tenure://127.0.0.1:1,127.0.0.1:2", SystemClock())
    with raises(EngineUnavailable) as caught:
        await engine.open()
    for each in ("127.0.0.1:1", "127.0.0.1:2"):
        assert each in str(caught.error)
    await engine.aclose()
