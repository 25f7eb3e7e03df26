"""State shared by the listeners of one server.

These are the store, the limits and the counts against them, authentication, and the log. Rules:

* One `Context` belongs to one server and to the event loop on which its engine was opened. It is
  used only on that loop.
* Everything taken from a count is released exactly once.
* The data and tokens of clients are never logged; their addresses and mistakes are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.server.admission import Admission
from tenure.server.audit import Audit
from tenure.server.auth.authenticator import Authenticator
from tenure.server.auth.guard import Guard
from tenure.server.budget import InputBudget, LoopBudget
from tenure.server.limits import Count, Limits
from tenure.server.log import log_event
from tenure.server.reads import Reads
from tenure.server.semaphores import Semaphores
from tenure.server.sessions.keys import SessionKeys


class Counts:
    """Current counts over all listeners of a server."""

    def __init__(self, engine: Engine, limits: Limits, reads: Reads, guard: Guard) -> None:
        self.connections = Count("connections", limits.connections)
        self.greetings = Count("greetings", limits.greetings)
        self.sessions = Count("sessions", limits.sessions)
        self.semaphores = Semaphores(engine, limits, reads, guard)


class Context:
    """State shared by all listeners.

    Args:
        engine: the open store; the server closes it, after the listeners.
        limits: the limits of clients.
        authenticator: decides which clients may connect.
        logger: the logger of the server.
        arrived: called whenever a client has sent something.
        audit: the audit log; by default it is part of the log.

    Attributes:
        counts: the current counts.
        admission: the connections by source.
        budget: shares the event loop among the connections.
        input: counts what the connections have received and not carried out.
        session_keys: keys of the sessions whose clients send none.
        reads: the schedule of costly reads.
        engine: the store, for the server's own operations.
        guard: the store as each identity may use it, for operations of clients.
        shared: state shared by the listeners of one protocol, by type, while one of them is open.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        authenticator: Authenticator,
        logger: logging.Logger,
        arrived: Callable[[], None] = lambda: None,
        audit: Audit | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.authenticator = authenticator
        self.logger = logger
        self.arrived = arrived
        self.audit = audit or Audit(logger)
        self.reads = Reads()
        self.guard = Guard(engine, limits)
        self.counts = Counts(engine, limits, self.reads, self.guard)
        self.admission = Admission(
            limits, self.counts.connections, self.counts.greetings, engine.clock
        )
        self.session_keys = SessionKeys(engine.url)
        now = engine.clock.now if engine.clock.virtual else time.perf_counter
        self.budget = LoopBudget(now, logger)
        self.input = InputBudget(limits)
        self.shared: dict[type, Any] = {}

    @property
    def clock(self) -> Clock:
        """The engine's clock."""
        return self.engine.clock

    def log(self, level: int, event: str, **facts: object) -> None:
        """Log an event; see `tenure.server.log.log_event`."""
        log_event(self.logger, level, event, **facts)
