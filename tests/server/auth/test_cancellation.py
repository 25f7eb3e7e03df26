"""Charges for what a server does not know: cancelled operations, and what it finds at its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.engines.contract import Attach as Attaching
from tenure.engines.contract import EngineSession, Enqueued, Place
from tenure.engines.memory import MemoryEngine
from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired
from tenure.model import NodeConfig
from tenure.server.auth.authenticator import Authenticator
from tenure.server.auth.guard import Guard
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Identity
from tenure.server.context import Context
from tenure.server.limits import LimitReached, Limits
from tenure.testing import VirtualClock

pytestmark = pytest.mark.usefixtures("loop_factory")

WINDOW = 20.0
MOST = 100  # bytes


class Events:
    """Events of a session that a test does not look at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Stopping:
    """Stops at one operation: before the store carries it out, or before its answer arrives."""

    def __init__(self) -> None:
        self.at = ""
        self.after = False
        self.reached = asyncio.Event()

    def stop(self, at: str, *, after: bool) -> None:
        self.at, self.after = at, after

    async def carry_out(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if name != self.at:
            return await work()
        self.at = ""
        if self.after:
            await work()
        self.reached.set()
        return await asyncio.get_running_loop().create_future()


class StoppingSession:
    """A session of such a store."""

    def __init__(self, session: Any, stopping: Stopping) -> None:
        self._session = session
        self._stopping = stopping

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._session, name)
        if not asyncio.iscoroutinefunction(function):
            return function
        return lambda *arguments, **named: self._stopping.carry_out(
            name, lambda: function(*arguments, **named)
        )


class Store(MemoryEngine):
    """A store in memory whose operations a test can stop."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("", clock)
        self.stopping = Stopping()

    async def attach(self, how: Attaching, events: Any) -> Any:
        begun: list[EngineSession] = []

        async def attach() -> Any:
            begun.append(await super(Store, self).attach(how, events))
            return begun[0]

        try:
            return StoppingSession(await self.stopping.carry_out("attach", attach), self.stopping)
        except asyncio.CancelledError:
            for session in begun:  # as the contract has it
                await (session.close() if how.session_id is None else session.detach())
            raise

    async def create_node(self, *arguments: Any, **named: Any) -> None:
        create = super().create_node
        await self.stopping.carry_out("create_node", lambda: create(*arguments, **named))

    async def drop_node(self, *arguments: Any, **named: Any) -> None:
        drop = super().drop_node
        await self.stopping.carry_out("drop_node", lambda: drop(*arguments, **named))

    async def end_session(self, *arguments: Any) -> bool:
        end = super().end_session
        ended: bool = await self.stopping.carry_out("end_session", lambda: end(*arguments))
        return ended

    async def list_nodes(self) -> Any:
        return await self.stopping.carry_out("list_nodes", super().list_nodes)

    async def describe_semaphore(self, *arguments: Any, **named: Any) -> Any:
        describe = super().describe_semaphore
        return await self.stopping.carry_out(
            "describe_semaphore", lambda: describe(*arguments, **named)
        )


class World:
    """One identity with a session, a node and a semaphore.

    Attributes:
        engine: the identity's.
        session: on ``/default``.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.guard = Guard(store, Limits(stored_bytes=MOST, nodes=3))
        self.engine = GuardedEngine(self.guard, Identity("one", "token"))
        self.session: EngineSession

    async def attach(self, engine: GuardedEngine | None = None, number: int | None = None) -> Any:
        how = Attaching("/default", WINDOW, "", "window", b"k", number, assume_dead=True)
        return await (engine or self.engine).attach(how, Events())

    async def cancel(
        self, at: str, work: Callable[[World], Awaitable[Any]], *, after: bool
    ) -> None:
        """Cancel some work at an operation of the store."""
        self.store.stopping.stop(at, after=after)

        async def run() -> None:
            await work(self)

        task = asyncio.ensure_future(run())
        await self.store.stopping.reached.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    async def look(self) -> None:
        """Have the guard compare what it has counted with the store."""
        await asyncio.sleep(11.0)
        session = await self.attach()
        with pytest.raises(LimitReached):
            await session.create_semaphore("large", 1, b"x" * (MOST + 1), exist_ok=False)
        await session.close()

    def charged(self) -> dict[str, int]:
        shares = self.engine.account.shares
        return {
            name: shares[name].used for name in ("sessions", "nodes", "stored_bytes", "requests")
        }

    async def there(self) -> dict[str, int]:
        """What the store has."""
        nodes = list(await MemoryEngine.list_nodes(self.store))
        sessions = [each for node in nodes for each in await self.store.list_sessions(node)]
        semaphores = [
            each
            for node in nodes
            for each in await self.store.list_semaphores(node, owners=True, waiters=True)
        ]
        requests = [each for it in semaphores for each in (*it.owners, *it.waiters)]
        data = sum(len(it.data) for it in semaphores) + sum(len(it.data) for it in requests)
        return {
            "sessions": len(sessions),
            "nodes": len(nodes) - 1,  # that were made
            "stored_bytes": data,
            "requests": len(requests),
        }

    async def covers(self) -> bool:
        """Whether at least what is there is charged."""
        charged = self.charged()
        return all(charged[name] >= there for name, there in (await self.there()).items())


@asynccontextmanager
async def a_world(clock: VirtualClock) -> AsyncIterator[World]:
    store = Store(clock)
    await store.open()
    world = World(store)
    world.session = await world.attach()
    await world.session.create_semaphore("old", 4, b"12", exist_ok=False)
    await world.engine.create_node("/made", NodeConfig(), exist_ok=False)
    try:
        yield world
    finally:
        await store.aclose()


both_ways = pytest.mark.parametrize("after", [False, True], ids=["not carried out", "carried out"])

WORK: dict[str, tuple[str, Callable[[World], Awaitable[Any]]]] = {
    "create": (
        "create_semaphore",
        lambda it: it.session.create_semaphore("new", 1, b"123456", exist_ok=False),
    ),
    "create what may be there": (
        "create_semaphore",
        lambda it: it.session.create_semaphore("new", 1, b"123456", exist_ok=True),
    ),
    "create what is there": (
        "create_semaphore",
        lambda it: it.session.create_semaphore("old", 4, b"123456", exist_ok=True),
    ),
    "write more": ("update_semaphore", lambda it: it.session.update_semaphore("old", b"1234567")),
    "write less": ("update_semaphore", lambda it: it.session.update_semaphore("old", b"1")),
    "write nothing": ("update_semaphore", lambda it: it.session.update_semaphore("old", b"")),
    "delete": ("delete_semaphore", lambda it: it.session.delete_semaphore("old", force=False)),
    "create a node": (
        "create_node",
        lambda it: it.engine.create_node("/new", NodeConfig(), exist_ok=False),
    ),
    "create a node that is there": (
        "create_node",
        lambda it: it.engine.create_node("/made", NodeConfig(), exist_ok=True),
    ),
    "drop a node": ("drop_node", lambda it: it.engine.drop_node("/made", force=False)),
    "attach": ("attach", lambda it: it.attach()),
    "close": ("close", lambda it: it.session.close()),
    "detach": ("detach", lambda it: it.session.detach()),
    "end a session": (
        "end_session",
        lambda it: it.engine.end_session("/default", it.session.id),
    ),
}


@both_ways
@pytest.mark.parametrize("what", WORK)
async def test_what_may_be_there_is_charged_until_it_is_known(
    what: str, after: bool, clock: VirtualClock
) -> None:
    at, work = WORK[what]
    async with a_world(clock) as world:
        # An existing node is refused by the store: only the refusal was not seen.
        carried_out = after and what not in {"create a node that is there", "create what is there"}
        await world.cancel(at, work, after=carried_out)
        assert await world.covers(), world.charged()
        await asyncio.sleep(WINDOW + 1)  # there are no renewals
        await world.look()
        assert world.charged() == await world.there()


async def test_a_write_that_is_repeated_after_a_cancellation_is_charged_once(
    clock: VirtualClock,
) -> None:
    async with a_world(clock) as world:
        for size in (30, 50, 40):
            await world.cancel(
                "update_semaphore",
                lambda it, size=size: it.session.update_semaphore("old", b"x" * size),  # type: ignore[misc]
                after=True,
            )
            world.store.stopping.reached.clear()
        assert world.charged()["stored_bytes"] == 2 + 50
        await world.session.update_semaphore("old", b"123")
        assert world.charged() == await world.there()


async def test_a_creation_behind_one_without_an_answer_is_charged_with_the_larger_data(
    clock: VirtualClock,
) -> None:
    async with a_world(clock) as world:
        await world.cancel(
            "create_semaphore",
            lambda it: it.session.create_semaphore("new", 1, b"1", exist_ok=True),
            after=False,
        )
        await world.session.create_semaphore("new", 1, b"x" * 60, exist_ok=True)
        assert await world.covers()
        await world.look()
        assert world.charged() == await world.there()


async def test_many_writes_without_an_answer_are_read_again(clock: VirtualClock) -> None:
    async with a_world(clock) as world:
        for number in range(70):
            world.store.stopping.reached.clear()
            await world.cancel(
                "create_semaphore",
                lambda it, name=f"n{number}": it.session.create_semaphore(  # type: ignore[misc]
                    name, 1, b"1", exist_ok=True
                ),
                after=number % 2 == 0,
            )
        assert world.charged()["stored_bytes"] == 2 + 70
        for _ in range(11):
            world.session.renew()
            await asyncio.sleep(1.0)
        await world.session.update_semaphore("old", b"123")
        await asyncio.sleep(1.0)  # they are read in the background
        assert world.charged()["stored_bytes"] == 3 + 35 == (await world.there())["stored_bytes"]


@pytest.mark.parametrize("at", ["list_nodes", "describe_semaphore"])
async def test_a_look_at_the_store_that_is_cancelled_charges_nothing(
    at: str, clock: VirtualClock
) -> None:
    async with a_world(clock) as world:
        await world.cancel(*WORK["write more"], after=True)
        world.store.stopping.reached.clear()
        before = world.charged()
        for _ in range(11):
            world.session.renew()
            await asyncio.sleep(1.0)
        await world.cancel(
            at, lambda it: it.session.update_semaphore("old", b"x" * MOST), after=False
        )
        assert world.charged() == before
        for _ in range(11):
            world.session.renew()
            await asyncio.sleep(1.0)
        with pytest.raises(LimitReached):
            await world.session.update_semaphore("old", b"x" * (MOST + 1))
        assert world.charged() == await world.there()


async def test_a_takeover_that_is_cancelled_leaves_the_session_charged_to_its_identity(
    clock: VirtualClock,
) -> None:
    async with a_world(clock) as world:
        for hold in (1, 2):
            world.session.enqueue(hold, "old", 1, b"12345", timeout=None, ephemeral=False)
        before = world.charged()
        number = world.session.id
        await world.cancel("attach", lambda it: it.attach(number=number), after=True)
        assert world.charged() == before == await world.there()
        other = GuardedEngine(world.guard, Identity("other", "token"))
        with pytest.raises(AuthenticationFailed):
            await world.attach(other, number)
        await asyncio.sleep(WINDOW + 1)
        await world.look()
        assert world.charged() == await world.there()


async def test_a_session_that_is_over_is_not_charged_after_a_takeover(clock: VirtualClock) -> None:
    async with a_world(clock) as world:
        await MemoryEngine.end_session(world.store, "/default", world.session.id)
        await asyncio.sleep(0)
        with pytest.raises(SessionExpired):
            await world.attach(number=world.session.id)
        assert world.charged()["sessions"] == 0


class Waits:
    """Session whose answers come when a test says so, around one of the store's."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self.answers: list[asyncio.Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _later(self, answer: Any) -> Any:
        del answer
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def enqueue(self, *arguments: Any, **named: Any) -> Any:
        return self._later(self._session.enqueue(*arguments, **named))

    def alter(self, *arguments: Any, **named: Any) -> Any:
        return self._later(self._session.alter(*arguments, **named))


class WaitingStore(Store):
    """Store in memory that answers when a test says so."""

    async def attach(self, how: Attaching, events: Any) -> Any:
        self.last = Waits(await super().attach(how, events))
        return self.last


@asynccontextmanager
async def a_waiting_world(clock: VirtualClock) -> AsyncIterator[tuple[World, Waits]]:
    store = WaitingStore(clock)
    await store.open()
    world = World(store)
    world.session = await world.attach()
    try:
        yield world, store.last
    finally:
        await store.aclose()


async def test_a_request_whose_answer_is_cancelled_stays_charged(clock: VirtualClock) -> None:
    async with a_waiting_world(clock) as (world, waits):
        world.session.enqueue(1, "m", 1, b"12345", timeout=None, ephemeral=True)
        waits.answers[0].cancel()
        await asyncio.sleep(0)
        assert world.charged() == await world.there()
        world.session.withdraw(1)
        assert world.charged() == await world.there()


@pytest.mark.parametrize(
    "error", [MemoryError(), InvalidArgument("no")], ids=["unknown", "refused"]
)
async def test_a_request_that_fails_is_charged_unless_the_store_refused_it(
    error: Exception, clock: VirtualClock
) -> None:
    async with a_waiting_world(clock) as (world, waits):
        world.session.enqueue(1, "m", 1, b"12345", timeout=None, ephemeral=True)
        waits.answers[0].set_exception(error)
        await asyncio.sleep(0)
        assert world.charged()["requests"] == isinstance(error, MemoryError)


@pytest.mark.parametrize("size", [2, 9])
async def test_of_a_change_without_an_answer_the_larger_data_is_charged(
    size: int, clock: VirtualClock
) -> None:
    async with a_waiting_world(clock) as (world, waits):
        world.session.enqueue(1, "m", 1, b"12345", timeout=None, ephemeral=True)
        waits.answers[0].set_result(Enqueued(Place.GRANTED, 1))
        world.session.alter(1, count=None, data=b"x" * size)
        waits.answers[1].cancel()
        await asyncio.sleep(0)
        assert world.charged()["stored_bytes"] == max(size, 5)


@pytest.mark.parametrize("error", [MemoryError, InvalidArgument])
@pytest.mark.parametrize("call", ["enqueue", "alter", "withdraw"])
async def test_an_operation_that_raises_at_once_is_charged_like_one_that_fails(
    call: str, error: type[Exception], clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_waiting_world(clock) as (world, waits):
        if call != "enqueue":
            world.session.enqueue(1, "m", 1, b"12345", timeout=None, ephemeral=True)
            waits.answers[0].set_result(Enqueued(Place.GRANTED, 1))

        def fail(*_: Any, **__: Any) -> Any:
            raise error("injected")

        monkeypatch.setattr(waits, call, fail, raising=False)
        work: dict[str, Callable[[], object]] = {
            "enqueue": lambda: world.session.enqueue(
                1, "m", 1, b"12345", timeout=None, ephemeral=True
            ),
            "alter": lambda: world.session.alter(1, count=None, data=b"1"),
            "withdraw": lambda: world.session.withdraw(1),
        }
        with pytest.raises(error):
            work[call]()
        unknown = error is MemoryError or call != "enqueue"
        assert world.charged()["requests"] == unknown
        assert world.charged()["stored_bytes"] == (5 if unknown else 0)


async def test_a_server_counts_what_it_finds_against_its_limits_and_no_quota(
    clock: VirtualClock,
) -> None:
    async with a_world(clock) as world:
        context = Context(
            world.store,
            Limits(stored_bytes=10, nodes=2),
            Authenticator(),
            logging.getLogger("tests.server.auth"),
        )
        await context.counts.semaphores.count_once()
        engine = GuardedEngine(context.guard, Identity("one", "token"))
        account, unowned = engine.account, context.guard.accounts.unowned
        assert (unowned.nodes.used, unowned.stored_bytes.used) == (1, 2)
        assert (account.nodes.used, account.stored_bytes.used) == (0, 0)
        session = await world.attach(engine)
        await engine.create_node("/new", NodeConfig(), exist_ok=False)
        with pytest.raises(LimitReached, match="nodes = 2"):
            await engine.create_node("/more", NodeConfig(), exist_ok=False)
        await engine.drop_node("/made", force=False)
        await engine.create_node("/more", NodeConfig(), exist_ok=False)
        with pytest.raises(LimitReached, match="stored_bytes = 10"):
            await session.create_semaphore("new", 1, b"x" * 9, exist_ok=False)
        await session.update_semaphore("old", b"12345")  # it is its own now
        assert (unowned.nodes.used, unowned.stored_bytes.used) == (0, 0)
        assert (account.nodes.used, account.stored_bytes.used) == (2, 5)
        await session.create_semaphore("new", 1, b"x" * 5, exist_ok=False)
        await context.counts.semaphores.count()  # again, which finds nothing new
        assert (unowned.stored_bytes.used, account.stored_bytes.used) == (0, 10)


# Comparisons with the store in the background


async def abandon_writes(world: World, number: int) -> None:
    """Begin writes without an answer, and let the time pass until the data is read again."""
    for each in range(number):
        write = world.guard.stored.begin("/default", f"lost {each}", world.engine.account, 1)
        world.guard.stored.abandoned(write, world.guard.now())
    await asyncio.sleep(11.0)


async def test_no_writer_waits_for_the_data_that_is_read_again(clock: VirtualClock) -> None:
    async with a_world(clock) as world:
        await abandon_writes(world, 65)
        world.store.stopping.stop("list_nodes", after=False)
        async with asyncio.timeout(1):
            await world.session.update_semaphore("old", b"123")
            await world.store.stopping.reached.wait()
        assert world.guard.stored.without_answer == 65
        world.session.renew()
        await asyncio.sleep(11.0)  # longer than a comparison may take
        await world.session.update_semaphore("old", b"1234")
        await asyncio.sleep(1.0)
        assert world.guard.stored.without_answer == 0
        assert world.charged()["stored_bytes"] == 4


async def test_an_error_while_data_is_read_again_concerns_no_writer(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_world(clock) as world:
        await abandon_writes(world, 65)

        async def fail() -> Any:
            raise MemoryError("the store's")

        world.store.list_nodes = fail  # type: ignore[method-assign]
        await world.session.update_semaphore("old", b"123")
        await asyncio.sleep(1.0)
        assert "the store's" in caplog.text
        del world.store.list_nodes


async def test_closing_the_guard_ends_its_reads(clock: VirtualClock) -> None:
    async with a_world(clock) as world:
        await abandon_writes(world, 65)
        world.store.stopping.stop("list_nodes", after=False)
        await world.session.update_semaphore("old", b"123")
        await world.store.stopping.reached.wait()
        async with asyncio.timeout(1):
            await world.guard.aclose()
            await world.guard.aclose()
        assert len(asyncio.all_tasks()) == 1
