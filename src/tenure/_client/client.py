"""A client: one program's access to one store, and its operations without a session.

A client owns what outlives a single call:

* the engine;
* the sessions and the implicit session (`sessions`);
* the keeper that renews the sessions, the listeners to events, and the tasks that finish operations
  of cancelled callers (`tasks`).

`Client.aclose` ends all of them.

**Without a session** are the operations on nodes and their contents. A read raises
`EngineUnavailable` when the store does not answer within the client's answer timeout.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar

from tenure._client.blocked import (
    Describe,
    OnDeadlock,
    read_deadlocks,
    read_queues,
    read_tasks,
)
from tenure._client.client_core import ClientCore
from tenure._client.decorators import Decorators
from tenure._client.election import Leadership
from tenure._client.habits import unknown_argument
from tenure._client.handles import AsyncHandle, call_site, note_failure
from tenure._client.leading import Retry, lead
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.rate import Rate
from tenure._client.session import Session
from tenure._client.session_handle import ResumeToken
from tenure._client.sessions import (
    DEFAULT_WINDOW,
    Attempts,
    ImplicitSession,
    SessionOptions,
    attach,
    attach_anchored,
    path_and_work,
)
from tenure._client.several import Several
from tenure._client.signals import close_on_loop, release_on
from tenure._client.source import ClientAnchor
from tenure.clock import Clock, SystemClock
from tenure.core import refusals, rules
from tenure.core.deadlocks import WAITS, deadlocks, shows_waits, standing, unsupported
from tenure.durations import Duration
from tenure.engines import connect_engine, split_client_parameters, state_home
from tenure.engines.contract import Engine
from tenure.errors import InvalidArgument, Misuse
from tenure.identity import identify_by_default, semaphore_with_identities, session_with_identity
from tenure.model import (
    DEFAULT_NODE,
    BlockedTask,
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
    WaitGraph,
)
from tenure.reaper.program import Registrations

if TYPE_CHECKING:
    from tenure.events import EventStream


T = TypeVar("T")

MOST_IN_GRAPH = 200
"""Greatest number of semaphores that one `Client.waits` describes."""


class Nodes:
    """Operations on nodes, a part of `Client`."""

    _core: ClientCore

    async def _read(self, subject: str, reading: Callable[[Engine], Awaitable[T]]) -> T:
        """Await a read of the engine, within the client's answer timeout."""

        async def read() -> T:
            return await reading(await self._core.opened())

        return await self._core.contact.answered(subject, read())

    async def create_node(
        self, path: str, config: NodeConfig | None = None, *, exist_ok: bool = False
    ) -> None:
        """Create a node. An existing node is not changed.

        Raises:
            NodeExists: it exists, and `exist_ok` is false.
        """
        rules.check_path(path)
        engine = await self._core.opened()
        await engine.create_node(path, config or NodeConfig(), exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change a node's configuration; unset fields are left alone. Raises `NodeNotFound`."""
        rules.check_path(path)
        await (await self._core.opened()).alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool = False) -> None:
        """Drop a node with its semaphores and detached sessions.

        Args:
            path: the node.
            force: drop it even when sessions are attached; they expire.

        Raises:
            NodeNotFound: the node does not exist.
            NodeBusy: sessions are attached, and `force` is false.
            InvalidArgument: the path is ``/default``.
        """
        rules.check_path(path)
        await (await self._core.opened()).drop_node(path, force=force)

    async def describe_node(self, path: str = DEFAULT_NODE) -> NodeDescription:
        """Describe a node. Raises `NodeNotFound`."""
        rules.check_path(path)
        return await self._read(f"node {path}", lambda engine: engine.describe_node(path))

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        return await self._read("the list of nodes", lambda engine: engine.list_nodes())

    async def list_semaphores(
        self, path: str = DEFAULT_NODE, *, owners: bool = False, waiters: bool = False
    ) -> Sequence[SemaphoreDescription]:
        """Return all semaphores of a node, including mutexes and elections, sorted by name.

        That in which clients publish their waits, ``:tenure:waits``, is left out.

        Raises:
            NodeNotFound: there is no such node.
        """
        rules.check_path(path)
        found = await self._read(
            f"the semaphores on {path}",
            lambda engine: engine.list_semaphores(path, owners=owners, waiters=waiters),
        )
        return [semaphore_with_identities(each) for each in found if each.name != WAITS]

    async def describe_semaphore(
        self, name: str, path: str = DEFAULT_NODE, *, owners: bool = True, waiters: bool = True
    ) -> SemaphoreDescription:
        """Describe a semaphore, without a session.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist.
        """
        rules.check_name(name, path)
        rules.check_path(path)
        found = await self._read(
            f"{name!r} on {path}",
            lambda engine: engine.describe_semaphore(path, name, owners=owners, waiters=waiters),
        )
        return semaphore_with_identities(found)

    async def waits(self, name: str, path: str = DEFAULT_NODE) -> WaitGraph:
        """Return the reason why the waiters of a name wait.

        The graph has the holders and the waiters of the name, what their tasks wait for in turn,
        and so on, and whether their sessions live. A task is known to wait if it is inside the
        block of a lease or ticket, or waits for several tokens, and has waited for about a second.
        `WaitGraph.chain` returns the part of the graph that explains one request.

        Example::

            async with client.mutex("invoices").lock():
                graph = await client.waits("invoices")
            for root in graph.roots:
                print(root.program, root.pid, root.host, root.since)

        Args:
            name: the name of a mutex, semaphore or election.
            path: the path of its node.

        Raises:
            NodeNotFound: the node does not exist.
            SemaphoreNotFound: no semaphore has that name. A mutex without a holder or waiter does
                not exist.
            Unsupported: the store does not show which task waits for which.
        """
        rules.check_name(name, path)
        rules.check_path(path)
        return await self._read(
            f"the waits for {name!r} on {path}", partial(_read_graph, path=path, name=name)
        )

    async def deadlocks(self, path: str = DEFAULT_NODE) -> Sequence[tuple[BlockedTask, ...]]:
        """Return the deadlocks of a node, each with the oldest wait first.

        A deadlock is a set of tasks that wait for each other. None of them can be granted what it
        waits for, even if all other programs release everything. A task is known to wait if it is
        inside the block of a lease or ticket, or waits for several tokens, and has waited for about
        a second.

        Raises:
            NodeNotFound: the node does not exist.
            Unsupported: the store does not show which task waits for which.
        """
        rules.check_path(path)
        return await self._read(f"the deadlocks on {path}", partial(_read_deadlocks, path=path))

    async def list_sessions(self, path: str = DEFAULT_NODE) -> Sequence[SessionDescription]:
        """Return all sessions of a node, sorted by id. Raises `NodeNotFound`."""
        rules.check_path(path)
        found = await self._read(
            f"the sessions on {path}", lambda engine: engine.list_sessions(path)
        )
        return [session_with_identity(each) for each in found]

    async def end_session(self, path: str, session_id: int) -> bool:
        """Expire a session; return false if it does not exist."""
        rules.check_path(path)
        return await (await self._core.opened()).end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Take one request out of a queue; return false if it is not there.

        Its owner loses the lease (`LeaseLost`) when the notification arrives, at the latest when it
        releases. Until then it still considers the lease held.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist. A mutex
                without a holder or waiter does not exist.
        """
        rules.check_path(path)
        rules.check_name(name, path)
        return await (await self._core.opened()).evict(path, name, order_id)


def _describe_on(engine: Engine, path: str) -> Describe:
    """Return the function that describes the semaphores of a node."""
    if not shows_waits(engine.capabilities):
        raise unsupported(engine.url, path)

    async def describe(name: str) -> SemaphoreDescription:
        found = await engine.describe_semaphore(path, name, owners=True, waiters=True)
        return semaphore_with_identities(found)

    return describe


async def _read_graph(engine: Engine, *, path: str, name: str) -> WaitGraph:
    describe = _describe_on(engine, path)
    tasks = await read_tasks(describe)
    queues, complete = await read_queues(describe, [name], tasks, MOST_IN_GRAPH)
    if name not in queues:
        raise refusals.semaphore_not_found(path, name)
    there = {
        (queue.name, each.order_id): each.session_id
        for queue in queues.values()
        for each in (*queue.owners, *queue.waiters)
    }
    reached = set(there.values())
    found = await engine.list_sessions(path)
    known = standing(tasks, queues)
    return WaitGraph(
        path,
        name,
        tuple(queues.values()),
        tuple(known),
        tuple(session_with_identity(each) for each in found if each.id in reached),
        tuple(deadlocks(known, queues)),
        complete,
    )


async def _read_deadlocks(engine: Engine, *, path: str) -> Sequence[tuple[BlockedTask, ...]]:
    return await read_deadlocks(_describe_on(engine, path))


def default_url() -> str:
    """Return the URL that `connect` and the command line use when none is given.

    ``TENURE_URL`` if set, else the user's own SQLite file, in ``XDG_STATE_HOME`` or
    ``~/.local/state``.
    """
    url = os.environ.get("TENURE_URL")
    if url:
        return url
    from urllib.parse import quote  # slow to import, and most programs name their store

    return "sqlite:///" + quote(os.path.join(state_home(os.environ), "tenure", "tenure.db"))


def connect(
    url: str | None = None,
    *,
    clock: Clock | None = None,
    identify: bool | None = None,
    reaper: bool | None = None,
    **_unknown: Never,
) -> Client:
    """Return a client of the store at `url`.

    ``async with tenure.connect(url) as client`` closes it at the end of the block. Otherwise
    `Client.aclose` closes it: ``client = await tenure.connect(url)`` connects at once, and without
    ``await`` it connects on first use.

    Example::

        async with tenure.connect("sqlite:///jobs.db") as client:
            async with client.mutex("nightly").lock(timeout=5) as lease:
                await work(lease.fencing_token)

    Args:
        url: ``memory://``, ``sqlite:///jobs.db``, ...; without one, `default_url`.
        clock: the source of time, for tests.
        identify: whether sessions carry the host, the process id and the name of this program, so
            that `SessionDescription` and errors can name the holder. ``None`` means yes, unless
            ``TENURE_IDENTIFY=0`` is set in the environment.
        reaper: whether a small process beside this program waits for its death and then ends its
            sessions, so that the next holder follows at once instead of after the recovery window.
            ``None`` means what the URL says, else yes, for the stores that need it.

    Raises:
        InvalidArgument: the URL is wrong.
        Unsupported: no engine is installed for its scheme.
    """
    if _unknown:
        raise unknown_argument("connect", _unknown)
    clock = clock if clock is not None else SystemClock()
    if identify is None:
        identify = identify_by_default()
    url = default_url() if url is None else url
    engine = connect_engine(url, clock)
    _, given = split_client_parameters(url)
    if reaper is None:
        reaper = given.reaper is not False
    return Client(
        engine,
        clock,
        identify=identify,
        answer_timeout=given.answer_timeout,
        registrations=Registrations(url) if reaper else None,
    )


class Client(Nodes, Decorators, Several, AsyncHandle):
    """A program's access to one store. `connect` makes one. It belongs to one event loop.

    Example::

        await client.create_node("/billing")
        async with client.session("/billing") as session:
            async with session.mutex("invoices").lock() as lease:
                await work(lease.fencing_token)

    Attributes:
        clock: the clock of its deadlines.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        identify: bool = True,
        answer_timeout: float | None = None,
        registrations: Registrations | None = None,
    ) -> None:
        self.clock = clock
        self._core = ClientCore(
            engine,
            clock,
            identify=identify,
            answer_timeout=answer_timeout,
            registrations=registrations,
        )
        site = call_site(debug=_in_debug_mode())
        self._anchor = ClientAnchor(self._core, site)
        self._implicit = ImplicitSession(self._anchor)

    def __repr__(self) -> str:
        return f"<Client {self.url}{' (closed)' if self._core.closed else ''}>"

    @property
    def url(self) -> str:
        """URL of the store, without secrets."""
        return self._core.url

    @property
    def capabilities(self) -> Capabilities:
        """Features of the engine, and the facts that it reports."""
        return self._core.capabilities

    @property
    def guarantees(self) -> str:
        """Limits of this store's guarantees beyond those of every engine, in a few sentences.

        Empty if there are none.
        """
        return self._core.engine.guarantees

    # Opening and closing

    def __await__(self) -> Generator[Any, Any, Client]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Client:
        self._core.check_owner()
        try:
            await self._core.opened()
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
            EngineError: the store failed; it ends the sessions when their recovery windows have
                passed.
        """
        await self._core.aclose()

    def release_on_signals(self, *signals: int) -> None:
        """Close the client when SIGTERM arrives, and then let the signal take its action.

        So the leases of a program that is stopped, by a deployment for example, pass on at once.
        Otherwise a networked store keeps them for the recovery window. The action is the program's
        own handler, or the end of the program (exit status 143 in a shell). It waits for 5 seconds
        at most, and a second signal does not wait. A handler that is installed later, as by a
        server's framework, replaces this one. An ignored signal remains ignored.

        Blocks of leases are cancelled as by `aclose`. Ctrl-C needs no call: `asyncio.run` cancels
        the program's task, and the blocks release what they hold.

        Example::

            async with tenure.connect("sqlite:///jobs.db") as client:
                client.release_on_signals()
                async with client.mutex("nightly").lock() as lease:
                    await work(lease.fencing_token)

        Args:
            *signals: numbers of the signals instead of SIGTERM, from the module ``signal``.

        Raises:
            Misuse: it is called in another thread than the main thread, which handles signals, or
                outside of the client's event loop.
            InvalidArgument: a signal cannot be handled.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise Misuse("release_on_signals was called outside of an event loop") from None
        core = self._core
        core.check_owner()
        release_on(core, signals, partial(close_on_loop, core, loop), waits=False)

    # Sessions

    def session(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        on_deadlock: OnDeadlock = "wait",
        resumable: bool = False,
        resume: str | None = None,
        assume_dead: bool = False,
    ) -> Once[Session]:
        """Return a session: ``async with client.session("/billing") as session``, or await it.

        A session ends with its program, unless it is *resumable*: then it survives the death of the
        program, and a restart of the machine where the store does, for its recovery window. Another
        program takes it over with its `Session.resume_token`, and finds its requests in
        `Session.recovered`. The takeover waits until the former program has been notified, is known
        to be dead, or has been silent for the window, so that two programs never hold a lease at
        once.

        Args:
            path: the path of an existing node (`create_node`).
            recovery_window: seconds that the session survives without contact, 1 to 1,800: how long
                the store may be unreachable before leases are lost, and how long waiters wait for a
                holder that is stopped or cut off.
            description: the description that other clients see, at most 1,024 bytes, next to the
                host, the process id and the name of the program (`connect` says how to omit these).
                A longer description leaves less room for them.
            on_loss: reaction to the loss of one of its leases, besides raising it.
            max_stall: seconds that the event loop may be stuck before the session is no
                longer renewed; twice the window if ``None``.
            on_deadlock: ``"raise"`` looks for deadlocks among tasks that wait while they are inside
                leases: the youngest wait of those that raise gets `Deadlock`. ``"wait"`` waits.
            resumable: whether it can be resumed.
            resume: the token of the session to take over; its node, window and description stay the
                same.
            assume_dead: with `resume`, do not wait for proof that the former program has stopped.
                Unsafe: if that program only lost its connection, both hold the leases.

        Raises:
            NodeNotFound: there is no such node.
            SessionExpired: the session to resume has ended or never existed, or another program
                resumed it too.
            AuthenticationFailed: the token does not match the session: it is of another store, for
                example, that has a session of the same number.
            EngineUnavailable: the store cannot be reached.
            InvalidArgument: a path, a window or a description that no engine accepts, or an invalid
                resume token.
            Unsupported: the engine has no sessions that can be resumed, or does not show which
                request a task waits for.
        """
        options = SessionOptions.of(
            path, recovery_window, description, on_loss, max_stall, on_deadlock
        )
        if resume is not None:
            options = options.resuming(ResumeToken.parse(resume), assume_dead=assume_dead)
        elif resumable:
            options = options.resumable()
        return attach(self._anchor, options)

    def sessions(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        on_deadlock: OnDeadlock = "wait",
    ) -> Attempts:
        """Yield attempts, each with a session; a new attempt follows an expired session.

        Example::

            async for attempt in client.sessions():
                async with attempt as session:
                    async with session.mutex("job").lock():
                        await work()

        An attempt is repeated if and only if its session expired and its body raises
        `SessionExpired`, or `LeaseLost` caused by that, alone or as every leaf of an exception
        group. A normal end of the body ends the loop; any other exception propagates.

        The arguments are those of `session`.
        """
        options = SessionOptions.of(
            path, recovery_window, description, on_loss, max_stall, on_deadlock
        )
        return Attempts(partial(attach_anchored, self._anchor, options, call_site()))

    async def run(
        self,
        path: str | Callable[[Session], Awaitable[T]],
        work: Callable[[Session], Awaitable[T]] | None = None,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        on_deadlock: OnDeadlock = "wait",
    ) -> T:
        """Call `work` with a session, and again with a new one whenever the session expires.

        ``await client.run(work)`` uses the default node, ``await client.run("/billing", work)``
        another one. The other arguments are those of `session`; `sessions` has the rule for
        repeating.

        Returns:
            The result of `work`.
        """
        path, work = path_and_work(path, work)
        result: list[T] = []
        async for attempt in self.sessions(
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
            on_deadlock=on_deadlock,
        ):
            async with attempt as session:
                result[:] = [await work(session)]
        return result[0]

    async def lead(
        self,
        name: str,
        work: Callable[[Leadership], Awaitable[T]],
        *,
        path: str = DEFAULT_NODE,
        data: bytes = b"",
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        retry: Retry = True,
    ) -> T:
        """Campaign in an election, run `work` while leading, and campaign again after failures.

        Example::

            async def schedule(leadership):
                await work(leadership.fencing_token)

            await client.lead("scheduler", schedule, data=b"10.0.0.7:80")

        `work` is cancelled when the leadership is lost. A loss, an unreachable store and an error
        of the work are logged; the leadership is resigned, and the next campaign begins after a
        pause of 1 to 60 seconds. Cancelling the call resigns.

        Args:
            name: the election.
            work: called with each leadership.
            path: the election's node.
            data: the leader's data, visible to observers.
            recovery_window: seconds that a session survives without contact, as for `session`.
            description: the description that other clients see, as for `session`.
            on_loss: the reaction to a loss, as for `session`.
            max_stall: seconds for which the event loop may be stuck, as for `session`.
            retry: whether an error of the work is retried; a callable decides for each error.

        Returns:
            The result of `work`. When `work` returns, the leadership is resigned and the call ends.

        Raises:
            Exception: any error of the work for which `retry` says no.
            NodeNotFound, InvalidArgument, AuthenticationFailed, Unsupported: the campaign cannot
                succeed.
            SessionClosed: the client was closed.
        """
        options = SessionOptions.of(path, recovery_window, description, on_loss, max_stall)
        return await lead(self._anchor, options, name, work, data, retry)

    # Primitives of the implicit session on /default

    def _source(self) -> ImplicitSession:
        return self._implicit

    # Rates

    def rate(
        self,
        name: str,
        *,
        limit: int,
        per: Duration,
        burst: int | None = None,
        path: str = DEFAULT_NODE,
        **_unknown: Never,
    ) -> Rate:
        """Return the rate of that name: at most `limit` tokens in any `per` seconds.

        Example::

            openai = client.rate("openai", limit=100_000, per=60)
            await openai.take(1_200)

        Nothing is sent to the store. It needs no session.

        Args:
            name: the name, shared by all programs that share the limit.
            limit: greatest number of tokens in any period, 1 to 10^11.
            per: the period in seconds, 0.001 to 366 days.
            burst: greatest number of tokens at once, of which the limit is a multiple. It is the
                limit by default. A tenth of the limit is granted at most once in a tenth of the
                period.
            path: the path of its node.

        Raises:
            InvalidArgument: a value is invalid.
        """
        if _unknown:
            raise unknown_argument("rate", _unknown)
        return Rate(self._anchor, path, name, limit, per, burst)

    # Events

    def events(self, size: int = 1024) -> EventStream:
        """Return a stream of this client's events from now on (`tenure.events`).

        Example::

            async with client.events() as events:
                async with client.mutex("nightly").lock():
                    async for event in events:
                        if isinstance(event, tenure.events.Acquired):
                            break

        Args:
            size: number of events kept for a slow reader; beyond it the oldest are dropped.
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"a stream of events holds at least 1, not {size!r}")
        self._core.check_process()
        if self._core.closed:
            raise self._core.closed_error()
        return self._core.listeners.open(size)


def client_core(client: Client) -> ClientCore:
    """Return the state and services of a client, for tenure's other packages and its tests."""
    return client._core  # noqa: SLF001


def client_anchor(client: Client) -> ClientAnchor:
    """Return the anchor of a client, for `tenure.blocking`."""
    return client._anchor  # noqa: SLF001


def _in_debug_mode() -> bool:
    """Return true in asyncio's debug mode, also before a loop runs."""
    try:
        return asyncio.get_running_loop().get_debug()
    except RuntimeError:
        return sys.flags.dev_mode or bool(os.environ.get("PYTHONASYNCIODEBUG"))
