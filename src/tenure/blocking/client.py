"""The mirror of `tenure._client.client`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar, overload

from tenure._client import client as twins
from tenure._client.client import DEFAULT_WINDOW
from tenure._client.leading import Retry, Supervision, pause
from tenure._client.loss import OnLoss
from tenure._client.nodes import Nodes
from tenure._client.scope import note_failure
from tenure._client.sessions import path_and_work
from tenure.blocking.election import Election, Leadership
from tenure.blocking.mirror import mirrors
from tenure.blocking.mutex import Mutex
from tenure.blocking.portal import the_portal
from tenure.blocking.runs import Jobs
from tenure.blocking.semaphore import Semaphore
from tenure.blocking.session import Attempts, Session, abandon
from tenure.blocking.watch import EventStream
from tenure.clock import Clock
from tenure.durations import Duration
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["Client", "connect"]

T = TypeVar("T")


def connect(
    url: str | None = None, *, clock: Clock | None = None, identify: bool | None = None
) -> Client:
    """A client of the store at `url`, for threads.

    ``with tenure.blocking.connect(url) as client`` closes it at the end of the block. Otherwise
    it connects on first use, and `Client.close` closes it. One background thread serves all
    clients of the process, from the first `connect` until the last is closed; while it runs,
    `sys.setswitchinterval` is at most 0.0005 s.

    Args:
        url: ``memory://``, ``sqlite:///jobs.db``, ...; without one, `default_url`.
        clock: where time comes from, for tests.
        identify: whether sessions carry the host, the process id and the name of this program;
            ``None``: unless the environment says ``TENURE_IDENTIFY=0``.

    Raises:
        InvalidArgument: the URL is wrong.
        Unsupported: no engine is installed for its scheme, or threads have been replaced with
            greenlets (gevent, eventlet).
        Misuse: it is called by a callback on the background thread.
    """
    portal = the_portal()
    portal.check_caller()
    twin = twins.connect(url, clock=clock, identify=identify)
    client = Client(portal, twin)
    portal.serve(twin)
    return client


@mirrors(Nodes)
@mirrors(twins.Client)
class Client(Jobs[twins.Client]):
    """`tenure.Client`, for threads: any number of them may use it at once."""

    __slots__ = ()

    @property
    def clock(self) -> Clock:
        """What its deadlines are measured on."""
        return self._twin.clock

    @property
    def url(self) -> str:
        return self._twin.url

    @property
    def capabilities(self) -> Capabilities:
        return self._twin.capabilities

    @property
    def guarantees(self) -> str:
        return self._twin.guarantees

    def __enter__(self) -> Client:
        try:
            self._portal.call(self._twin.__aenter__)
        except BaseException as error:
            try:
                self.close()
            except Exception as failure:
                note_failure(error, failure, f"closing the client of {self.url}")
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._portal.leave(self._twin.__aexit__, kind, error, trace)
        finally:
            self._portal.let_go(self._twin)

    def close(self) -> None:
        try:
            self._portal.give_back(self._twin.aclose)
        finally:
            self._portal.let_go(self._twin)

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
    ) -> Session:
        return self._portal.obtain(
            Session,
            partial(abandon, detach=resume is not None),
            self._twin.session,
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
            resumable=resumable,
            resume=resume,
            assume_dead=assume_dead,
        )

    def sessions(
        self,
        path: str = DEFAULT_NODE,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> Attempts:
        attempts = self._twin.sessions(
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
        )
        return Attempts(self._portal, attempts)

    @overload
    def run(
        self,
        work: Callable[[Session], T],
        /,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> T: ...

    @overload
    def run(
        self,
        path: str,
        work: Callable[[Session], T],
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> T: ...

    def run(
        self,
        path: str | Callable[[Session], T],
        work: Callable[[Session], T] | None = None,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
    ) -> T:
        path, work = path_and_work(path, work)
        result: list[T] = []
        for attempt in self.sessions(
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
        ):
            with attempt as session:
                result[:] = [work(session)]
        return result[0]

    def lead(
        self,
        name: str,
        work: Callable[[Leadership], T],
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

        ::

            def schedule(leadership):
                for job in queue():
                    leadership.check()  # raises LeaseLost: a thread cannot be cancelled
                    start(job, leadership.fencing_token)

            client.lead("scheduler", schedule, data=b"10.0.0.7:80")

        A loss, an unreachable store and an error of the work are logged; the leadership is
        resigned, and the next campaign begins after a pause of 1 to 60 seconds. Closing the
        client ends a campaign and a pause with `SessionClosed`.

        Args:
            name: the election.
            work: called with each leadership, in the calling thread.
            path: the election's node.
            data: what observers see of the leader.
            recovery_window, description, on_loss, max_stall: of the sessions, as for `session`.
            retry: whether an error of the work is retried; a callable decides for each error.

        Returns:
            what `work` returns. A work that returns resigns and ends the call.

        Raises:
            Exception: of the work, where `retry` says no.
            NodeNotFound, InvalidArgument, AuthenticationFailed, Unsupported: the campaign cannot
                succeed.
            SessionClosed: the client was closed.
        """
        supervision = Supervision(self.clock, path, name, retry)
        while True:
            try:
                with (
                    self.session(
                        path,
                        recovery_window=recovery_window,
                        description=description,
                        on_loss=on_loss,
                        max_stall=max_stall,
                    ) as session,
                    session.election(name).campaign(data) as leadership,
                ):
                    supervision.begin(leadership)
                    result = work(leadership)
                    supervision.end()
                return result
            except Exception as error:
                length = supervision.failed(error)
            self._portal.call(pause, self._twin, length)

    def mutex(self, name: str) -> Mutex:
        return Mutex(self._portal, self._twin.mutex(name))

    def semaphore(self, name: str, *, ephemeral: bool = False) -> Semaphore:
        return Semaphore(self._portal, self._twin.semaphore(name, ephemeral=ephemeral))

    def election(self, name: str) -> Election:
        return Election(self._portal, self._twin.election(name))

    def events(self, size: int = 1024) -> EventStream:
        return EventStream(self._portal, self._portal.run(self._twin.events, size))

    # Nodes

    def create_node(
        self, path: str, config: NodeConfig | None = None, *, exist_ok: bool = False
    ) -> None:
        self._portal.call(self._twin.create_node, path, config, exist_ok=exist_ok)

    def alter_node(self, path: str, config: NodeConfig) -> None:
        self._portal.call(self._twin.alter_node, path, config)

    def drop_node(self, path: str, *, force: bool = False) -> None:
        self._portal.call(self._twin.drop_node, path, force=force)

    def describe_node(self, path: str = DEFAULT_NODE) -> NodeDescription:
        return self._portal.call(self._twin.describe_node, path)

    def list_nodes(self) -> Sequence[str]:
        return self._portal.call(self._twin.list_nodes)

    def list_semaphores(
        self, path: str = DEFAULT_NODE, *, owners: bool = False, waiters: bool = False
    ) -> Sequence[SemaphoreDescription]:
        return self._portal.call(self._twin.list_semaphores, path, owners=owners, waiters=waiters)

    def describe_semaphore(
        self, name: str, path: str = DEFAULT_NODE, *, owners: bool = True, waiters: bool = True
    ) -> SemaphoreDescription:
        return self._portal.call(
            self._twin.describe_semaphore, name, path, owners=owners, waiters=waiters
        )

    def list_sessions(self, path: str = DEFAULT_NODE) -> Sequence[SessionDescription]:
        return self._portal.call(self._twin.list_sessions, path)

    def end_session(self, path: str, session_id: int) -> bool:
        return self._portal.call(self._twin.end_session, path, session_id)

    def evict(self, path: str, name: str, order_id: int) -> bool:
        return self._portal.call(self._twin.evict, path, name, order_id)
