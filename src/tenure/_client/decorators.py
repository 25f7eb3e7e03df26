"""Decorators: functions whose calls hold a mutex or a semaphore, or run once per period.

Rules:

* Decorating a function does no I/O. It checks the name, and that the function can be decorated.
* Each call acquires a lease of its own, runs inside of its block, and releases it. So the block's
  rules hold for the function: its task is cancelled when the lease is lost, and a call from inside
  of another one waits for itself (`tenure.SelfDeadlock`).
* A generator holds its lease from its first step until it ends or is closed.

`tenure.blocking.decorators` has the same for threads.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from datetime import timedelta
from functools import partial, wraps
from string import Formatter
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, ParamSpec, TypeVar, overload

from tenure._client.handles import CallSite
from tenure._client.internals import note_lease_site
from tenure._client.lease import Lease
from tenure._client.once import Once
from tenure._client.rate import Rate, Taken
from tenure._client.semaphore import Semaphore
from tenure._client.session import Primitives
from tenure.core import rules
from tenure.core.rates import RateRule
from tenure.durations import Duration, seconds, timeout_seconds
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    Misuse,
    RateExceeded,
    SemaphoreNotFound,
)

G = TypeVar("G", bound=AsyncIterator[Any])
L = TypeVar("L")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_CONVERSIONS = (None, "a", "r", "s")


class NameOfCall:
    """The name that a call uses: a text with arguments of the function in braces.

    Args:
        what: the decorator, for errors.
        text: the text, as in `str.format`.
        function: the decorated function.

    Raises:
        InvalidArgument: the text is invalid, or refers to what is no argument.

    Attributes:
        site: the function, for messages about a call that no line of the program has made.
    """

    __slots__ = ("_function", "_plain", "_signature", "_text", "_what", "site")

    def __init__(self, what: str, text: str, function: Callable[..., object]) -> None:
        self._what, self._text, self._function = what, text, name_of(function)
        self.site = CallSite(getattr(inspect.unwrap(function), "__code__", None), 0)
        fields = list(self._fields())
        self._plain = None if fields else text.format()
        if self._plain is not None:
            rules.check_name(self._plain)
            return
        try:
            self._signature = inspect.signature(function)
        except ValueError:
            raise InvalidArgument(
                f"{what}: the arguments of {self._function}() are not known, so the name {text!r} "
                "cannot refer to them"
            ) from None
        known = self._signature.parameters
        if any(each.kind is each.VAR_KEYWORD for each in known.values()):
            return
        for each in fields:
            if each not in known:
                has = ", ".join(known) or "none"
                raise InvalidArgument(
                    f"{what}: {self._function}() has no argument {each!r} for the name {text!r}; "
                    f"its arguments: {has}"
                )

    def _fields(self) -> Iterator[str]:
        try:
            parts = list(Formatter().parse(self._text))
        except ValueError as error:
            raise InvalidArgument(
                f"{self._what}: the name {self._text!r} is invalid ({error}); a brace itself is "
                "written twice"
            ) from None
        for _, field, spec, conversion in parts:
            if field is None:
                continue
            root = field.partition(".")[0].partition("[")[0]
            if not root.isidentifier() or "{" in (spec or "") or conversion not in _CONVERSIONS:
                raise InvalidArgument(
                    f"{self._what}: the name {self._text!r} refers to arguments by their names, as "
                    "in 'report {user_id}'"
                )
            yield root

    def of(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        """Return the name for a call with these arguments.

        Raises:
            TypeError: the function cannot be called with them.
        """
        if self._plain is not None:
            return self._plain
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._function}(): {error}") from None
        bound.apply_defaults()
        values = dict(bound.arguments)
        for each in self._signature.parameters.values():
            if each.kind is each.VAR_KEYWORD:
                values = {**values[each.name], **values}
        try:
            return self._text.format_map(values)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{self._what}: the name {self._text!r} cannot be made from the arguments: "
                f"{error!r}"
            ) from error


def name_of(function: object) -> str:
    """Return the name of a function, for errors."""
    return getattr(function, "__qualname__", repr(function))


def longest_wait(wait: Duration | None, *, skip: bool) -> float | None:
    """Return the timeout of a call in seconds."""
    return 0.0 if wait is None and skip else timeout_seconds(wait)


def period(days: float, hours: float, minutes: float, secs: float) -> float:
    """Return a period in seconds.

    Raises:
        InvalidArgument: it is not longer than zero.
    """
    try:
        whole = timedelta(days=days, hours=hours, minutes=minutes, seconds=secs)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"once_per: the period is invalid: {error}") from None
    if not whole:
        raise InvalidArgument("once_per: give the period, such as hours=1")
    return seconds(whole, "a period")


def check_rate(limit: int, per: Duration, burst: int | None, count: int) -> None:
    """Check the values of a rate, and that `count` tokens of it can be granted.

    Raises:
        InvalidArgument: they cannot.
    """
    rule = RateRule.of(limit, seconds(per, "the period"), burst, None, None)
    rules.check_count(count, rule.burst)


def is_busy(error: AcquireTimeout) -> bool:
    """Return true if the lease was held by others, and false for an outage."""
    return error.__cause__ is None


class DecoratorCore(Generic[L]):
    """Base of the decorators of both APIs: the name of the call, and how its lease is obtained.

    Args:
        what: the method of the client that made it, for errors.
        name: the text of the name.
        obtain: acquires the lease of a call by its name; its result is, or leads to, ``None`` for
            a call that is skipped.
        of_iterators: whether generators can be decorated.
    """

    __slots__ = ("_obtain", "_of_iterators", "_text", "_what")

    def __init__(
        self, what: str, name: str, obtain: Callable[[str], L], *, of_iterators: bool = True
    ) -> None:
        given: object = name
        if callable(given) or isinstance(given, staticmethod | classmethod):
            raise Misuse(f"{what} needs a name: write @client.{what}('name') above the function")
        if not isinstance(given, str):
            raise InvalidArgument(f"{what}: a name is a text, not {name!r}")
        self._what, self._text, self._obtain = what, name, obtain
        self._of_iterators = of_iterators

    def _examined(self, function: Callable[..., object]) -> tuple[NameOfCall, Callable[..., Any]]:
        """Return the name of its calls, and the function that a call executes.

        Raises:
            Misuse: it is no function.
            InvalidArgument: the name refers to an argument that it does not have.
        """
        if isinstance(function, staticmethod | classmethod):
            kind = type(function).__name__
            raise Misuse(f"write @{kind} above @client.{self._what}(...), not below it")
        if isinstance(function, type) or not callable(function):
            raise Misuse(f"client.{self._what}(...) decorates a function, not {function!r}")
        own = inspect.isroutine(function) or isinstance(function, partial)
        executed = function if own else type(function).__call__
        return NameOfCall(f"client.{self._what}", self._text, function), executed


class Decorator(DecoratorCore[Awaitable[AbstractAsyncContextManager[Any] | None]], Generic[S]):
    """Result of a decorating method of a client, to be applied to a function.

    `S` is the type of a skipped call's result.
    """

    __slots__ = ()

    @overload
    def __call__(self, function: Callable[P, G]) -> Callable[P, G]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R | S]]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is called by the program from now on.

        Raises:
            Misuse: it is no coroutine function, and no asynchronous generator function.
            InvalidArgument: the name refers to an argument that it does not have.
        """
        name, executed = self._examined(function)
        if inspect.iscoroutinefunction(executed):
            return self._around_coroutine(function, name)
        if inspect.isasyncgenfunction(executed) and self._of_iterators:
            return self._around_iterator(function, name)
        others = " and asynchronous generators" if self._of_iterators else ""
        raise Misuse(
            f"client.{self._what}(...) decorates functions with 'async def'{others}, and "
            f"{name_of(function)}() is none; a client of tenure.blocking decorates the others"
        )

    def _around_coroutine(
        self, function: Callable[..., Coroutine[Any, Any, Any]], name: NameOfCall
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        # Its name is public: a task that executes it executes the program (`session_core`).
        @wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            lease = await self._obtained(name, args, kwargs)
            if lease is None:
                return None
            async with lease:
                return await function(*args, **kwargs)

        return call

    async def _obtained(
        self, name: NameOfCall, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> AbstractAsyncContextManager[Any] | None:
        lease = await self._obtain(name.of(args, kwargs))
        if isinstance(lease, Lease):
            note_lease_site(lease, name.site)
        return lease

    def _around_iterator(
        self, function: Callable[..., Any], name: NameOfCall
    ) -> Callable[..., AsyncIterator[Any]]:
        @wraps(function)
        async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            lease = await self._obtained(name, args, kwargs)
            if lease is None:
                return
            async with lease, aclosing(function(*args, **kwargs)) as iterator:
                step = iterator.asend(None)
                while True:
                    try:
                        value = await step
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield value
                    except GeneratorExit:
                        return  # so that closing it waits for the release
                    except BaseException as error:
                        step = iterator.athrow(error)
                    else:
                        step = iterator.asend(sent)

        return call


async def _unless_busy(acquiring: Once[Lease]) -> Lease | None:
    try:
        return await acquiring
    except AcquireTimeout as error:
        if is_busy(error):
            return None
        raise


class Decorators(Primitives):
    """Methods of a client that decorate functions."""

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
            async def report(user_id: int) -> None:
                await work()

            await report(7)

        A call holds the mutex of that name on ``/default``. Coroutine functions, asynchronous
        generators and methods can be decorated. A generator holds the mutex from its first step
        until it ends or is closed (`contextlib.aclosing`), and is empty if it is skipped. For the
        fencing token, write the block ``async with client.mutex(name) as lease`` instead.

        Args:
            name: the mutex. ``{argument}`` in it is replaced by the argument of the call, as by
                `str.format`; a brace itself is written twice.
            wait: seconds that a call waits for the mutex; ``None`` waits until it is free, or
                with `skip` does not wait.
            skip: a call that does not get the mutex in time returns ``None``, instead of raising.

        Raises:
            InvalidArgument: the name is invalid, or has an argument that the function has not.
            Misuse: what is decorated is no such function.

        A call raises what `Mutex.lock` raises: `AcquireTimeout`, for example.
        """
        timeout = longest_wait(wait, skip=skip)

        async def obtain(name: str) -> Lease | None:
            mutex = self.mutex(name)
            if not skip:
                return await mutex.lock(timeout=timeout)
            if not timeout:
                return await mutex.try_lock()
            return await _unless_busy(mutex.lock(timeout=timeout))

        return Decorator("exclusive", name, obtain)

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
            async def train(model: str) -> None:
                await work()

            await train("small")

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
            Misuse: what is decorated is no such function.

        A call raises what `Semaphore.acquire` raises. If the semaphore exists with another limit,
        this is `SemaphoreExists`.
        """
        timeout = longest_wait(wait, skip=skip)
        rules.check_limit(limit)
        rules.check_count(count, limit)

        kept: Semaphore | None = None  # it has been created, if it was missing

        async def take(semaphore: Semaphore) -> Lease | None:
            if not skip:
                return await semaphore.acquire(count, timeout=timeout)
            if not timeout:
                return await semaphore.try_acquire(count)
            return await _unless_busy(semaphore.acquire(count, timeout=timeout))

        async def obtain(name: str) -> Lease | None:
            nonlocal kept
            semaphore = kept
            if semaphore is not None and semaphore.name == name:
                try:
                    return await take(semaphore)
                except SemaphoreNotFound:
                    pass  # it has been deleted since
            kept = semaphore = self.semaphore(name, limit=limit)
            return await take(semaphore)

        return Decorator("limited", name, obtain)

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
            async def query(user: str, text: str) -> None:
                await work()

            await query("ann", "why?")

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

        async def obtain(name: str) -> AbstractAsyncContextManager[Taken] | None:
            rate = self.rate(name, limit=limit, per=per, burst=burst)
            if skip and not timeout:
                taken = await rate.try_take(count)
                return None if taken is None else nullcontext(taken)
            try:
                return nullcontext(await rate.take(count, timeout=timeout))
            except RateExceeded:
                if skip:
                    return None
                raise

        return Decorator("rate_limited", name, obtain)

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
        """Decorate a coroutine function: one call per period runs, in all programs.

        Example::

            @client.once_per("nightly", hours=12)
            async def clean_up() -> None:
                await work()

            await clean_up()

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
            Misuse: what is decorated is no coroutine function.

        A call raises what `once` raises.
        """
        per = period(days, hours, minutes, seconds)
        timeout = timeout_seconds(wait)

        async def obtain(name: str) -> Lease | None:
            return await self.once(name, per=per, timeout=timeout, count_failed=count_failed)

        return Decorator("once_per", name, obtain, of_iterators=False)
