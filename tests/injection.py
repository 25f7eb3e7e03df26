"""Unexpected errors, injected into background steps at each call that a step makes."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tenure
from tenure.background import BackgroundTimer
from tenure.engines.contract import Place, Removal
from tenure.testing.program import Program, ProgramRequest

ERRORS: tuple[type[Exception], ...] = (OSError, MemoryError, RuntimeError)

each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)

_numbers = itertools.count(1)

_SOURCE = Path(tenure.__file__).parent
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GIVES_BACK = frozenset({"Turn.release"})
"""Functions that only give a lock back, in a ``finally``: nothing could do that in their place."""


class Injector:
    """Raises an error at one call of a function of the package, made by a background step.

    Steps are what a `BackgroundTimer` runs, the methods named in `also`, and all that threads do
    that are started while the injector is in place. The error is raised in the caller, as it is
    when memory or descriptors run out. It is raised once.

    Args:
        part: of the package whose functions are counted: "engines/sqlite".
        also: methods that are steps as well.

    Attributes:
        fired: the function whose call raised the error; empty as long as none did.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        part: str,
        error: type[Exception],
        *also: tuple[type, str],
        threads: bool = False,
    ) -> None:
        self.fired = ""
        self._error = error
        self._left = self._number = 0
        self._lock = threading.Lock()
        self._prefix = str(_SOURCE / part)
        for owner, name in ((BackgroundTimer, "_run"), *also):
            patch.setattr(owner, name, self._traced(getattr(owner, name)))
        if threads:
            patch.setattr(threading.Thread, "run", self._traced(threading.Thread.run))

    def arm(self, number: int) -> None:
        """Raise the error at that call from now on."""
        with self._lock:
            self.fired = ""
            self._left = self._number = number

    def disarm(self) -> str:
        """Raise it no more; returns the function whose call raised it."""
        with self._lock:
            self._left = 0
            return self.fired

    def _traced(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*arguments: Any) -> Any:
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                return step(*arguments)
            finally:
                sys.settrace(before)

        return run

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(self._prefix)
            and not code.co_flags & _SUSPENDED
            and code.co_qualname not in _GIVES_BACK
        ):
            with self._lock:
                fires = self._left == 1
                self._left = max(0, self._left - 1)
                if fires:
                    self.fired = code.co_qualname
            if fires:
                raise self._error(f"injected {self._number}")
        return None


Scene = Callable[[Injector, int, Sequence[Program]], Coroutine[Any, Any, list[str]]]
"""What happens on a stage with an error at that call; returns the errors that were raised."""


async def played_in_spite_of_errors(
    scene: Scene, injector: Injector, caplog: pytest.LogCaptureFixture, programs: Sequence[Program]
) -> list[str]:
    """Play a scene with an error at the first call, the second, and so on.

    Each of them is logged, or raised to a caller, once.

    Returns:
        the functions whose calls raised the error.
    """
    fired: list[str] = []
    while True:
        number = len(fired) + 1
        caplog.clear()
        reported = await scene(injector, number, programs)
        at = injector.disarm()
        if not at:
            return fired
        fired.append(at)
        reported += [each.getMessage() for each in caplog.records]
        told = [each for each in reported if f"injected {number}" in each]
        assert len(told) == 1, f"the error at call {number}, of {at}, was reported so: {told}"


async def a_hand_over(injector: Injector, number: int, programs: Sequence[Program]) -> list[str]:
    """A waiter is granted when the holder before it has released."""
    holder, waiter = programs[:2]
    held, waiting = await holder.lock("x"), await waiter.lock("x")
    assert (held.place, waiting.place) == (Place.GRANTED, Place.WAITING)
    injector.arm(number)
    reported = await _withdrawn(held)
    await waiting.granted()
    return reported + await _withdrawn(waiting)


async def a_timeout(injector: Injector, number: int, programs: Sequence[Program]) -> list[str]:
    """A waiter is granted when the time of the waiter before it is over."""
    holder, late, waiter = programs
    await holder.session.create_semaphore("pool", 2, b"", exist_ok=True)
    held = await holder.enqueue("pool", 1)
    blocking = await late.enqueue("pool", 2, timeout=0.02)
    waiting = await waiter.enqueue("pool", 1)
    assert (held.place, blocking.place) == (Place.GRANTED, Place.WAITING)
    injector.arm(number)
    await waiting.granted()
    assert await blocking.removed() == Removal.TIMED_OUT
    return await _withdrawn(waiting) + await _withdrawn(held)


async def _withdrawn(request: ProgramRequest) -> list[str]:
    """Withdraw a request, as often as that takes, as a client does; returns the errors."""
    errors: list[str] = []
    while True:
        try:
            await request.program.withdraw(request)
        except Exception as error:
            errors.append(repr(error.__cause__ or error))
        else:
            return errors


def failing_once(
    patch: pytest.MonkeyPatch, owner: type, name: str, error: type[Exception]
) -> list[str]:
    """Have a method raise once, before it does anything; returns a list of who raised."""
    method = getattr(owner, name)
    raised: list[str] = []

    @wraps(method)
    def fails(*arguments: Any, **named: Any) -> Any:
        if not raised:
            raised.append(name)
            raise error(f"injected into {name} ({next(_numbers)})")  # a cause of its own
        return method(*arguments, **named)

    patch.setattr(owner, name, fails)
    return raised
