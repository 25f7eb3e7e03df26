"""The differences between the asynchronous classes and the sync wrappers that `sync` writes.

All else follows from the source: a public method of an asynchronous class is one of its wrapper,
with the same parameters and documentation. `RULES` chooses the body by the annotation of what it
returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wrapper:
    """One generated class.

    Attributes:
        name: of the class.
        module: the module of the asynchronous class, below `tenure`; with ":" and its name, if that
            differs.
        base: of the wrapper, hand-written.
        parts: other classes whose members it has: "module:class".
        attributes: annotations of plain attributes of the asynchronous object.
        by_hand: members that the base has.
        object: annotation of the asynchronous object, where it is narrower than the base's.
        makes: arguments of the asynchronous constructor, for a class that programs construct.
    """

    name: str
    module: str
    base: str
    parts: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    by_hand: frozenset[str] = frozenset()
    object: str = ""
    makes: str = ""


@dataclass(frozen=True)
class File:
    """One generated module."""

    title: str
    imports: str
    wrappers: tuple[Wrapper, ...]
    exports: tuple[str, ...] = ()
    after_imports: str = ""


RULES = {
    "Once[Lease]": ("Lease", "obtain:Lease:undo_acquire"),
    "Once[Leadership]": ("Leadership", "obtain:Leadership:undo_acquire"),
    "Once[Session]": ("Session", "obtain:Session:abandon_session"),
    "Once[Party]": ("Party", "obtain:Party:undo_acquire"),
    "Once[PoolItem]": ("PoolItem", "obtain:PoolItem:undo_acquire"),
    "PoolItem | None": ("PoolItem | None", "obtain:optional(PoolItem):undo_acquire"),
    "Once[RunLease | None]": ("RunLease | None", "obtain:optional(RunLease):undo_acquire"),
    "Lease | None": ("Lease | None", "obtain:optional(Lease):undo_acquire"),
    "Once[Ticket[Lease]]": (
        "Ticket[Lease]",
        "obtain:lambda portal, ticket: Ticket(portal, ticket, Lease):abandon_ticket",
    ),
    "Taken": ("Taken", "obtain:Taken:undo_take"),
    "Taken | None": ("Taken | None", "obtain:optional(Taken):undo_take"),
    "Ticket[Lease] | None": ("Ticket[Lease] | None", "ticket:Lease"),
    "Ticket[Leadership] | None": ("Ticket[Leadership] | None", "ticket:Leadership"),
    "EventStream": ("EventStream", "stream"),
    "L": ("L", "granted"),
}
"""What a method returns here, and how it is called, by its annotation there."""

WRAPPED = {"Attempts", "Changes", "Election", "Mutex", "Rate", "Semaphore", "States", "Watch"}
"""Classes whose objects a plain method of the asynchronous API returns."""

RELEASING = {"aclose", "detach", "refund", "release", "resign", "withdraw"}
"""Methods that are carried out even inside the block of a lost lease."""

UNDO = {"ClientCalls.session": "partial(abandon_session, detach=resume is not None)"}
"""How to undo an interrupted call, where the rule's function is not enough."""

DOCS = {
    "Lease": """A granted request.

    A thread cannot be cancelled. Inside the block of a lost lease, the next call of this library
    raises `LeaseLost`, except for calls that release something; so does the end of the block.
    Long computations should call `check` from time to time.

    A lease object is always truthy; read `held`.
    """,
    "Session": """A program's session on a node. `Client.session` makes one.

    ``with client.session(...) as session`` closes it at the end of the block. A session that is
    not entered is closed with `close`.

    A thread cannot be cancelled. Inside the block of an expired session, the next call of this
    library raises `SessionExpired`, except for calls that release something; so does the end of the
    block.
    """,
    "ClientCalls": "Calls of a client that the asynchronous one has, too.",
    "Watch": """A stream of states: an iterator and a context manager.

    It starts with the current state, and equal states are delivered once. It ends with
    `SemaphoreNotFound` when the semaphore is deleted (an ephemeral one is reported as empty while
    it has no requests), and with the session's error when the session ends. Any thread may close
    it, which ends the iteration.
    """,
}
"""Documentation that is not the asynchronous one in other words."""

PHRASES = (
    (r",? or ``?await``?\s+it(?=[.`])", ""),
    (r"\s*\(?, or (``)?await\1? it\)?", ""),
    (r"\basync(?= with| for)\s+|\basync (?=def)|\bawait\s+", ""),
    (r"from tenure\.recipes import", "from tenure.blocking.recipes import"),
    (r"\baclose\b", "close"),
    (r"\btask(s?)\b", r"thread\1"),
    (r"An async iterator and an async context", "An iterator and a context"),
    (r"an async iterator and an async context", "an iterator and a context"),
    (r"Awaited again", "Called again"),
    (r"\bwhen cancelled\b", "when interrupted"),
    (r"A party that is cancelled, or out", "A party that is interrupted, or out"),
    (r"Cancelled, it keeps", "Interrupted, it keeps"),
    (r"A `wait` that times out or is cancelled\b", "A `wait` that times out or is interrupted"),
    (r"a `wait` that times out or is cancelled\b", "a `wait` that times out or is interrupted"),
    (r"needs to stop after its\s+cancellation", "needs to stop after the loss"),
    (
        (
            r"Leases that other threads are inside are lost, and\s+their bodies cancelled; a block "
            r"that the\s+calling thread itself is inside raises at its end\."
        ),
        (
            "Leases that threads are inside are lost: the next call in such a\n        "
            "block raises, and so does its end."
        ),
    ),
)
"""Patterns in the asynchronous documentation, and what stands for them here."""

_COMMON = """
from tenure._client.loss import OnLoss
from tenure.durations import Duration
"""

_NAME = {"name": "str"}

FILES = {
    "blocking/lease.py": File(
        "Leases with their sessions, tickets for them, and elections.",
        _COMMON
        + """
from typing import Generic, TypeVar
from tenure._client import election as async_election
from tenure._client import runs as async_runs
from tenure._client.session_life import SessionState
from tenure.blocking.blocks import LeaseBlock, SessionBlock, TicketBlock, undo_acquire
from tenure.blocking.streams import Watch
from tenure.blocking.wrapper import SyncWrapper, obtaining, releasing, wrap
from tenure.errors import LeaseLost
from tenure.model import Leader, Recovered, SemaphoreDescription
""",
        (
            Wrapper(
                "SessionHandle",
                "_client.session_handle",
                "SessionBlock",
                attributes={"node": "str", "recovery_window": "float", "max_stall": "float"},
            ),
            Wrapper(
                "Lease",
                "_client.lease",
                "LeaseBlock",
                (),
                {"session": "SessionHandle", "name": "str"},
                frozenset({"check", "guard", "name", "session", "wait_lost"}),
            ),
            Wrapper("Leadership", "_client.election", "Lease", object="async_election.Leadership"),
            Wrapper("RunLease", "_client.runs", "Lease", object="async_runs.RunLease"),
            Wrapper("Ticket", "_client.ticket", "TicketBlock[L], Generic[L]"),
            Wrapper(
                "Election", "_client.election", "SyncWrapper[async_election.Election]", (), _NAME
            ),
        ),
        after_imports='L = TypeVar("L", bound="Lease")',
    ),
    "blocking/primitives.py": File(
        "Mutexes and semaphores.",
        _COMMON
        + """
from tenure._client import mutex as async_mutex
from tenure._client import semaphore as async_semaphore
from typing import Never
from tenure.blocking.blocks import AcquirableBlock, undo_acquire, abandon_ticket, optional
from tenure.blocking.lease import Lease, Ticket
from tenure.blocking.streams import Watch
from tenure.blocking.wrapper import obtaining
from tenure.model import MutexHolder, SemaphoreDescription
""",
        (
            Wrapper(
                "Mutex", "_client.mutex", "AcquirableBlock[async_mutex.Mutex, Lease]", (), _NAME
            ),
            Wrapper(
                "Semaphore",
                "_client.semaphore",
                "AcquirableBlock[async_semaphore.Semaphore, Lease]",
                (),
                {"name": "str", "ephemeral": "bool"},
            ),
        ),
    ),
    "blocking/rate.py": File(
        "Rates, and tokens that were taken.",
        """
from tenure.durations import Duration
from typing import Never
from tenure._client import rate as async_rate
from tenure._client.internals import undo_take
from tenure.blocking.blocks import optional
from tenure.blocking.wrapper import SyncWrapper, obtaining, releasing, wrap
from tenure.model import RateDescription
""",
        (
            Wrapper(
                "Rate",
                "_client.rate",
                "SyncWrapper[async_rate.Rate]",
                (),
                {"name": "str", "node": "str"},
            ),
            Wrapper(
                "Taken",
                "_client.rate",
                "SyncWrapper[async_rate.Taken]",
                (),
                {"rate": "Rate", "waited": "float"},
            ),
        ),
    ),
    "blocking/session.py": File(
        "Sessions.",
        _COMMON
        + """
from typing import Any, Never
from tenure._client import session as async_session
from tenure.blocking.blocks import undo_acquire, optional
from tenure.blocking.wrapper import SyncWrapper, obtaining
from tenure.blocking.lease import SessionHandle
from tenure.blocking.lease import Election, RunLease
from tenure.blocking.primitives import Mutex, Semaphore
from tenure.model import LastRun
""",
        (
            Wrapper(
                "Primitives",
                "_client.session",
                "SyncWrapper[Any]",
                object="async_session.Primitives",
            ),
            Wrapper(
                "Session",
                "_client.session",
                "Primitives, SessionHandle",
                object="async_session.Session",
            ),
        ),
    ),
    "blocking/calls.py": File(
        "Calls of the client.",
        _COMMON
        + """
from collections.abc import Sequence
from functools import partial
from tenure._client import client as async_client
from tenure._client.blocked import OnDeadlock
from tenure._client.sessions import DEFAULT_WINDOW
from tenure.blocking.attempts import Attempts
from typing import Never
from tenure.blocking.blocks import abandon_session
from tenure.blocking.rate import Rate
from tenure.blocking.session import Primitives, Session
from tenure.blocking.streams import EventStream
from tenure.blocking.wrapper import obtaining
from tenure.clock import Clock
from tenure.model import DEFAULT_NODE, BlockedTask, Capabilities, NodeConfig, NodeDescription
from tenure.model import SemaphoreDescription, SessionDescription, WaitGraph
""",
        (
            Wrapper(
                "ClientCalls",
                "_client.client:Client",
                "Primitives",
                ("_client.client:Nodes",),
                {"clock": "Clock"},
                frozenset({"aclose", "release_on_signals", "run", "lead"}),
                object="async_client.Client",
            ),
        ),
    ),
    "blocking/streams.py": File(
        "Streams of states and events.",
        """
from typing import TypeVar
from tenure import events as async_events
from tenure._client import watch as async_watch
from tenure.blocking.blocks import Stream
from tenure.blocking.wrapper import releasing
from tenure.events import Event
""",
        (
            Wrapper("Watch", "_client.watch", "Stream[T]", object="async_watch.Watch[T]"),
            Wrapper(
                "EventStream",
                "events",
                "Stream[Event]",
                attributes={"dropped": "int"},
                object="async_events.EventStream",
            ),
        ),
        after_imports='T = TypeVar("T")',
    ),
    "blocking/recipes/wrappers.py": File(
        "Recipes, each made from a session or a client of `tenure.blocking`, and their streams.",
        _COMMON
        + """
from typing import Generic, TypeAlias, TypeVar
from tenure import recipes as async_recipes
from tenure.blocking.blocks import Stream, undo_acquire, optional
from tenure.blocking.client import Client
from collections.abc import Mapping
from tenure.blocking.lease import Lease
from tenure.blocking.recipes.reentrant import InnerLeaseBlock, ReentrantBlock
from tenure.blocking.session import Session
from tenure.blocking.wrapper import SyncWrapper, made_from, obtaining, releasing
from tenure.recipes import Change, Codec, Endpoint, Member, json_codec
""",
        (
            Wrapper("States", "recipes.base", "Stream[T]", object="async_recipes.States[T]"),
            Wrapper("Changes", "recipes.group", "Stream[Change]", object="async_recipes.Changes"),
            Wrapper(
                "RWLock",
                "recipes.rwlock",
                "SyncWrapper[async_recipes.RWLock]",
                attributes=_NAME,
                makes="name",
            ),
            Wrapper(
                "SharedConfig",
                "recipes.config",
                'SyncWrapper["async_recipes.SharedConfig[T]"], Generic[T]',
                attributes=_NAME,
                makes="name, codec=codec",
            ),
            Wrapper(
                "ServiceRegistry",
                "recipes.registry",
                "SyncWrapper[async_recipes.ServiceRegistry]",
                attributes=_NAME,
                makes="name",
            ),
            Wrapper(
                "Group",
                "recipes.group",
                "SyncWrapper[async_recipes.Group]",
                attributes=_NAME,
                makes="name",
            ),
            Wrapper(
                "Barrier",
                "recipes.barrier",
                "SyncWrapper[async_recipes.Barrier]",
                attributes={"name": "str", "parties": "int"},
                makes="name, parties",
            ),
            Wrapper(
                "Counter",
                "recipes.counter",
                "SyncWrapper[async_recipes.Counter]",
                attributes=_NAME,
                makes="name, initial=initial",
            ),
            Wrapper(
                "CountDownLatch",
                "recipes.counter",
                "SyncWrapper[async_recipes.CountDownLatch]",
                attributes={"name": "str", "count": "int"},
                makes="name, count",
            ),
            Wrapper("Party", "recipes.barrier", "Lease", object="async_recipes.Party"),
            Wrapper(
                "DoubleBarrier",
                "recipes.barrier",
                "SyncWrapper[async_recipes.DoubleBarrier]",
                attributes={"name": "str", "parties": "int"},
                makes="name, parties",
            ),
            Wrapper("PoolItem", "recipes.pool", "Lease", object="async_recipes.PoolItem"),
            Wrapper(
                "Pool",
                "recipes.pool",
                "SyncWrapper[async_recipes.Pool]",
                attributes={"name": "str", "resources": "dict[str, bytes]"},
                makes="name, resources",
            ),
            Wrapper(
                "InnerLease",
                "recipes.reentrant",
                "InnerLeaseBlock",
                object="async_recipes.InnerLease",
            ),
            Wrapper(
                "ReentrantMutex",
                "recipes.reentrant",
                "ReentrantBlock",
                attributes=_NAME,
                by_hand=frozenset({"lock"}),
                makes="name",
            ),
        ),
        exports=("Source",),
        after_imports='''T = TypeVar("T")

Source: TypeAlias = "Client | Session"
"""What a recipe is made from: a session, or a client for its implicit session."""''',
    ),
}
"""The generated modules, by their paths below `tenure`."""
