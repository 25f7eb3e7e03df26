"""Tenure for synchronous programs: the public API of `tenure`, without await.

Start with `connect`. Awaited calls of `tenure` are plain calls here: ``client.mutex("job").lock()``
returns a held lease, to be entered with ``with`` or released. Any number of threads may share a
client. Code in an event loop uses `tenure` itself.

Differences: `close` replaces ``aclose``; a thread cannot be cancelled, so inside the block of a
lost lease its next call raises. The wrappers are generated from the asynchronous classes.

Read in this order: `portal` passes calls of threads to the event loop, and runs it in a thread;
`workers` has the tasks that carry out the calls of each thread. `wrapper`, `blocks`, `attempts` and
`client` are the hand-written parts of the wrappers. ``make sync`` generates the other modules.
"""

from typing import NoReturn as _NoReturn

from tenure._client.blocked import OnDeadlock
from tenure._client.client import default_url
from tenure._client.habits import missing_name as _missing_name
from tenure._client.leading import Retry
from tenure._client.loss import LOSS_EXIT_STATUS, OnLoss
from tenure._client.session_life import SessionState
from tenure.blocking.attempts import Attempt, Attempts
from tenure.blocking.client import Client, connect
from tenure.blocking.decorators import Decorator
from tenure.blocking.lease import Election, Leadership, Lease, RunLease, SessionHandle, Ticket
from tenure.blocking.primitives import Mutex, Semaphore
from tenure.blocking.rate import Rate, Taken
from tenure.blocking.session import Session
from tenure.blocking.several import Leases
from tenure.blocking.streams import EventStream, Watch
from tenure.clock import Clock
from tenure.durations import Duration
from tenure.errors import (
    AcquireTimeout,
    AuthenticationFailed,
    Deadlock,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    RateExceeded,
    SelfDeadlock,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    StaleToken,
    TenureError,
    Unsupported,
)
from tenure.model import (
    BlockedTask,
    Capabilities,
    Consistency,
    CountersMode,
    LastRun,
    Leader,
    Liveness,
    MutexHolder,
    NodeConfig,
    NodeDescription,
    RateDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
    WaitGraph,
)
from tenure.public import publish as _publish

__all__ = [
    "LOSS_EXIT_STATUS",
    "AcquireTimeout",
    "Attempt",
    "Attempts",
    "AuthenticationFailed",
    "BlockedTask",
    "Capabilities",
    "Client",
    "Clock",
    "Consistency",
    "CountersMode",
    "Deadlock",
    "Decorator",
    "Duration",
    "Election",
    "EngineError",
    "EngineUnavailable",
    "EventStream",
    "InvalidArgument",
    "LastRun",
    "Leader",
    "Leadership",
    "Lease",
    "LeaseLost",
    "LeaseReleased",
    "Leases",
    "Liveness",
    "Misuse",
    "Mutex",
    "MutexHolder",
    "NodeBusy",
    "NodeConfig",
    "NodeDescription",
    "NodeExists",
    "NodeNotFound",
    "OnDeadlock",
    "OnLoss",
    "Rate",
    "RateDescription",
    "RateExceeded",
    "Recovered",
    "RequestDescription",
    "Retry",
    "RunLease",
    "SelfDeadlock",
    "Semaphore",
    "SemaphoreBusy",
    "SemaphoreDescription",
    "SemaphoreExists",
    "SemaphoreNotFound",
    "Session",
    "SessionClosed",
    "SessionDescription",
    "SessionExpired",
    "SessionHandle",
    "SessionState",
    "StaleToken",
    "Taken",
    "TenureError",
    "Ticket",
    "Unsupported",
    "WaitGraph",
    "Watch",
    "connect",
    "default_url",
]

_publish(__name__, __all__, globals())


def __getattr__(name: str) -> _NoReturn:
    raise _missing_name(__name__, name)
