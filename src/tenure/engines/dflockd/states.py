"""States of a request and its transitions.

::

    NEW        waits for its turn, or for a connection              -> TRYING
    TRYING     sent with a timeout of 0, on the shared connection   -> PROVING, JOINING, GONE
    JOINING    about to enter the queue, on a connection of its own -> WAITING, PROVING, GONE
    WAITING    in the server's queue                                -> PROVING
    PROVING    granted; if its proof is old, it is being renewed    -> HELD
    HELD       its session has been notified                        -> GONE
    LEAVING    it is being released, or is leaving the queue        -> GONE
"""

from __future__ import annotations

from enum import Enum


class Standing(Enum):
    """State of a request; the module's docstring has the transitions."""

    NEW = "new"
    TRYING = "trying"
    JOINING = "joining"
    WAITING = "waiting"
    PROVING = "proving"
    HELD = "held"
    LEAVING = "leaving"
    GONE = "gone"
