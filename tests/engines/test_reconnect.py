"""The kit's reconnector: order of hosts, pauses, and cancellation at each of its waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from tenure.engines._kit.reconnect import FIRST_PAUSE, LONGEST_PAUSE, Reconnector, ReconnectPolicy
from tenure.errors import AuthenticationFailed, EngineUnavailable, TenureError
from tenure.testing.clock import VirtualClock, run

DOWN = EngineUnavailable("it is down")


class Owner:
    """Connections are strings: the name of the host, and their number.

    Attributes:
        fails: errors of attempts, by host.
        tried: the time and host of each attempt.
        used, dropped: connections.
    """

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.slow = 0.0
        self.tried: list[tuple[float, str]] = []
        self.abandoned: list[str] = []
        self.used: list[str] = []
        self.dropped: list[tuple[str, TenureError]] = []
        self.error_of_up: Exception | None = None
        self.error_of_down: Exception | None = None
        self.changed = asyncio.Event()

    async def connect(self, host: str) -> str:
        self.tried.append((asyncio.get_running_loop().time(), host))
        try:
            await asyncio.sleep(self.slow)
        except asyncio.CancelledError:
            self.abandoned.append(host)
            raise
        if host in self.fails:
            raise self.fails[host]
        return f"{host}{len(self.tried)}"

    def up(self, connection: str) -> None:
        error, self.error_of_up = self.error_of_up, None
        if error is not None:
            raise error
        self.used.append(connection)
        self.changed.set()

    def down(self, connection: str, why: TenureError) -> None:
        self.dropped.append((connection, why))
        if self.error_of_down is not None:
            raise self.error_of_down

    def longest_pause(self) -> float:
        return LONGEST_PAUSE

    async def uses(self, number: int) -> None:
        while len(self.used) < number:
            self.changed.clear()
            await self.changed.wait()

    @property
    def hosts(self) -> str:
        return "".join(host for _, host in self.tried)


def made(owner: Owner, hosts: str = "ab") -> Reconnector[str, str]:
    return Reconnector("test://ab", hosts, owner)


def lose(reconnector: Reconnector[str, str], *, first: bool = True) -> None:
    assert reconnector.connection is not None
    reconnector.lost(reconnector.connection, DOWN, first=first)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run(scenario, VirtualClock())


# The policy


def test_hosts_are_tried_in_turn_with_a_pause_after_each_round() -> None:
    policy = ReconnectPolicy("abc")
    order, pauses = "", []
    for _ in range(7):
        host = policy.hosts[0]
        order += host
        pauses.append(policy.pause())
        policy.failed(host)
    assert order == "abcabca"
    assert [pause > 0 for pause in pauses] == [False, False, False, True, False, False, True]
    assert FIRST_PAUSE / 2 <= pauses[3] <= FIRST_PAUSE <= pauses[6] <= 2 * FIRST_PAUSE


def test_a_lost_host_comes_first_and_at_once() -> None:
    policy = ReconnectPolicy("ab")
    policy.failed("a")
    policy.lost("b", first=True)
    assert policy.hosts[0] == "b"
    assert policy.pause() == 0.0


def test_a_lost_host_that_is_not_to_come_first_has_failed() -> None:
    policy = ReconnectPolicy("ab")
    policy.lost("a", first=False)
    assert policy.hosts[0] == "b"
    alone = ReconnectPolicy("a")
    alone.lost("a", first=False)
    assert 0 < alone.pause(0.01) <= FIRST_PAUSE


# The task


def test_a_connection_is_replaced_at_the_same_host() -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        assert (reconnector.connection, reconnector.failure) == ("a1", None)
        connection = await reconnector.connected(10)
        lose(reconnector)
        assert (reconnector.connection, reconnector.failure) == (None, DOWN)
        reconnector.lost(connection, DOWN)  # it is known already
        assert owner.dropped == [("a1", DOWN)]
        assert await reconnector.connected(10) == "a2"
        assert owner.used == ["a1", "a2"]
        await reconnector.aclose()

    play(scenario())


def test_the_first_connection_is_to_any_host_or_to_none() -> None:
    async def scenario() -> None:
        owner = Owner()
        owner.fails["a"] = EngineUnavailable("a is down")
        reconnector = made(owner)
        await reconnector.open()
        assert owner.hosts == "ab"
        await reconnector.aclose()
        owner.fails["b"] = EngineUnavailable("b is down")
        with pytest.raises(EngineUnavailable, match="a is down; b is down"):
            await made(owner).open()
        owner.fails["a"] = AuthenticationFailed("wrong token")
        with pytest.raises(AuthenticationFailed, match="wrong token"):
            await made(owner).open()

    play(scenario())


def test_it_may_open_without_a_connection() -> None:
    async def scenario() -> None:
        owner = Owner()
        owner.fails = {host: EngineUnavailable(f"{host} is down") for host in "ab"}
        reconnector = made(owner)
        await reconnector.open(required=False)
        assert (owner.hosts, reconnector.connection) == ("ab", None)
        owner.fails.clear()
        assert await reconnector.connected(None) == "a3"
        await reconnector.aclose()

    play(scenario())


def test_a_host_comes_first_if_its_connection_lasted() -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        for lasts in (0.0, 2 * LONGEST_PAUSE):
            await asyncio.sleep(lasts)
            reconnector.lost(await reconnector.connected(10), DOWN, first=None)
        await reconnector.connected(10)
        assert owner.hosts == "abb"
        await reconnector.aclose()

    play(scenario())


@pytest.mark.parametrize("lasts", [0.0, 0.3])
def test_pauses_begin_anew_after_a_connection_that_lasted(lasts: float) -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner, "a")
        await reconnector.open()
        pauses = []
        for _ in range(20):
            connection = await reconnector.connected(10)
            await asyncio.sleep(lasts)
            lost = asyncio.get_running_loop().time()
            reconnector.lost(connection, DOWN, first=None)
            await reconnector.connected(10)
            pauses.append(asyncio.get_running_loop().time() - lost)
        if lasts:
            assert max(pauses) <= FIRST_PAUSE
        else:  # a server that accepts and then rejects
            assert min(pauses[-5:]) >= LONGEST_PAUSE / 2
        await reconnector.aclose()

    play(scenario())


def test_attempts_go_on_with_pauses_whatever_they_fail_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        owner.fails = {"a": AuthenticationFailed("wrong token"), "b": ZeroDivisionError("a fault")}
        lose(reconnector)
        with pytest.raises(EngineUnavailable, match="for 60 s: wrong token"):
            await reconnector.connected(60)
        rounds = [when for when, host in owner.tried[1:] if host == "a"]
        gaps = [after - before for before, after in itertools.pairwise(rounds)]
        assert gaps[0] <= FIRST_PAUSE
        assert LONGEST_PAUSE / 2 <= min(gaps[-10:]) <= max(gaps[-10:]) <= LONGEST_PAUSE
        owner.fails.clear()
        await owner.uses(2)
        await reconnector.aclose()

    with caplog.at_level(logging.INFO, logger="tenure"):
        play(scenario())
    assert caplog.text.count("error=wrong token") == 1
    assert caplog.text.count("ZeroDivisionError('a fault')") == 1


def test_errors_of_the_owner_do_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        owner.error_of_up = ZeroDivisionError("up")
        owner.error_of_down = ZeroDivisionError("down")
        lose(reconnector)
        await owner.uses(2)
        assert owner.hosts == "aab"  # what could not be used has failed
        assert [connection for connection, _ in owner.dropped] == ["a1", "a2"]
        await reconnector.aclose()

    play(scenario())
    assert "ZeroDivisionError('up')" in caplog.text
    assert "ZeroDivisionError('down')" in caplog.text


def test_a_connection_that_is_lost_while_it_is_taken_up_is_replaced() -> None:
    class Losing(Owner):
        def up(self, connection: str) -> None:
            super().up(connection)
            if connection == "a2":
                reconnector.lost(connection, DOWN, first=False)

    async def scenario() -> None:
        await reconnector.open()
        lose(reconnector)
        await owner.uses(3)
        assert reconnector.connection == "b3"
        await reconnector.aclose()

    owner = Losing()
    reconnector = made(owner)
    play(scenario())


# The end


@pytest.mark.parametrize("when", ["connected", "pausing", "connecting"])
def test_closing_it_ends_the_task_wherever_it_waits(when: str) -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        waiting: list[asyncio.Task[str]] = []
        if when != "connected":
            owner.slow = 5.0 if when == "connecting" else 0.0
            owner.fails = dict.fromkeys("ab", DOWN)
            lose(reconnector, first=when == "connecting")
            waiting.append(asyncio.create_task(reconnector.connected(60)))
            await asyncio.sleep(1)  # by then it has tried again
            assert len(owner.tried) == 2 if when == "connecting" else len(owner.tried) > 4
        await reconnector.aclose()
        assert (reconnector.connection, [each for each, _ in owner.dropped]) == (None, ["a1"])
        assert owner.abandoned == (["a"] if when == "connecting" else [])
        for each in waiting:
            with pytest.raises(EngineUnavailable, match="was closed"):
                await each
        await reconnector.aclose()
        assert str(reconnector.failure) == "test://ab was closed"
        with pytest.raises(EngineUnavailable, match="was closed"):
            await reconnector.connected(60)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(scenario())


def test_closing_it_may_be_cancelled_and_repeated() -> None:
    class Slow(Owner):
        async def connect(self, host: str) -> str:
            try:
                return await super().connect(host)
            finally:
                if self.used:
                    await asyncio.sleep(1)  # it takes a while to clean up

    async def scenario() -> None:
        owner = Slow()
        reconnector = made(owner)
        await reconnector.open()
        owner.slow = 5.0
        lose(reconnector)
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reconnector.aclose()
        await reconnector.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(owner.tried) == 2

    play(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_closing_it_ends_an_attempt_in_which_a_library_loses_the_cancellation(fails: bool) -> None:
    class Deaf(Owner):
        async def connect(self, host: str) -> str:
            try:
                return await super().connect(host)
            except asyncio.CancelledError:
                if fails:
                    raise DOWN from None
                return "late"

    async def scenario() -> None:
        owner = Deaf()
        reconnector = made(owner)
        await reconnector.open()
        owner.slow = 5.0
        lose(reconnector)
        await asyncio.sleep(1)
        async with asyncio.timeout(60):
            await reconnector.aclose()
        assert [each for each, _ in owner.dropped] == (["a1"] if fails else ["a1", "late"])
        assert len(owner.tried) == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(scenario())


def test_opening_it_may_be_cancelled() -> None:
    async def scenario() -> None:
        owner = Owner()
        owner.slow = 5.0
        reconnector = made(owner)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reconnector.open()
        assert owner.abandoned == ["a"]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await reconnector.aclose()

    play(scenario())


def test_a_caller_that_waits_for_a_connection_may_be_cancelled() -> None:
    async def scenario() -> None:
        owner = Owner()
        reconnector = made(owner)
        await reconnector.open()
        owner.slow = 5.0
        lose(reconnector)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reconnector.connected(60)
        assert await reconnector.connected(60) == "a2"
        await reconnector.aclose()

    play(scenario())
