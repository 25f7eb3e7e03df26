"""Clients that have not shown their token yet: the server reads each of them in its turn."""

from __future__ import annotations

import asyncio

import pytest

from tenure.server.auth import Authenticator
from tenure.testing import VirtualClock
from tests.server.dflockd.talking import SOON, Client, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

TOKEN = "a-token-of-one's-own"


def is_read(client: Client) -> bool:
    return client.reading


async def test_a_stranger_is_read_again_in_its_turn_and_who_came_in_at_once(
    clock: VirtualClock,
) -> None:
    async with serving(clock, authenticator=Authenticator({TOKEN: "test"})) as listener:
        client = Client(listener)
        for each in f"auth\n_\n{TOKEN}\n".encode():
            client.say(bytes([each]))
            assert not is_read(client)
            await asyncio.sleep(SOON)
            assert is_read(client)
        assert await client.hears() == "ok\n"
        for each in b"ping\n_\n_\n":
            client.say(bytes([each]))
            assert is_read(client)
        assert await client.hears() == "ok\n"


async def test_a_stranger_that_is_refused_is_read_in_its_turns_until_it_is_sent_away(
    clock: VirtualClock,
) -> None:
    async with serving(clock, authenticator=Authenticator({TOKEN: "test"})) as listener:
        client = Client(listener)
        client.say(b"auth\n_\nwrong\n")
        await asyncio.sleep(SOON / 2)
        assert client.heard == b"error_auth\n"
        client.say(b"more")
        assert not is_read(client)
        await asyncio.sleep(SOON / 4)
        assert is_read(client)
        await asyncio.sleep(SOON)
        assert client.is_closed()
