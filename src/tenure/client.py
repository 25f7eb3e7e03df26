"""A client: one program's way to one store.

It owns what outlives a single call: the engine, the keeper that renews its sessions, the
sessions themselves, the implicit one included, and the tasks that finish what a cancelled caller
began. `aclose` ends all of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from tenure import fork
from tenure.clock import Clock, SystemClock
from tenure.core import rules
from tenure.durations import Duration, seconds
from tenure.election import Election
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    Misuse,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    TenureError,
)
from tenure.events import EventStream, LoopStalled
from tenure.keeper import Keeper
from tenure.lease import OnLoss
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.mutex import Mutex
from tenure.once import Once
from tenure.semaphore import Semaphore
from tenure.session import Session

__all__ = ["DEFAULT_WINDOW", "Attempt", "Attempts", "Client", "connect", "default_url"]

T = TypeVar("T")

DEFAULT_WINDOW = 30.0
"""Seconds of recovery window, unless asked otherwise."""

_log = logging.getLogger("tenure")


def default_url() -> str:
    """Where `connect` and the command line go when they are told nothing.

    ``TENURE_URL`` if set, else the user's own SQLite file, in ``XDG_STATE_HOME`` or
    ``~/.local/state``.
    """
    url = os.environ.get("TENURE_URL")
    if url:
        return url
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path.home() / ".local" / "state"
    return "sqlite:///" + quote(str(home / "tenure" / "tenure.db"))


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


class Client:
    """A program's way to one store. `connect` makes one. It belongs to one event loop.

    Attributes:
        clock: what its deadlines are measured on.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.clock = clock
        self._engine = engine
        self._born = fork.generation()
        self._keeper: Keeper
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._sessions: set[Session] = set()
        self._implicit = _ImplicitSession(self)
        self._streams: list[EventStream] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    @property
    def url(self) -> str:
        """Where the store is, without secrets."""
        return self._engine.url

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do, and which facts it knows."""
        return self._engine.capabilities

    # Life

    async def __aenter__(self) -> Client:
        try:
            await self._opened()
        except BaseException:
            await self.aclose()
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
        except TenureError as failure:
            if error is None:
                raise
            error.add_note(f"and closing the client of {self.url} failed: {failure}")

    async def aclose(self) -> None:
        """Close every session, then the connection. Safe to call twice, or when cancelled."""
        fork.check(self._born, "this client")
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            # Whatever became of it was told to those who waited for it.
            await asyncio.wait([self._opening])
        failures = await asyncio.gather(
            *(session.close() for session in list(self._sessions)), return_exceptions=True
        )
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        for stream in list(self._streams):
            stream._close()
        if self._loop is not None:
            self._keeper.close()
        await self._engine.aclose()
        for failure in failures:
            if failure is not None:
                raise failure

    async def _opened(self) -> Engine:
        """The engine, opened by whoever comes first."""
        fork.check(self._born, "this client")
        if self._closing is not None:
            raise SessionClosed(f"the client of {self.url} is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._keeper = Keeper(self.clock, loop, self._stalled)
        elif self._loop is not loop:
            raise Misuse(
                f"the client of {self.url} belongs to another event loop; call "
                "tenure.connect() in this one"
            )
        if self._opening is None:
            self._opening = loop.create_task(self._engine.open())
        try:
            await asyncio.shield(self._opening)
        except TenureError:
            self._opening = None  # the next call tries again
            raise
        return self._engine

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that finishes what a caller began; `aclose` waits for it."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("%s: %s", self.url, task.exception())

    def _stalled(self, length: float) -> None:
        for session in self._sessions:
            session._tell(LoopStalled(session.node, session.id, length))

    # Sessions

    def session(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> Once[Session]:
        """A session on a node: ``async with client.session("/billing") as session``, or await it.

        Args:
            path: the node, which exists (`create_node`).
            recovery_window: seconds that the session survives without contact, 1 to 1,800:
                how long the store may be out of reach before leases are lost, and how long
                others wait for a holder that is stopped or cut off.
            description: what others see of it, at most 1,024 bytes.
            on_loss: what the loss of one of its leases does beside being raised.
            max_stall: seconds that the event loop may be stuck before the session is no
                longer renewed; twice the window if ``None``.

        Raises:
            NodeNotFound: there is no such node.
            EngineUnavailable: the store cannot be reached.
            InvalidArgument: a path, a window or a description that no engine accepts.
        """
        rules.check_path(path)
        window = seconds(recovery_window, "a recovery window")
        rules.check_window(window, path)
        rules.check_description(description, path)
        _check_policy(on_loss)
        stall = 2 * window if max_stall is None else seconds(max_stall, "max_stall")
        return Once(
            f"the session on {path}",
            self._attach,
            Attach(path, window, description),
            on_loss,
            stall,
        )

    async def _attach(self, how: Attach, on_loss: OnLoss, max_stall: float) -> Session:
        engine = await self._opened()
        session = Session(self, how.node, how.recovery_window, on_loss, max_stall)
        session._start(await engine.attach(how, session))
        self._sessions.add(session)
        self._keeper.add(session)
        if self._closing is not None:  # closed while this attached
            await session.close()
        return session._alive()

    def _forget_session(self, session: Session) -> None:
        self._sessions.discard(session)
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
        return Attempts(
            lambda: self.session(
                path,
                recovery_window=recovery_window,
                description=description,
                on_loss=on_loss,
                max_stall=max_stall,
            )
        )

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

    def semaphore(self, name: str) -> Semaphore:
        """The semaphore of that name on ``/default``, through the client's implicit session."""
        return Semaphore(self._implicit, name)

    def election(self, name: str) -> Election:
        """The election of that name on ``/default``, through the client's implicit session."""
        return Election(self._implicit, name)

    # Nodes

    async def create_node(
        self, path: str, config: NodeConfig | None = None, *, exist_ok: bool = False
    ) -> None:
        """Create a node. What exists is not touched.

        Raises:
            NodeExists: it exists, and `exist_ok` is false.
        """
        rules.check_path(path)
        engine = await self._opened()
        await engine.create_node(path, config or NodeConfig(), exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change a node's configuration; unset fields are left alone. Raises `NodeNotFound`."""
        rules.check_path(path)
        await (await self._opened()).alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool = False) -> None:
        """Drop a node with its semaphores and detached sessions.

        Args:
            force: even when sessions are attached; they expire.

        Raises:
            NodeNotFound: there is none.
            NodeBusy: sessions are attached, and `force` is false.
            InvalidArgument: the path is ``/default``.
        """
        rules.check_path(path)
        await (await self._opened()).drop_node(path, force=force)

    async def describe_node(self, path: str = DEFAULT_NODE) -> NodeDescription:
        """A node as it is now. Raises `NodeNotFound`."""
        rules.check_path(path)
        return await (await self._opened()).describe_node(path)

    async def list_nodes(self) -> Sequence[str]:
        """The paths of all nodes, sorted."""
        return await (await self._opened()).list_nodes()

    async def list_semaphores(
        self, path: str = DEFAULT_NODE, *, owners: bool = False, waiters: bool = False
    ) -> Sequence[SemaphoreDescription]:
        """All semaphores of a node (mutexes and elections are some), sorted by name.

        Raises:
            NodeNotFound: there is no such node.
        """
        rules.check_path(path)
        engine = await self._opened()
        return await engine.list_semaphores(path, owners=owners, waiters=waiters)

    async def describe_semaphore(
        self, name: str, path: str = DEFAULT_NODE, *, owners: bool = True, waiters: bool = True
    ) -> SemaphoreDescription:
        """A semaphore as it is now, without a session.

        Raises:
            NodeNotFound, SemaphoreNotFound: there is none.
        """
        rules.check_name(name, path)
        for each in await self.list_semaphores(path, owners=owners, waiters=waiters):
            if each.name == name:
                return each
        raise SemaphoreNotFound(f"there is no {name!r} on {path}", node=path, name=name)

    async def list_sessions(self, path: str = DEFAULT_NODE) -> Sequence[SessionDescription]:
        """All sessions of a node, sorted by id. Raises `NodeNotFound`."""
        rules.check_path(path)
        return await (await self._opened()).list_sessions(path)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session as if it had expired; false when there was none."""
        rules.check_path(path)
        return await (await self._opened()).end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Take one request out of a queue; false when there was none.

        Its owner learns it (`LeaseLost`); until the news arrives it believes that it holds.
        """
        rules.check_path(path)
        rules.check_name(name, path)
        return await (await self._opened()).evict(path, name, order_id)

    # What happens

    def events(self, size: int = 1024) -> EventStream:
        """What happens to this client's sessions and leases from now on (`tenure.events`).

        Args:
            size: how many events wait for a slow reader; then the oldest are dropped.
        """
        if size < 1:
            raise InvalidArgument(f"a stream of events holds at least 1, not {size}")
        stream = EventStream(size, self._forget_stream)
        self._streams.append(stream)
        return stream

    def _forget_stream(self, stream: EventStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)


class _ImplicitSession:
    """The session behind `Client.mutex` and its like: attached on first use, anew once over."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session: Session | None = None
        self._attaching: asyncio.Task[Session] | None = None

    async def _obtain(self) -> Session:
        session = self._session
        if session is not None and session._proven():
            return session._alive()
        client = self._client
        await client._opened()
        if self._attaching is None:
            self._attaching = client._spawn(self._attach())
        return await asyncio.shield(self._attaching)

    async def _attach(self) -> Session:
        try:
            self._session = await self._client.session()
            return self._session
        finally:
            self._attaching = None


class Attempts:
    """The loop of `Client.sessions`."""

    def __init__(self, attach: Callable[[], Once[Session]]) -> None:
        self._attach = attach
        self._attempt: Attempt | None = None

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._attempt is not None and not self._attempt._again:
            raise StopAsyncIteration
        self._attempt = Attempt(self._attach())
        return self._attempt


class Attempt:
    """One attempt of `Client.sessions`: a session's block that may be repeated."""

    def __init__(self, session: Once[Session]) -> None:
        self._attaching = session
        self._session: Session
        self._again = False

    def __del__(self) -> None:
        self._attaching.close()

    async def __aenter__(self) -> Session:
        self._session = await self._attaching
        return await self._session.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            await self._session.__aexit__(kind, error, trace)
        except SessionExpired as expired:
            error = expired
            if not self._is_expiry(error):
                raise
        if error is None or self._session._state != "expired" or not self._is_expiry(error):
            return False
        self._again = True
        return True

    def _is_expiry(self, error: BaseException) -> bool:
        """Whether the error is the expiry of this attempt's session, and nothing else."""
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_expiry(each) for each in error.exceptions)
        ended = self._session._ended
        return isinstance(error, SessionExpired | LeaseLost) and error.__cause__ is ended


def _check_policy(on_loss: Literal["cancel", "exit"] | Callable[[LeaseLost], object]) -> None:
    if on_loss not in ("cancel", "exit") and not callable(on_loss):
        raise InvalidArgument(
            f"on_loss is 'cancel', 'exit' or a callable that takes the LeaseLost, not {on_loss!r}"
        )
