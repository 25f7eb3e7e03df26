"""A client: one program's way to one store.

It owns what outlives a single call: the engine, the keeper that renews its sessions, the
sessions themselves, the implicit one included, and the tasks that finish what a cancelled caller
began. `aclose` ends all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from tenure import fork
from tenure.clock import Clock, SystemClock
from tenure.core import rules
from tenure.durations import Duration, seconds
from tenure.election import Election
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine
from tenure.errors import (
    EngineUnavailable,
    InvalidArgument,
    Misuse,
    SessionClosed,
    Unsupported,
)
from tenure.keeper import Keeper
from tenure.loss import OnLoss, check_policy
from tenure.model import DEFAULT_NODE, Capabilities
from tenure.mutex import Mutex
from tenure.nodes import Nodes
from tenure.once import Once
from tenure.resume import ResumeToken, new_key
from tenure.scope import note_failure
from tenure.semaphore import Semaphore
from tenure.session import Session
from tenure.sessions import Attempts, ImplicitSession

if TYPE_CHECKING:
    from tenure.events import EventStream

__all__ = ["DEFAULT_WINDOW", "Client", "connect", "default_url"]

T = TypeVar("T")

DEFAULT_WINDOW = 30.0
"""Seconds of recovery window, unless asked otherwise."""


def default_url() -> str:
    """Where `connect` and the command line go when they are told nothing.

    ``TENURE_URL`` if set, else the user's own SQLite file, in ``XDG_STATE_HOME`` or
    ``~/.local/state``.
    """
    url = os.environ.get("TENURE_URL")
    if url:
        return url
    from urllib.parse import quote  # slow to import, and most programs name their store

    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return "sqlite:///" + quote(os.path.join(home, "tenure", "tenure.db"))


def connect(url: str | None = None, *, clock: Clock | None = None) -> Client:
    """A client of the store at `url`.

    ``async with tenure.connect(url) as client`` closes it at the end of the block. Otherwise it
    connects on first use, and `Client.aclose` closes it.

    Args:
        url: ``memory://``, ``sqlite:///jobs.db``, ...; without one, `default_url`.
        clock: where time comes from, for tests.

    Raises:
        InvalidArgument: the URL is wrong.
        Unsupported: no engine is installed for its scheme.
    """
    clock = clock if clock is not None else SystemClock()
    return Client(connect_engine(url if url is not None else default_url(), clock), clock)


class Client(Nodes):
    """A program's way to one store. `connect` makes one. It belongs to one event loop.

    Attributes:
        clock: what its deadlines are measured on.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.clock = clock
        self._engine = engine
        self._born = fork.generation()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: Keeper  # set with the loop
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False
        self._sessions: dict[Session, None] = {}
        self._implicit = ImplicitSession(self, DEFAULT_WINDOW)
        self._streams: set[ref[EventStream]] = set()
        self._beginnings: set[asyncio.Task[Any]] = set()
        self._endings: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Client {self.url}{' (closed)' if self._closed else ''}>"

    @property
    def url(self) -> str:
        """Where the store is, without secrets."""
        return self._engine.url

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do, and which facts it knows."""
        return self._engine.capabilities

    @property
    def guarantees(self) -> str:
        """What this store leaves to chance beyond what every engine does, in a few sentences.

        Empty where that is nothing.
        """
        return getattr(self._engine, "guarantees", "")

    # Life

    async def __aenter__(self) -> Client:
        self._check_owner()
        try:
            await self._opened()
        except BaseException as error:
            try:
                await self.aclose()
            except Exception as failure:
                note_failure(error, failure, f"closing the client of {self.url}")
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except Exception as failure:
            note_failure(error, failure, f"closing the client of {self.url}")

    async def aclose(self) -> None:
        """Close every session, then the connection. Safe to call twice, and when cancelled.

        Leases that other tasks are inside are lost, and their bodies cancelled; a block that the
        calling task itself is inside raises at its end.

        Raises:
            EngineError: the store failed; it will end the sessions when their windows are over.
        """
        self._check_owner()
        if self._closing is None:
            self._closed = True
            self._end_sessions()
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.wait([self._closing])
        self._closing.result()

    def _end_sessions(self) -> None:
        for session in list(self._sessions):
            session._end_now(session._closed())

    async def _close(self) -> None:
        failures: list[Exception] = []
        try:
            while self._beginnings:
                for beginning in self._beginnings:
                    beginning.cancel()
                await asyncio.wait(self._beginnings)
            self._end_sessions()  # those that came into being meanwhile
            while self._endings:
                done, _ = await asyncio.wait(self._endings)
                failures += [error for error in map(_failure, done) if isinstance(error, Exception)]
        finally:
            for stream in self._listening():
                stream._close()
            if self._loop is not None:
                await self._keeper.aclose()
        try:
            await self._engine.aclose()
        except Exception as failure:
            failures.append(failure)
        for other in failures[1:]:
            failures[0].add_note(f"and: {other}")
        if failures:
            raise failures[0]

    async def _opened(self) -> Engine:
        """The engine, opened by whoever comes first; when that fails, by the next."""
        self._check_owner()
        if self._closed:
            raise self._closed_error()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._keeper = Keeper(self.clock, self._loop, self._stalled)
        opening = self._opening
        if opening is None or (opening.done() and _failure(opening) is not None):
            opening = self._opening = self._begin(self._engine.open())
        await self._outcome(opening)
        return self._engine

    def _check_owner(self) -> None:
        fork.check(self._born, f"the client of {self.url}")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise Misuse(
                f"the client of {self.url} belongs to another event loop; call "
                "tenure.connect() in this one"
            )

    # Tasks of the client's own, so that what a cancelled caller began has an owner

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `aclose` cancels.

        Those who wait for it are told how it ends (`_outcome`); when nobody does any more, its
        failure is nobody's business.
        """
        task = self._own(work, self._beginnings)
        task.add_done_callback(_failure)
        return task

    def _see_through(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `aclose` waits for."""
        return self._own(work, self._endings)

    def _own(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
        assert self._loop is not None
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _outcome(self, beginning: asyncio.Task[T]) -> T:
        """What became of it, for anyone who waits; a cancelled waiter does not stop it."""
        if not beginning.done():
            await asyncio.wait([beginning])
        if beginning.cancelled():
            raise self._closed_error()
        return beginning.result()

    def _closed_error(self) -> SessionClosed:
        return SessionClosed(f"the client of {self.url} is closed")

    def _soon(self, call: Callable[[], object]) -> None:
        """Have it called on the loop, if that still turns. From any thread or process."""
        if self._loop is not None and fork.generation() == self._born:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def _stalled(self, length: float) -> None:
        for session in self._sessions:
            session._tell("LoopStalled", length)

    # Sessions

    def session(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        resumable: bool = False,
        resume: str | None = None,
        assume_dead: bool = False,
    ) -> Once[Session]:
        """A session on a node: ``async with client.session("/billing") as session``, or await it.

        A session ends with its program, unless it is *resumable*: then it survives the death of
        the program, and a restart of the machine where the store does, for its recovery window.
        Another program takes it over with its `Session.resume_token`, and finds what it held in
        `Session.recovered`. That takes until the former program has been told, is known to be
        dead, or has been silent for the window, so that never two of them hold.

        Args:
            path: the node, which exists (`create_node`).
            recovery_window: seconds that the session survives without contact, 1 to 1,800:
                how long the store may be out of reach before leases are lost, and how long
                others wait for a holder that is stopped or cut off.
            description: what others see of it, at most 1,024 bytes.
            on_loss: what the loss of one of its leases does beside being raised.
            max_stall: seconds that the event loop may be stuck before the session is no
                longer renewed; twice the window if ``None``.
            resumable: whether it can be resumed.
            resume: the token of the session to take over; its node, window and description
                stay what they are.
            assume_dead: with `resume`, do not make sure that the former program has stopped.
                Unsafe: if it only could not reach the store, both hold.

        Raises:
            NodeNotFound: there is no such node.
            SessionExpired: the session to resume is over or was never there, or another
                program resumed it too.
            AuthenticationFailed: the token is not of this session: of another store, for
                example, that has a session of that number too.
            EngineUnavailable: the store cannot be reached.
            InvalidArgument: a path, a window or a description that no engine accepts; or what
                is no resume token.
            Unsupported: the engine has no sessions that can be resumed.
        """
        how, policy, stall = _how(path, recovery_window, description, on_loss, max_stall)
        if resume is not None:
            how = _resumed(how, ResumeToken.parse(resume), assume_dead)
        elif resumable:
            how = replace(how, liveness="window", key=new_key())
        return self._session((how, policy, stall))

    def _session(self, how: tuple[Attach, OnLoss, float]) -> Once[Session]:
        if how[0].liveness == "window" and not self.capabilities.resume:
            raise Unsupported(
                f"{self.url} has no sessions that can be resumed; "
                "sqlite://, redis://, etcd:// and tenure:// have",
                node=how[0].node,
            )
        return Once(f"the session on {how[0].node}", self._attach, *how)

    async def _attach(self, how: Attach, on_loss: OnLoss, max_stall: float) -> Session:
        """A new session; a cancelled call leaves none behind."""
        await self._opened()
        attaching = self._begin(self._attach_now(how, on_loss, max_stall))
        try:
            return await self._outcome(attaching)
        except (asyncio.CancelledError, GeneratorExit):
            self._soon(partial(_abandon, attaching, detach=how.session_id is not None))
            raise

    async def _attach_now(self, how: Attach, on_loss: OnLoss, max_stall: float) -> Session:
        session = Session(self, how, on_loss, max_stall)
        session._start(await self._engine.attach(how, session))
        if not session._proven():
            raise EngineUnavailable(
                f"attaching a session on {how.node} took longer than it lives without contact: "
                f"{session._ended}",
                node=how.node,
            )
        self._sessions[session] = None
        self._keeper.add(session)
        return session

    def _forget_session(self, session: Session) -> None:
        self._sessions.pop(session, None)
        self._keeper.discard(session)

    def sessions(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> Attempts:
        """Sessions, one after the other: a new one when the last has expired.

        ::

            async for attempt in client.sessions("/billing"):
                async with attempt as session:
                    async with session.mutex("job").lock():
                        await work()

        An attempt is repeated if and only if its session expired and what leaves its body is
        `SessionExpired`, or `LeaseLost` caused by that, alone or as every leaf of an exception
        group. A normal end of the body ends the loop; any other exception passes through.

        The arguments are those of `session`.
        """
        how = _how(path, recovery_window, description, on_loss, max_stall)
        return Attempts(lambda: self._session(how))

    async def run(
        self,
        path: str,
        work: Callable[[Session], Awaitable[T]],
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> T:
        """Call `work` with a session, again with a new one whenever that expires (`sessions`).

        Returns:
            what `work` returns.
        """
        result: list[T] = []
        async for attempt in self.sessions(
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
        ):
            async with attempt as session:
                result[:] = [await work(session)]
        return result[0]

    # Primitives, through one implicit session on /default

    def mutex(self, name: str) -> Mutex:
        """The mutex of that name on ``/default``, through the client's implicit session."""
        return Mutex(self._implicit, name)

    def semaphore(self, name: str, *, ephemeral: bool = False) -> Semaphore:
        """The semaphore of that name on ``/default``, through the client's implicit session.

        Args:
            ephemeral: it comes and goes with its requests, and needs no creation.
        """
        return Semaphore(self._implicit, name, ephemeral=ephemeral)

    def election(self, name: str) -> Election:
        """The election of that name on ``/default``, through the client's implicit session."""
        return Election(self._implicit, name)

    # What happens

    def events(self, size: int = 1024) -> EventStream:
        """What happens to this client's sessions and leases from now on (`tenure.events`).

        Args:
            size: how many events wait for a slow reader; then the oldest are dropped.
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"a stream of events holds at least 1, not {size!r}")
        fork.check(self._born, f"the client of {self.url}")
        if self._closed:
            raise self._closed_error()
        from tenure.events import EventStream  # see `Session._tell`

        return EventStream(size, self._streams)

    def _listening(self) -> list[EventStream]:
        """The streams of events that somebody may still read."""
        return [stream for known in tuple(self._streams) if (stream := known()) is not None]


def _how(
    path: str,
    recovery_window: Duration,
    description: str,
    on_loss: OnLoss,
    max_stall: Duration | None,
) -> tuple[Attach, OnLoss, float]:
    """How a session is asked for, checked."""
    rules.check_path(path)
    window = seconds(recovery_window, "a recovery window")
    rules.check_window(window, path)
    rules.check_description(description, path)
    check_policy(on_loss)
    stall = 2 * window if max_stall is None else seconds(max_stall, "max_stall")
    return Attach(path, window, description), on_loss, stall


def _resumed(how: Attach, token: ResumeToken, assume_dead: bool) -> Attach:
    """How a session is to be taken over."""
    if how.node not in {DEFAULT_NODE, token.node}:
        raise InvalidArgument(
            f"the session to resume is on {token.node}, not on {how.node}: leave the path out",
            node=how.node,
        )
    return Attach(
        token.node,
        token.recovery_window,
        liveness="window",
        key=token.key,
        session_id=token.session_id,
        assume_dead=assume_dead,
    )


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    """Why a task that is done has no result."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _abandon(attaching: asyncio.Task[Session], *, detach: bool) -> None:
    """Nobody wants the session any more; one that was there before stays for the next."""
    attaching.add_done_callback(partial(_end_at_once, detach=detach))
    attaching.cancel()


def _end_at_once(attaching: asyncio.Task[Session], *, detach: bool) -> None:
    if _failure(attaching) is None:
        session = attaching.result()
        session._end_now(session._closed(), detach=detach)
