"""State shared by the listeners of one server, and their answers to clients of other protocols.

These are the store, the limits and the counts against them, authentication, and the log. Rules:

* One `Context` belongs to one server and to the event loop on which its engine was opened. It is
  used only on that loop.
* Everything taken from a count is released exactly once.
* The data and tokens of clients are never logged; their addresses and mistakes are.

**Other protocols** come from browsers, TLS clients at a port without TLS, and the PROXY protocol.
Any web page can make a browser send a request to a port of its user's machine. The lines of the
body could be commands of a line protocol, so the connection is closed at the first line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.server.admission import Admission
from tenure.server.audit import Audit
from tenure.server.auth.authenticator import Authenticator
from tenure.server.auth.guard import Guard
from tenure.server.budget import InputBudget, LoopBudget
from tenure.server.limits import Count, Limits
from tenure.server.log import log_event
from tenure.server.meter import Meter
from tenure.server.reads import ReadSchedule
from tenure.server.semaphores import SemaphoreCounts
from tenure.server.sessions.keys import SessionKeys

_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"  # of TLS, fatal: protocol_version

Foreign: TypeAlias = Literal["HTTP", "TLS", "PROXY"]

_EXPLAINED: dict[Foreign, str] = {
    "HTTP": "an HTTP client at a port that does not serve HTTP",
    "TLS": "a TLS client at a port without TLS",
    "PROXY": "a proxy announces its clients, and this server does not read the PROXY protocol; "
    "turn it off in the proxy (HAProxy: send-proxy; a balancer of AWS: proxy_protocol_v2)",
}

_METHODS = frozenset(
    each.encode()[:4]
    for each in (
        "GET ",
        "POST",
        "HEAD",
        "PUT ",
        "OPTIONS",
        "DELETE",
        "PATCH",
        "CONNECT",
        "TRACE",
        "PRI ",  # of HTTP/2
    )
)


def foreign(start: bytes) -> Foreign | None:
    """Return the protocol whose connections begin with these bytes, if four of them identify it."""
    if start[:2] == b"\x16\x03":
        return "TLS"
    if start[:4] == b"PROX" or (start[:4] == b"\r\n\r\n" and start[4:5] in {b"", b"\0"}):
        return "PROXY"  # version 1, or 2
    return "HTTP" if start[:4] in _METHODS else None


def is_http(line: str) -> bool:
    """Return true if a line is the first line of an HTTP request."""
    return line.rpartition(" ")[2].startswith("HTTP/")


def explain(found: Foreign) -> str:
    """Return the log text for a client that uses another protocol."""
    return _EXPLAINED[found]


def answer(found: Foreign, protocol: str) -> bytes:
    """Return the last reply to a client that uses another protocol than the port's.

    Args:
        found: the client's protocol, which is not ``PROXY``: behind such a proxy there is a
            client of the port's protocol.
        protocol: the port's protocol, for people.
    """
    if found == "TLS":
        return _ALERT  # so that its library reports a TLS error, and not a closed connection
    text = f"This port of a tenure server is for {protocol}. It does not serve HTTP.\n".encode()
    head = (
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


class Counts:
    """Current counts over all listeners of a server."""

    def __init__(self, engine: Engine, limits: Limits, reads: ReadSchedule, guard: Guard) -> None:
        self.connections = Count("connections", limits.connections)
        self.greetings = Count("greetings", limits.greetings)
        self.sessions = Count("sessions", limits.sessions)
        self.semaphores = SemaphoreCounts(engine, limits, reads, guard)


class Context:
    """State shared by all listeners.

    Args:
        engine: the open store; the server closes it, after the listeners.
        limits: the limits of clients.
        authenticator: decides which clients may connect.
        logger: the logger of the server.
        arrived: called whenever a client has sent something.
        audit: the audit log; by default it is part of the log.
        meter: the counts for the metrics; by default new ones.

    Attributes:
        meter: the counts for the metrics.
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
        meter: Meter | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.authenticator = authenticator
        self.logger = logger
        self.arrived = arrived
        self.meter = meter or Meter()
        self.audit = audit or Audit(logger)
        self.reads = ReadSchedule()
        self.guard = Guard(engine, limits, logger, self.meter)
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

    def refused(self, event: str, limit: str, **facts: object) -> None:
        """Log and count that a limit was enforced: its name in `Limits`."""
        self.meter.refusals[limit] += 1
        self.log(logging.WARNING, event, **facts, limit=limit)

    def refused_login(self, peer: str, why: object, **facts: object) -> None:
        """Record in the audit log, and count, that a client was rejected."""
        self.meter.refusals["login"] += 1
        self.audit.refused_login(peer, why, **facts)
