"""Every command, every reply: what a client of dflockd says and hears.

Each script is played on a store that answers at once, and on one that answers later.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure.engines.contract import Engine
from tenure.server.auth import ANONYMOUS
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.dflockd import commands
from tenure.server.dflockd.claims import Key
from tenure.server.limits import Limits
from tenure.testing import VirtualClock
from tests.server.dflockd.talking import Client, play, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

SCRIPTS = {
    "a lock is held by one": """
        a l job 10 = ok $1 33
        b l job 0 = timeout
        a r job $1 = ok
        b l job 0 = ok $2 33
    """,
    "keys do not disturb each other": """
        a l job 10 = ok $1 33
        a l other 10 = ok $2 33
        b l another 10 = ok $3 33
    """,
    "a lease is as long as asked for": """
        a l job 10 7 = ok $1 7
        a sl pool 10 2 8 = ok $2 8
        a e other 9 = acquired $3 9
        a se others 2 5 = acquired $4 5
    """,
    "who waits is next": """
        a l job 10 = ok $1 33
        b l job 10 = ?
        c l job 10 = ?
        a r job $1 = ok
        b = ok $2 33
        c = ?
        b r job $2 = ok
        c = ok $3 33
    """,
    "who waits for too long gives up": """
        a l job 10 = ok $1 33
        b l job 3 = ?
        + 2.7
        b = ?
        + 0.3
        b = timeout
        a r job $1 = ok
        b l job 0 = ok $2 33
    """,
    "nobody enters twice": """
        a l job 10 = ok $1 33
        a l job 0 = timeout
    """,
    "a lease ends": """
        a l job 10 3 = ok $1 3
        b l job 10 = ?
        + 1.5
        b = ?
        + 2.5
        b = ok $2 33
        a n job $1 = error
        a r job $1 = error
    """,
    "a lease that has ended is seen at once by who asks": """
        a l job 10 3 = ok $1 3
        + 2.95
        b l job 0 = ok $2 33
    """,
    "a renewal prolongs": """
        a l job 10 3 = ok $1 3
        + 2
        a n job $1 5 = ok 5
        + 4
        b l job 0 = timeout
        + 2
        b l job 0 = ok $2 33
        a n job $1 5 = error
    """,
    "a renewal without a lease has the server's": """
        a l job 10 3 = ok $1 3
        a n job $1 = ok 33
        + 20
        b l job 0 = timeout
    """,
    "any connection that has the token renews and releases": """
        a l job 10 = ok $1 33
        b n job $1 60 = ok 60
        b r job $1 = ok
        a r job $1 = error
        b l job 0 = ok $2 33
    """,
    "a token is for its key": """
        a l job 10 = ok $1 33
        a r other $1 = error
        a n other $1 = error
        a n job $1 = ok 33
    """,
    "a token that was never given": """
        a r job 00000000000000000000000000000000 = error
        a n job 00000000000000000000000000000000 = error
        a n job x 10 = error
    """,
    "so many hold a semaphore": """
        a sl pool 10 2 = ok $1 33
        b sl pool 10 2 = ok $2 33
        c sl pool 0 2 = timeout
        c sl pool 10 2 = ?
        a sr pool $1 = ok
        c = ok $3 33
        b sn pool $2 60 = ok 60
        c sr pool $3 = ok
    """,
    "one connection may hold a semaphore more than once": """
        a sl pool 10 2 = ok $1 33
        a sl pool 10 2 = ok $2 33
        a sl pool 0 2 = timeout
        a sr pool $1 = ok
        a sl pool 0 2 = ok $3 33
    """,
    "a lock is a semaphore of limit 1": """
        a l job 10 = ok $1 33
        b sl job 0 1 = timeout
        b sl job 10 1 = ?
        a sr job $1 = ok
        b = ok $2 33
        b r job $2 = ok
    """,
    "a limit stays": """
        a sl pool 10 2 = ok $1 33
        b sl pool 10 3 = error_limit_mismatch
        b l pool 10 = error_limit_mismatch
        b e pool = error_limit_mismatch
        b se pool 3 = error_limit_mismatch
        a sr pool $1 = ok
        b sl pool 10 3 = error_limit_mismatch
        a l job 10 = ok $2 33
        a r job $2 = ok
        b sl job 10 2 = error_limit_mismatch
    """,
    "a limit is forgotten when nobody has used the key for long": """
        a sl pool 10 2 = ok $1 33
        a sr pool $1 = ok
        a l job 10 = ok $2 33
        a r job $2 = ok
        a closes
        + 66
        b sl pool 10 3 = ok $3 33
        b sl job 10 3 = ok $4 33
    """,
    "two phases, at once": """
        a e job = acquired $1 33
        a w job 10 = ok $1 33
        a w job 10 = error_not_enqueued
        a r job $1 = ok
    """,
    "two phases, later": """
        a l job 10 = ok $1 33
        b e job = queued
        c l job 20 = ?
        b w job 10 = ?
        a r job $1 = ok
        b = ok $2 33
        c = ?
        b r job $2 = ok
        c = ok $3 33
    """,
    "two phases, granted between them": """
        a l job 10 = ok $1 33
        b e job = queued
        a r job $1 = ok
        c l job 0 = timeout
        b w job 10 = ok $2 33
    """,
    "two phases, of a semaphore": """
        a se pool 1 = acquired $1 33
        b sl slots 10 2 = ok $2 33
        b se pool 1 20 = queued
        a se slots 2 = acquired $3 33
        a sr pool $1 = ok
        b sw pool 10 = ok $4 20
        b sw pool 10 = error_not_enqueued
    """,
    "the second phase gives up": """
        a l job 10 = ok $1 33
        b e job = queued
        b w job 2 = ?
        + 2
        b = timeout
        b w job 2 = error_not_enqueued
        b e job = queued
        b w job 0 = timeout
        a r job $1 = ok
        b l job 0 = ok $2 33
    """,
    "a second first phase": """
        a e job = acquired $1 33
        a e job = error_already_enqueued
        b e job = queued
        b e job = error_already_enqueued
        b se job 2 = error_already_enqueued
        a e other = acquired $2 33
        c w job 1 = error_not_enqueued
    """,
    "a first phase after the grant of the former one is over": """
        a e job = acquired $1 33
        a r job $1 = ok
        a e job = acquired $2 33
        b r job $2 = ok
        a e job 3 = acquired $3 3
        + 5
        a e job = acquired $4 33
        a e job = error_already_enqueued
        b e job = queued
        a w job 10 = ok $4 33
        a r job $4 = ok
        a r job $4 = error
        c l job 0 = timeout
    """,
    "a first phase in the moment in which the former lease ends": """
        a e job 3 = acquired $1 3
        b l job 10 = ?
        + 2.75
        a e job = error_already_enqueued
        + 0.1
        a e job = queued
        b = ok $2 33
        b r job $2 = ok
        a w job 10 = ok $3 33
    """,
    "the second phase begins the lease anew": """
        a e job 3 = acquired $1 3
        + 2
        a w job 10 = ok $1 3
        + 2
        b l job 0 = timeout
        + 1
        b l job 0 = ok $2 33
    """,
    "a lease that ends before the second phase": """
        a e job 3 = acquired $1 3
        + 3
        a w job 10 = error_lease_expired
        a w job 10 = error_not_enqueued
        a l job 10 = ok $2 33
        b e job 3 = queued
        a r job $2 = ok
        + 2.9
        c l job 0 = ok $3 33
        b w job 10 = error_lease_expired
        b w job 10 = error_not_enqueued
    """,
    "what was released has no second phase": """
        a e job = acquired $1 33
        a r job $1 = ok
        a w job 10 = error_not_enqueued
        a e job = acquired $2 33
        b r job $2 = ok
        a w job 10 = error_not_enqueued
    """,
    "what a connection has ends with it": """
        a l job 10 = ok $1 33
        a sl pool 10 2 = ok $2 33
        b l job 10 = ?
        c l job 10 = ?
        b closes
        a closes
        c = ok $3 33
        c n job $1 = error
        c sn pool $2 = error
    """,
    "a place in a queue ends with its connection": """
        a l job 10 = ok $1 33
        b e job = queued
        b closes
        a r job $1 = ok
        a l job 0 = ok $2 33
    """,
    "what is no request": """
        a x job 10 = error
        a L job 10 = error
        a l job = error
        a l job x = error
        a l job -1 = error
        a l job 1.5 = error
        a l job 1 0 = error
        a l job 1 2 3 = error
        a sl job 1 = error
        a sl job 1 0 = error
        a sl job 1 2 0 = error
        a r job = error
        a n job = error
        a n job x 0 = error
        a e job 0 = error
        a e job x = error
        a se job = error
        a se job 0 = error
        a w job = error
        a w job -1 = error
        a auth _ secret = error
        a ping _ _ = ok
    """,
    "numbers as Go reads them": """
        a l job +5 = ok $1 33
        a n job $1 +7 = ok 7
        a sl pool 007 002 = ok $2 33
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_client_hears(name: str, clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        await play(listener, SCRIPTS[name])


LIMITED = {
    "no more keys than may be": (
        {"max_locks": 2},
        """
        a l one 10 = ok $1 33
        a sl two 10 2 = ok $2 33
        a l three 10 = error_max_locks
        b e three = error_max_locks
        b sl three 10 2 = error_max_locks
        b l one 0 = timeout
        a r one $1 = ok
        b l three 0 = error_max_locks
        """,
    ),
    "keys that nobody uses make room": (
        {"max_locks": 2, "read_timeout": 1000.0},
        """
        a l one 10 = ok $1 33
        a sl two 10 2 = ok $2 33
        a r one $1 = ok
        a sr two $2 = ok
        a l three 10 = error_max_locks
        + 66
        a l three 10 = ok $3 33
        a l four 10 = ok $4 33
        a l five 10 = error_max_locks
        """,
    ),
    "no more waiters than may be": (
        {"max_waiters": 1},
        """
        a l job 10 = ok $1 33
        b l job 0 = timeout
        b l job 10 = ?
        c l job 0 = error_max_waiters
        c l job 10 = error_max_waiters
        c e job = error_max_waiters
        c l other 10 = ok $2 33
        a r job $1 = ok
        b = ok $3 33
        c l job 10 = ?
        """,
    ),
    "any number of waiters": (
        {"max_waiters": 0},
        """
        a l job 10 = ok $1 33
        b l job 10 = ?
        c l job 10 = ?
        """,
    ),
    "what a connection has is kept for its lease": (
        {"auto_release": False},
        """
        a l job 10 20 = ok $1 20
        a l other 10 10 = ok $2 10
        b l job 0 = timeout
        a closes
        b l job 0 = timeout
        b n job $1 20 = ok 20
        + 12
        b l other 0 = ok $3 33
        b l job 0 = timeout
        b r job $1 = ok
        b l job 0 = ok $4 33
        """,
    ),
    "a client that has gone waits for nothing": (
        {"auto_release": False},
        """
        a l job 10 = ok $1 33
        b l job 10 = ?
        b closes
        a r job $1 = ok
        c l job 0 = ok $2 33
        """,
    ),
    "who says nothing is sent away, and what it held is free": (
        {},
        """
        a l job 10 60 = ok $1 60
        + 22
        a ping _ _ = ok
        + 22
        b l job 30 = ?
        + 2
        a = error
        a = closed
        b = ok $2 33
        """,
    ),
    "who waits is not silent": (
        {},
        """
        a l job 10 600 = ok $1 600
        b l job 100 = ?
        + 20
        a ping _ _ = ok
        + 20
        a r job $1 = ok
        b = ok $2 33
        + 20
        b ping _ _ = ok
        """,
    ),
}


@pytest.mark.parametrize("name", LIMITED)
async def test_as_the_server_is_told(name: str, clock: VirtualClock, engine: Engine) -> None:
    options, script = LIMITED[name]
    async with serving(clock, engine=engine, **options) as listener:  # type: ignore[arg-type]
        await play(listener, script)


@pytest.mark.parametrize("read_timeout", [23.0, 5.6])
async def test_the_next_is_granted_within_a_sweep_of_the_end_of_a_lease(
    clock: VirtualClock, engine: Engine, read_timeout: float
) -> None:
    async with serving(clock, engine=engine, read_timeout=read_timeout) as listener:
        for number in range(30):
            await asyncio.sleep(0.23)
            holder, waiter = Client(listener), Client(listener)
            began = clock.now()
            holder.ask("l", f"job-{number}", "0 1")
            waiter.ask("l", f"job-{number}", "10")
            while not waiter.heard:  # noqa: ASYNC110  (virtual time)
                await asyncio.sleep(0.01)
            assert waiter.heard.startswith(b"ok ")
            assert 1.0 <= clock.now() - began <= 2.0
            holder.abort()
            waiter.abort()


async def test_tokens_rise(clock: VirtualClock) -> None:
    async with serving(clock) as listener:
        client = Client(listener)
        fences = []
        for _ in range(5):
            _, token, _ = (await client.asks("l", "job", "0")).split()
            fences.append(int(token[:16], 16))
            await client.asks("r", "job", token)
        assert fences == sorted(set(fences))


async def test_stats_say_who_has_what(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        one, two = Client(listener), Client(listener)
        assert (await one.asks("l", "job", "0")).startswith("ok ")
        assert await two.asks("e", "job", "") == "queued"
        assert (await one.asks("sl", "pool", "0 3")).startswith("ok ")
        assert (await two.asks("sl", "pool", "0 3")).startswith("ok ")
        for name, argument in ("idle", "0"), ("idles", "0 2"):
            command = "l" if name == "idle" else "sl"
            _, token, _ = (await one.asks(command, name, argument)).split()
            assert await one.asks("r", name, token) == "ok"
        await asyncio.sleep(6)
        reply = await two.asks("stats")
        assert reply.startswith("ok {")
        told = json.loads(reply[3:])
        (lock,) = told["locks"]
        assert 20 < lock.pop("lease_expires_in_s") < 33
        assert lock == {"key": "job", "owner_conn_id": one.connection.number, "waiters": 1}
        assert told["semaphores"] == [{"key": "pool", "limit": 3, "holders": 2, "waiters": 0}]
        assert [each["key"] for each in told["idle_locks"]] == ["idle"]
        assert [each["key"] for each in told["idle_semaphores"]] == ["idles"]
        assert told["idle_locks"][0]["idle_s"] > 5
        assert told["connections"] == 2


async def test_statistics_wait_for_their_turn_and_others_are_served(
    clock: VirtualClock, engine: Engine
) -> None:
    async with serving(clock, engine=engine, read_timeout=1000.0) as listener:
        holder, greedy, other = Client(listener), Client(listener), Client(listener)
        for number in range(300):
            holder.ask("l", f"job{number}", "0")
            await holder.hears()
        greedy.say(b"stats\n_\n_\n" * 200)
        assert greedy.heard.count(b"\n") <= 1
        assert await other.asks("ping") == "ok"
        while greedy.heard.count(b"\n") < 200:  # noqa: ASYNC110  (there is no event at this end)
            await asyncio.sleep(0.1)
        for reply in greedy.heard.splitlines():
            told = json.loads(reply.removeprefix(b"ok "))
            assert [each["key"] for each in told["locks"]] == [f"job{n}" for n in range(300)]
        assert listener.context.reads.waiting == 0


async def test_statistics_of_a_client_are_made_one_after_the_other(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[asyncio.Task[object] | None] = []
    describe = commands._describe

    def note(key: Key, now: float) -> tuple[str, dict[str, object]]:
        if makers[-1:] != [asyncio.current_task()]:
            makers.append(asyncio.current_task())
        return describe(key, now)

    monkeypatch.setattr(commands, "_describe", note)
    async with serving(clock, read_timeout=1000.0) as listener:
        holder, *readers = (Client(listener) for _ in range(4))
        for number in range(500):
            await holder.asks("l", f"job{number}", "0")
        for reader in readers:
            reader.say(b"stats\n_\n_\n")
        for reader in readers:
            assert (await reader.hears()).startswith("ok {")
    assert len(makers) == 3  # each one's memory is free before the next one begins


async def test_statistics_end_with_their_client(clock: VirtualClock) -> None:
    async with serving(clock) as listener:
        clients = [Client(listener) for _ in range(5)]
        for client in clients:
            client.say(b"stats\n_\n_\n" * 100)
        for client in clients:
            client.abort()
        await asyncio.sleep(1)
        assert listener.context.reads.waiting == 0


async def test_statistics_that_are_too_long_are_refused(clock: VirtualClock) -> None:
    tight = Limits(output_bytes=8 * 1024 * 1024 + 4096, semaphores=100_000)
    async with serving(clock, limits=tight) as listener:
        client = Client(listener)
        account = GuardedEngine(listener.context.guard, ANONYMOUS).account
        for number in range(20_000):
            listener.locks.keys.add(f"{number:0200d}", 2, clock.now(), account)
        client.ask("stats")
        await asyncio.sleep(1)
        assert await client.hears() == "error\n"
        assert await client.asks("ping") == "ok"
