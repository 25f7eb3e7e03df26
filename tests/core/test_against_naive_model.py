"""Random histories of the core, against a model that recomputes everything from the one rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenure.core.node import StoredRequest, StoredSession
from tenure.core.rules import EXACT
from tenure.core.store import ENDED, GRANTED, RESIZED, TIMED_OUT, Store
from tenure.model import EPHEMERAL_LIMIT
from tests.guarantees import MEMORY, guarantee

NODE = "/default"
LASTING = {"one": 1, "four": 4, "exact": EXACT, "vast": EPHEMERAL_LIMIT}


@dataclass
class Naive:
    """A queue as a list; who owns is worked out anew each time.

    What owned when the limit was changed owns for as long as it is in the queue.
    """

    limit: int
    queue: list[NaiveRequest] = field(default_factory=list)
    kept: list[NaiveRequest] = field(default_factory=list)

    def owners(self) -> list[NaiveRequest]:
        owning: list[NaiveRequest] = []
        for request in self.queue:
            whole = request.count == self.limit
            if request in self.kept:
                owning.append(request)
                continue
            if owning and (whole or owning[0].count == self.limit):
                break
            held = sum(each.count for each in owning)
            if self.limit <= EXACT and held + request.count > self.limit:
                break
            owning.append(request)
        return owning

    def resize(self, limit: int) -> list[NaiveRequest]:
        """Change the limit; those that wait for more than it leave, and are returned."""
        self.kept, self.limit = self.owners(), limit
        gone = [each for each in self.queue if each not in self.kept and each.count > limit]
        self.queue = [each for each in self.queue if each not in gone]
        return gone


@dataclass(eq=False)
class NaiveRequest:
    session: int
    request_id: int
    count: int
    deadline: float | None


class CoreAgainstNaiveModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.store = Store()
        self.node = self.store.nodes[NODE]
        self.sessions: list[StoredSession] = []
        self.requests: list[StoredRequest] = []
        self.naive: dict[str, Naive] = {}
        self.silent_since: dict[int, float] = {}
        self.holds = 0
        for name, limit in LASTING.items():
            self.store.create(self.node, name, limit, b"", exist_ok=False)
            self.naive[name] = Naive(limit)

    @property
    def alive(self) -> list[StoredSession]:
        return [session for session in self.sessions if session.alive]

    @rule(window=st.sampled_from([1.0, 2.0, 5.0]))
    def attach(self, window: float) -> None:
        session = self.store.attach(NODE, "", window, "process", b"", self.now)
        self.sessions.append(session)
        self.silent_since[session.id] = self.now

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        name=st.sampled_from([*LASTING, "mutex", "registry"]),
        timeout=st.sampled_from([None, None, 0.0, 0.5, 3.0]),
    )
    def enqueue(self, data: st.DataObject, name: str, timeout: float | None) -> None:
        session = data.draw(st.sampled_from(self.alive))
        ephemeral = name not in LASTING
        limit = self.naive[name].limit if name in LASTING else EPHEMERAL_LIMIT
        counts = {1, min(2, limit), min(3, limit), min(EXACT, limit), limit}
        count = data.draw(st.sampled_from(sorted(counts)))
        self.holds += 1
        order_id = self.store.last_order_id + 1
        request = self.store.enqueue(
            session, self.holds, name, count, b"", timeout, ephemeral, self.now, order_id
        )
        naive = self.naive.setdefault(name, Naive(limit))
        mine = NaiveRequest(session.id, self.holds, count, None)
        naive.queue.append(mine)
        granted = mine in naive.owners()
        if timeout == 0 and not granted:
            naive.queue.remove(mine)
            assert request is None
            return
        assert request is not None
        assert (request.granted_at is not None) == granted
        if not granted and timeout is not None:
            mine.deadline = self.now + timeout
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.store.withdraw(request.session, request.request_id, self.now)
        self.drop(lambda each: each.request_id == request.request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), less=st.integers(0, 3))
    def shrink(self, data: st.DataObject, less: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.request_id not in request.session.requests or request.count - less < 1:
            return
        new = request.count - less
        if new > EXACT and new != request.semaphore.limit:
            return
        self.store.alter(request.session, request.request_id, new, None, self.now)
        for naive in self.naive.values():
            for each in naive.queue:
                if each.request_id == request.request_id:
                    each.count = new

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), timeout=st.sampled_from([None, 0.0, 0.5, 3.0]))
    def wait_for_as_long_from_now(self, data: st.DataObject, timeout: float | None) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.request_id not in request.session.requests:
            return
        self.store.alter(request.session, request.request_id, None, None, self.now, timeout)
        for naive in self.naive.values():
            owners = naive.owners()
            for each in naive.queue:
                if each.request_id == request.request_id and each not in owners:
                    each.deadline = None if timeout is None else self.now + timeout
        if timeout == 0:
            self.give_up()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.alive))
        self.store.close(session, self.now)
        self.drop(lambda each: each.session == session.id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.alive))
        assert session.touch(self.now)
        self.silent_since[session.id] = self.now

    @rule(name=st.sampled_from([*LASTING]))
    def delete_and_create_again(self, name: str) -> None:
        self.store.delete(self.node, name, force=True)
        self.store.create(self.node, name, LASTING[name], b"", exist_ok=False)
        self.naive[name] = Naive(LASTING[name])

    @rule(
        name=st.sampled_from(["one", "four", "exact"]),
        limit=st.sampled_from([1, 2, 3, 4, 6, EXACT - 1, EXACT]),
    )
    def resize(self, name: str, limit: int) -> None:
        self.store.effects.clear()
        owned = self.owning(name)
        self.store.resize(self.node, name, limit, self.now)
        assert self.owning(name)[: len(owned)] == owned, "a change takes nothing away"
        gone = self.naive[name].resize(limit)
        told = [effect[2] for effect in self.store.effects if effect[1] == RESIZED]
        assert [(each.request_id, new) for each, new in told] == [
            (each.request_id, limit) for each in gone
        ]

    def owning(self, name: str) -> list[int]:
        semaphore = self.node.semaphores[name]
        return [each.request_id for each in semaphore if each.granted_at is not None]

    @rule(pause=st.sampled_from([0.1, 0.6, 1.0, 2.5]))
    def time_passes(self, pause: float) -> None:
        until = self.now + pause
        while True:
            due = self.store.next_deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self.run_out()
        self.now = until
        self.run_out()

    def run_out(self) -> None:
        self.store.effects.clear()
        self.store.expire(self.now)
        gone = {
            session.id
            for session in self.sessions
            if self.silent_since[session.id] + session.window <= self.now
        }
        ended = {effect[0].id for effect in self.store.effects if effect[1] == ENDED}
        assert all(not session.alive for session in self.sessions if session.id in gone)
        assert ended <= gone
        self.drop(lambda each: each.session in gone)
        self.give_up()
        told = {effect[2].request_id for effect in self.store.effects if effect[1] == TIMED_OUT}
        assert not told & {each.request_id for naive in self.naive.values() for each in naive.queue}

    def give_up(self) -> None:
        """Those whose time is over leave, but none that those before it make an owner."""
        for naive in self.naive.values():
            while True:
                owners = naive.owners()
                late = [
                    each
                    for each in naive.queue
                    if each not in owners and each.deadline and each.deadline <= self.now
                ]
                if not late:
                    break
                naive.queue.remove(late[0])

    def drop(self, gone: object) -> None:
        for naive in self.naive.values():
            naive.queue = [each for each in naive.queue if not gone(each)]  # type: ignore[operator]

    @invariant()
    def the_owners_are_the_longest_prefix_that_fits(self) -> None:
        if not hasattr(self, "store"):
            return
        granted = [effect[2] for effect in self.store.effects if effect[1] == GRANTED]
        assert len({id(request) for request in granted}) == len(granted)
        self.store.effects.clear()
        for name, naive in self.naive.items():
            semaphore = self.node.semaphores.get(name)
            if semaphore is None:
                assert name not in LASTING
                assert not naive.queue
                continue
            assert [request.request_id for request in semaphore] == [
                each.request_id for each in naive.queue
            ]
            owning = [request.request_id for request in semaphore if request.granted_at is not None]
            assert owning == [each.request_id for each in naive.owners()]
            orders = [request.order_id for request in semaphore]
            assert orders == sorted(set(orders))
            assert semaphore.held == sum(each.count for each in naive.owners())
            assert semaphore.waiting == len(naive.queue) - len(owning)
            waiting = [each.count for each in semaphore if each.granted_at is None]
            assert all(count <= semaphore.limit for count in waiting)


TestCoreAgainstNaiveModel = CoreAgainstNaiveModel.TestCase
TestCoreAgainstNaiveModel.settings = settings(max_examples=60, stateful_step_count=40)
TestCoreAgainstNaiveModel.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on=MEMORY)
]
