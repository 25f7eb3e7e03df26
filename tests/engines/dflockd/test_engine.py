"""Mutexes and semaphores on real servers: tenure's own, and dflockd's of its early days."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tenure
from tenure.cli.app import invoke
from tenure.clock import SystemClock
from tenure.engines.dflockd import DflockdEngine, connect
from tenure.engines.dflockd.request import HELD, WAITING
from tenure.wire import lines
from tenure.wire.lines import fence_of
from tests.engines.dflockd.proxy import Proxy
from tests.engines.dflockd.servers import InThread, Server, early_server
from tests.guarantees import DFLOCKD, guarantee

PATIENCE = 30.0


@asynccontextmanager
async def clients(url: str, number: int = 2) -> AsyncIterator[list[tenure.Client]]:
    """Some programs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(tenure.connect(url)) for _ in range(number)]


async def queued(client: tenure.Client, name: str, number: int) -> None:
    """Return when so many wait, as the server says."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for found in await client.list_semaphores():
                if found.name == name and found.waiting == number:
                    return
            await asyncio.sleep(0.01)


# Mutexes


async def test_a_mutex_has_one_holder_and_the_rest_are_told_or_wait(server: Server) -> None:
    async with clients(server.url) as (one, two):
        async with one.mutex("m").lock() as lease:
            assert lease.held
            assert await two.mutex("m").try_lock() is None
            with pytest.raises(tenure.AcquireTimeout):
                await two.mutex("m").lock(timeout=0.05)
            waiting = asyncio.create_task(_hold(two, "m"))
        await waiting
        async with one.mutex("m").lock(timeout=PATIENCE):
            pass


async def _hold(client: tenure.Client, name: str) -> None:
    async with client.mutex(name).lock():
        pass


@guarantee("none", "one owner", "in order", "others proceed", on=DFLOCKD)
async def test_many_tasks_of_several_programs_hold_in_the_order_of_their_requests(
    server: Server,
) -> None:
    inside: list[int] = []
    order: list[int] = []

    async def work(client: tenure.Client, number: int) -> None:
        async with client.mutex("m").lock():
            assert not inside
            inside.append(number)
            order.append(number)
            await asyncio.sleep(0)
            inside.remove(number)

    async with clients(server.url, 3) as some:
        tasks = []
        async with some[0].mutex("m").lock():
            for number in range(24):
                tasks.append(asyncio.create_task(work(some[number % 3], number)))
                await _has_joined(some[number % 3])
            assert not order
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
    assert order == list(range(24))


async def _has_joined(client: tenure.Client) -> None:
    """Return when the program's latest request stands in the server's queue."""
    engine = client._core.engine
    assert isinstance(engine, DflockdEngine)

    def joined() -> bool:
        requests = [each for session in engine._sessions for each in session.requests.values()]
        return bool(requests) and all(each.standing in {WAITING, HELD} for each in requests)

    async with asyncio.timeout(PATIENCE):
        await asyncio.sleep(0)
        while not joined():  # noqa: ASYNC110  nothing tells when to look again
            await asyncio.sleep(0.002)


async def test_tasks_of_one_program_that_begin_at_once_keep_their_order(server: Server) -> None:
    order: list[int] = []

    async def work(client: tenure.Client, number: int) -> None:
        async with client.mutex("m").lock():
            order.append(number)

    async with clients(server.url, 1) as (client,):
        _warm = await client.mutex("warm").try_lock()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(work(client, number))
    assert order == list(range(20))


@guarantee("cancelled", "nothing leaks", "others proceed", on=DFLOCKD)
async def test_cancelled_waits_leave_nothing_in_the_queue(server: Server) -> None:
    async with clients(server.url, 3) as (owner, leaver, last):
        async with owner.mutex("m").lock():
            leaving = [asyncio.create_task(_hold(leaver, "m")) for _ in range(5)]
            for _ in leaving:
                await _has_joined(leaver)
            waiting = asyncio.create_task(_hold(last, "m"))
            await _has_joined(last)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            assert all(task.cancelled() for task in leaving)
        async with asyncio.timeout(PATIENCE):
            await waiting
        async with asyncio.timeout(PATIENCE), owner.mutex("m").lock():
            pass


@guarantee("cancelled", "nothing leaks", on=DFLOCKD)
async def test_the_server_sees_that_a_waiter_has_left(ours: InThread) -> None:
    async with clients(ours.url) as (owner, waiter), owner.mutex("m").lock():
        waiting = asyncio.create_task(_hold(waiter, "m"))
        await queued(owner, "m", 1)
        waiting.cancel()
        await queued(owner, "m", 0)
        with pytest.raises(tenure.AcquireTimeout):
            await waiter.mutex("m").lock(timeout=0.05)
        await queued(owner, "m", 0)


@guarantee("cancelled", "kept", "one owner", on=DFLOCKD)
@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_whenever_a_request_is_cancelled_nothing_stays_held(
    ours: InThread, turns: int
) -> None:
    async with clients(ours.url) as (one, two):
        _warm = await one.mutex("warm").try_lock()
        for name in ("m", "m", "m"):
            task = asyncio.create_task(_take(one, name))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task.result().release()
            lease = await two.mutex(name).lock(timeout=PATIENCE)
            await lease.release()


async def _take(client: tenure.Client, name: str) -> tenure.Lease:
    return await client.mutex(name).lock()


async def test_a_place_in_line_can_be_kept_and_given_up(server: Server) -> None:
    async with clients(server.url) as (one, two):
        lease = await one.mutex("m").lock()
        async with two.session() as session:
            ephemeral = session.semaphore("m", ephemeral=True)
            async with ephemeral.enqueue(tenure_whole()) as ticket:
                with pytest.raises(tenure.AcquireTimeout):
                    await ticket.wait(timeout=0.05)
                await lease.release()
                assert (await ticket.wait(timeout=PATIENCE)).held
        free = await one.mutex("m").try_lock()
        assert free is not None


def tenure_whole() -> int:
    return 2**64 - 1


async def test_who_waits_for_what_it_is_inside_of_is_told_at_once(server: Server) -> None:
    async with clients(server.url, 1) as (client,), client.mutex("m").lock():
        with pytest.raises(tenure.SelfDeadlock):
            await client.mutex("m").lock()


async def test_who_waits_inside_of_a_semaphore_for_another_slot_may_well_get_it(
    ours: InThread,
) -> None:
    async with clients(ours.url) as (one, two):
        for client in (one, two):
            await client.semaphore("pool").create(2, exist_ok=True)
        theirs = await two.semaphore("pool").acquire()
        async with one.semaphore("pool").acquire():
            waiting = asyncio.ensure_future(_second_slot(one))
            await queued(one, "pool", 1)
            await theirs.release()
            await waiting
            theirs = await two.semaphore("pool").acquire()
            releasing = asyncio.create_task(_release_when_waited_for(two, theirs))
            async with one.semaphore("pool").acquire():
                pass
            await releasing


async def _second_slot(client: tenure.Client) -> None:
    async with client.semaphore("pool").acquire():
        pass


async def _release_when_waited_for(client: tenure.Client, lease: tenure.Lease) -> None:
    await queued(client, lease.name, 1)
    await lease.release()


# Connections


async def test_behind_a_server_its_clients_are_known_by_their_address(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    with InThread(store) as server:
        async with tenure.connect(server.url) as client, client.mutex("m").lock():
            with pytest.raises(tenure.Unsupported):
                await client.describe_semaphore("m")
            assert not client.capabilities.resize
            with pytest.raises(tenure.Unsupported, match=r"sqlite://.* start them with limit 4"):
                await client.semaphore("pool").resize(4)
            async with tenure.connect(store) as eye:
                (owner,) = (await eye.describe_semaphore("m", "/dflockd")).owners
                assert (owner.host, owner.pid) == ("127.0.0.1", None)


async def test_what_is_free_is_held_on_one_connection(ours: InThread) -> None:
    async with Proxy(ours.port) as proxy, tenure.connect(proxy.url) as client:
        leases = [await client.mutex(f"m{number}").lock() for number in range(20)]
        assert all(lease.held for lease in leases)
        assert proxy.open == 1


async def test_who_waits_has_a_connection_of_its_own_which_is_used_again(ours: InThread) -> None:
    async with Proxy(ours.port) as proxy, tenure.connect(proxy.url) as client:
        async with client.mutex("m").lock():
            tasks = [asyncio.create_task(_hold(client, "m")) for _ in range(3)]
            await queued(client, "m", 3)
            assert proxy.open == 4
        await asyncio.gather(*tasks)
        accepted = proxy.accepted
        async with client.mutex("m").lock():
            task = asyncio.create_task(_hold(client, "m"))
            await queued(client, "m", 1)
        await task
        assert proxy.accepted == accepted


async def test_there_are_never_more_connections_than_one_allows(ours: InThread) -> None:
    async with Proxy(ours.port) as proxy, tenure.connect(f"{proxy.url}?connections=4") as client:
        async with client.mutex("m").lock():
            tasks = [asyncio.create_task(_hold(client, "m")) for _ in range(12)]
            await queued(client, "m", 3)
            assert proxy.open == 4
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
        assert proxy.open <= 4


# Semaphores


async def test_a_semaphore_admits_as_many_as_its_limit_says(ours: InThread) -> None:
    inside = most = 0

    async def work(client: tenure.Client) -> None:
        nonlocal inside, most
        async with client.semaphore("pool").acquire():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async with clients(ours.url, 3) as some:
        for client in some:
            await client.semaphore("pool").create(3, exist_ok=True)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for number in range(18):
                group.create_task(work(some[number % 3]))
        assert most == 3
        assert await some[0].semaphore("pool").count() == 0


async def test_a_semaphore_is_used_by_who_says_its_limit(ours: InThread) -> None:
    async with clients(ours.url) as (one, two):
        await one.semaphore("pool").create(2)
        with pytest.raises(tenure.SemaphoreExists):
            await one.semaphore("pool").create(2)
        with pytest.raises(tenure.SemaphoreNotFound, match="has not declared it"):
            await two.semaphore("pool").acquire()
        async with one.semaphore("pool").acquire():
            found = await two.semaphore("pool").describe()
            assert (found.limit, found.held, found.waiting) == (2, 1, 0)
            with pytest.raises(tenure.SemaphoreExists) as caught:
                await two.semaphore("pool").create(3, exist_ok=True)
            assert caught.value.limit == 2
            with pytest.raises(tenure.InvalidArgument, match="another limit"):
                await two.mutex("pool").lock()
            with pytest.raises(tenure.SemaphoreBusy):
                await one.semaphore("pool").delete()
        await one.semaphore("pool").delete()
        with pytest.raises(tenure.SemaphoreNotFound):
            await one.semaphore("pool").acquire()


async def test_an_early_server_has_no_semaphores_but_those_of_limit_one() -> None:
    with early_server() as server:
        async with clients(server.url, 1) as (client,):
            with pytest.raises(tenure.Unsupported, match=r"runs dflockd 0\.x"):
                await client.semaphore("pool").create(2)
            async with client.mutex("m").lock() as lease:
                assert not client.capabilities.fencing
                with pytest.raises(tenure.Unsupported, match="no fencing tokens"):
                    _ = lease.fencing_token


# Fencing


@guarantee("none", "tokens rise", on=DFLOCKD)
async def test_fencing_tokens_rise_with_every_grant(ours: InThread) -> None:
    async with clients(ours.url) as (one, two):
        assert one.capabilities.fencing
        tokens = []
        for number in range(10):
            async with (one, two)[number % 2].mutex("m").lock() as lease:
                tokens.append(lease.fencing_token)
                if number % 3 == 0:
                    waiting = asyncio.create_task(_token_of((two, one)[number % 2], "m"))
                    await queued(one, "m", 1)
            if number % 3 == 0:
                tokens.append(await waiting)
        assert tokens == sorted(set(tokens))


async def test_a_lease_shows_the_token_by_which_the_server_knows_it(ours: InThread) -> None:
    async with clients(ours.url) as (one, _):
        async with one.mutex("m").lock() as lease:
            token = lease.store_token
            assert fence_of(token) == lease.fencing_token
            reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
            writer.write(lines.renew("m", token, 33))
            assert await reader.readline() == b"ok 33\n"
            writer.close()
            await writer.wait_closed()
        assert lease.store_token == ""


async def test_what_was_released_behind_its_back_is_lost_by_its_release(server: Server) -> None:
    async with clients(server.url) as (one, two):
        lease = await one.mutex("m").lock()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(lines.release("m", lease.store_token))
        assert await reader.readline() == b"ok\n"
        writer.close()
        await writer.wait_closed()
        async with two.mutex("m").lock(timeout=PATIENCE):
            with pytest.raises(tenure.LeaseLost):
                await lease.release()
            assert await one.mutex("m").try_lock() is None


async def test_a_release_that_a_lost_connection_cuts_off_was_in_time(server: Server) -> None:
    async with (
        Proxy(server.port) as proxy,
        clients(proxy.url) as (one, _),
        clients(server.url) as (two, _),
    ):
        lease = await one.mutex("m").lock()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)  # it has been sent, and the proxy has not come to it
        proxy.cut()
        await releasing
        async with two.mutex("m").lock(timeout=PATIENCE):
            assert lease.loss is None


async def _token_of(client: tenure.Client, name: str) -> int:
    async with client.mutex(name).lock() as lease:
        return lease.fencing_token


# Several servers


async def test_keys_are_divided_among_servers_as_crc32_says() -> None:
    with InThread() as first, InThread() as second:
        async with clients(f"{first.url},127.0.0.1:{second.port}", 1) as (both,):
            leases = [await both.mutex(name).lock() for name in "abcdefgh"]
            async with clients(first.url, 1) as (one,), clients(second.url, 1) as (other,):
                there = {found.name for found in await one.list_semaphores() if found.held}
                elsewhere = {found.name for found in await other.list_semaphores() if found.held}
            listed = [found.name for found in await both.list_semaphores()]
        assert {lease.name for lease in leases} == there | elsewhere
        # CRC-32 of a, b, c and h is odd (of a it is E8B7BE43), of d, e, f and g it is even.
        assert (sorted(there), sorted(elsewhere)) == (list("defg"), list("abch"))
        assert listed == list("abcdefgh")


async def test_another_sharding_function_may_be_used() -> None:
    with InThread() as first, InThread() as second:
        clock = SystemClock()
        engine = connect(f"{first.url},127.0.0.1:{second.port}", clock)
        engine.sharding = lambda key, servers: len(key) % servers
        async with tenure.Client(engine, clock) as both, clients(second.url, 1) as (other,):
            async with both.mutex("odd").lock(), both.mutex("even").lock():
                assert [each.name for each in await other.list_semaphores()] == ["odd"]
            engine.sharding = lambda _key, servers: servers
            with pytest.raises(tenure.InvalidArgument, match="from 0 to 1"):
                await both.mutex("m").lock()


@guarantee("cut off", "others proceed", on=DFLOCKD)
async def test_a_server_that_is_away_takes_only_its_own_keys_with_it() -> None:
    with InThread() as first:
        async with Proxy(first.port) as proxy:
            proxy.refuses = True
            url = f"{first.url},127.0.0.1:{proxy.port}"
            async with clients(url, 1) as (client,):
                async with client.mutex("d").lock():
                    pass
                with pytest.raises(tenure.AcquireTimeout):
                    await client.mutex("a").lock(timeout=0.1)
                proxy.refuses = False
                async with client.mutex("a").lock(timeout=PATIENCE):
                    pass


# What it cannot do


async def test_what_dflockd_cannot_do_is_refused_and_says_who_can(ours: InThread) -> None:
    async with clients(ours.url, 1) as (client,):
        await client.semaphore("pool").create(2)
        mutex, pool = client.mutex("m"), client.semaphore("pool")

        async def watched() -> None:
            async with pool.watch(owners=True) as states:
                await anext(aiter(states))

        for refused in (
            lambda: mutex.lock(data=b"me"),
            lambda: pool.acquire(2),
            lambda: pool.describe(owners=True),
            lambda: pool.update(b"data"),
            lambda: pool.delete(force=True),
            lambda: client.semaphore("services", ephemeral=True).acquire(),
            lambda: client.mutex("two words").lock(),
            lambda: client.session("/billing"),
            lambda: client.session(recovery_window=600),
            lambda: client.create_node("/billing"),
            client.list_sessions,
            lambda: client.election("e").campaign(b"me"),
            watched,
        ):
            with pytest.raises(tenure.Unsupported, match="redis://"):
                await refused()
        with pytest.raises(tenure.Unsupported):
            await client.session(resumable=True)
        assert await client.list_nodes() == ["/default"]


async def test_who_is_not_there_cannot_be_opened(ours: InThread) -> None:
    port = ours.port
    async with Proxy(port) as proxy:
        proxy.refuses = True
        with pytest.raises(
            tenure.EngineUnavailable, match="check that a dflockd server runs there"
        ):
            async with tenure.connect(proxy.url):
                pass


def test_the_command_line_lists_keys_without_their_holders(
    ours: InThread, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hold_and_list() -> int:
        async with tenure.connect(ours.url) as client, client.mutex("nightly").lock():
            async with client.mutex("weekly").lock():
                pass
            return await asyncio.to_thread(invoke, ["ls", "--url", ours.url])

    assert asyncio.run(hold_and_list()) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1:4] for row in rows] == [
        ["nightly", "mutex", "held"],
        ["weekly", "mutex", "free"],
    ]
