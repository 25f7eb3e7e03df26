"""Decorators of functions, for threads: as `tenure._client.decorators`.

Exceptions of signal handlers: until its block is entered, no variable refers to the lease. So an
exception before that drops the lease, and a dropped lease is released (`tenure._client.lease`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, ParamSpec, TypeVar, overload

from tenure._client.decorators import (
    DecoratorCore,
    NameOfCall,
    check_rate,
    is_busy,
    longest_wait,
    name_of,
    period,
)
from tenure.blocking.lease import Lease
from tenure.blocking.primitives import Semaphore
from tenure.blocking.rate import Rate, Taken
from tenure.blocking.session import Primitives
from tenure.core import rules
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, Misuse, RateExceeded, SemaphoreNotFound

G = TypeVar("G", bound=Generator[Any, Any, Any])
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_SKIPPED = nullcontext()


class Decorator(DecoratorCore[AbstractContextManager[Any] | None], Generic[S]):
    """Result of a decorating method of a client, to be applied to a function.

    `S` is the type of a skipped call's result.
    """

    __slots__ = ()

    @overload
    def __call__(self, function: Callable[P, G]) -> Callable[P, G]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R | S]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is called by the program from now on.

        Raises:
            Misuse: it is no function, or a coroutine function.
            InvalidArgument: the name refers to an argument that it does not have.
        """
        name, executed = self._examined(function)
        if inspect.iscoroutinefunction(executed) or inspect.isasyncgenfunction(executed):
            raise Misuse(
                f"a client of tenure.blocking decorates no function with 'async def', such as "
                f"{name_of(function)}(); a client of tenure.connect() does"
            )
        if not inspect.isgeneratorfunction(executed):
            return self._around_function(function, name)
        if self._of_iterators:
            return self._around_iterator(function, name)
        raise Misuse(
            f"client.{self._what}(...) decorates no generator, such as {name_of(function)}()"
        )

    def _around_function(
        self, function: Callable[..., Any], name: NameOfCall
    ) -> Callable[..., Any]:
        obtain = self._obtain

        @wraps(function)
        def _call(*args: Any, **kwargs: Any) -> Any:
            with obtain(name.of(args, kwargs)) or _SKIPPED as lease:
                return None if lease is None else _complete(function, function(*args, **kwargs))

        return _call

    def _around_iterator(
        self, function: Callable[..., Any], name: NameOfCall
    ) -> Callable[..., Any]:
        obtain = self._obtain

        @wraps(function)
        def _call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with obtain(name.of(args, kwargs)) or _SKIPPED as lease:
                return None if lease is None else (yield from function(*args, **kwargs))

        return _call


def _complete(function: object, result: Any) -> Any:
    """Return the result of a call, unless it is only the beginning of its work."""
    if inspect.iscoroutine(result):
        result.close()
        raise Misuse(f"{name_of(function)}() returned a coroutine; decorate it with 'async def'")
    return result


def _unless_busy(acquire: Callable[[], Lease]) -> Lease | None:
    try:
        return acquire()
    except AcquireTimeout as error:
        if is_busy(error):
            return None
        raise


class Decorators(Primitives):
    """Methods of a client that decorate functions."""

    __slots__ = ()

    @overload
    def exclusive(
        self, name: str, *, wait: Duration | None = None, skip: Literal[False] = False
    ) -> Decorator[Never]: ...

    @overload
    def exclusive(
        self, name: str, *, wait: Duration | None = None, skip: bool
    ) -> Decorator[None]: ...

    def exclusive(
        self, name: str, *, wait: Duration | None = None, skip: bool = False
    ) -> Decorator[Any]:
        """Decorate a function: at most one call of it runs at a time, in all programs.

        Example::

            @client.exclusive("report {user_id}", wait=5)
            def report(user_id: int) -> None:
                work()

            report(7)

        A call holds the mutex of that name on ``/default``. Functions, generators and methods can
        be decorated. A generator holds the mutex from its first step until it ends or is closed
        (`contextlib.closing`), and is empty if it is skipped. For the fencing token, write the
        block ``with client.mutex(name) as lease`` instead.

        Args:
            name: the mutex. ``{argument}`` in it is replaced by the argument of the call, as by
                `str.format`; a brace itself is written twice.
            wait: seconds that a call waits for the mutex; ``None`` waits until it is free, or
                with `skip` does not wait.
            skip: a call that does not get the mutex in time returns ``None``, instead of raising.

        Raises:
            InvalidArgument: the name is invalid, or has an argument that the function has not.
            Misuse: what is decorated is no function, or a coroutine function.

        A call raises what `Mutex.lock` raises: `AcquireTimeout`, for example.
        """
        timeout = longest_wait(wait, skip=skip)

        def _obtain(name: str) -> Lease | None:
            mutex = self.mutex(name)
            if not skip:
                return mutex.lock(timeout=timeout)
            if not timeout:
                return mutex.try_lock()
            return _unless_busy(lambda: mutex.lock(timeout=timeout))

        return Decorator("exclusive", name, _obtain)

    @overload
    def limited(
        self,
        name: str,
        limit: int,
        *,
        count: int = 1,
        wait: Duration | None = None,
        skip: Literal[False] = False,
    ) -> Decorator[Never]: ...

    @overload
    def limited(
        self,
        name: str,
        limit: int,
        *,
        count: int = 1,
        wait: Duration | None = None,
        skip: bool,
    ) -> Decorator[None]: ...

    def limited(
        self,
        name: str,
        limit: int,
        *,
        count: int = 1,
        wait: Duration | None = None,
        skip: bool = False,
    ) -> Decorator[Any]:
        """Decorate a function: at most `limit` calls of it run at a time, in all programs.

        Example::

            @client.limited("gpu", 4)
            def train(model: str) -> None:
                work()

            train("small")

        A call holds tokens of the semaphore of that name on ``/default``, which is created when it
        is missing. The rest is as for `exclusive`.

        Args:
            name: the semaphore, as for `exclusive`.
            limit: its number of tokens.
            count: number of tokens that a call holds.
            wait: seconds that a call waits, as for `exclusive`.
            skip: a call that does not get its tokens in time returns ``None``.

        Raises:
            InvalidArgument: a name, limit or number is invalid, or the function has no such
                argument.
            Misuse: what is decorated is no function, or a coroutine function.

        A call raises what `Semaphore.acquire` raises. If the semaphore exists with another limit,
        this is `SemaphoreExists`.
        """
        timeout = longest_wait(wait, skip=skip)
        rules.check_limit(limit)
        rules.check_count(count, limit)

        kept: Semaphore | None = None  # it has been created, if it was missing

        def _take(semaphore: Semaphore) -> Lease | None:
            if not skip:
                return semaphore.acquire(count, timeout=timeout)
            if not timeout:
                return semaphore.try_acquire(count)
            return _unless_busy(lambda: semaphore.acquire(count, timeout=timeout))

        def _obtain(name: str) -> Lease | None:
            nonlocal kept
            semaphore = kept
            if semaphore is not None and semaphore.name == name:
                try:
                    return _take(semaphore)
                except SemaphoreNotFound:
                    pass  # it has been deleted since
            kept = semaphore = self.semaphore(name, limit=limit)
            return _take(semaphore)

        return Decorator("limited", name, _obtain)

    if TYPE_CHECKING:

        def rate(self, name: str, *, limit: int, per: Duration, burst: int | None = None) -> Rate:
            """Return the rate of that name."""
            ...

    @overload
    def rate_limited(
        self,
        name: str,
        *,
        limit: int,
        per: Duration,
        burst: int | None = None,
        count: int = 1,
        wait: Duration | None = None,
        skip: Literal[False] = False,
    ) -> Decorator[Never]: ...

    @overload
    def rate_limited(
        self,
        name: str,
        *,
        limit: int,
        per: Duration,
        burst: int | None = None,
        count: int = 1,
        wait: Duration | None = None,
        skip: bool,
    ) -> Decorator[None]: ...

    def rate_limited(
        self,
        name: str,
        *,
        limit: int,
        per: Duration,
        burst: int | None = None,
        count: int = 1,
        wait: Duration | None = None,
        skip: bool = False,
    ) -> Decorator[Any]:
        """Decorate a function: at most `limit` calls of it begin in `per` seconds, in all programs.

        Example::

            @client.rate_limited("openai {user}", limit=60, per=60)
            def query(user: str, text: str) -> None:
                work()

            query("ann", "why?")

        A call takes tokens of the rate of that name on ``/default``, and begins when they are
        granted. The rest is as for `exclusive`.

        Args:
            name: the rate, as for `exclusive`.
            limit: greatest number of tokens in any `per` seconds, as for `rate`.
            per: the period in seconds.
            burst: greatest number of tokens at once; the limit by default.
            count: number of tokens that a call takes.
            wait: seconds that a call waits, as for `exclusive`.
            skip: a call that does not get its tokens in time returns ``None``.

        Raises:
            InvalidArgument: a name or number is invalid, or the function has no such argument.
            Misuse: what is decorated is no such function.

        A call raises what `Rate.take` raises: `RateExceeded`, for example.
        """
        timeout = longest_wait(wait, skip=skip)
        check_rate(limit, per, burst, count)

        def _obtain(name: str) -> AbstractContextManager[Taken] | None:
            rate = self.rate(name, limit=limit, per=per, burst=burst)
            if skip and not timeout:
                taken = rate.try_take(count)
                return None if taken is None else nullcontext(taken)
            try:
                return nullcontext(rate.take(count, timeout=timeout))
            except RateExceeded:
                if skip:
                    return None
                raise

        return Decorator("rate_limited", name, _obtain)

    def once_per(
        self,
        name: str,
        *,
        days: float = 0.0,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        wait: Duration | None = 0.0,
        count_failed: bool = False,
    ) -> Decorator[None]:
        """Decorate a function: one call per period runs, in all programs.

        Example::

            @client.once_per("nightly", hours=12)
            def clean_up() -> None:
                work()

            clean_up()

        A call runs when no run that succeeded was started within the period. Otherwise it returns
        ``None`` at once. `once` has the rules, and advice for the period.

        Args:
            name: the job, as for `exclusive`.
            days: of the period, which is the sum of all four.
            hours: of the period.
            minutes: of the period.
            seconds: of the period.
            wait: seconds to wait for the end of a current run, which may fail.
            count_failed: whether unsuccessful runs count.

        Raises:
            InvalidArgument: the name or the period is invalid, or the function has no such
                argument.
            Misuse: what is decorated is no function, or a generator.

        A call raises what `once` raises.
        """
        per = period(days, hours, minutes, seconds)
        timeout = timeout_seconds(wait)

        def _obtain(name: str) -> Lease | None:
            return self.once(name, per=per, timeout=timeout, count_failed=count_failed)

        return Decorator("once_per", name, _obtain, of_iterators=False)
