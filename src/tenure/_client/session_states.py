"""States of a session and every transition between them. Pure: no clock, no I/O, no threads.

::

    CONNECTING --attached--> ATTACHED <--contact lost, re-established--> DETACHED

    any of these --expired--> EXPIRED
    any of these --closed---> CLOSED
    any of these --left-----> LEFT       (the session lives on in the store)

Each event is a table of transitions. An event without a transition from the current state changes
nothing, so an end is final.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, TypeAlias

SessionState = Literal["connecting", "attached", "detached", "expired", "closed"]


class SessionPhase(Enum):
    """State of a session."""

    CONNECTING = "the engine attaches it"
    ATTACHED = "attached"
    DETACHED = "the contact is broken, and the engine tries to attach again"
    EXPIRED = "the store ended it, or its deadline has passed"
    CLOSED = "the program closed it"
    LEFT = "the program detached from it for good"


_P = SessionPhase

LIVING = frozenset({_P.CONNECTING, _P.ATTACHED, _P.DETACHED})
"""The states of a session that has not ended."""

SessionEvent: TypeAlias = Mapping[SessionPhase, SessionPhase]

ATTACHED: SessionEvent = {_P.CONNECTING: _P.ATTACHED}
CONTACT_LOST: SessionEvent = {_P.ATTACHED: _P.DETACHED}
CONTACT_RESTORED: SessionEvent = {_P.DETACHED: _P.ATTACHED}
EXPIRED: SessionEvent = dict.fromkeys(LIVING, _P.EXPIRED)
CLOSED: SessionEvent = dict.fromkeys(LIVING, _P.CLOSED)
LEFT: SessionEvent = dict.fromkeys(LIVING, _P.LEFT)

REPORTED: Mapping[SessionPhase, SessionState] = {
    _P.CONNECTING: "connecting",
    _P.ATTACHED: "attached",
    _P.DETACHED: "detached",
    _P.EXPIRED: "expired",
    _P.CLOSED: "closed",
    _P.LEFT: "detached",
}
"""The state that `Session.state` reports."""
