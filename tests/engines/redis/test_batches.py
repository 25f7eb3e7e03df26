"""What a session asks for in one go is one script; a mutex nobody waits for is one string."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tests.engines.redis.helpers import is_waited_for
from tests.engines.redis.servers import Server


def scripts_run(server: Server) -> int:
    """How many scripts the server has run."""
    told = server.tell("INFO", "commandstats")
    assert isinstance(told, dict)
    return int(told["cmdstat_evalsha"]["calls"])


def kind_of(server: Server, name: str) -> object:
    return server.tell("TYPE", f"{{tenure}}:m:/default:{name}")


async def test_locks_that_are_wanted_together_are_taken_by_a_script_or_two(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        before = scripts_run(server)
        leases = await asyncio.gather(*(session.mutex(f"m{n}").lock() for n in range(12)))
        assert scripts_run(server) - before <= 2  # the first may go alone
        tokens = [lease.fencing_token for lease in leases]
        assert tokens == sorted(set(tokens))
        before = scripts_run(server)
        await asyncio.gather(*(lease.release() for lease in leases))
        assert scripts_run(server) - before <= 2
        assert not any(":m:" in key for key in server.all_keys())


async def test_a_key_that_is_not_tenures_fails_its_own_request_and_no_other(server: Server) -> None:
    server.tell("SADD", "{tenure}:m:/default:m3", "somebody else's")
    async with tenure.connect(server.url) as client, client.session() as session:
        got = await asyncio.gather(
            *(session.mutex(f"m{n}").lock() for n in range(8)), return_exceptions=True
        )
        assert isinstance(got.pop(3), tenure.EngineError)
        for lease in got:
            assert isinstance(lease, tenure.Lease)
            assert lease.held
            await lease.release()
        again = await session.mutex("m2").lock(timeout=5)
        await again.release()
    assert server.tell("SMEMBERS", "{tenure}:m:/default:m3") == {b"somebody else's"}


async def test_a_mutex_is_a_string_until_somebody_waits_for_it(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        lease = await session.mutex("m").lock(data=b"who")
        assert kind_of(server, "m") == b"string"
        assert all(dies for key, dies in server.all_keys().items() if ":m:" in key or ":s:" in key)
        holder = await session.mutex("m").inspect()
        assert holder is not None
        assert (holder.data, holder.fencing_token) == (b"who", lease.fencing_token)
        assert kind_of(server, "m") == b"string"
        waiting = asyncio.create_task(client.mutex("m").lock())
        await is_waited_for(client, "m")
        assert kind_of(server, "m") == b"hash"
        holder = await session.mutex("m").inspect()
        assert holder is not None
        assert (holder.data, holder.waiting) == (b"who", 1)
        await lease.release()
        following = await waiting
        assert following.fencing_token > lease.fencing_token
        await following.release()
        assert not any(":m:" in key or ":w:" in key for key in server.all_keys())


async def test_what_a_session_holds_in_strings_ends_with_it(server: Server) -> None:
    async with tenure.connect(server.url) as client:
        session = await client.session()
        held = [await session.mutex(f"m{number}").lock() for number in range(3)]
        await session.aclose()
        assert not any(lease.held for lease in held)
        assert not any(":m:" in key for key in server.all_keys())
        lease = await client.mutex("m1").try_lock()
        assert lease is not None


@pytest.mark.parametrize("data", [b"", b"new", b"\0 \n" * 9])
async def test_the_data_of_a_held_mutex_can_be_replaced(server: Server, data: bytes) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        lease = await session.mutex("m").lock(data=b" old ")
        await lease.update(data)
        holder = await session.mutex("m").inspect()
        assert holder is not None
        assert (holder.data, holder.fencing_token) == (data, lease.fencing_token)
        await lease.release()
        assert await session.mutex("m").inspect() is None


@pytest.mark.parametrize("others", [0, 2])
async def test_a_string_that_others_have_by_now_is_left_to_them(
    server: Server, others: int
) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        lease = await session.mutex("m").lock()
        released = [lease, *[await session.mutex(f"m{n}").lock() for n in range(others)]]
        server.tell("DEL", "{tenure}:m:/default:m")
        other = await client.mutex("m").lock()
        releases = [each.release() for each in released]
        late, *others_released = await asyncio.gather(*releases, return_exceptions=True)
        assert isinstance(late, tenure.LeaseLost)
        assert not any(others_released)
        holder = await client.mutex("m").inspect()
        assert holder is not None
        assert holder.fencing_token == other.fencing_token
        assert all(dies for key, dies in server.all_keys().items() if ":m:" in key)
        await other.release()
