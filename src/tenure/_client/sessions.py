"""Sessions of a client: attaching, the implicit one, and the retry loop of `Client.sessions`.

The engine attaches a session in a task that the client owns (`tasks`). If the caller is cancelled
meanwhile, a new session is closed as soon as it is attached; a session that was taken over is
detached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar

from tenure._client.blocked import OnDeadlock, check_on_deadlock
from tenure._client.client_core import ClientCore
from tenure._client.contact import Contact, shortened
from tenure._client.handles import AsyncHandle, CallSite, call_site
from tenure._client.internals import session_core
from tenure._client.listeners import Listeners
from tenure._client.loss import OnLoss, check_policy
from tenure._client.once import Once
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure._client.session_handle import ResumeToken, SessionAnchor, new_key
from tenure._client.session_life import ORIGIN
from tenure._client.source import ClientAnchor
from tenure._client.tasks import failure_of
from tenure.core import rules
from tenure.core.deadlocks import shows_waits, unsupported
from tenure.durations import Duration, seconds
from tenure.engines.contract import Attach
from tenure.errors import (
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.identity import described
from tenure.model import DEFAULT_NODE, FULL_STORES

DEFAULT_WINDOW = 30.0
"""Default recovery window in seconds."""


class SessionOptions(NamedTuple):
    """Arguments of `Client.session`, checked."""

    how: Attach
    on_loss: OnLoss
    max_stall: float
    on_deadlock: OnDeadlock = "wait"

    @classmethod
    def of(
        cls,
        path: str,
        recovery_window: Duration,
        description: str,
        on_loss: OnLoss,
        max_stall: Duration | None,
        on_deadlock: OnDeadlock = "wait",
    ) -> SessionOptions:
        """Check the arguments of `Client.session`, and return them."""
        rules.check_path(path)
        window = seconds(recovery_window, "a recovery window")
        rules.check_window(window, path)
        rules.check_description(description, path)
        check_policy(on_loss)
        check_on_deadlock(on_deadlock)
        stall = 2 * window if max_stall is None else seconds(max_stall, "max_stall")
        return cls(Attach(path, window, description), on_loss, stall, on_deadlock)

    def resumable(self) -> SessionOptions:
        """Return these arguments for a session that survives its program."""
        return self._replace(how=replace(self.how, liveness="window", key=new_key()))

    def resuming(self, token: ResumeToken, *, assume_dead: bool) -> SessionOptions:
        """Return the arguments for taking over the session of that token."""
        node = self.how.node
        if node not in {DEFAULT_NODE, token.node}:
            raise InvalidArgument(
                f"the session to resume is on {token.node}, not on {node}: leave the path out",
                node=node,
            )
        how = Attach(
            token.node,
            token.recovery_window,
            liveness="window",
            key=token.key,
            session_id=token.session_id,
            assume_dead=assume_dead,
        )
        return self._replace(how=how)


def attach(client: ClientAnchor, options: SessionOptions) -> Once[Session]:
    """Return a session to be awaited or entered: a new one, or one that is taken over."""
    node = options.how.node
    if options.how.liveness == "window" and not client.core.capabilities.resume:
        raise Unsupported(
            f"{client.core.url} has no sessions that can be resumed; {FULL_STORES} have",
            node=node,
        )
    return Once(f"the session on {node}", attach_anchored, client, options, call_site())


async def attach_anchored(
    anchor: ClientAnchor, options: SessionOptions, site: CallSite | None
) -> Session:
    """Attach a session, and return the program's handle.

    Args:
        anchor: keeps the client.
        options: the arguments of `Client.session`.
        site: the program's call; ``None`` for a session that the program never gets.
    """
    try:
        core = await _attach_core(anchor.core, options)
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error
    if site is not None and core.debug:
        site = call_site(debug=True, otherwise=site)
    return Session(SessionAnchor(core, anchor, site))


async def _attach_core(client: ClientCore, options: SessionOptions) -> SessionCore:
    await client.opened()
    if options.on_deadlock == "raise" and not shows_waits(client.capabilities):
        raise unsupported(client.url, options.how.node)
    attaching = client.tasks.begin(_attach_now(client, options))
    try:
        return await client.outcome(attaching)
    except (asyncio.CancelledError, GeneratorExit):
        there_before = options.how.session_id is not None
        client.soon(partial(_abandon, attaching, detach=there_before))
        raise


async def _attach_now(client: ClientCore, options: SessionOptions) -> SessionCore:
    core = SessionCore(client, *options)
    description = described(options.how.description, client.identity)
    how = replace(options.how, description=description)
    core.start(await client.engine.attach(how, core))
    if not core.is_proven():
        raise EngineUnavailable(
            f"attaching a session on {core.node} took longer than it lives without contact: "
            f"{core.why}",
            node=core.node,
        )
    client.keep_session(core)
    return core


def _abandon(attaching: asyncio.Task[SessionCore], *, detach: bool) -> None:
    """Close the session as soon as it is attached: the caller was cancelled."""
    attaching.add_done_callback(partial(_end_at_once, detach=detach))
    attaching.cancel()


def _end_at_once(attaching: asyncio.Task[SessionCore], *, detach: bool) -> None:
    if failure_of(attaching) is None:
        attaching.result().close_soon(detach=detach)


W = TypeVar("W", bound=Callable[..., object])


class ImplicitSession:
    """Session of `Client.mutex` and similar methods, attached when one is needed.

    A session that has ended is replaced by a new one. The first caller starts a task of the client
    that attaches it. If that caller is cancelled, the others still get the session. If attaching
    fails, all of them get the error.
    """

    def __init__(self, anchor: ClientAnchor) -> None:
        self.node = DEFAULT_NODE
        self._anchor = anchor
        self._client = anchor.core
        self._handle: Session | None = None  # keeps the session
        self._session: SessionCore | None = None
        self._attaching: asyncio.Task[SessionCore] | None = None

    @property
    def recovery_window(self) -> float:
        """The usual one, or the longest that the store allows, once the store is known."""
        return min(DEFAULT_WINDOW, self._client.capabilities.longest_window)

    @property
    def contact(self) -> Contact:
        """The client's contact to the store."""
        return self._client.contact

    @property
    def listeners(self) -> Listeners:
        """The listeners to the client's events."""
        return self._client.listeners

    def ready(self) -> SessionCore | None:
        """Return the session if it can be used at once."""
        session = self._session
        if session is not None and session.is_proven():
            session.check_loop()
            return session
        self._client.check_owner()
        return None

    def current(self) -> SessionCore | None:
        """Return the session that was used last, ended or not."""
        return self._session

    async def obtain(self) -> SessionCore:
        """Return the session, attaching it if needed."""
        await self._client.opened()
        session = self.ready()
        if session is not None:
            return session
        if self._attaching is None or self._attaching.done():
            self._attaching = self._client.tasks.begin(self._attach())
        return await self._client.outcome(self._attaching)

    async def _attach(self) -> SessionCore:
        options = SessionOptions.of(DEFAULT_NODE, self.recovery_window, "", "cancel", None)
        self._handle = handle = await attach_anchored(self._anchor, options, None)
        self._session = core = session_core(handle)
        return core


class Attempts:
    """Loop of `Client.sessions`."""

    def __init__(self, attach: Callable[[], Awaitable[Session]]) -> None:
        self._attach = attach
        self._again = True

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if not self._again:
            raise StopAsyncIteration
        self._again = False
        return Attempt(self._attach, self._repeat)

    def _repeat(self) -> None:
        self._again = True


class Attempt(AsyncHandle):
    """One attempt of `Client.sessions`: a session's block that may be repeated."""

    def __init__(
        self, attach: Callable[[], Awaitable[Session]], repeat: Callable[[], None]
    ) -> None:
        self._attach = attach
        self._repeat = repeat
        self._core: SessionCore
        self._session: Session

    async def __aenter__(self) -> Session:
        self._session = await self._attach()
        self._core = session_core(self._session)
        self._core.enter()
        return self._session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            await self._session.__aexit__(kind, error, trace)
        except SessionExpired as expired:
            if error is None:
                return False  # the work is done
            error = expired
        again = error is not None and _is_expiry_of(self._core, error)
        if again:
            self._repeat()
        return again


def path_and_work(path: str | W, work: W | None) -> tuple[str, W]:
    """Return the arguments of `Client.run`, with the default node if the path is omitted.

    Raises:
        InvalidArgument: the work is missing, or the path is not a string.
    """
    if work is None and not isinstance(path, str):
        return DEFAULT_NODE, path
    if work is None or not isinstance(path, str):
        raise InvalidArgument("client.run takes the work, or a path and the work")
    return path, work


def is_loss(error: BaseException) -> bool:
    """Return true if the error, or every leaf of a group, reports a lost lease or session."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(each) for each in error.exceptions)
    return isinstance(error, LeaseLost | SessionExpired)


def _is_expiry_of(session: SessionCore, error: BaseException) -> bool:
    """Return true if the error, or every leaf of a group, reports that session's expiry."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expiry_of(session, each) for each in error.exceptions)
    origin = error.__cause__ if isinstance(error, LeaseLost) else error.__dict__.get(ORIGIN)
    return origin is session.why and isinstance(origin, SessionExpired)
