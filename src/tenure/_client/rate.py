"""A rate: at most `limit` tokens in any period, in the order of the calls.

Rules:

* One call to the store decides a take, and says when its tokens are granted. The caller waits for
  that time on the client's clock, without another call.
* A take that is cancelled refunds its tokens in the background, also if the store has not
  answered yet.
* `tenure.core.rates` has the rule by which all engines decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Never

from tenure._client.habits import unknown_argument
from tenure._client.handles import AsyncHandle
from tenure._client.source import ClientAnchor
from tenure.clock import Clock
from tenure.core import rules
from tenure.core.rates import MICROSECONDS, RateAnswer, RateCall, RateRule
from tenure.durations import Duration, seconds, timeout_seconds
from tenure.errors import EngineUnavailable, InvalidArgument, RateExceeded, TenureError
from tenure.model import RateDescription

_log = logging.getLogger("tenure")


class Rate(AsyncHandle):
    """A rate limit, which all programs with the same name on a node share.

    Example::

        openai = client.rate("openai", limit=100_000, per=60)
        taken = await openai.take(1_200)
        await work()
        await taken.refund(300)  # it used fewer

    At most `limit` tokens are granted in any `per` seconds, by the store's clock. It is a sliding
    window, so it also holds from the middle of one minute to the middle of the next. Takes are
    granted in the order of their calls: a large one is not overtaken by small ones.

    Tokens count from their grant. A program that is stopped between the grant and the use can use
    them late. A take whose answer was lost with a connection is sent again, so its tokens may be
    counted twice, but never too few. A program that dies while it waits loses its tokens, and
    nothing else.

    A rate exists in the store while tokens are in its window. Until then every caller needs the
    same values; `resize` replaces them.

    Attributes:
        name: 1 to 1,024 bytes; a semaphore may have the same name.
        node: the path of its node.
    """

    def __init__(
        self,
        anchor: ClientAnchor,
        node: str,
        name: str,
        limit: int,
        per: Duration,
        burst: int | None,
    ) -> None:
        rules.check_path(node)
        rules.check_name(name, node)
        self.name = name
        self.node = node
        self._anchor = anchor
        self._rule = self._rule_of(limit, per, burst)

    def __repr__(self) -> str:
        return f"<Rate {self.name!r}: {self._rule}>"

    @property
    def limit(self) -> int:
        """Greatest number of tokens in any `per` seconds."""
        return self._rule.limit

    @property
    def per(self) -> float:
        """Length of the period in seconds."""
        return self._rule.per / MICROSECONDS

    @property
    def burst(self) -> int:
        """Greatest number of tokens at once."""
        return self._rule.burst

    async def take(
        self, count: int = 1, *, timeout: Duration | None = None, **_unknown: Never
    ) -> Taken:
        """Take `count` tokens, and wait until they are granted.

        A cancelled call refunds its tokens.

        Args:
            count: 1 to the burst, which is the limit by default.
            timeout: seconds to wait; ``None`` is no limit. If the wait would be longer, nothing is
                taken, and the error is raised at once.

        Raises:
            RateExceeded: the tokens are not there in time; `RateExceeded.retry_after` says when.
            InvalidArgument: so many tokens are never granted, or the rate has another limit.
            NodeNotFound: there is no such node.
            EngineUnavailable: the store cannot be reached, or does not answer.
            Unsupported: the store has no rates.
        """
        if _unknown:
            raise unknown_argument("take", _unknown)
        longest = timeout_seconds(timeout)
        answer = await self._take(count, longest)
        if not answer.granted:
            raise self._exceeded(count, longest, answer.wait / MICROSECONDS)
        if answer.wait:
            await self._until_granted(answer, count)
        return self._taken(answer, count)

    async def try_take(self, count: int = 1, **_unknown: Never) -> Taken | None:
        """Take `count` tokens if they are there now; else return ``None``. Raises as `take`."""
        if _unknown:
            raise unknown_argument("try_take", _unknown)
        answer = await self._take(count, 0.0)
        return self._taken(answer, count) if answer.granted else None

    async def peek(self, count: int = 1) -> RateDescription:
        """Return how many tokens are free, and how long a take of `count` would wait.

        Raises as `take`.
        """
        self._check_count(count)
        answer = await self._answer(RateCall("peek", self._rule, count))
        rule = answer.rule
        return RateDescription(
            answer.free, answer.wait / MICROSECONDS, rule.limit, rule.per / MICROSECONDS, rule.burst
        )

    async def resize(self, *, limit: int, per: Duration, burst: int | None = None) -> None:
        """Replace the limit, the period and the burst, here and in the store.

        Tokens that were taken before still count, those that have left the former window do not.
        Waiting takes keep their times. Callers with the former values raise from now on.

        Args:
            limit: greatest number of tokens in any `per` seconds.
            per: seconds.
            burst: greatest number of tokens at once, as for `Client.rate`.

        Raises:
            InvalidArgument: a value is invalid.
            NodeNotFound, EngineUnavailable, Unsupported: as for `take`.
        """
        rule = self._rule_of(limit, per, burst)
        await self._answer(RateCall("resize", rule))
        self._rule = rule

    # Parts of the calls

    def _rule_of(self, limit: int, per: Duration, burst: int | None) -> RateRule:
        return RateRule.of(limit, seconds(per, "the period"), burst, self.node, self.name)

    def _check_count(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidArgument(
                f"a count is a whole number of at least 1, not {count!r}",
                node=self.node,
                name=self.name,
            )
        if count > self.burst:
            what = "limit" if self.burst == self.limit else "burst"
            raise InvalidArgument(
                f"rate {self.name!r} on {self.node}: {count} tokens can never be granted, because "
                f"the {what} is {self.burst}. Take fewer, or resize the rate",
                node=self.node,
                name=self.name,
            )

    async def _take(self, count: int, longest: float | None) -> RateAnswer:
        self._check_count(count)
        wait = None if longest is None else int(min(longest * MICROSECONDS, rules.EXACT))
        return await self._answer(RateCall("take", self._rule, count, wait))

    def _taken(self, answer: RateAnswer, count: int) -> Taken:
        return Taken(self, count, answer.wait / MICROSECONDS, answer.at, self._refund_soon)

    async def _until_granted(self, answer: RateAnswer, count: int) -> None:
        """Wait for the time of the grant."""
        try:
            await _sleep(self._anchor.core.clock, answer.wait / MICROSECONDS)
        except asyncio.CancelledError:
            self._refund_soon(count, answer.at)
            raise

    def _refund_soon(self, count: int, at: int) -> asyncio.Task[None]:
        """Refund tokens in the background; `Client.aclose` waits for it."""
        return self._anchor.core.tasks.complete(self._refund(count, at))

    async def _refund(self, count: int, at: int) -> None:
        try:
            await self._answer(RateCall("refund", self._rule, count, at=at))
        except TenureError as error:
            _log.warning(
                "tokens were not refunded: node=%s name=%r count=%d error=%s",
                self.node,
                self.name,
                count,
                error,
            )

    async def _answer(self, call: RateCall) -> RateAnswer:
        """Return the store's answer. A take whose caller is cancelled meanwhile is refunded.

        Raises:
            InvalidArgument: the rate has another rule.
        """
        core = self._anchor.core
        engine = await core.opened()
        answer = engine.rate(self.node, self.name, call)
        if not isinstance(answer, RateAnswer):
            answer = await self._awaited(call, answer)
        if answer.rule != call.rule and call.kind != "refund":
            raise InvalidArgument(
                f"rate {self.name!r} on {self.node} is {answer.rule}, and is used here as "
                f"{call.rule}. Use the same values everywhere, or replace them with "
                "rate.resize(...)",
                node=self.node,
                name=self.name,
            )
        return answer

    async def _awaited(
        self, call: RateCall, reply: Coroutine[Any, Any, RateAnswer] | asyncio.Future[RateAnswer]
    ) -> RateAnswer:
        core = self._anchor.core
        deciding = reply if isinstance(reply, asyncio.Future) else core.tasks.begin(reply)
        subject = f"rate {self.name!r} on {self.node}"
        try:
            return await core.contact.answered(subject, _undisturbed(deciding), failed="no answer")
        except (asyncio.CancelledError, EngineUnavailable):
            if core.closed and deciding.cancelled():
                raise core.closed_error() from None
            if call.kind == "take":
                deciding.add_done_callback(partial(self._refund_unwanted, call.count))
            raise

    def _refund_unwanted(self, count: int, deciding: asyncio.Future[RateAnswer]) -> None:
        """Refund a take whose caller has not waited for the answer."""
        if deciding.cancelled() or deciding.exception() is not None:
            return
        answer = deciding.result()
        if answer.granted and not self._anchor.core.closed:
            self._refund_soon(count, answer.at)

    def _exceeded(self, count: int, longest: float | None, wait: float) -> RateExceeded:
        within = "because too many takes wait" if longest is None else f"within {longest:g} s"
        return RateExceeded(
            f"rate {self.name!r} on {self.node}: {count} of {self._rule} not granted {within}: it "
            f"would take {wait:.3f} s. Try again after that time",
            node=self.node,
            name=self.name,
            retry_after=wait,
        )


class Taken(AsyncHandle):
    """Tokens of a rate that were granted. `Rate.take` makes one.

    Attributes:
        rate: the rate.
        waited: seconds between the store's decision and the grant.
    """

    def __init__(
        self,
        rate: Rate,
        count: int,
        waited: float,
        at: int,
        refund: Callable[[int, int], Awaitable[None]],
    ) -> None:
        self.rate = rate
        self.waited = waited
        self._count = count
        self._at = at  # microseconds, by the store's clock
        self._refund = refund

    def __repr__(self) -> str:
        return f"<Taken: {self._count} of {self.rate!r}>"

    @property
    def count(self) -> int:
        """Number of tokens, without those that were refunded."""
        return self._count

    async def refund(self, count: int) -> None:
        """Refund tokens that were not used, so that other callers can take them.

        Once the tokens have left the window it has no effect. If the store does not answer, the
        tokens stay counted, and the failure is logged.

        Args:
            count: 0 to `count`.

        Raises:
            InvalidArgument: the take has not so many tokens left.
        """
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= self._count:
            raise InvalidArgument(
                f"a take of {self._count} tokens cannot refund {count!r}",
                node=self.rate.node,
                name=self.rate.name,
            )
        if count:
            self._count -= count
            await asyncio.shield(self._refund(count, self._at))

    def _undo(self) -> None:
        """Refund everything in the background: the program never got it."""
        count, self._count = self._count, 0
        if count:
            self._refund(count, self._at)


async def _undisturbed(deciding: asyncio.Future[RateAnswer]) -> RateAnswer:
    """Await an answer, which a cancelled caller does not cancel."""
    return await asyncio.shield(deciding)


async def _sleep(clock: Clock, wait: float) -> None:
    """Wait that long on the client's clock."""
    if wait > 0:
        until = clock.now() + wait
        while (left := until - clock.now()) > 0:  # noqa: ASYNC110  the clock decides
            await asyncio.sleep(left)  # a timer may be early by the resolution of the loop's clock
