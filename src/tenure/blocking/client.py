"""The client, for threads: its life cycle, and the calls that run a program's work.

`tools.sync` generates its other calls, in `tenure.blocking.calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Never, TypeVar

from tenure._client import client as async_client
from tenure._client.blocked import OnDeadlock
from tenure._client.client import client_anchor, client_core
from tenure._client.client_core import ClientCore
from tenure._client.habits import unknown_argument
from tenure._client.handles import note_failure
from tenure._client.leading import Retry, Supervision, pause
from tenure._client.loss import OnLoss
from tenure._client.sessions import DEFAULT_WINDOW, path_and_work
from tenure._client.signals import close_in_time, release_on
from tenure._client.source import ClientAnchor
from tenure.blocking.calls import ClientCalls
from tenure.blocking.covered import covered
from tenure.blocking.decorators import Decorators
from tenure.blocking.lease import Leadership
from tenure.blocking.portal import Error, Kind, Portal, Trace, the_portal
from tenure.blocking.session import Session
from tenure.blocking.several import Several
from tenure.blocking.wrapper import insist, releasing
from tenure.clock import Clock
from tenure.durations import Duration
from tenure.model import DEFAULT_NODE

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    clock: Clock | None = None,
    identify: bool | None = None,
    reaper: bool | None = None,
    **_unknown: Never,
) -> Client:
    """Return a client of the store at `url`, for threads.

    ``with tenure.blocking.connect(url) as client`` closes it at the end of the block. Otherwise
    it connects on first use, and `Client.close` closes it. One background thread serves all
    clients of the process, from the first `connect` until the last is closed; while it runs,
    `sys.setswitchinterval` is at most 0.0005 s.

    Example::

        with tenure.blocking.connect("sqlite:///jobs.db") as client:
            with client.mutex("nightly").lock(timeout=5) as lease:
                work(lease.fencing_token)

    Args:
        url: ``memory://``, ``sqlite:///jobs.db``, ...; without one, `default_url`.
        clock: the source of time, for tests.
        identify: whether sessions carry the host, the process id and the name of this program.
            ``None`` means yes, unless ``TENURE_IDENTIFY=0`` is set in the environment.
        reaper: whether a small process ends the sessions of this program after its death, as in
            `tenure.connect`.

    Raises:
        InvalidArgument: the URL is wrong.
        Unsupported: no engine is installed for its scheme, or threads have been replaced by
            eventlet, or by gevent after the first use.
        Misuse: it is called by a callback on the background thread.
    """
    if _unknown:
        raise unknown_argument("connect", _unknown)
    portal = the_portal()
    portal.check_caller()
    wrapped = async_client.connect(url, clock=clock, identify=identify, reaper=reaper)
    core, anchor = client_core(wrapped), client_anchor(wrapped)
    return _served(Client(portal, wrapped), portal, core, anchor)


@covered
def _served(client: Client, portal: Portal, core: ClientCore, anchor: ClientAnchor) -> Client:
    """Have the background thread run until the client is closed."""
    try:
        portal.serve(core)
        anchor.closed_by(partial(portal.close_dropped, core))
        return client
    except BaseException as error:
        insist(error, portal.discard, (core,))
        raise


class Client(ClientCalls, Decorators, Several):
    """A program's access to one store. `connect` makes one. Any number of threads may share it.

    Example::

        client.create_node("/billing")
        with client.session("/billing") as session:
            with session.mutex("invoices").lock() as lease:
                work(lease.fencing_token)
    """

    __slots__ = ()

    @covered
    def __enter__(self) -> Client:
        """Connect."""
        try:
            self._portal.call(self._wrapped.__aenter__)
            return self
        except BaseException as error:
            insist(error, self._close_because, (error,))
            raise

    def _close_because(self, error: BaseException) -> None:
        try:
            self.close()
        except Exception as failure:
            note_failure(error, failure, f"closing the client of {self.url}")

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the client and its sessions."""
        portal = self._portal

        async def leave(kind: Kind, error: Error, trace: Trace) -> None:
            """Close the client at the end of the block."""
            wrapped = self._wrapped
            await portal.close(client_core(wrapped), partial(wrapped.__aexit__, kind, error, trace))

        try:
            portal.leave(leave, kind, error, trace)
        finally:
            portal.wait_for_end()

    @releasing
    def close(self) -> None:
        """Close every session, then the connection. Safe to call twice, and when interrupted.

        Leases that threads are inside are lost: the next call in such a block raises, and so does
        its end.

        Raises:
            EngineError: the store failed; it ends the sessions when their recovery windows have
                passed.
        """
        portal = self._portal
        try:
            portal.release(portal.close, client_core(self._wrapped), self._wrapped.aclose)
        finally:
            portal.wait_for_end()

    def release_on_signals(self, *signals: int) -> None:
        """Close the client when SIGTERM arrives, and then let the signal take its action.

        So the leases of a program that is stopped, by a deployment for example, pass on at once.
        Otherwise a networked store keeps them for the recovery window. The action is the program's
        own handler, or the end of the program (exit status 143 in a shell). It waits for 5 seconds
        at most, and a second signal does not wait. A handler that is installed later, as by a
        server's framework, replaces this one. An ignored signal remains ignored.

        Other threads run on while the client closes; their next calls raise. Ctrl-C needs no call:
        `KeyboardInterrupt` leaves the blocks of the main thread, and the exit closes the client.

        Example::

            with tenure.blocking.connect("sqlite:///jobs.db") as client:
                client.release_on_signals()
                with client.mutex("nightly").lock() as lease:
                    work(lease.fencing_token)

        Args:
            *signals: numbers of the signals instead of SIGTERM, from the module ``signal``.

        Raises:
            Misuse: it is called in another thread than the main thread, which handles signals.
            InvalidArgument: a signal cannot be handled.
        """
        core = client_core(self._wrapped)
        core.check_process()
        close = partial(self._portal.begin_closing, core, partial(close_in_time, core))
        release_on(core, signals, close, waits=True)

    def run(
        self,
        path: str | Callable[[Session], T],
        work: Callable[[Session], T] | None = None,
        *,
        recovery_window: Duration = DEFAULT_WINDOW,
        description: str = "",
        on_loss: OnLoss = "cancel",
        max_stall: Duration | None = None,
        on_deadlock: OnDeadlock = "wait",
    ) -> T:
        """Call `work` with a session, and again with a new one whenever the session expires.

        ``client.run(work)`` uses the default node, ``client.run("/billing", work)`` another one.
        The other arguments are those of `session`.

        Returns:
            The result of `work`.
        """
        path, work = path_and_work(path, work)
        result: list[T] = []
        for attempt in self.sessions(
            path,
            recovery_window=recovery_window,
            description=description,
            on_loss=on_loss,
            max_stall=max_stall,
            on_deadlock=on_deadlock,
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

        Example::

            def schedule(leadership):
                leadership.check()  # raises LeaseLost: a thread cannot be cancelled
                work(leadership.fencing_token)

            client.lead("scheduler", schedule, data=b"10.0.0.7:80")

        A loss, an unreachable store and an error of the work are logged; the leadership is
        resigned, and the next campaign begins after a pause of 1 to 60 seconds. Closing the
        client ends a campaign and a pause with `SessionClosed`.

        Args:
            name: the election.
            work: called with each leadership, in the calling thread.
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
            self._portal.call(pause, client_core(self._wrapped), length)
