"""Program of the suites: one session, its requests and watches, and the events it received."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import unittest
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Generic, TypeVar

from tenure.engines.contract import (
    Answer,
    Engine,
    EngineSession,
    Enqueued,
    Place,
    Removal,
    Withdrawn,
)
from tenure.errors import SemaphoreNotFound, SessionExpired, TenureError, Unsupported
from tenure.model import (
    EPHEMERAL_LIMIT,
    UNCHANGED,
    Capabilities,
    SemaphoreDescription,
    Unchanged,
)
from tenure.testing.recorder import TIMEOUT, Recorder

T = TypeVar("T")
E = TypeVar("E", bound=TenureError)

_FENCE = "a fence of the test"


class RequestStanding(Enum):
    """State of a request, according to the answers and events that its program received."""

    SENT = "sent"
    OWNS = "owns"
    WAITS = "waits"
    GONE = "gone"


class ProgramRequest:
    """Request of a program, from the moment at which it was sent.

    Attributes:
        program: the program.
        request_id: its number within the session.
        name: the name of the semaphore.
        answer: the answer of `enqueue`, or the future of it.
        order_id: its place in the queue, once known.
        withdrawn: whether the program has withdrawn it.
    """

    def __init__(
        self, program: Program, request_id: int, name: str, answer: Answer[Enqueued]
    ) -> None:
        """Start from the answer to `enqueue`, which may still be pending."""
        self.program = program
        self.request_id = request_id
        self.name = name
        self.answer = answer
        self.order_id: int | None = None
        self.withdrawn = False
        self._place: Place | None = None
        if isinstance(answer, Enqueued):
            self._note(answer)

    def __repr__(self) -> str:
        """Return the request and its standing."""
        of = f"of session {self.program.id} on {self.name!r}"
        return f"<request {self.request_id} {of}: {self.standing}>"

    async def answered(self) -> ProgramRequest:
        """Wait for the answer of `enqueue`; raise its error if it failed."""
        self._note(await answer_of(self.answer))
        return self

    def _note(self, answer: Enqueued) -> None:
        self._place = answer.place
        if answer.order_id is not None:
            self.order_id = answer.order_id

    @property
    def place(self) -> Place:
        """The place that `enqueue` returned."""
        assert self._place is not None, "enqueue has not answered yet"
        return self._place

    @property
    def standing(self) -> RequestStanding:
        """State of the request, according to the answers and events received so far."""
        recorder = self.program.recorder
        if self.withdrawn or self.program.over or self.request_id in recorder.removals:
            return RequestStanding.GONE
        if self.request_id in recorder.grants or self._place is Place.GRANTED:
            return RequestStanding.OWNS
        if self._place is None:
            return RequestStanding.SENT
        return RequestStanding.WAITS if self._place is Place.WAITING else RequestStanding.GONE

    @property
    def queued(self) -> bool:
        """True if it is known to be in its queue."""
        return self.standing in (RequestStanding.OWNS, RequestStanding.WAITS)

    @property
    def removal(self) -> Removal | None:
        """Reason for its removal from the queue, if its program was notified of one."""
        return self.program.recorder.removals.get(self.request_id)

    async def granted(self) -> int | None:
        """Wait until it is granted, and return its order id."""
        recorder = self.program.recorder

        def decided(_: Recorder) -> bool:
            self.order_id = recorder.grants.get(self.request_id) or self.order_id
            known = self.order_id is not None or not self.program.capabilities.fencing
            return self.standing is RequestStanding.GONE or (
                self.standing is RequestStanding.OWNS and known
            )

        await recorder.wait_for(decided, f"the grant of {self}")
        assert self.standing is RequestStanding.OWNS, f"{self} was to be granted"
        return self.order_id

    async def removed(self) -> Removal:
        """Wait until it is removed from its queue, and return the reason."""
        recorder, number = self.program.recorder, self.request_id
        await recorder.wait_for(lambda _: number in recorder.removals, f"the removal of {self}")
        return recorder.removals[number]


class Watching:
    """Watch of a program, with the number of its calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.calls = 0
        self.stop: Callable[[], None] = lambda: None
        self._loop = loop
        self._taken = 0
        self._called = asyncio.Event()

    def changed(self) -> None:
        """Count a call; it must come on the session's loop."""
        assert asyncio.get_running_loop() is self._loop, "called on the session's loop"
        self.calls += 1
        self._called.set()

    async def called(self) -> None:
        """Wait until the watch has been called since the last return."""
        try:
            async with asyncio.timeout(TIMEOUT):
                while self.calls == self._taken:
                    self._called.clear()
                    await self._called.wait()
        except TimeoutError:
            raise AssertionError(f"the watch was not called within {TIMEOUT:g} s") from None
        self._taken = self.calls


class Program:
    """One session, with its requests and the events that it received."""

    def __init__(
        self, engine: Engine, session: EngineSession, recorder: Recorder, node: str
    ) -> None:
        self.engine = engine
        self.session = session
        self.recorder = recorder
        self.node = node
        self.requests = [
            ProgramRequest(
                self,
                found.request_id,
                found.name,
                Enqueued(Place.GRANTED if found.granted else Place.WAITING, found.order_id),
            )
            for found in recorder.found
        ]
        self.left = False
        self._holds = itertools.count((session.attach_number << 32) + 1)
        self._fences = itertools.count(1)
        self._fencing: Watching | None = None

    @property
    def id(self) -> int:
        """Id of the session."""
        return self.session.id

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine."""
        return self.engine.capabilities

    @property
    def over(self) -> bool:
        """True if the session is closed, detached or ended."""
        return self.left or self.recorder.end is not None

    def next_request_id(self) -> int:
        """Return an unused request id of this session."""
        return next(self._holds)

    def send(
        self,
        name: str,
        count: int = 1,
        *,
        data: bytes = b"",
        timeout: float | None = None,
        ephemeral: bool = False,
        request_id: int | None = None,
    ) -> ProgramRequest:
        """Call `enqueue`, without waiting for its answer."""
        number = self.next_request_id() if request_id is None else request_id
        self.recorder.sending(number)
        answer = self.session.enqueue(
            number, name, count, data, timeout=timeout, ephemeral=ephemeral
        )
        request = ProgramRequest(self, number, name, answer)
        self.requests.append(request)
        return request

    async def enqueue(
        self,
        name: str,
        count: int = 1,
        *,
        data: bytes = b"",
        timeout: float | None = None,
        ephemeral: bool = False,
        request_id: int | None = None,
    ) -> ProgramRequest:
        """Call `enqueue`, and wait for its answer (not for the grant)."""
        request = self.send(
            name, count, data=data, timeout=timeout, ephemeral=ephemeral, request_id=request_id
        )
        return await request.answered()

    async def lock(
        self, name: str, *, timeout: float | None = None, data: bytes = b""
    ) -> ProgramRequest:
        """Request all tokens of an ephemeral semaphore, as a mutex does."""
        return await self.enqueue(name, EPHEMERAL_LIMIT, data=data, timeout=timeout, ephemeral=True)

    def recovered(self, name: str) -> ProgramRequest:
        """Return the request for a name that this session had when it was taken over."""
        [found] = [each for each in self.recorder.found if each.name == name]
        return next(each for each in self.requests if each.request_id == found.request_id)

    def send_withdrawal(self, request: ProgramRequest) -> Answer[Withdrawn]:
        """Call `withdraw`, without waiting for its answer."""
        request.withdrawn = True
        return self.session.withdraw(request.request_id)

    async def withdraw(self, request: ProgramRequest) -> Withdrawn:
        """Call `withdraw`, and return its answer."""
        return await answer_of(self.send_withdrawal(request))

    def send_change(
        self,
        request: ProgramRequest,
        *,
        count: int | None = None,
        data: bytes | None = None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Call `alter`, without waiting for its answer."""
        return self.session.alter(request.request_id, count=count, data=data, timeout=timeout)

    async def alter(
        self,
        request: ProgramRequest,
        *,
        count: int | None = None,
        data: bytes | None = None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> None:
        """Call `alter`, and wait until it is done."""
        await answer_of(self.send_change(request, count=count, data=data, timeout=timeout))

    async def create(self, name: str, limit: int, data: bytes = b"") -> None:
        """Create a lasting semaphore."""
        await self.session.create_semaphore(name, limit, data, exist_ok=False)

    async def describe(self, name: str) -> SemaphoreDescription:
        """Describe a semaphore with its owners and waiters."""
        return await self.session.describe_semaphore(name, owners=True, waiters=True)

    async def queue(self, name: str) -> tuple[list[int], list[int]]:
        """Return the session ids of owners and waiters, in order; empty without a semaphore."""
        require_owners(self.capabilities)
        try:
            found = await self.describe(name)
        except SemaphoreNotFound:
            return [], []
        return (
            [each.session_id for each in found.owners],
            [each.session_id for each in found.waiters],
        )

    async def watch(self, name: str, *, data: bool = True, owners: bool = True) -> Watching:
        """Start a watch, and return once it is in place."""
        watching = Watching(asyncio.get_running_loop())
        watching.stop = self.session.watch(name, data=data, owners=owners, changed=watching.changed)
        with contextlib.suppress(SemaphoreNotFound, SessionExpired):
            await self.session.describe_semaphore(name, owners=False, waiters=False)
        return watching

    async def fence(self, writer: Program) -> None:
        """Wait until this program has received the events of all earlier actions of `writer`.

        It watches a change of a semaphore reserved for this purpose. So an unwanted event can be
        distinguished from one that has not arrived yet.
        """
        if self._fencing is None:
            await self.session.create_semaphore(_FENCE, 1, b"", exist_ok=True)
            self._fencing = await self.watch(_FENCE, owners=False)
        mark = f"{self.id}: {next(self._fences)}".encode()
        await writer.session.update_semaphore(_FENCE, mark)
        await self._fencing.called()

    async def close(self) -> None:
        """Close the session."""
        self.left = True
        await self.session.close()

    async def detach(self) -> None:
        """Detach from the session."""
        self.left = True
        await self.session.detach()

    async def ended(self) -> TenureError:
        """Wait until the store has ended the session."""
        await self.recorder.wait_for(lambda each: each.end is not None, "the end of the session")
        assert self.recorder.end is not None
        return self.recorder.end


def require_owners(capabilities: Capabilities) -> None:
    """Skip the test if the engine cannot list owners and waiters.

    Raises:
        unittest.SkipTest: the engine cannot.
    """
    if not capabilities.owners:
        raise unittest.SkipTest("the engine says that it cannot: owners")


async def answer_of(answer: Answer[T]) -> T:
    """Return the value of an answer, after waiting for it if it is a future."""
    return await answer if isinstance(answer, asyncio.Future) else answer


class raises(Generic[E]):  # noqa: N801  it reads as a word of the sentence around it
    """Context manager that passes if its block raises an error of this class, and no other.

    Args:
        kind: the class of the error.
        what: the attempted operation, for the message.

    Attributes:
        error: the error that was raised.
    """

    error: E

    def __init__(self, kind: type[E], what: str = "it") -> None:
        """Expect an error of class `kind` in `what`."""
        self._kind = kind
        self._what = what

    def __enter__(self) -> raises[E]:
        """Enter the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Keep the expected error; report any other outcome as an `AssertionError`."""
        if isinstance(error, self._kind):
            self.error = error
            return True
        # `Unsupported`, which skips the test, and errors of other libraries propagate.
        if isinstance(error, Unsupported) or not isinstance(error, TenureError | None):
            return False
        expected = f"{self._what}: expected {self._kind.__name__}"
        raise AssertionError(f"{expected}, not {error!r}") from error
