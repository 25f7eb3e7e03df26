"""Distributed coordination for Python, with one meaning on every engine.

Start with `connect`. Programs without an event loop use `tenure.blocking`. `tenure.recipes` has
combinations of the primitives, `tenure.fencing` checks fencing tokens at a resource,
`tenure.events` has the classes of `Client.events`, and `tenure.telemetry` reports a client to
OpenTelemetry and Prometheus.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from tenure._client.blocked import OnDeadlock
from tenure._client.client import Client, connect, default_url
from tenure._client.decorators import Decorator
from tenure._client.election import Election, Leadership
from tenure._client.habits import missing_name as _missing_name
from tenure._client.leading import Retry
from tenure._client.lease import Lease
from tenure._client.loss import LOSS_EXIT_STATUS, OnLoss
from tenure._client.mutex import Mutex
from tenure._client.once import Once
from tenure._client.rate import Rate, Taken
from tenure._client.runs import RunLease
from tenure._client.semaphore import Semaphore
from tenure._client.session import Session
from tenure._client.session_handle import SessionHandle
from tenure._client.session_life import SessionState
from tenure._client.sessions import Attempt, Attempts
from tenure._client.several import Leases
from tenure._client.ticket import Ticket
from tenure._client.watch import Watch
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

__version__ = "0.1.0"

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
    "Once",
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

_MODULES = ("blocking", "events", "fencing", "recipes")

_publish(__name__, __all__, globals())


def __getattr__(name: str) -> _ModuleType | type:
    # These are slow to import, and most programs do not need them.
    if name == "events":
        return _import_module("tenure.events")
    if name == "EventStream":
        stream: type = _import_module("tenure.events").EventStream
        return stream
    raise _missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
