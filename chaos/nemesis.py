"""The nemesis: which fault comes when, for how long, and that every one of them is healed.

Rules:

* The plan is drawn from the seed. What it hits depends on what the processes do meanwhile, so two
  runs of one seed are alike, not equal.
* Two *lanes* inflict faults side by side, the engine's own on one, the rest on the other, each one
  fault after the other with a rest between. A lane goes round all its faults, in a new order each
  time, so that each kind comes about as often.
* A fault that cannot be inflicted just then is noted, and the next one follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from random import Random

from chaos.adapter import Fault, NotNow, Scene
from tenure.errors import EngineError, EngineUnavailable, SessionExpired

_REST = (0.4, 1.8)
"""Seconds between two faults of one lane."""

_ATTEMPTS = 3
"""How often an occasion is looked for, where each fault is to be inflicted once."""


@dataclass(frozen=True, slots=True)
class Inflicted:
    """A fault as it happened.

    Attributes:
        name: of the fault.
        begun, ended: on the history's clock, in seconds.
        what: it hit, or why it could not be inflicted.
        done: whether it was inflicted.
    """

    name: str
    begun: float
    ended: float
    what: str
    done: bool = True

    def facts(self) -> dict[str, object]:
        """For a file of the run."""
        return asdict(self)


class Nemesis:
    """Inflicts faults for as long as it is told."""

    def __init__(self, scene: Scene, lanes: Sequence[Sequence[Fault]], seed: int) -> None:
        """Start with no fault inflicted."""
        self.inflicted: list[Inflicted] = []
        self._scene = scene
        self._lanes = lanes
        self._seed = seed

    async def torment(self, seconds: float) -> None:
        """Inflict faults for that long; all of them are healed at the end."""
        until = self._scene.journal.now() + seconds
        await self._on_each_lane(lambda lane, random: self._go_round(lane, random, until))

    async def torment_once(self) -> None:
        """Inflict each fault once, with hardly a rest between."""
        await self._on_each_lane(self._go_once)

    async def _on_each_lane(
        self, go: Callable[[Sequence[Fault], Random], Coroutine[None, None, None]]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for number, lane in enumerate(self._lanes):
                if lane:
                    group.create_task(go(lane, Random(f"{self._seed} lane {number}")))

    async def _go_once(self, lane: Sequence[Fault], random: Random) -> None:
        for fault in random.sample(lane, len(lane)):
            for _ in range(_ATTEMPTS):
                await asyncio.sleep(_REST[0] / 2)
                await self._inflict(fault, random.uniform(*fault.seconds))
                if any(each.name == fault.name and each.done for each in self.inflicted):
                    break

    async def _go_round(self, lane: Sequence[Fault], random: Random, until: float) -> None:
        now = self._scene.journal.now
        shortest = min(fault.seconds[0] for fault in lane)
        while True:
            for fault in random.sample(lane, len(lane)):
                rest, lasts = random.uniform(*_REST), random.uniform(*fault.seconds)
                left = until - now()
                if left < rest + shortest:
                    await asyncio.sleep(max(0.0, left))
                    return
                if left >= rest + lasts:  # or else a shorter one may still have its turn
                    await asyncio.sleep(rest)
                    await self._inflict(fault, lasts)

    async def _inflict(self, fault: Fault, lasts: float) -> None:
        now = self._scene.journal.now
        begun, done = now(), False
        try:
            async with fault.inflict(self._scene) as what:
                done = True
                await asyncio.sleep(lasts)
        except NotNow as why:
            what = str(why)
        except (EngineError, EngineUnavailable, SessionExpired) as error:
            if done:
                raise
            what = f"the store was out of order: {error}"
        self._scene.crew.check_alive()
        self.inflicted.append(Inflicted(fault.name, begun, now(), what, done))
