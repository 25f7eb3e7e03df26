"""Engine that sends commands: its opening and closing, attaching, and the operations on nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tenure.background import Ending, Failures
from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.engines._kit.commands.pipeline import HANDED, OWNS, WAITING, OrderIds
from tenure.engines._kit.commands.replies import (
    REPEATED,
    Unanswered,
    Values,
    config_from,
    config_text,
    first_word,
    included,
    settle,
    text,
)
from tenure.engines._kit.commands.session import CommandSession, SessionParameters
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.quarantine import Quarantine
from tenure.engines._kit.session import close_sessions, received, restores_default
from tenure.engines.contract import (
    Attach,
    EngineDefaults,
    Orphan,
    RateAnswer,
    RateCall,
    RateRule,
    SessionEvents,
)
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.identity import retold
from tenure.model import (
    Liveness,
    NodeConfig,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)


class CommandPages:
    """Lists in pages, as the contract defines them, of a store that can continue a list."""

    def __init__(self, engine: CommandEngine[Any]) -> None:
        self._engine = engine

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id."""
        rules.check_path(path)
        _, found = await self._engine.command(path, "list_sessions", path, after, most)
        return self._engine.values.sessions(path, found)

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted."""
        page = await self.semaphores(path, owners=False, waiters=False, after=after, most=most)
        return [each.name for each in page]

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name."""
        rules.check_path(path)
        kinds = included(owners=owners, waiters=waiters)
        _, found = await self._engine.command(path, "describe", path, None, kinds, after, most)
        return self._engine.described(found, owners=owners, waiters=waiters)

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Return the next owners or waiters of a semaphore, by order id; it reads all of them."""
        found = await self._engine.describe_semaphore(
            path, name, owners=not waiters, waiters=waiters
        )
        following = [each for each in (*found.owners, *found.waiters) if each.order_id > after]
        return following[:most]


S = TypeVar("S", bound=CommandSession)


class TakenOver(NamedTuple):
    """A session that was taken over.

    Attributes:
        token: the token of the new attachment.
        window: its recovery window in seconds.
        description: its former description.
    """

    token: str
    window: float
    description: str


def new_token(number: int) -> str:
    """Return a unique token for a new attachment."""
    return f"{number}.{secrets.token_hex(8)}"


_ENDING = 2.0
"""Seconds for abandoned sessions to end, when the engine is closed."""


class CommandReconnector(Protocol):
    """The connection of an engine, such as the kit's `Reconnector`."""

    @property
    def failure(self) -> TenureError | None:
        """Reason why there is no connection; ``None`` while there is one."""
        ...

    async def open(self) -> None:
        """Connect for the first time."""

    async def aclose(self) -> None:
        """Disconnect. Safe to call twice."""


class CommandEngine(EngineDefaults, ABC, Generic[S]):
    """An engine: its life cycle, the attaching of sessions, and operations without a session.

    Args:
        url: the store's URL, without secrets.
        answer_timeout: timeout of an answer in seconds.
        values: decodes the store's replies.
        clock: measures the sessions' proofs.

    Attributes:
        loop: the event loop on which the engine was opened.
        order_ids: the highest order id seen by this program.
        failures: failures of events and timers.
        heartbeat: renews sessions while the loop is stuck.
        quarantine: the time for which nothing is granted, as far as known here.
        reconnector: keeps a connection.
    """

    loop: asyncio.AbstractEventLoop

    heartbeat: HeartbeatThread[Any]
    quarantine: Quarantine
    reconnector: CommandReconnector

    def __init__(self, url: str, answer_timeout: float, values: Values, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        self.url = url
        self.values = values
        self.clock = clock
        self._answer_timeout = answer_timeout
        self._open = False
        self._awaited: dict[asyncio.Future[Any], tuple[type[TenureError], str]] = {}
        self.order_ids = OrderIds()
        self.failures = Failures(
            f"looking after the sessions on {url}", logging.getLogger("tenure")
        )
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._closing: Ending | None = None
        self._thread = 0

    # Defined by each engine

    @abstractmethod
    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Send a command; `answered` receives the reply, a list that begins with "ok".

        A store that does not recognize a command which it has executed before, for example because
        the answer was lost, passes the reply through `replies.repeated`.

        Commands and their arguments, with the rest of the reply after "ok" or another first word:

        * ``create_node``, path, configuration: "exists"
        * ``alter_node``, path, the former configuration, the new one: "changed"
        * ``drop_node``, path, by force: "busy", number of attached sessions
        * ``describe_node``, path: configuration, number of sessions, number of semaphores
        * ``describe``, path, name or ``None`` for all, `included`: a list for `Values.semaphore`
        * ``list_sessions``, path: a list for `Values.sessions`
        * ``end_session``, path, id: true if it existed
        * ``evict``, path, name, order id: true if it existed; "missing"
        * ``rate``, path, name, kind, limit, period, burst, window, count, longest wait or ``None``,
          time of a grant: limit, period and burst of the rate, whether granted, wait, time, free. A
          refund is executed once at most: if its answer was lost, the reply is `Unanswered`

        All but the first may reply "no node". For `CommandPages`, ``list_sessions`` has an id
        and a number as further arguments, and ``describe`` a name and a number: the reply begins
        behind that id or name, and is no longer than the number.
        """

    @abstractmethod
    def note_silence(self) -> TenureError | None:
        """Record that an answer is overdue; return the reason, if it is known."""

    @abstractmethod
    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session; the reply has its id after "ok".

        The reply to an attach begins with "ok", or with one of these: "no node"; "full", for a node
        at its limit; "refused", with the session's liveness and key; or another word, without the
        session.
        """

    @abstractmethod
    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take over a session; the secret is that of its new token."""

    @abstractmethod
    def read_take_over(self, number: int, reply: Any) -> TakenOver:
        """Decode the reply to a successful takeover."""

    @abstractmethod
    def send_end(self, number: int, tokens: Sequence[str], answered: Callable[[Any], None]) -> None:
        """End a session that has one of these tokens."""

    @abstractmethod
    def new_session(self, given: SessionParameters) -> S:
        """Create the object of the attached session."""

    @abstractmethod
    def admit(self, session: S) -> bool:
        """Add an attached session; return false if the engine has been closed."""

    def check_window(self, how: Attach) -> None:
        """Raise `InvalidArgument` if the recovery window is not allowed."""
        rules.check_window(how.recovery_window, how.node)

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead, by the tokens of its attachment."""
        self.check_open()
        ended: asyncio.Future[Any] = self.loop.create_future()
        tokens = orphan.credential.split(",")
        self.send_end(orphan.session_id, tokens, partial(settle, ended))
        late = self.limit(ended, EngineError, orphan.node)
        try:
            reply = await ended
        finally:
            late.cancel()
        if isinstance(reply, Exception):
            raise EngineError(
                f"{self.url} did not end the session on {orphan.node}: {reply}", node=orphan.node
            )

    @abstractmethod
    def prepare_opening(self) -> None:
        """Make the reconnector, the heartbeat thread and the timers, for `loop`."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the timers, and drop all sessions and watches."""

    async def closed(self) -> None:
        """Release the remaining resources, as the last step of `aclose`."""
        return

    @abstractmethod
    def all_sessions(self) -> Collection[S]:
        """Return the attached sessions."""

    # Answers

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """Fail an overdue answer after a timeout; return the timer, for cancelling it."""
        self._awaited[answer] = kind, path
        answer.add_done_callback(self._awaited.pop)

        def fail() -> None:
            if not answer.done():
                cause = self.note_silence() or "no answer"
                text = f"{self.url} did not answer within {self._answer_timeout:g} s: {cause}"
                error = kind(text, node=path)
                if isinstance(cause, TenureError):
                    error.__cause__ = cause
                answer.set_exception(error)

        return self.loop.call_later(self._answer_timeout, fail)

    def fail_awaited(self) -> None:
        """Fail all pending answers, because the engine is being closed."""
        for answer, (kind, path) in list(self._awaited.items()):
            if not answer.done():
                answer.set_exception(kind(f"{self.url} was closed", node=path))

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if the engine is not open."""
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")

    async def command(self, path: str, command: str, *args: Any) -> Any:
        """Send a command for a node, and return its reply.

        Raises:
            NodeNotFound: there is no such node.
            EngineError: the store rejected the command, or did not answer in time.
            EngineUnavailable: the engine is not open.
        """
        self.check_open()
        answer: asyncio.Future[Any] = self.loop.create_future()
        self.administer(command, args, partial(settle, answer))
        late = self.limit(answer, EngineError, path)
        try:
            reply = await answer
        finally:
            late.cancel()
        if isinstance(reply, Exception):
            raise EngineError(f"{self.url} refused a command: {reply}", node=path)
        if first_word(reply) == "no node":
            raise refusals.node_not_found(path)
        return reply

    # Nodes

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        reply = await self.command(path, "create_node", path, config_text(config))
        if first_word(reply) == "exists" and not exist_ok:
            if reply[1:] == [REPEATED]:
                _, found, *_ = await self.command(path, "describe_node", path)
                if found == config_text(config):
                    return  # the first execution has created it
            raise refusals.node_exists(path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        rules.check_path(path)
        done = False
        while not done:  # until no other client alters it at the same time
            _, old, *_ = await self.command(path, "describe_node", path)
            new = config_text(rules.merge_config(config_from(old), config))
            done = first_word(await self.command(path, "alter_node", path, old, new)) == "ok"

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_path(path)
        rules.check_droppable(path)
        reply = await self.command(path, "drop_node", path, force)
        if first_word(reply) == "busy":
            raise refusals.node_busy(path, reply[1])

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        _, text, sessions, semaphores = await self.command(path, "describe_node", path)
        return NodeDescription(path, config_from(text), sessions, semaphores)

    # Semaphores and sessions

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        rules.check_path(path)
        kinds = included(owners=owners, waiters=waiters)
        _, found = await self.command(path, "describe", path, None, kinds)
        described = self.described(found, owners=owners, waiters=waiters)
        return sorted(described, key=lambda each: each.name)

    def described(
        self, found: Iterable[Any], *, owners: bool, waiters: bool
    ) -> list[SemaphoreDescription]:
        """Decode semaphores."""
        return [self.values.semaphore(each, owners=owners, waiters=waiters) for each in found]

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_path(path)
        rules.check_name(name, path)
        kinds = included(owners=owners, waiters=waiters)
        reply = await self.command(path, "describe", path, name, kinds)
        if first_word(reply) == "missing" or not reply[1]:
            raise refusals.semaphore_not_found(path, name)
        return self.values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    def rate(self, path: str, name: str, call: RateCall) -> asyncio.Future[RateAnswer]:
        """Carry out an operation on a rate."""
        rules.check_path(path)
        rules.check_name(name, path)
        self.check_open()
        rule, answer = call.rule, self.loop.create_future()
        values = (rule.limit, rule.per, rule.burst, rule.window)
        facts = (call.count, call.longest_wait, call.at)
        late = self.limit(answer, EngineUnavailable, path)
        answer.add_done_callback(lambda _: late.cancel())

        def decided(reply: Any) -> None:
            if answer.done():
                return
            if isinstance(reply, Unanswered):
                answer.set_exception(
                    EngineUnavailable(
                        f"{self.url} did not answer: {reply}. It may have carried out the refund",
                        node=path,
                        name=name,
                    )
                )
            elif isinstance(reply, Exception):
                error = EngineError(f"{self.url} refused a command: {reply}", node=path, name=name)
                answer.set_exception(error)
            elif first_word(reply) == "no node":
                answer.set_exception(refusals.node_not_found(path))
            else:
                limit, per, burst, granted, wait, at, free = reply[1:]
                found = RateRule(limit, per, burst)
                answer.set_result(RateAnswer(found, bool(granted), wait, at, free))

        self.administer("rate", (path, name, call.kind, *values, *facts), decided)
        return answer

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        rules.check_path(path)
        _, found = await self.command(path, "list_sessions", path)
        return self.values.sessions(path, found)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; return false if it did not exist."""
        rules.check_path(path)
        reply = await self.command(path, "end_session", path, session_id)
        return bool(reply[1])

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        rules.check_path(path)
        reply = await self.command(path, "evict", path, name, order_id)
        if first_word(reply) == "missing":
            rules.check_name(name, path)
            raise refusals.semaphore_not_found(path, name)
        return bool(reply[1])

    # Attaching

    @restores_default
    async def attach(self, how: Attach, events: SessionEvents) -> S:
        """Attach a session, as defined by the contract."""
        self.check_open()
        rules.check_path(how.node)
        if how.session_id is not None:
            return await self._take_over(how, how.session_id, events)
        self.check_window(how)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
        token = new_token(1)

        def made(reply: Any) -> S:
            given = SessionParameters(how, events, reply[1], token, how.recovery_window)
            return self.new_session(given)

        at = self.clock.now()
        session = await self._attached(how, made, partial(self.send_attach, how, token))
        events.proven(at)
        return session

    async def _take_over(self, how: Attach, number: int, events: SessionEvents) -> S:
        if how.adopt:
            self.check_window(how)
        secret = secrets.token_hex(8)
        former = ""

        def made(reply: Any) -> S:
            nonlocal former
            token, window, former = self.read_take_over(number, reply)
            return self.new_session(SessionParameters(how, events, number, token, window))

        send = partial(self.send_take_over, how, number, secret)
        session = await self._attached(how, made, send)

        async def begin() -> float:
            at = self.clock.now()
            await session.begin(how.description if how.adopt else retold(former, how.description))
            return at

        remaining = None if how.assume_dead else session.remaining
        events.proven(await session.take_over(remaining, begin))
        return session

    async def _attached(
        self,
        how: Attach,
        make: Callable[[Any], S],
        send: Callable[[Callable[[Any], None]], None],
    ) -> S:
        """Send the command that attaches; the answer creates the session at once."""
        made: asyncio.Future[S] = self.loop.create_future()

        def answered(reply: Any) -> None:
            if first_word(reply) != "ok":
                if not made.done():
                    made.set_exception(self._attach_error(how, reply))
                return
            session = make(reply)
            if self.admit(session) and not made.done():
                made.set_result(session)
                return
            session.abandon()  # the caller has an error, or the engine is being closed
            if not made.done():
                made.set_exception(EngineUnavailable(f"{self.url} was closed", node=how.node))

        send(answered)
        late = self.limit(made, EngineUnavailable, how.node)
        try:
            return await received(made)
        except asyncio.CancelledError:
            self.close_after(made)
            raise
        finally:
            late.cancel()

    def _attach_error(self, how: Attach, reply: Any) -> TenureError:
        number = how.session_id
        if isinstance(reply, Exception):
            return EngineError(
                f"the session on {how.node} could not be attached: {self.url} refused it: {reply}",
                node=how.node,
            )
        word = first_word(reply)
        if word == "no node":
            return refusals.node_not_found(how.node)
        if word == "full":
            return refusals.node_full(how.node)
        assert number is not None
        if word == "refused":
            liveness: Liveness = "window" if text(reply[1]) == "window" else "process"
            key = reply[2] if isinstance(reply[2], bytes) else bytes.fromhex(reply[2])
            try:
                rules.check_resumable(liveness, key, how.key, how.node, number)
            except TenureError as error:
                return error
        return rules.not_there_to_resume(how.node, number)

    # Opening and closing

    async def open(self) -> None:
        """Connect to the store."""
        if self._open:
            return
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closing = None
        self.prepare_opening()
        try:
            await self.loop.create_task(self.reconnector.open())
        except BaseException:
            await self.reconnector.aclose()
            raise
        self._open = True

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self._open:
                return
            self._closing = Ending(self._close)
        await self._closing.wait()

    async def _close(self) -> None:
        self._open = False
        try:
            await self._end_abandoned()
            await close_sessions(self.all_sessions(), self.url, lambda: self.reconnector.failure)
        finally:
            self._abandoned.clear()
            self.stop()
            self.fail_awaited()
            await self.reconnector.aclose()  # first: nothing is granted afterwards
            await self.heartbeat.aclose()
            await self.closed()

    def close_after(self, ending: asyncio.Future[Any]) -> None:
        """Have the closing wait for the end of an attach or session that its caller abandoned."""
        self._abandoned.add(ending)
        ending.add_done_callback(self._abandoned.discard)

    async def _end_abandoned(self) -> None:
        """Wait until the store has no abandoned session, unless it is out of reach or silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                while self._abandoned and self.reconnector.failure is None:
                    await asyncio.wait(self._abandoned)  # an attach is followed by the end

    # Sessions

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        return (self.reconnector.failure or self.quarantine.trouble()) if self._open else None

    def longest_silence(self, timeout: float) -> float:
        """Return the seconds after which a server that does not answer is abandoned.

        Args:
            timeout: the longest time; the sessions need another connection within their windows.
        """
        shortest = min((session.window for session in self.all_sessions()), default=3 * timeout)
        return min(timeout, max(shortest / 3, 0.3))

    def report_detached(self, why: TenureError) -> None:
        """Report the loss of contact to the sessions."""
        for session in self.all_sessions():
            session.events.detached(why)

    def report_attached(self) -> None:
        """Report to the sessions that contact is re-established, and look up their requests."""
        for session in self.all_sessions():
            session.events.attached()
            session.look_up((WAITING, HANDED, OWNS))

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        return threading.get_ident() == self._thread
