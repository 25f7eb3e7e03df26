"""One request of a session: its state, and which module changes it.

`waiting` sets `created`, concludes that it owns, and has its watch and its poll. `requests`
has its timer, and sets `gone`. `count` and `data` change when etcd has confirmed the change.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tenure.engines.etcd.keys import Name
from tenure.engines.etcd.watching import EtcdWatch
from tenure.model import EPHEMERAL_LIMIT

__all__ = ["EtcdRequest"]


class Looker(Protocol):
    """The waiting requests of a session."""

    def look_soon(self, request: EtcdRequest) -> None:
        """Look at the queue of a request."""


class EtcdRequest:
    """One request of a session.

    Attributes:
        waiting: of its session.
        created: its create revision; 0 while it is asked for.
        near: whether it was so near to the head when it joined that no time is to be lost.
        followers: requests of this engine that wait for it to go.
        left: etcd has said that it is out of its queue.
        timeout: seconds that it waits, as its value says.
        late: looks whether another program's request before it is to be taken out.
        perhaps_left: etcd was asked to take it out, and did not answer.
    """

    __slots__ = (
        "count",
        "created",
        "data",
        "data_key",
        "early",
        "ephemeral",
        "followers",
        "gone",
        "hold",
        "key",
        "late",
        "left",
        "limit",
        "look_again",
        "looking",
        "marked",
        "name",
        "near",
        "owns",
        "perhaps_left",
        "poll",
        "timeout",
        "timer",
        "waiting",
        "watch",
        "watched",
    )

    def __init__(
        self,
        waiting: Looker,
        session: int,
        hold: int,
        name: Name,
        count: int,
        data: bytes,
        ephemeral: bool,
    ) -> None:
        which = b"%016x-%016x" % (session, hold)
        self.waiting = waiting
        self.hold = hold
        self.name = name
        self.count = count
        self.data = data
        self.ephemeral = ephemeral
        self.key = name.requests + which
        self.data_key = name.request_data + which
        self.limit = EPHEMERAL_LIMIT
        self.created = 0
        self.owns = self.gone = self.left = self.marked = self.looking = self.look_again = False
        self.near = True
        self.perhaps_left = False
        self.followers: list[EtcdRequest] = []
        self.early: bytes | None = None
        self.timeout: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.late: asyncio.TimerHandle | None = None
        self.poll: asyncio.TimerHandle | None = None
        self.watch: EtcdWatch | None = None
        self.watched: frozenset[bytes] = frozenset()

    @property
    def decided(self) -> bool:
        """True if it waits for nothing."""
        return self.gone or self.owns
