"""State of one request of a session.

`requests` sets `created` and `gone`, and has the timer. `waiting` concludes that the request owns,
and has its watch and its poll. `count` and `data` change when etcd has confirmed the change.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tenure.engines.etcd.keys import Name
from tenure.engines.etcd.watching import EtcdWatch
from tenure.model import EPHEMERAL_LIMIT

__all__ = ["EtcdRequest"]


class Looker(Protocol):
    """The waiting requests of a session."""

    def look_soon(self, request: EtcdRequest) -> None:
        """Look at the queue of a request."""


@dataclass(slots=True, eq=False)
class EtcdRequest:
    """One request of a session.

    Attributes:
        waiting: of its session.
        key: where it stands in its queue.
        timeout: seconds that it waits, as its value says.
        limit: of its semaphore.
        created: its create revision; 0 while it is asked for.
        left: etcd has said that it is out of its queue.
        near: whether it was so near to the head when it joined that no time is to be lost.
        perhaps_left: etcd was asked to take it out, and did not answer.
        early: the reason for which it was taken out before its own answer came.
        followers: requests of this engine that wait for it to go.
        late: looks whether another program's request before it is to be taken out.
    """

    waiting: Looker
    request_id: int
    name: Name
    key: bytes
    count: int
    data: bytes
    ephemeral: bool
    timeout: float | None
    limit: int = EPHEMERAL_LIMIT
    created: int = 0
    owns: bool = False
    gone: bool = False
    left: bool = False
    marked: bool = False
    looking: bool = False
    look_again: bool = False
    near: bool = True
    perhaps_left: bool = False
    early: bytes | None = None
    followers: list[EtcdRequest] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    late: asyncio.TimerHandle | None = None
    poll: asyncio.TimerHandle | None = None
    watch: EtcdWatch | None = None
    watched: frozenset[bytes] = frozenset()

    @property
    def data_key(self) -> bytes:
        """The key of its data."""
        return self.name.data_of(self.key)

    @property
    def decided(self) -> bool:
        """True if it waits for nothing."""
        return self.gone or self.owns
