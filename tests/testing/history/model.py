"""A naive store, one step after another, and programs that are told of it late.

What happens, happens in the store at an instant; what is recorded are the instants around it, with
random delays. So every history of it is in order, by the plainest reading of the rules.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.history import Record
from tenure.testing.history.records import (
    Called,
    Crashed,
    Gone,
    Granted,
    Held,
    Leaves,
    Observed,
    Queued,
    Requested,
    Returned,
    Truth,
)

NODE = "/n"
LIMITS = {"mutex": EPHEMERAL_LIMIT, "pool": 3}
WINDOW = 2.0
LENGTH = 20.0


class Request:
    def __init__(self, label: str, name: str, count: int) -> None:
        self.label = label
        self.name = name
        self.count = count
        self.order_id = 0
        self.over = False  # its program has given up
        self.told = False


class World:
    """One history.

    Attributes:
        records: what was recorded, by the end of `run`.
    """

    def __init__(self, random: Random, requests: int = 25, calls: int = 25) -> None:
        self.records: list[Record] = []
        self._random = random
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._order_ids = itertools.count(100, 3)
        self._now = 0.0
        self._queues: dict[str, list[Request]] = {name: [] for name in LIMITS}
        self._granted: set[int] = set()
        self._data: bytes | None = None
        for number in range(requests):
            self._at(random.uniform(0, LENGTH), lambda number=number: self._ask(number))  # type: ignore[misc]
        for number in range(calls):
            self._at(random.uniform(0, LENGTH), lambda number=number: self._call(number))  # type: ignore[misc]

    def run(self) -> World:
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now += WINDOW
        for name, queue in self._queues.items():
            owners = tuple(each.order_id for each in queue if each.order_id in self._granted)
            waiters = tuple(each.order_id for each in queue if each.order_id not in self._granted)
            self.records.append(Truth(self._now, NODE, name, None, owners, waiters))
        self.records.append(Truth(self._now, NODE, "data", self._data))
        return self

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _soon(self, event: Callable[[], None], most: float = 0.3) -> None:
        self._at(self._now + self._random.uniform(0, most), event)

    def _say(self, record: Record) -> None:
        self.records.append(record)

    # Requests

    def _ask(self, number: int) -> None:
        random = self._random
        name = random.choice(list(LIMITS))
        count = LIMITS[name] if name == "mutex" else random.randint(1, LIMITS[name])
        request = Request(f"r{number}", name, count)
        process, timeout = f"p{number}", random.choice([None, random.uniform(0.0, 4.0)])
        self._say(
            Requested(
                *(self._now, process, request.label, NODE, name, count, LIMITS[name], WINDOW),
                timeout,
            )
        )
        self._soon(lambda: self._enqueue(request))
        if timeout is not None:
            self._at(self._now + timeout, lambda: self._give_up(request))

    def _enqueue(self, request: Request) -> None:
        if request.over:
            return
        request.order_id = next(self._order_ids)
        self._queues[request.name].append(request)
        if self._random.random() < 0.5:
            self._soon(lambda: self._say_place(request))
        self._settle(request.name)

    def _say_place(self, request: Request) -> None:
        if not request.over:
            self._say(Queued(self._now, request.label, request.order_id))

    def _settle(self, name: str) -> None:
        """The owners are the longest prefix of the queue whose counts fit."""
        held = 0
        for request in self._queues[name]:
            held += request.count
            if held > LIMITS[name]:
                return
            if request.order_id not in self._granted:
                self._granted.add(request.order_id)
                self._soon(lambda request=request: self._notify(request))  # type: ignore[misc]

    def _give_up(self, request: Request) -> None:
        if not request.told and not request.over:
            request.over = True
            self._say(Leaves(self._now, request.label))
            self._soon(lambda: self._remove(request))
            self._soon(lambda: self._say(Gone(self._now, request.label, "timeout")))

    def _notify(self, request: Request) -> None:
        if request.over:
            return
        request.told = True
        deadline = self._now + WINDOW
        self._say(Granted(self._now, request.label, request.order_id, deadline))
        fate = self._random.choices(["release", "lose", "crash", "keep"], [10, 2, 2, 1])[0]
        if fate == "release":
            self._soon(lambda: self._sample(request), 0.8)
            self._at(self._now + self._random.uniform(0.8, 1.6), lambda: self._release(request))
        elif fate == "lose":
            self._at(deadline, lambda: self._lose(request, deadline))
        elif fate == "crash":
            self._soon(lambda: self._crash(request))
        else:
            self._say(Held(self._now, request.label, 1000.0))

    def _sample(self, request: Request) -> None:
        self._say(Held(self._now, request.label, self._now + WINDOW))

    def _release(self, request: Request) -> None:
        request.over = True
        self._say(Leaves(self._now, request.label))
        removed = self._now + self._random.uniform(0, 0.3)
        self._at(removed, lambda: self._remove(request))
        deadline = self._now + WINDOW
        self._at(removed, lambda: self._say(Gone(self._now, request.label, "released", deadline)))

    def _lose(self, request: Request, deadline: float) -> None:
        request.over = True
        self._soon(lambda: self._say(Gone(self._now, request.label, "lost", deadline)), 0.1)
        self._soon(lambda: self._remove(request))

    def _crash(self, request: Request) -> None:
        request.over = True
        self._say(Crashed(self._now, f"p{request.label[1:]}"))
        self._soon(lambda: self._remove(request), WINDOW)

    def _remove(self, request: Request) -> None:
        if request in self._queues[request.name]:
            self._queues[request.name].remove(request)
            self._settle(request.name)

    # Data

    def _call(self, number: int) -> None:
        op = self._random.choice(["create", "ensure", "update", "update", "delete", "read", "read"])
        label = f"c{number}"
        argument = None if op in ("delete", "read") else label.encode()
        self._say(Called(self._now, f"q{number}", label, NODE, "data", op, argument))  # type: ignore[arg-type]
        self._soon(lambda: self._happen(op, label, argument))

    def _happen(self, op: str, label: str, argument: bytes | None) -> None:
        result, known = None, self._random.random() < 0.8
        if not known and self._random.random() < 0.5:
            return  # it never reached the store
        if self._data is None:
            outcome = "ok" if op in ("create", "ensure") else "missing"
        else:
            outcome = "exists" if op == "create" else "ok"
        if outcome == "ok":
            if op == "read":
                result = self._data
            elif op == "delete" or op != "ensure" or self._data is None:
                self._change(argument)
        if known:
            self._soon(lambda: self._say(Returned(self._now, label, outcome, result)))  # type: ignore[arg-type]
        elif self._random.random() < 0.5:
            self._soon(lambda: self._say(Returned(self._now, label, "unknown")))

    def _change(self, data: bytes | None) -> None:
        self._data = data
        self._soon(self._observe, 0.1)

    def _observe(self) -> None:
        """The state of now: of changes that follow each other closely only the last is seen."""
        self._say(Observed(self._now, "o", "w", NODE, "data", self._data))
