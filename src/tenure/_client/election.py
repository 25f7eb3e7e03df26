"""An election: one leader at a time, which every client can observe. It needs no set-up.

It is a lasting semaphore of limit 1, created when missing. The candidates are its requests, the
leader is its owner, and the leader's data is the owner's data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tenure._client.acquire import acquire
from tenure._client.handles import AsyncHandle, call_site
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import RequestOptions
from tenure._client.source import SessionSource
from tenure._client.ticket import Ticket, recover
from tenure._client.watch import Watch, described_now
from tenure.core import rules
from tenure.durations import Duration, timeout_seconds
from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound
from tenure.model import Leader, SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.contact import Contact
    from tenure._client.listeners import Listeners
    from tenure._client.session_core import SessionCore


class Leadership(Lease):
    """The lease of a leader. `Election.campaign` returns one; its fencing token is the term."""

    __slots__ = ()

    async def proclaim(self, data: bytes) -> None:
        """Replace the leader's data; observers see it at once.

        Raises:
            LeaseLost, LeaseReleased: this is no longer the leader.
        """
        await self.update(data=data)

    async def resign(self) -> None:
        """Stop leading; the next candidate leads. Safe to call twice.

        Raises:
            LeaseLost: it was lost before.
        """
        await self.release()


class Election(AsyncHandle):
    """An election on a node.

    Example::

        election = session.election("primary")
        async with election.campaign(b"10.0.0.7:80") as leadership:
            await leadership.proclaim(b"10.0.0.7:81")
            await work(leadership.fencing_token)

    Attributes:
        name: 1 to 1,024 bytes.
    """

    def __init__(self, source: SessionSource, name: str) -> None:
        rules.check_name(name)
        self.name = name
        self._source = source

    def __repr__(self) -> str:
        return f"<Election {self.name!r}>"

    def campaign(
        self,
        data: bytes = b"",
        *,
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Leadership]:
        """Become a candidate, and later the leader: ``async with`` it, or ``await`` it.

        Args:
            data: the leader's data, visible to observers; an address, for example.
            timeout: seconds to wait for the leadership; ``None`` waits until elected.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation.

        Raises:
            AcquireTimeout: not elected in time.
            InvalidArgument: a semaphore of another limit, or a mutex, has that name.
            Deadlock: this wait is the victim of a deadlock, in a session that was opened with
                ``on_deadlock="raise"``.
            SelfDeadlock: the program leads this election itself, and no other task is known that
                could resign (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        options = self._options(data, on_loss, stop_time)
        source = _Prepared(self._source, self._prepare)
        limit = timeout_seconds(timeout)
        return Once(options, acquire, source, options, limit, call_site())

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Leadership] | None:
        """Claim the first candidacy in this election of a resumed session, or return ``None``.

        Each candidacy is returned once. The ticket keeps it, and can `wait` for it or withdraw it.

        Args:
            on_loss: reaction to a loss, besides raising it, as for `campaign`.
            stop_time: seconds that the work needs to stop, as for `campaign`.
        """
        return recover(self._source, self._options(b"", on_loss, stop_time), call_site())

    async def describe(
        self, *, owners: bool = False, waiters: bool = False
    ) -> SemaphoreDescription:
        """Read the election's state: a semaphore of limit 1, empty before the first campaign.

        Args:
            owners: include the leader.
            waiters: include the waiting candidates, in their order.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: a semaphore of another limit, or a mutex, has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return await self._source.contact.answered(
            f"election {self.name!r} on {self._source.node}",
            self._described_now(owners=owners, waiters=waiters),
        )

    async def leader(self) -> Leader | None:
        """Read the current leader, or ``None``. A short form of `describe`.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: a semaphore of another limit, or a mutex, has that name.
        """
        return await self._source.contact.answered(
            f"election {self.name!r} on {self._source.node}", self._leader_now()
        )

    async def _leader_now(self) -> Leader | None:
        session = await self._source.obtain()
        return _leader(session, await self._described(session, owners=True, waiters=False))

    async def _described_now(self, *, owners: bool, waiters: bool) -> SemaphoreDescription:
        session = await self._source.obtain()
        return await self._described(session, owners=owners, waiters=waiters)

    async def _described(
        self, session: SessionCore, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        try:
            described = await described_now(
                session, self.name, ephemeral=False, owners=owners, waiters=waiters
            )
        except SemaphoreNotFound:  # there was no campaign yet
            return SemaphoreDescription(self.name, b"", 1, 0, ephemeral=False, waiting=0)
        rules.check_kind(False, described.ephemeral, session.node, self.name)
        if described.limit != 1:
            raise self._not_an_election(session.node, described.limit)
        return described

    def observe(self) -> Watch[Leader | None]:
        """Watch the leader: the current one, then each change of the leader or of its data.

        ``None`` means that there is no leader.
        """
        return Watch(
            self._source,
            self.name,
            data=False,
            owners=True,
            view=_leader,
            prepare=self._prepare,
        )

    def _options(
        self, data: bytes, on_loss: OnLoss | None, stop_time: Duration
    ) -> RequestOptions[Leadership]:
        return RequestOptions(
            "election",
            self.name,
            1,
            data,
            ephemeral=False,
            on_loss=on_loss,
            stop_time=stop_time,
            handle=Leadership,
        )

    async def _prepare(self, session: SessionCore) -> None:
        """Create the semaphore if it is missing, and check that its limit is 1.

        Candidates share a pending creation. Otherwise those that try again and again would fill the
        memory during a long outage.
        """
        name, creations = self.name, session.creations
        creating = creations.get(name)
        if creating is None:
            creation = session.engine.create_semaphore(name, 1, b"", exist_ok=True)
            creating = creations[name] = session.client.tasks.begin(creation)
            creating.add_done_callback(lambda _: creations.pop(name))
        try:
            await session.race(session.client.outcome(creating))
        except SemaphoreExists as error:
            raise self._not_an_election(session.node, error.limit) from None

    def _not_an_election(self, node: str, limit: int | None) -> InvalidArgument:
        return InvalidArgument(
            f"{self.name!r} on {node} is a semaphore of limit {limit}, and is used here as an "
            "election (a semaphore of limit 1); use another name for one of the two",
            node=node,
            name=self.name,
        )


class _Prepared:
    """A source of sessions on whose node the election's semaphore is known to exist."""

    def __init__(
        self, source: SessionSource, prepare: Callable[[SessionCore], Awaitable[None]]
    ) -> None:
        self._source = source
        self._prepare = prepare

    @property
    def node(self) -> str:
        return self._source.node

    @property
    def contact(self) -> Contact:
        return self._source.contact

    @property
    def listeners(self) -> Listeners:
        return self._source.listeners

    def ready(self) -> None:
        self._source.ready()  # for its errors: preparing needs an answer from the store

    def current(self) -> SessionCore | None:
        return self._source.current()

    async def obtain(self) -> SessionCore:
        session = await self._source.obtain()
        await self._prepare(session)
        return session


def _leader(session: SessionCore, described: SemaphoreDescription) -> Leader | None:
    if not described.owners:
        return None
    owner = described.owners[0]
    return Leader(
        owner.data,
        owner.session_id == session.id,
        owner.order_id,
        host=owner.host,
        pid=owner.pid,
        program=owner.program,
        description=owner.session_description,
    )
