"""The native protocol's listener, spoken to message by message."""

from __future__ import annotations

import asyncio

from tenure.wire.messages import (
    Attached,
    Bye,
    Close,
    CreateSemaphore,
    DescribeSemaphore,
    Done,
    Enqueue,
    Granted,
    Hello,
    Placed,
    Proven,
    Renew,
    SemaphoreDescribed,
    Withdraw,
)
from tests.server.talking import called, linked, serving


async def test_a_client_is_greeted_attaches_asks_and_leaves() -> None:
    async with serving() as listener, called(listener) as client:
        attached = await client.attach()
        assert attached.attach_number == 1
        assert attached.age is not None
        client.say(Enqueue(client.next_rid(), 1, 1, "a", 1, b"mine", None, True))
        placed = await client.hear(Placed)
        assert placed.place == 0
        client.say(Renew(1, 7))
        proven = await client.hear(Proven)
        assert (proven.channel, proven.number) == (1, 7)
        client.say(Withdraw(client.next_rid(), 1, 1))
        await client.hear(Done)
        client.say(Close(client.next_rid(), 1))
        await client.hear(Done)


async def test_a_new_session_is_new_whatever_its_client_says_besides() -> None:
    async with serving() as listener, called(listener) as one, called(listener) as other:
        first = await one.attach()
        second = await other.attach(session_id=first.session_id, assume_dead=True)
        assert second.session_id != first.session_id


async def test_who_waits_is_told_when_it_is_granted() -> None:
    async with serving() as listener, called(listener) as one, called(listener) as other:
        for client in (one, other):
            await client.attach()
            client.say(Enqueue(client.next_rid(), 1, 5, "a", 2**64 - 1, b"", None, True))
        assert [(await client.hear(Placed)).place for client in (one, other)] == [0, 1]
        one.say(Withdraw(one.next_rid(), 1, 5))
        granted = await other.hear(Granted)
        assert (granted.channel, granted.request_id) == (1, 5)


async def test_who_is_granted_is_told_in_the_turn_in_which_the_release_is_read() -> None:
    async with serving() as listener, linked(listener) as one, linked(listener) as other:
        for client in (one, other):
            await client.attach()
            client.say(Enqueue(client.next_rid(), 1, 5, "a", 2**64 - 1, b"", None, True))
            await client.hear(Placed)
        one.say(Withdraw(one.next_rid(), 1, 5))
        await asyncio.sleep(0)  # what was written arrives
        assert [type(each) for each in other.unread] == [Granted]


async def test_what_takes_time_in_the_engine_keeps_its_place_among_the_others() -> None:
    async with serving() as listener, called(listener) as client:
        await client.attach()
        client.say(
            CreateSemaphore(client.next_rid(), 1, "s", 3, b"", False),
            Enqueue(client.next_rid(), 1, 1, "s", 1, b"", None, False),
            DescribeSemaphore(client.next_rid(), 1, "s", False, False),  # costly ones wait
            Withdraw(client.next_rid(), 1, 1),
        )
        await client.hear(Done)
        assert (await client.hear(Placed)).place == 0
        described = [await client.hear(SemaphoreDescribed, skip=True)]
        assert described[0].semaphore.held == 1
        assert isinstance(client.heard[-1], Done | SemaphoreDescribed | Attached)


async def test_a_version_that_is_not_spoken_is_refused_in_words() -> None:
    async with serving() as listener, called(listener, greet=False) as client:
        client.say(Hello(7, 9, [], "", client.program))
        bye = await client.hear(Bye)
        assert not bye.again
        assert "speaks version 1" in bye.error.message
        await client.until_lost()
