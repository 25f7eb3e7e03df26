"""Protocol of one session on the server, without I/O.

The I/O layer gets the first message of a new stream from `begin`, passes the server's messages to
`receive`, and reports the end of the stream with `lost`. It writes the messages in `outgoing` when
`YdbProtocolEvents.outgoing` is called. Operations begin with `send`, at any time, connected or not.

Rules:

* Every attachment has a higher sequence number, and carries the protection key.
* Unfinished operations are sent again after every attachment, in order: the server forgets
  operations and watches with the stream, but keeps the places in queues.
* **Proof** requires two answers: to a ping and to a description, both sent at the same time. On YDB
  a ping is answered by the server of the connection, a description by the coordination node itself,
  which rejects it if the session is no longer attached. tenure's own server answers a ping after it
  has renewed the session in its store.
* The server's pings are answered only while the program is active: for one window after `renew` or
  `send` was called. An answer keeps the session alive in the store.
* Only the statuses SESSION_EXPIRED and BAD_SESSION end a session that has been attached. Any other
  rejection of an attachment is transient.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tenure.engines.ydb import messages
from tenure.wire.ydb import Message, Status

PROBE = "tenure.alive"
"""Name that is described for a proof; the semaphore need not exist."""

_PROBES = 4
"""Maximum number of pending proofs; a server that answers none gets no more requests."""

_OVER = frozenset({Status.SESSION_EXPIRED, Status.BAD_SESSION})


class YdbProtocolEvents(Protocol):
    """Events of a protocol."""

    def outgoing(self) -> None:
        """Report that there is something to write."""

    def started(self) -> None:
        """Report that the session is attached, for the first time or again."""

    def proven(self, at: float) -> None:
        """Report that the session was proven by a message that was sent at that time."""

    def refused(self, failure: Message) -> None:
        """Report that the server has ended the stream, for a transient reason."""

    def ended(self, failure: Message | None) -> None:
        """Report the end of the session: by `stop` (``None``), or by the store."""


@dataclass(slots=True, eq=False)
class YdbOperation:
    """One operation, until it is finished.

    Attributes:
        req_id: its number, which is in the answers.
        make: returns the message for that number; called each time that it is sent.
        answered: called with the kind and the body of each answer; returns true for the last.
        sent: whether it was sent.
        repeated: whether it was sent over a lost stream, where it may have taken effect.
    """

    req_id: int
    make: Callable[[int], Message]
    answered: Callable[[str, Message], bool]
    sent: bool = False
    repeated: bool = False


@dataclass(slots=True, eq=False)
class _Probe:
    sent_at: float
    opaque: int
    req_id: int
    ponged: bool = False
    described: bool = False


class YdbProtocol:
    """One session on the server.

    Attributes:
        id: the session's id, 0 before it has been attached.
        seq_no: the number of the last attachment, or attempt.
        attached: whether the server has attached the session to the current stream.
        outgoing: the messages to write, in order.
        window: the recovery window, in seconds.
        last_activity: time of the program's last call.
        last_proof: time at which the messages of the last proof were sent.
    """

    def __init__(
        self,
        path: str,
        window: float,
        description: str,
        key: bytes,
        now: Callable[[], float],
        events: YdbProtocolEvents,
        session_id: int = 0,
        seq_no: int = 0,
    ) -> None:
        self.id = session_id
        self.seq_no = seq_no
        self.attached = False
        self.outgoing: list[Message] = []
        self.last_activity = self.last_proof = self._last_contact = now()
        self.window = window
        self._path = path
        self._description = description
        self._key = key
        self._now = now
        self._events = events
        self._started_at = 0.0
        self._last_req_id = 0
        self._operations: dict[int, YdbOperation] = {}  # in order
        self._probes: list[_Probe] = []
        self._stopping = False
        self._over = False

    @property
    def active(self) -> bool:
        """True if the program was active within the window."""
        return self._now() < self.last_activity + self.window

    @property
    def may_attach(self) -> bool:
        """True if attaching would not keep an abandoned session alive."""
        return self._stopping or self.active

    @property
    def silent_for(self) -> float:
        """Seconds since the server may have had the last contact with the session."""
        return self._now() - self._last_contact

    @property
    def awaits_proof(self) -> bool:
        """True if a proof is pending."""
        return bool(self._probes)

    # Operations

    def send(
        self, make: Callable[[int], Message], answered: Callable[[str, Message], bool]
    ) -> YdbOperation:
        """Begin an operation, now or as soon as the session is attached; see `YdbOperation`."""
        self.last_activity = self._now()
        self._last_req_id += 1
        operation = YdbOperation(self._last_req_id, make, answered)
        self._operations[operation.req_id] = operation
        if self.attached and not self._stopping:
            self._send(operation)
        return operation

    def drop(self, operation: YdbOperation) -> None:
        """Ignore further answers, and do not send it again."""
        self._operations.pop(operation.req_id, None)

    def renew(self) -> None:
        """Record that the program is active, and request a proof."""
        self.last_activity = now = self._now()
        if not self.attached or self._stopping or len(self._probes) >= _PROBES:
            return
        self._last_req_id += 1
        probe = _Probe(now, random.randrange(1, 2**63), self._last_req_id)
        self._probes.append(probe)
        self._write(messages.request("ping", opaque=probe.opaque))
        self._write(messages.describe(probe.req_id, PROBE))

    def stop(self) -> None:
        """End the session, now or as soon as the server can be reached. Safe to call twice."""
        if not self._stopping:
            self._stopping = True
            if self.attached:
                self._write(messages.request("session_stop"))

    # The stream

    def begin(self) -> Message:
        """Return the first message of a new stream."""
        assert not self.attached
        self.seq_no += 1
        self._started_at = self._last_contact = self._now()
        return messages.start(
            self._path, self.id, self.window, self._description, self.seq_no, self._key
        )

    def lost(self) -> None:
        """Record the end of the stream."""
        if self.attached:
            self._last_contact = self._now()  # the server counts the window from here
        self.attached = False
        self.outgoing.clear()
        self._probes.clear()
        for operation in self._operations.values():
            operation.repeated = operation.sent

    def receive(self, message: Message) -> None:
        """Process a message of the server; ignore one of an unknown kind."""
        if self._over:
            return
        kind, body = messages.kind_of(message)
        match kind:
            case "ping":
                if self.active and not self._stopping:
                    self._write(messages.request("pong", opaque=body.opaque))
            case "pong":
                for probe in self._probes:
                    if probe.opaque == body.opaque:
                        probe.ponged = True
                self._prove()
            case "session_started":
                self._start(body.session_id)
            case "session_stopped":
                self._end(None)
            case "failure":
                self._last_contact = self._now()
                self.attached = False
                if self.id and body.status in _OVER:
                    self._end(body)
                else:
                    self._events.refused(body)
            case "":
                pass
            case _:
                self._answer(kind, body)

    def _start(self, session_id: int) -> None:
        self.id = session_id
        self.attached = True
        self.last_proof = self._started_at
        if self._stopping:
            self._write(messages.request("session_stop"))
            return
        for operation in list(self._operations.values()):
            self._send(operation)
        self._events.proven(self._started_at)
        self._events.started()

    def _answer(self, kind: str, body: Message) -> None:
        operation = self._operations.get(body.req_id)
        if operation is not None:
            if operation.answered(kind, body):
                self._operations.pop(body.req_id, None)
            return
        for probe in self._probes:
            if probe.req_id == body.req_id:
                # The semaphore probably does not exist; any other status proves nothing.
                probe.described = body.status in {Status.SUCCESS, Status.NOT_FOUND}
        self._prove()

    def _prove(self) -> None:
        for number, probe in reversed(list(enumerate(self._probes))):
            if probe.ponged and probe.described:
                del self._probes[: number + 1]  # earlier ones prove nothing more
                self.last_proof = probe.sent_at
                self._events.proven(probe.sent_at)
                return

    def _end(self, failure: Message | None) -> None:
        self._over = True
        self.attached = False
        self._operations.clear()
        self._probes.clear()
        self.outgoing.clear()
        self._events.ended(failure)

    def _send(self, operation: YdbOperation) -> None:
        operation.sent = True
        self._write(operation.make(operation.req_id))

    def _write(self, message: Message) -> None:
        self._last_contact = self._now()
        self.outgoing.append(message)
        self._events.outgoing()
