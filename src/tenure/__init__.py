"""Distributed coordination for Python, with one meaning on every engine.

Start with `connect`. The errors are in `tenure.errors`, the events in `tenure.events`; both
are told of in the documentation of what raises or sends them.
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from tenure._client.client import Client, connect, default_url
from tenure._client.election import Election, Leadership
from tenure._client.lease import Lease
from tenure._client.loss import LOSS_EXIT_STATUS
from tenure._client.mutex import Mutex
from tenure._client.runs import RunLease
from tenure._client.semaphore import Semaphore, Ticket
from tenure._client.session import Session
from tenure._client.sessions import Attempt
from tenure.errors import (
    AcquireTimeout,
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    NodeBusy,
    NodeExists,
    NodeNotFound,
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
    Capabilities,
    LastRun,
    Leader,
    MutexHolder,
    NodeConfig,
    NodeDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__version__ = "0.1.0"

__all__ = [
    "LOSS_EXIT_STATUS",
    "AcquireTimeout",
    "Attempt",
    "AuthenticationFailed",
    "Capabilities",
    "Client",
    "Election",
    "EngineError",
    "EngineUnavailable",
    "InvalidArgument",
    "LastRun",
    "Leader",
    "Leadership",
    "Lease",
    "LeaseLost",
    "LeaseReleased",
    "Misuse",
    "Mutex",
    "MutexHolder",
    "NodeBusy",
    "NodeConfig",
    "NodeDescription",
    "NodeExists",
    "NodeNotFound",
    "Recovered",
    "RequestDescription",
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
    "StaleToken",
    "TenureError",
    "Ticket",
    "Unsupported",
    "connect",
    "default_url",
]


def __getattr__(name: str) -> _ModuleType:
    if name == "events":  # takes long to import, and most programs do without
        return _import_module("tenure.events")
    raise AttributeError(f"module 'tenure' has no attribute {name!r}")
