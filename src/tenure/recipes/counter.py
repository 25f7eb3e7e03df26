"""A counter, and a latch that opens when it has been counted down.

Both are numbers in the data of a lasting semaphore of limit 1, created when missing. Rules:

* A change reads, computes and writes under the mutex ``<name>.counting``, all in one session
  (`tenure.recipes.base`).
* The mutex is released only after the write has been answered, also when the caller is cancelled.
* A number that does not change is not written.
* Reading and watching need no mutex.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from tenure._client.contact import Obstacle
from tenure._client.internals import source_of
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, InvalidArgument, SemaphoreExists, SemaphoreNotFound
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source, States, write_under

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest number of a counter; -2^63 is the smallest."""


class _Number(Generic[T]):
    """A value in a semaphore's data, which is changed under a mutex.

    Args:
        source: a session or a client.
        name: of the semaphore.
        what: the recipe, for errors.
        initial: the value before the first change.
        decode: makes a value of text; raises `ValueError` for other text.
    """

    def __init__(
        self, source: Source, name: str, what: str, initial: T, decode: Callable[[str], T]
    ) -> None:
        self.name = name
        self._semaphore = source.semaphore(name)
        self._changing = source.mutex(f"{name}.counting")
        self._what = what
        self._initial = initial
        self._decode = decode

    @property
    def node(self) -> str:
        return self._semaphore.node

    async def read(self) -> T:
        try:
            return self._value(await self._semaphore.describe())
        except SemaphoreNotFound:
            return self._initial

    async def change(self, change: Callable[[T], T], timeout: Duration | None) -> T:
        async with self._changing.lock(timeout=timeout) as lease:
            try:
                described = await self._semaphore.describe()
            except SemaphoreNotFound:
                await self.create()
                described = await self._semaphore.describe()
            old = self._value(described)
            new = change(old)
            if new != old:
                await write_under(lease, self.name, str(new).encode())
        return new

    def watch(self) -> States[T]:
        return States(self._semaphore.watch(data=True), self._value, self.create)

    async def create(self) -> None:
        try:
            await self._semaphore.create(1, exist_ok=True)
        except SemaphoreExists as error:
            raise self._another(f"is a semaphore of limit {error.limit}") from None

    def _value(self, described: SemaphoreDescription) -> T:
        if described.ephemeral:
            raise self._another("is a mutex, or an ephemeral semaphore")
        if described.limit != 1:
            raise self._another(f"is a semaphore of limit {described.limit}")
        if not described.data:
            return self._initial
        try:
            return self._decode(described.data.decode())
        except ValueError:
            raise self._another("has other data") from None

    def _another(self, found: str) -> InvalidArgument:
        return self.invalid(f"{found}, and is used here as a {self._what}; use another name")

    def obstacle(self) -> Obstacle | None:
        """Return the reason why the store reports no changes, if it is known."""
        return source_of(self._semaphore).contact.obstacle(self.name)

    def invalid(self, message: str) -> InvalidArgument:
        """Return the error; the message continues the name."""
        where = f"{self.name!r} on {self.node}"
        return InvalidArgument(f"{where} {message}", node=self.node, name=self.name)


class Counter:
    """A number on a node that programs change, one after the other, and follow.

    Example::

        from tenure.recipes import Counter

        orders = Counter(session, "orders")
        assert await orders.add(2) == 2
        assert await orders.get() == 2

    A change is made once, or raises. After `LeaseLost`, `SessionExpired` or a cancellation, it may
    have been made. A program that dies during a change has made it or not; the next one waits until
    its session has ended.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,015 bytes; the mutex ``<name>.counting`` is used, too.
        initial: the number before the first change; the same for all programs.
    """

    def __init__(self, source: Source, name: str, *, initial: int = 0) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self._number = _Number(source, name, "counter", initial, int)
        self._check(initial)

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<Counter {self.name!r}>"

    async def get(self) -> int:
        """Return the current number.

        Raises:
            InvalidArgument: the semaphore of that name is no counter.
            SessionExpired, SessionClosed: the session has ended.
        """
        return await self._number.read()

    async def add(self, amount: int = 1, *, timeout: Duration | None = None) -> int:
        """Add a number, which may be negative, and return the sum.

        Args:
            amount: the number.
            timeout: seconds to wait for changes of other programs.

        Raises:
            AcquireTimeout: other changes took too long; nothing was changed.
            InvalidArgument: the sum is not from -2^63 to 2^63-1; or the semaphore of that name is
                no counter.
            LeaseLost, SessionExpired, SessionClosed: the session has ended, or the request for the
                mutex was evicted; it may have been changed.
        """
        self._check(amount)
        return await self._number.change(lambda old: self._check(old + amount), timeout)

    async def set(self, value: int, *, timeout: Duration | None = None) -> None:
        """Replace the number. Arguments and errors are those of `add`."""
        self._check(value)
        await self._number.change(lambda _: value, timeout)

    async def compare_and_set(
        self, expected: int, value: int, *, timeout: Duration | None = None
    ) -> bool:
        """Replace the number if it is the expected one; return whether it was.

        The other arguments and errors are those of `add`.
        """
        self._check(value)
        found: list[int] = []

        def change(old: int) -> int:
            found.append(old)
            return value if old == expected else old

        await self._number.change(change, timeout)
        return found == [expected]

    def watch(self) -> States[int]:
        """Return the current number and every newer one; changes may be merged."""
        return self._number.watch()

    def _check(self, value: int) -> int:
        if not isinstance(value, int) or not -LARGEST - 1 <= value <= LARGEST:
            raise self._number.invalid(
                f"is a counter of whole numbers from -2^63 to 2^63-1, not {value!r}"
            )
        return value


class _Left(NamedTuple):
    """Calls that are still to be counted, of all."""

    left: int
    calls: int

    def __str__(self) -> str:
        return f"{self.left}/{self.calls}"

    @classmethod
    def of(cls, text: str) -> _Left:
        left, _, calls = text.partition("/")
        return cls(int(left), int(calls))


class CountDownLatch:
    """A latch that opens for all waiters when it has been counted down to zero.

    Example::

        from tenure.recipes import CountDownLatch

        loaded = CountDownLatch(session, "loaded", 2)
        await loaded.count_down()
        await loaded.count_down()
        await loaded.wait(timeout=60)

    It stays open until `reset`. A waiter that has not been notified by then waits for the next
    opening. Each call counts, also a second one of the same program: after `LeaseLost`,
    `SessionExpired` or a cancellation, a call may have counted.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,015 bytes; the mutex ``<name>.counting`` is used, too.
        count: number of calls of `count_down` that open it; the same for all programs.
    """

    def __init__(self, source: Source, name: str, count: int) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self.count = count
        self._number = _Number(source, name, "latch", _Left(count, count), _Left.of)
        if not isinstance(count, int) or not 1 <= count <= LARGEST:
            raise self._number.invalid(
                f"is a latch for a whole number of calls, 1 or more, not {count!r}"
            )

    def __repr__(self) -> str:
        """Return the class, the name and the count."""
        return f"<CountDownLatch {self.name!r} of {self.count}>"

    async def left(self) -> int:
        """Return how many calls of `count_down` are still to come; 0: it is open.

        Raises:
            InvalidArgument: a latch of another count, or something else, has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return self._checked(await self._number.read())

    async def count_down(self, *, timeout: Duration | None = None) -> int:
        """Count down by one, unless it is open, and return what is left.

        Args:
            timeout: seconds to wait for the calls of other programs.

        Raises:
            AcquireTimeout: other calls took too long; it was not counted.
            InvalidArgument: a latch of another count, or something else, has that name.
            LeaseLost, SessionExpired, SessionClosed: the session has ended, or the request for the
                mutex was evicted; it may have been counted.
        """

        def change(old: _Left) -> _Left:
            return _Left(max(0, self._checked(old) - 1), self.count)

        return (await self._number.change(change, timeout)).left

    async def reset(self, *, timeout: Duration | None = None) -> None:
        """Close it, with all calls to come. Arguments and errors are those of `count_down`."""

        def change(old: _Left) -> _Left:
            self._checked(old)
            return _Left(self.count, self.count)

        await self._number.change(change, timeout)

    async def wait(self, timeout: Duration | None = None) -> None:
        """Wait until it is open.

        Args:
            timeout: seconds to wait, on the local clock; ``None``: until it is open.

        Raises:
            AcquireTimeout: it was not open in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            InvalidArgument: a latch of another count, or something else, has that name.
            SemaphoreNotFound: it was deleted meanwhile.
            SessionExpired, SessionClosed: the session has ended.
        """
        limit = timeout_seconds(timeout)
        expiry = asyncio.timeout(limit)
        seen = "it could not be read"
        try:
            async with expiry, self._number.watch() as states:
                while left := self._checked(await anext(states)):
                    seen = f"{left} of {self.count} calls were still to come"
        except TimeoutError:
            if not expiry.expired():
                raise
            obstacle = self._number.obstacle()
            because = "" if obstacle is None else f", because {obstacle.clause}"
            raise AcquireTimeout(
                f"the latch {self.name!r} on {self._number.node} was not open within {limit:g} s"
                f"{because}: {seen}",
                node=self._number.node,
                name=self.name,
            ) from (None if obstacle is None else obstacle.cause)

    def _checked(self, found: _Left) -> int:
        if found.calls != self.count:
            raise self._number.invalid(
                f"is a latch for {found.calls} calls, and was given {self.count}; all programs "
                "must give the same number"
            )
        return found.left
