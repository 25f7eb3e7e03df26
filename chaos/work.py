"""What the processes compete for, and how one of them is told its part.

Everything lies on one node, but for what goes through a client's implicit session, which is on
``/default``. A request carries its own label as data, so that whoever finds it in the store, the
nemesis or a process that resumes a session, knows which one it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tenure.model import DEFAULT_NODE

NODE = "/chaos"

MUTEXES = tuple(f"mutex-{number}" for number in range(12))
"""Locked by sessions that are renewed when they expire."""

POOLS = {"pool-2": 2, "pool-3": 3, "pool-5": 5, "pool-8": 8}
"""Semaphores, and their limits."""

RESIZED, RESIZED_LIMIT, HIGHEST_LIMIT = "resized", 4, 7
"""A semaphore whose limit an administrator changes, its first limit, and the highest."""

SHARED, SHARED_LIMIT, PER_KEY = "shared", 5, 2
"""A semaphore in which each key has a limit, and the two limits."""

KEYS = ("flood", "flood", "flood", "small-1", "small-2", "small-3")
"""The keys by which its tokens are requested; the first one has most of the requests."""

SEVERAL = tuple(f"several-{number}" for number in range(4))
"""Mutexes that are locked together, in any order of the arguments, and each alone."""

TANGLED = tuple(f"tangled-{number}" for number in range(4))
"""Mutexes that are locked inside each other, in any order, so that tasks wait for each other."""

KNOT, KNOT_LIMIT = "knot", 3
"""A semaphore among them, and its limit."""

RATES = {"rate": (40, 0.5, None), "rate-in-bursts": (60, 0.6, 20)}
"""Rates: limit, seconds and burst."""

ELECTION = "leader"

CONFIGS = ("config-a", "config-b")
"""Semaphores of which only the data is used; the second is deleted and created again."""

IMPLICIT = "implicit"
"""A mutex on ``/default``, locked through implicit sessions and by threads."""


def resumable(slot: int) -> str:
    """Return the mutex that a slot's resumable session holds, beside one of its neighbour's."""
    return f"resumed-{slot}"


def of_key(key: str) -> str:
    """Return the name of the semaphore that `SHARED` has for a key."""
    return f"{SHARED}/key/{key}"


def label_in(data: bytes) -> str:
    """Return the label of a request, from its data; a leader adds what it proclaims."""
    return data.partition(b"#")[0].decode()


@dataclass(frozen=True, slots=True)
class Part:
    """What a process is told when it starts.

    Attributes:
        label: of this process, in the history.
        slot: its number among the processes; its successor after a crash has the same.
        slots: how many there are.
        url: of the store.
        folder: where it keeps its history and its resume token.
        window: seconds of recovery window of its sessions.
        seed: of its choices.
        plain: whether the store has but mutexes and semaphores, for requests of one token without
            data; see `chaos.adapter.Engine`.
        one_writer: whether each document is written by one process alone; see there.
        frugal: whether few tasks share a session; see there.
        keeps_rates: whether the store never forgets a rate; see there.
        shows_waits: whether the store shows which request a task waits for; see there.
    """

    label: str
    slot: int
    slots: int
    url: str
    folder: str
    window: float
    seed: str
    plain: bool = False
    one_writer: bool = False
    frugal: bool = False
    keeps_rates: bool = True
    shows_waits: bool = True

    @property
    def on_deadlock(self) -> Literal["wait", "raise"]:
        """Reaction of its sessions to a deadlock."""
        return "raise" if self.shows_waits else "wait"

    @property
    def node(self) -> str:
        """Where lies what it competes for."""
        return DEFAULT_NODE if self.plain else NODE

    def writes(self, document: str) -> bool:
        """Whether it writes one of `CONFIGS`, or only reads it."""
        return not self.one_writer or self.slot == CONFIGS.index(document)

    @property
    def history(self) -> Path:
        """Where it writes what happens to it."""
        return Path(self.folder) / f"{self.label}.history"

    @property
    def token(self) -> Path:
        """Where the token of its resumable session is kept, for its successor."""
        return Path(self.folder) / f"slot-{self.slot}.token"

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Part:
        """Return the value that `to_json` has written."""
        return cls(**json.loads(text))
