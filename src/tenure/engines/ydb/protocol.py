"""Protocol of one session on the server, with no I/O and no event loop.

The I/O part gets the first message of a new stream from `begin`, hands the server's messages to
`receive`, reports the end of the stream with `lost`, and writes what is in `outgoing`, whenever
`YdbProtocolEvents.outgoing` announces that there is something. Operations begin with `ask`, at any
time, connected or not.

Rules:

* Every attachment has a higher sequence number, and shows the protection key.
* What was asked and is not finished is asked again after every attachment, in its order: the
  server forgets requests and watches with the stream, and keeps the places in queues.
* **Proof** takes two answers: that to a ping and that to a description, both sent at the same
  time. On YDB a ping is answered by the server that has the connection, and a description by the
  coordination node itself, which refuses one through a session that is not attached any more.
  tenure's own server answers a ping after it has renewed the session in its store.
* The server's pings are answered only while the program shows signs of life: for one window after
  `renew` or `ask` was called. An answer keeps the session alive in the store.
* Only the statuses SESSION_EXPIRED and BAD_SESSION end a session that has been attached. Whatever
  else a server refuses an attachment with may pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tenure.engines.ydb import messages
from tenure.wire.ydb import Message, Status

__all__ = ["Ask", "YdbProtocol", "YdbProtocolEvents"]

PROBE = "tenure.alive"
"""The name that is described for a proof; whether there is such a semaphore does not matter."""

_PROBES = 4
"""How many proofs may be under way; a server that answers none is not asked for more."""

_OVER = frozenset({Status.SESSION_EXPIRED, Status.BAD_SESSION})


class YdbProtocolEvents(Protocol):
    """Events of a protocol."""

    def outgoing(self) -> None:
        """Report that there is something to write."""

    def started(self) -> None:
        """The session is attached: anew, or again."""

    def proven(self, at: float) -> None:
        """The session was proven by what was sent then."""

    def refused(self, failure: Message) -> None:
        """The server has ended the stream, for a reason that may pass."""

    def ended(self, failure: Message | None) -> None:
        """The session has ended: stopped as asked (``None``), or by the store's word."""


@dataclass(slots=True, eq=False)
class Ask:
    """Something asked of the server, until it is finished.

    Attributes:
        req_id: its number; the answers carry it.
        again: whether it was sent over a stream that is lost, where it may have had its effect.
    """

    req_id: int
    _make: Callable[[int], Message]
    _heard: Callable[[str, Message], bool]
    again: bool = False
    _sent: bool = False

    def lost(self) -> None:
        """The stream is over on which it was sent, if it was."""
        self.again = self._sent

    def message(self) -> Message:
        """Return the messages to send now."""
        self._sent = True
        return self._make(self.req_id)

    def heard(self, kind: str, body: Message) -> bool:
        """Take an answer; true when that was the last."""
        return self._heard(kind, body)


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
        id: the session's, 0 before it has been attached.
        seq_no: the number of the last attachment, or attempt.
        attached: whether the server has said so on the stream that there is.
        outgoing: what is to be written, in order; the writer takes it from the left.
        window: seconds.
        last_word: when the program last showed a sign of life.
        last_proof: when what the last proof is an answer to was sent.
    """

    def __init__(
        self,
        path: str,
        window: float,
        description: str,
        key: bytes,
        now: Callable[[], float],
        events: YdbProtocolEvents,
    ) -> None:
        """Start unattached, with no messages to send."""
        self.id = 0
        self.seq_no = 0
        self.attached = False
        self.outgoing: list[Message] = []
        self.last_word = self.last_proof = self._spoke_at = now()
        self.window = window
        self._path = path
        self._description = description
        self._key = key
        self._now = now
        self._events = events
        self._started_at = 0.0
        self._last_req_id = 0
        self._asks: dict[int, Ask] = {}  # in the order in which they were asked
        self._probes: list[_Probe] = []
        self._stopping = False
        self._over = False

    @property
    def heard_of(self) -> bool:
        """True if the program was active within the window."""
        return self._now() < self.last_word + self.window

    @property
    def wants_contact(self) -> bool:
        """True if attaching would not keep an abandoned session alive."""
        return self._stopping or self.heard_of

    @property
    def silent_for(self) -> float:
        """Seconds since the server can have had the last contact of the session."""
        return self._now() - self._spoke_at

    @property
    def waits_for_proof(self) -> bool:
        """True if a proof is under way."""
        return bool(self._probes)

    # Asking

    def ask(self, make: Callable[[int], Message], heard: Callable[[str, Message], bool]) -> Ask:
        """Ask something, now or as soon as the session is attached.

        Args:
            make: makes the message of its number; called for every sending.
            heard: called with the kind and the body of each answer; true when that was the last.
        """
        self.last_word = self._now()
        self._last_req_id += 1
        ask = Ask(self._last_req_id, make, heard)
        self._asks[ask.req_id] = ask
        if self.attached and not self._stopping:
            self._write(ask.message())
        return ask

    def drop(self, ask: Ask) -> None:
        """No (further) answer is wanted, and it is not to be asked again."""
        self._asks.pop(ask.req_id, None)

    def renew(self) -> None:
        """The program is alive; ask for a proof."""
        self.last_word = now = self._now()
        if not self.attached or self._stopping or len(self._probes) >= _PROBES:
            return
        self._last_req_id += 1
        probe = _Probe(now, random.randrange(1, 2**63), self._last_req_id)
        self._probes.append(probe)
        self._write(messages.request("ping", opaque=probe.opaque))
        self._write(messages.describe(probe.req_id, PROBE))

    def stop(self) -> None:
        """End the session, now or as soon as it can be reached. Safe to call twice."""
        if not self._stopping:
            self._stopping = True
            if self.attached:
                self._write(messages.request("session_stop"))

    # The stream

    def begin(self) -> Message:
        """The first message of a new stream."""
        assert not self.attached
        self.seq_no += 1
        self._started_at = self._spoke_at = self._now()
        return messages.start(
            self._path, self.id, self.window, self._description, self.seq_no, self._key
        )

    def lost(self) -> None:
        """The stream is over."""
        if self.attached:
            self._spoke_at = self._now()  # the server counts the window from here
        self.attached = False
        self.outgoing.clear()
        self._probes.clear()
        for ask in self._asks.values():
            ask.lost()

    def receive(self, message: Message) -> None:
        """Take what the server says. What is not understood is left alone."""
        if self._over:
            return
        kind, body = messages.kind_of(message)
        match kind:
            case "ping":
                if self.heard_of and not self._stopping:
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
                self._spoke_at = self._now()
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
        for ask in list(self._asks.values()):
            self._write(ask.message())
        self._events.proven(self._started_at)
        self._events.started()

    def _answer(self, kind: str, body: Message) -> None:
        ask = self._asks.get(body.req_id)
        if ask is not None:
            if ask.heard(kind, body):
                self._asks.pop(body.req_id, None)
            return
        for probe in self._probes:
            if probe.req_id == body.req_id:
                # There is most likely no such semaphore; what else it says proves nothing.
                probe.described = body.status in {Status.SUCCESS, Status.NOT_FOUND}
        self._prove()

    def _prove(self) -> None:
        for number, probe in reversed(list(enumerate(self._probes))):
            if probe.ponged and probe.described:
                del self._probes[: number + 1]  # the earlier ones prove nothing more
                self.last_proof = probe.sent_at
                self._events.proven(probe.sent_at)
                return

    def _end(self, failure: Message | None) -> None:
        self._over = True
        self.attached = False
        self._asks.clear()
        self._probes.clear()
        self.outgoing.clear()
        self._events.ended(failure)

    def _write(self, message: Message) -> None:
        self._spoke_at = self._now()
        self.outgoing.append(message)
        self._events.outgoing()
