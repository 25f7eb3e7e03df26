"""What an engine has to say for itself so that chaos can be done to it.

An adapter is a small class: how the store is started and stopped, where clients find it, and what
can be broken and healed beyond the clients themselves. `ENGINES` in `chaos.__main__` lists them.

A *fault* is an asynchronous context manager: it breaks something when it is entered, gives a few
words about what it did, and has healed it when it is left, however that comes. The nemesis alone
decides when, and for how long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from chaos.work import NODE
from tenure.model import NodeConfig

if TYPE_CHECKING:
    from chaos.crew import Crew
    from tenure.testing.history import Journal


class NotNow(Exception):
    """A fault could not be inflicted this time; it says why. Nothing is broken."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may touch.

    Attributes:
        crew: the processes.
        engine: the store.
        journal: what the nemesis writes into the history.
        random: seeded; the only source of chance.
    """

    crew: Crew
    engine: Engine
    journal: Journal
    random: Random


Inflict = Callable[[Scene], AbstractAsyncContextManager[str]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break something.

    Attributes:
        name: one word, or a few with hyphens.
        about: what it breaks, in half a line.
        inflict: breaks and heals.
        seconds: how long it lasts, between these two; drawn anew each time.
    """

    name: str
    about: str
    inflict: Inflict
    seconds: tuple[float, float]


class Engine(ABC):
    """A store that chaos is done to.

    Args:
        folder: a new one of its own, empty.

    Attributes:
        name: as it is asked for on the command line.
        nodes: how its nodes are configured.
        lingers: seconds for which the session of a dead process may live on, with all its requests;
            those of implicit sessions, whose window is longer, are not waited for.
        plain: whether there is nothing but mutexes and semaphores on ``/default``, requests have
            one token and no data, and each program says the limits itself.
        one_writer: whether each document is written by one process alone, because the store may do
            twice what was answered to nobody.
        frugal: whether each further request of a session for a name takes a session of its own, so
            that few tasks share one.
        keeps_rates: whether the store never forgets a rate while tokens are in its window.
        shows_waits: whether the store shows which request a task waits for.
        spares: the faults of processes and administrators that are not inflicted here.
        seen_at: the node on which administrators find what lies on the processes' node.
        not_done: the faults that cannot be inflicted here, and why; said in the report.
    """

    name: str
    nodes = NodeConfig()
    lingers = 0.0
    plain = False
    one_writer = False
    frugal = False
    keeps_rates = True
    shows_waits = True
    spares: frozenset[str] = frozenset()
    seen_at = NODE

    def __init__(self, folder: Path) -> None:
        """Keep everything of the run in `folder`."""
        self.folder = folder
        self.not_done: dict[str, str] = {}

    @property
    @abstractmethod
    def url(self) -> str:
        """Where a client that starts now finds the store; it may differ from time to time."""

    @property
    def admin_url(self) -> str:
        """Where administrators find it, and who looks at everything in the end."""
        return self.url

    @abstractmethod
    async def start(self) -> None:
        """Have the store ready."""

    @abstractmethod
    async def stop(self) -> None:
        """Leave nothing behind that runs, or is mounted. Safe to call twice, and without start."""

    @abstractmethod
    def faults(self) -> Sequence[Fault]:
        """Return the faults that are possible here, after `start`."""

    def environment(self, slot: int) -> Mapping[str, str]:  # noqa: ARG002  others need it
        """Return further variables for the processes of a slot."""
        return {}

    def holds_up_all(self, pid: int) -> bool:  # noqa: ARG002  others need it
        """Whether nobody else can go on while this process is stopped as it is now."""
        return False
