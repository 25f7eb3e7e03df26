"""What a thread of a process does, through `tenure.blocking`.

A thread cannot be cancelled: it looks for itself whether it is time to stop, and nothing that it
waits for lasts longer than a second.
"""

from __future__ import annotations

import threading
from functools import partial
from random import Random

from chaos.tasks import SAMPLE, data_of, tolerated
from chaos.work import IMPLICIT, MUTEXES, POOLS, Part
from tenure import blocking
from tenure.errors import EngineError, EngineUnavailable, SessionExpired
from tenure.testing.history import Journal, Request

_PATIENCE = 0.5
"""Seconds of timeout."""


class Threads:
    """One thread, with a client of its own."""

    def __init__(self, part: Part, journal: Journal) -> None:
        """Prepare the thread of `part`."""
        self._part = part
        self._journal = journal
        self._data = partial(data_of, part)
        self._random = Random(f"{part.seed} thread")
        self._stopped = threading.Event()
        self._frozen = threading.Event()

    def freeze(self) -> None:
        """Ask for nothing new, and keep what is held."""
        self._frozen.set()

    def stop(self) -> None:
        """Give everything back, and end."""
        self._stopped.set()

    def run(self) -> None:
        """Work until stopped; a store that is out of order is tried again."""
        while not self._stopped.wait(SAMPLE):
            try:
                self._serve()
            except (EngineError, EngineUnavailable):
                continue

    def _serve(self) -> None:
        with blocking.connect(self._part.url) as client:
            if self._part.plain:
                for name, limit in POOLS.items():
                    client.semaphore(name).create(limit, exist_ok=True)
            for attempt in client.sessions(
                self._part.node,
                recovery_window=self._part.window,
                description=self._part.label,
                on_deadlock=self._part.on_deadlock,
            ):
                with attempt as session:
                    self._work(client, session)

    def _work(self, client: blocking.Client, session: blocking.Session) -> None:
        acts = (
            lambda: self._lock(session.mutex(self._random.choice(MUTEXES))),
            lambda: self._queue(session),
            lambda: self._lock_implicitly(client),
        )
        while not self._stopped.wait(self._random.expovariate(1 / 0.1)):
            if self._frozen.is_set():
                self._stopped.wait()
                return
            with tolerated():
                self._random.choice(acts)()

    def _lock(self, mutex: blocking.Mutex) -> None:
        with (
            self._journal.request(mutex, timeout=_PATIENCE) as request,
            mutex.lock(data=self._data(request), timeout=_PATIENCE) as lease,
        ):
            self._hold(request, lease)

    def _queue(self, session: blocking.Session) -> None:
        name, limit = self._random.choice(list(POOLS.items()))
        pool = session.semaphore(name)
        with (
            self._journal.request(pool, limit=limit) as request,
            pool.enqueue(data=self._data(request)) as ticket,
        ):
            try:
                self._hold(request, ticket.wait(timeout=_PATIENCE))
            finally:
                request.leaves()  # with the block

    def _lock_implicitly(self, client: blocking.Client) -> None:
        try:
            self._lock(client.mutex(IMPLICIT))
        except SessionExpired:
            return  # the next request brings a new session

    def _hold(self, request: Request, lease: blocking.Lease) -> None:
        with request.holds(lease):
            left = self._random.expovariate(1 / 0.005)
            while left > 0 or self._frozen.is_set():
                if self._stopped.wait(min(left, SAMPLE) if left > 0 else SAMPLE):
                    return
                if not request.sample():
                    return
                left -= SAMPLE
