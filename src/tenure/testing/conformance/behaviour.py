"""Definition and check of a behaviour, one sentence of the contract.

A behaviour is a coroutine function whose name is a sentence. It takes a `Stage`, and asserts that
the sentence is true. `@behaviour` adds it to `BEHAVIOURS`; its arguments name the required
capabilities of the engine.
"""

from __future__ import annotations

import asyncio
import gc
import unittest
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tenure.errors import Unsupported
from tenure.testing.recorder import TIMEOUT
from tenure.testing.stage import Stage, Stores, new_loop

Need: TypeAlias = Literal[
    "fencing",
    "watch",
    "data",
    "lasting",
    "resume",
    "since",
    "waiter_timeout",
    "durable",
    "adopt",
    "resize",
    "rates",
    "virtual",
]
Play: TypeAlias = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True)
class Behaviour:
    """One sentence of the contract.

    Attributes:
        name: the sentence, with underscores for spaces.
        play: the coroutine function that checks it on a stage.
        needs: required capabilities of the engine, or ``"virtual"`` for virtual time.
    """

    name: str
    play: Play
    needs: tuple[Need, ...]

    @property
    def sentence(self) -> str:
        """The name as a sentence."""
        return self.name.replace("_", " ")

    def check(self, stores: Stores) -> None:
        """Check the behaviour on a new store, in a new event loop.

        Raises:
            unittest.SkipTest: the engine lacks a capability; pytest then skips the test.
            Exception: the engine does not have the behaviour; usually an `AssertionError`.
        """
        unheard: list[str] = []

        def note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            unheard.append(f"{context['message']}: {context.get('exception')!r}")

        async def perform() -> list[str]:
            asyncio.get_running_loop().set_exception_handler(note)
            within = None if clock.virtual else 4 * TIMEOUT
            async with asyncio.timeout(within), Stage(stores, url, clock) as stage:
                self._skip_unless_possible(stage)
                try:
                    await self.play(stage)
                except Unsupported as error:
                    raise unittest.SkipTest(f"the engine says: {error}") from error
            running = asyncio.all_tasks() - {asyncio.current_task()}
            return [f"still running: {task!r}" for task in running]

        with stores.empty() as url:
            clock = stores.new_clock()
            with asyncio.Runner(debug=True, loop_factory=lambda: new_loop(clock)) as runner:
                left = runner.run(perform())
            gc.collect()  # a future in a reference cycle reports its error when it is collected
        assert not left, f"closing the engines left something behind: {left}"
        assert not unheard, f"errors that were not reported: {unheard}"

    def _skip_unless_possible(self, stage: Stage) -> None:
        for need in self.needs:
            if need == "virtual":
                if not stage.virtual:
                    raise unittest.SkipTest("it is about a clock that only a test can move")
            elif not getattr(stage.capabilities, need):
                raise unittest.SkipTest(f"the engine says that it cannot: {need}")


BEHAVIOURS: dict[str, Behaviour] = {}
"""All behaviours by name, in reading order."""


def behaviour(*needs: Need) -> Callable[[Play], Play]:
    """Add a function to `BEHAVIOURS`."""

    def add(play: Play) -> Play:
        name: str = play.__name__
        assert name not in BEHAVIOURS, f"there are two of {name}"
        BEHAVIOURS[name] = Behaviour(name, play, needs)
        return play

    return add
