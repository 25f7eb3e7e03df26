"""What becomes of leases when the server, the connection or the network fails."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tenure.events import EventStream, SessionAttached, SessionDetached
from tests.engines.redis.helpers import PATIENCE, queue_of
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server
from tests.guarantees import REDIS, guarantee


async def until_detached_and_back(events: EventStream) -> None:
    """Wait for the gap in the connection, and its end."""
    wanted: list[type[object]] = [SessionDetached, SessionAttached]
    async with asyncio.timeout(PATIENCE):
        async for event in events:
            if isinstance(event, wanted[0]):
                del wanted[0]
                if not wanted:
                    return


@guarantee("cut off", "kept", "one owner", on=REDIS)
async def test_a_killed_connection_loses_no_lease_and_no_place(server: Server) -> None:
    async with tenure.connect(server.url) as one, tenure.connect(server.url) as other:
        events = one.events()
        async with other.session() as second:
            await second.semaphore("m").create(limit=1)
            lease = await one.semaphore("m").acquire()
            async with second.semaphore("m").enqueue() as ticket:
                server.tell("CLIENT", "KILL", "TYPE", "normal")
                server.tell("CLIENT", "KILL", "TYPE", "pubsub")
                await until_detached_and_back(events)
                assert lease.held
                assert await queue_of(other, "m") == (1, 1)
                await lease.release()
                async with await ticket.wait(timeout=PATIENCE) as next_lease:
                    assert next_lease.fencing_token > lease.fencing_token
        await events.aclose()


async def test_forgotten_scripts_are_loaded_again_without_a_gap(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        events = client.events()
        server.tell("SCRIPT", "FLUSH")
        leases = await asyncio.gather(*(session.mutex(f"m{n}").lock(timeout=5) for n in range(20)))
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()
        await events.aclose()
        assert not [event async for event in events if isinstance(event, SessionDetached)]


@guarantee("cut off", "kept", on=REDIS)
async def test_a_server_that_sleeps_for_less_than_the_window_costs_nothing(server: Server) -> None:
    async with (
        tenure.connect(server.url) as client,
        client.session(recovery_window=6) as session,
        session.mutex("m").lock() as lease,
    ):
        await asyncio.to_thread(server.tell, "DEBUG", "SLEEP", "1.5")
        async with session.mutex("another").lock(timeout=PATIENCE):
            assert lease.held


@guarantee("restarted", "answers stand", "tokens rise", "kept", on=REDIS)
async def test_a_restart_with_the_data_keeps_leases_and_places(durable: Server) -> None:
    async with tenure.connect(durable.url) as client:
        session = await client.session(recovery_window=20)
        events = client.events()
        await session.semaphore("m").create(limit=1)
        lease = await session.semaphore("m").acquire()
        async with session.semaphore("m").enqueue() as ticket:
            durable.kill()
            durable.start()
            await until_detached_and_back(events)
            assert lease.held
            await lease.release()
            later = await ticket.wait(timeout=PATIENCE)
            assert later.fencing_token > lease.fencing_token
            await later.release()
        await events.aclose()


@guarantee("restarted", "tokens rise", on=REDIS)
@pytest.mark.parametrize("how", ["restarted", "flushed"])
async def test_lost_data_ends_sessions_and_grants_nothing_until_their_windows_are_over(
    server: Server, how: str
) -> None:
    url = f"{server.url}&max_window=2"
    async with tenure.connect(url) as holder, tenure.connect(url) as other:
        session = await holder.session(recovery_window=1.5)
        lease = await session.mutex("m").lock()
        if how == "flushed":
            server.tell("FLUSHALL")
        else:
            server.kill()
            server.start()
        async with asyncio.timeout(PATIENCE):
            lost = await lease.wait_lost()
        assert isinstance(lost.__cause__, tenure.SessionExpired)
        async with other.session(recovery_window=1.5) as session:
            with pytest.raises(tenure.AcquireTimeout):
                await session.mutex("m").lock(timeout=0.2)
            async with session.mutex("m").lock(timeout=PATIENCE) as later:
                assert later.fencing_token > lease.fencing_token


@guarantee("restarted", "kept", on=REDIS)
async def test_a_resumable_session_gets_its_window_anew_when_the_server_was_away(
    durable: Server,
) -> None:
    async with tenure.connect(durable.url) as client:
        session = await client.session(recovery_window=1, resumable=True)
        lease = await session.mutex("m").lock()
        token = session.resume_token
        await session.detach()
    durable.kill()
    await asyncio.sleep(1.2)  # longer than its window: the server's clock goes on meanwhile
    durable.start()
    async with (
        tenure.connect(durable.url) as client,
        client.session(resume=token) as resumed,
    ):
        ticket = resumed.mutex("m").recover()
        assert ticket is not None
        again = await ticket.wait(timeout=PATIENCE)
        assert again.fencing_token == lease.fencing_token
        await again.release()


@guarantee("restarted", "nothing leaks", on=REDIS)
async def test_a_server_that_comes_and_goes_keeps_no_session_alive(durable: Server) -> None:
    async with tenure.connect(durable.url) as client:
        session = await client.session(recovery_window=1, resumable=True)
        _held = await session.mutex("m").lock()
        await session.detach()
    key, ends = f"{{tenure}}:s:{session.id}", []
    for _ in range(3):
        durable.kill()
        durable.start()
        async with tenure.connect(durable.url):  # who meets it first gives sessions their time
            ends.append(durable.tell("HGET", key, "u"))
    assert ends[0] == ends[1] == ends[2] is not None


@guarantee("cut off", "loss reported", "others proceed", on=REDIS)
async def test_a_server_stopped_past_the_window_costs_the_lease_by_its_deadline(
    server: Server,
) -> None:
    async with tenure.connect(server.url) as client:
        session = await client.session(recovery_window=1)
        lease = await session.mutex("m").lock()

        async def hold() -> None:
            async with lease:
                server.pause()
                await asyncio.sleep(PATIENCE)

        try:
            with pytest.raises(tenure.LeaseLost):
                await hold()
            assert client.clock.now() >= lease.deadline
        finally:
            server.resume()
        async with client.session() as session, session.mutex("m").lock(timeout=PATIENCE) as lease:
            assert lease.held


async def test_a_session_that_the_server_takes_for_expired_is_lost_at_the_next_renewal(
    server: Server,
) -> None:
    async with tenure.connect(server.url) as client:
        session = await client.session(recovery_window=2)
        lease = await session.mutex("m").lock()
        # As after a step of the server's clock: all that it knows has run out.
        server.tell("HSET", f"{{tenure}}:s:{session.id}", "u", "1")
        server.tell("ZADD", "{tenure}:x", "1", str(session.id))
        async with asyncio.timeout(PATIENCE):
            lost = await lease.wait_lost()
        assert isinstance(lost.__cause__, tenure.SessionExpired)


async def test_a_queue_that_was_deleted_by_hand_stops_nobody(server: Server) -> None:
    async with tenure.connect(server.url) as client, tenure.connect(server.url) as other:
        session = await client.session()
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock())
        while await queue_of(client, "m") != (1, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.tell("DEL", "{tenure}:m:/default:m")
        with pytest.raises(tenure.LeaseLost):
            await lease.release()
        async with session.mutex("m").lock(timeout=PATIENCE):
            waiting.cancel()
            await asyncio.wait([waiting])
        await session.aclose()
        assert await queue_of(client, "m") == (0, 0)


# A bad network


@guarantee("cancelled", "nothing leaks", on=REDIS)
async def test_an_acquire_cancelled_before_its_answer_leaves_nothing(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
    ):
        proxy.delay = 0.1
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), session.mutex("m").lock():
                    pytest.fail("the answer takes longer than that")
        proxy.delay = 0.0
        async with session.mutex("m").lock(timeout=PATIENCE):
            assert await queue_of(client, "m") == (1, 0)
        assert await queue_of(client, "m") == (0, 0)


async def test_an_acquire_cancelled_on_a_line_that_breaks_meanwhile_leaves_nothing(
    server: Server,
) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        tenure.connect(server.url) as eye,
        client.session() as session,
        session.mutex("kept").lock() as kept,
    ):
        for cut_first in (True, False):
            proxy.delay = 0.1
            before = proxy.passed
            acquiring = asyncio.create_task(session.mutex("m").lock())
            while proxy.passed == before:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if cut_first:
                proxy.cut()
            acquiring.cancel()
            await asyncio.wait([acquiring])
            assert acquiring.cancelled()
            proxy.cut()
            proxy.delay = 0.0
            async with asyncio.timeout(PATIENCE):
                while await queue_of(eye, "m") != (0, 0):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        kept.check()
        endless = {key for key, dies in server.all_keys().items() if not dies}
        assert endless <= {"{tenure}:meta", "{tenure}:nodes"}


@guarantee("cancelled", "nothing leaks", "others proceed", on=REDIS)
async def test_a_release_cancelled_before_its_answer_takes_effect(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
    ):
        lease = await session.mutex("m").lock()
        proxy.delay = 0.1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await lease.release()
        async with session.mutex("m").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token


async def test_answers_reach_those_who_asked_whoever_has_given_up(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
    ):
        for number in range(20):
            await session.semaphore(f"s{number}").create(limit=number + 1)
        proxy.delay = 0.02

        async def ask(number: int) -> int:
            return (await session.semaphore(f"s{number}").describe()).limit

        tasks = [asyncio.create_task(ask(number)) for number in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        assert await asyncio.gather(*tasks[1::2]) == [number + 1 for number in range(1, 20, 2)]
        await asyncio.wait(tasks)


@guarantee("cut off", "nothing leaks", on=REDIS)
async def test_a_request_whose_answer_was_lost_stands_in_the_queue_once(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        tenure.connect(server.url) as eye,
        client.session() as session,
    ):
        proxy.swallows = True
        locking = asyncio.ensure_future(session.mutex("m").lock())
        await proxy.lose_an_answer()
        async with asyncio.timeout(PATIENCE):
            lease = await locking
        assert await queue_of(eye, "m") == (1, 0)
        proxy.swallows = True
        releasing = asyncio.ensure_future(lease.release())
        await proxy.lose_an_answer()
        async with asyncio.timeout(PATIENCE):
            await releasing
        assert await queue_of(eye, "m") == (0, 0)


async def test_a_change_whose_answer_was_lost_is_made_once(server: Server) -> None:
    async with (
        Proxy(server.socket, f"{server.socket}.proxy") as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
    ):
        for change in ("create", "delete"):
            semaphore = session.semaphore("pool")
            proxy.swallows = True
            changing = asyncio.ensure_future(
                semaphore.create(limit=2) if change == "create" else semaphore.delete()
            )
            await proxy.lose_an_answer()
            async with asyncio.timeout(PATIENCE):
                await changing  # it does not exist already, and was not missing


@guarantee("cut off", "one owner", "others proceed", "kept", on=REDIS)
@pytest.mark.parametrize("protocol", [2, 3])
async def test_contenders_on_a_line_that_breaks_have_the_lock_in_turn(
    server: Server, protocol: int
) -> None:
    inside: list[int] = []
    done = [0] * 6
    tokens: list[int] = []
    async with Proxy(server.socket, f"{server.socket}.proxy") as proxy:
        url = f"{proxy.url}&protocol={protocol}"
        async with tenure.connect(url) as one, tenure.connect(url) as other:

            async def contend(number: int, client: tenure.Client) -> None:
                async with client.session(recovery_window=20) as session:
                    for _ in range(20):
                        async with session.mutex("m").lock() as lease:
                            assert not inside
                            inside.append(number)
                            tokens.append(lease.fencing_token)
                            await asyncio.sleep(0.002)
                            inside.remove(number)
                            done[number] += 1

            async def cut() -> None:
                before = -1
                while True:
                    await asyncio.sleep(0.3)
                    if len(tokens) > before:  # where much else runs, connecting takes longer
                        before = len(tokens)
                        proxy.cut()

            async with asyncio.timeout(2 * PATIENCE):
                cutting = asyncio.create_task(cut())
                async with asyncio.TaskGroup() as group:
                    for number in range(6):
                        group.create_task(contend(number, (one, other)[number % 2]))
                cutting.cancel()
                await asyncio.wait([cutting])
    assert done == [20] * 6
    assert tokens == sorted(set(tokens))
    assert {key for key, dies in server.all_keys().items() if not dies} == {
        "{tenure}:meta",
        "{tenure}:nodes",
    }
    assert not any(":s:" in key or ":m:" in key or ":w:" in key for key in server.all_keys())


@guarantee("none", "nothing leaks", on=REDIS)
async def test_every_key_of_a_session_or_a_request_has_a_time_to_live(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        await session.semaphore("pool").create(limit=1, data=b"x")
        async with (
            session.semaphore("pool").acquire(),
            session.mutex("m").lock(data=b"y"),
            session.semaphore("pool").enqueue(),
        ):
            assert {key for key, dies in server.all_keys().items() if not dies} == {
                "{tenure}:meta",
                "{tenure}:nodes",
                "{tenure}:M:/default",
                "{tenure}:m:/default:pool",
            }
