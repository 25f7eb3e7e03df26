"""When and through whom leases are kept alive on the loop: on a virtual clock, and members that
say nothing unless they are told to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.engines.etcd import wire
from tenure.engines.etcd.cluster import Rounds
from tenure.testing import VirtualClock

pytestmark = pytest.mark.usefixtures("loop_factory")

WINDOW = 6.0
PATIENCE = WINDOW / 6


class Silence:
    """A call that is answered when the member says so."""

    def __init__(self, answered: asyncio.Event) -> None:
        self._answered = answered
        self._leases: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._leases.append(data + b"\x18\x06")  # the same number, and six seconds

    def done_writing(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    async def read(self) -> bytes | None:
        await self._answered.wait()
        if not self._leases:
            return None
        number = self._leases.pop(0)
        return b"\x10" + number[1:]


class Three:
    """Three members."""

    def __init__(self, clock: VirtualClock) -> None:
        self.turn = 0
        self.asked: list[tuple[float, int]] = []
        self.answers = [asyncio.Event() for _ in range(3)]
        self._clock = clock
        self._began = clock.now()

    def __len__(self) -> int:
        return 3

    def leave(self, turn: int, why: str) -> None:
        if turn == self.turn:
            self.turn += 1

    async def converse(self, turn: int, method: str) -> Silence:
        assert method == wire.KEEP_ALIVE
        self.asked.append((round(self._clock.now() - self._began, 3), turn % 3))
        return Silence(self.answers[turn % 3])


class Lease:
    """What the rounds know of a session."""

    window = WINDOW
    id = 7
    over = resumable = False

    def __init__(self) -> None:
        self.proven_at = -math.inf

    def prove(self, at: float) -> None:
        self.proven_at = max(self.proven_at, at)


@asynccontextmanager
async def rounds_of(members: Three, clock: VirtualClock) -> AsyncIterator[Callable[[Lease], None]]:
    tasks: list[asyncio.Task[Any]] = []

    def spawn(coroutine: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.ensure_future(coroutine))
        return tasks[-1]

    rounds: Any = Rounds(members, clock, spawn)  # type: ignore[arg-type]
    yield rounds.renew
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_member_is_asked_and_that_is_all_if_it_answers(clock: VirtualClock) -> None:
    members, lease = Three(clock), Lease()
    members.answers[0].set()
    async with rounds_of(members, clock) as renew:
        asked = clock.now()
        renew(lease)
        await asyncio.sleep(WINDOW)
        assert members.asked == [(0, 0)]
        assert lease.proven_at == asked


async def test_what_is_not_answered_is_asked_of_all_members_at_once(clock: VirtualClock) -> None:
    members, lease = Three(clock), Lease()
    async with rounds_of(members, clock) as renew:
        renew(lease)
        await asyncio.sleep(1.5 * PATIENCE)
        assert members.asked[:1] == [(0, 0)]
        assert sorted(members.asked[1:]) == [(PATIENCE, 0), (PATIENCE, 1), (PATIENCE, 2)]
        assert members.turn == 1  # the silent one is left
        members.answers[2].set()
        await asyncio.sleep(0)
        await asyncio.sleep(WINDOW)
        assert len(members.asked) == 4


async def test_a_member_that_answers_late_is_asked_anew_beside_the_others(
    clock: VirtualClock,
) -> None:
    members, lease = Three(clock), Lease()
    async with rounds_of(members, clock) as renew:
        began = clock.now()
        renew(lease)
        await asyncio.sleep(2.5 * PATIENCE)
        assert sorted(members.asked[4:]) == [(2 * PATIENCE, number) for number in range(3)]
        members.answers[0].set()
        await asyncio.sleep(0.1)
        assert lease.proven_at == began + 2 * PATIENCE  # as the latest that it was asked
        await asyncio.sleep(WINDOW)
        assert len(members.asked) == 7  # the next renewal is somebody else's business


async def test_sessions_share_their_rounds(clock: VirtualClock) -> None:
    members, leases = Three(clock), [Lease() for _ in range(100)]
    async with rounds_of(members, clock) as renew:
        for number, lease in enumerate(leases):
            lease.id = number + 1
            renew(lease)
        await asyncio.sleep(1.5 * PATIENCE)
        assert len(members.asked) == 4


async def test_a_session_that_is_over_is_asked_about_no_more(clock: VirtualClock) -> None:
    members, lease = Three(clock), Lease()
    async with rounds_of(members, clock) as renew:
        renew(lease)
        await asyncio.sleep(0.5 * PATIENCE)
        lease.over = True
        await asyncio.sleep(WINDOW)
        assert members.asked == [(0, 0)]
        assert members.turn == 0
