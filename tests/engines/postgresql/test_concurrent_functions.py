"""All functions of the store at once, with an oracle that watches the rows."""

from __future__ import annotations

import asyncio
import itertools
import random
from base64 import b64encode
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import psycopg
import pytest

from tenure.core import rules
from tests.engines.postgresql.stepping import (
    TABLES,
    Actor,
    Store,
    a_store,
    arguments,
    array,
    maintenance,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(240)]

_ACTORS = 10
_CALLS = 350
_NODES = ("/default", "/other")
_NAMES = ("a", "b", "c", "s", "t")
_EXPECTED = frozenset({"TN001", "TN002", "TN003", "55P03", "40001"})
"""Codes of errors that the engine handles: no row, no such lease, a guarded request, a session that
cannot be reattached yet, a guard with an old snapshot. There is no deadlock."""
_WHOLE = 18446744073709551615

_WRONG = """
    SELECT 'counters', q.name, q.held, q.owners, q.waiters, r.held, r.owners, r.waiters
        FROM SCHEMA.queues q LEFT JOIN LATERAL (
            SELECT sum(count) FILTER (WHERE y.order_id <= q.last_owner) AS held,
                count(*) FILTER (WHERE y.order_id <= q.last_owner) AS owners,
                count(*) FILTER (WHERE y.order_id > q.last_owner) AS waiters
            FROM SCHEMA.requests y WHERE y.queue = q.id) r ON true
        WHERE q.held <> coalesce(r.held, 0) OR q.owners <> r.owners OR q.waiters <> r.waiters
    UNION ALL SELECT 'limit', name, held, owners, waiters, max_count, 0, 0 FROM SCHEMA.queues
        WHERE held > coalesce(max_count, 18446744073709551615)
    UNION ALL SELECT 'request without queue', '', y.queue, 0, 0, 0, 0, 0 FROM SCHEMA.requests y
        WHERE NOT EXISTS (SELECT FROM SCHEMA.queues q WHERE q.id = y.queue)
    UNION ALL SELECT 'request without session', '', y.session, 0, 0, 0, 0, 0 FROM SCHEMA.requests y
        WHERE NOT EXISTS (SELECT FROM SCHEMA.sessions s WHERE s.id = y.session)
    UNION ALL SELECT 'removal without session', '', v.session, 0, 0, 0, 0, 0 FROM SCHEMA.removals v
        WHERE NOT EXISTS (SELECT FROM SCHEMA.sessions s WHERE s.id = v.session)
    UNION ALL SELECT 'former without session', '', f.session, 0, 0, 0, 0, 0 FROM SCHEMA.former f
        WHERE NOT EXISTS (SELECT FROM SCHEMA.sessions s WHERE s.id = f.session)
    UNION ALL SELECT 'queue without node', q.name, 0, 0, 0, 0, 0, 0 FROM SCHEMA.queues q
        WHERE NOT EXISTS (SELECT FROM SCHEMA.nodes n WHERE n.id = q.node)"""
"""What must never be seen, in one snapshot."""
_LATEST = """SELECT n.path, q.name, q.last_owner FROM SCHEMA.queues q
    JOIN SCHEMA.nodes n ON n.id = q.node WHERE q.last_owner > 0"""


class _Session(NamedTuple):
    """A session of the store, as some program has it."""

    node: str
    number: int
    token: str


class _Request(NamedTuple):
    """A request that was sent, whatever has become of it."""

    session: _Session
    number: int
    name: str


class _World:
    """What the programs of a test know."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sessions: list[_Session] = []
        self.requests: list[_Request] = []
        self.highest: dict[tuple[str, str], int] = {}  # tokens by node and name
        self.tokens: set[int] = set()
        self.numbers = itertools.count(1)
        self.grants = 0
        self.errors: dict[str, int] = {}

    def session(self) -> _Session:
        """Choose a session, most often a young one."""
        return self.random.choice(self.sessions[-12:])

    def place(self) -> list[str]:
        """Choose a semaphore."""
        return [self.random.choice(_NODES), self.random.choice(_NAMES)]

    def before(self, session: _Session, name: str) -> int:
        """Return a token below which no later grant may be."""
        return self.highest.get((session.node, name), 0)

    def granted(self, request: _Request, token: int, before: int) -> None:
        """Note an answer that grants a request."""
        assert token > before, f"the token of {request} fell from {before} to {token}"
        assert token not in self.tokens, f"{token} was given twice"
        self.tokens.add(token)
        self.grants += 1
        key = request.session.node, request.name
        self.highest[key] = max(self.highest.get(key, 0), token)


class _Program:
    """One connection that makes random calls."""

    def __init__(self, actor: Actor, world: _World) -> None:
        self.actor = actor
        self.world = world
        self.random = world.random
        self.own = _Session("", 0, "")

    async def attach(self) -> None:
        """Attach a session, some with a window that soon ends."""
        await self._attach(self.random.choice(_NODES), self.random.choice((0.2, 2.0, 30.0)))

    async def attach_own(self) -> None:
        """Attach a session that no other program uses."""
        await self._attach("/default", 600.0)
        self.own = self.world.sessions[-1]

    async def _attach(self, node: str, window: float) -> None:
        token = f"1.{next(self.world.numbers)}"
        reply = await self.actor.call(
            *("attach", node, token, self.actor.channel, window, "", "window", ""),
            rules.SESSIONS_PER_NODE,
        )
        if reply[0] == "ok":
            self.world.sessions.append(_Session(node, reply[1], token))

    async def operate(self) -> None:
        """Send a batch of one to six operations of one to three sessions."""
        world = self.world
        sessions = [world.session() for _ in range(self.random.randint(1, 3))]
        operations, requests = [], []
        for _ in range(self.random.randint(1, 6)):
            if world.requests and self.random.random() < 0.5:
                request = self.random.choice(world.requests[-30:])
                if request.session not in sessions:
                    sessions.append(request.session)
                words: list[Any] = ["w", request.number, request.name]
            else:
                session, name = self.random.choice(sessions), self.random.choice(_NAMES)
                request = _Request(session, next(world.numbers), name)
                words = ["m", request.number, name]
                if self.random.random() < 0.4:
                    count = str(self.random.choice((1, 2, _WHOLE)))
                    wait, ephemeral = (
                        self.random.choice(("", "0", "5000")),
                        self.random.choice("01"),
                    )
                    words = ["e", request.number, name, count, "", wait, ephemeral]
            at = sessions.index(request.session) + 1
            operations.append([at, *words])
            requests.append(request)
        fresh = _NAMES if self.random.random() < 0.5 else ()
        before = [world.before(each.session, each.name) for each in requests]
        who = [(each.number, each.token) for each in sessions]
        common = self.actor.channel, max(world.tokens, default=0), False
        for judged in (False, True):
            lists = arguments(who, operations, fresh)
            reply = await self.actor.call("operate", *common, *lists, judged)
            if isinstance(reply, list):
                break
            await self.actor.call("expire", reply["expired"], self.actor.channel)
        for words, request, least, answer in zip(operations, requests, before, reply, strict=False):
            if words[1] != "w":
                self._answered(request, least, answer)

    def _answered(self, request: _Request, least: int, answer: Any) -> None:
        if isinstance(answer, int):
            if answer:
                self.world.granted(request, answer, least)
                self.world.requests.append(request)
        elif isinstance(answer[0], int):
            self.world.requests.append(request)

    async def churn(self) -> None:
        """Lock mutexes whose rows come and go, and release them."""
        actor, world = self.actor, self.world
        names = self.random.sample(_NAMES, self.random.randint(2, 4))
        requests = [_Request(self.own, next(world.numbers), name) for name in names]
        before = [world.before(self.own, name) for name in names]
        who = [(self.own.number, self.own.token)]
        fresh = names if self.random.random() < 0.3 else ()
        common = actor.channel, 0, False
        locks = [[1, "m", each.number, each.name] for each in requests]
        try:
            lists = arguments(who, locks, fresh)
            answers = await actor.call("operate", *common, *lists, False)
            for request, least, answer in zip(requests, before, answers, strict=False):
                self._answered(request, least, answer)
            releases = [[1, "w", each.number, each.name] for each in requests]
            await actor.call("operate", *common, *arguments(who, releases, ()), False)
        finally:
            await actor.call("tick", actor.channel, None, None)

    async def acquire(self) -> None:
        """Lock a mutex as a program does that has nothing else to do."""
        session, name = self.world.session(), self.random.choice(_NAMES)
        request = _Request(session, next(self.world.numbers), name)
        least = self.world.before(session, name)
        reply = await self.actor.call(
            *("acquire", self.actor.channel, 0, False, session.number, session.token),
            *(request.number, name, self.random.choice((None, 0, 5000, 60_000_000))),
        )
        if isinstance(reply, dict):  # sessions have expired
            return
        self._answered(request, least, reply[0])

    async def release(self) -> None:
        """Release a lease, or withdraw a request."""
        if self.world.requests:
            request = self.random.choice(self.world.requests[-30:])
            session = request.session
            await self.actor.call(
                *("release", self.actor.channel, 0, False, session.number, session.token),
                *(request.number, request.name),
            )

    async def turn_over(self) -> None:
        """Release and withdraw requests of a session on one name, and queue up again."""
        world = self.world
        if not world.requests:
            return
        session, _, name = self.random.choice(world.requests[-30:])
        leaving = [each.number for each in world.requests if each[::2] == (session, name)][-3:]
        joining = [next(world.numbers) for _ in range(self.random.randint(0, 3))]
        waits = [self.random.choice((5000, 60_000_000)) for _ in joining]
        kept = leaving[1:] + leaving[:1] if self.random.random() < 0.2 else []
        least = world.before(session, name)
        reply = await self.actor.call(
            *("turn_over", self.actor.channel, 0, False, session.number, session.token),
            *(name, array(leaving), array(joining), array(waits), array(kept)),
        )
        for number, answer in zip(joining, reply[len(leaving) :], strict=False):
            self._answered(_Request(session, number, name), least, answer)

    async def change(self) -> None:
        """Change a semaphore or a request."""
        session, name = self.world.session(), self.random.choice(_NAMES)
        kind = self.random.choice(("create", "update", "delete", "alter"))
        arguments: dict[str, list[Any]] = {
            "create": [name, "2", "", True, rules.SEMAPHORES_PER_NODE],
            "update": [name, b64encode(self.random.randbytes(2)).decode()],
            "delete": [name, self.random.random() < 0.5],
            "alter": [],
        }
        args = arguments[kind]
        if kind == "alter":
            if not self.world.requests:
                return
            request = self.random.choice(self.world.requests[-30:])
            session, name = request.session, request.name
            wait = self.random.choice(("-", "", "0", "5000"))
            args = [name, request.number, self.random.choice((None, "1")), None, wait]
        words = next(self.world.numbers), kind, args, self.actor.channel, False
        await self.actor.call("change", session.number, session.token, *words)

    async def renew(self) -> None:
        """Renew some sessions, or one alone."""
        ((epoch,),) = await self.actor.execute("SELECT epoch FROM SCHEMA.meta")
        who = [[each.number, each.token] for each in self.world.sessions[-6:]]
        self.random.shuffle(who)
        await self.actor.call("renew", False, who, epoch)
        session = self.world.session()
        await self.actor.call("remaining", session.number, session.token)
        await self.actor.call("look", [[session.number, session.token, [1, 2, 3]]])

    async def reattach(self) -> None:
        """Attach some sessions again, after a lost connection."""
        found = {self.world.session().number: self.world.session() for _ in range(3)}
        old = list({each.number: each for each in found.values()}.values())
        new = [each._replace(token=f"1.{next(self.world.numbers)}") for each in old]
        who = [[a.number, [a.token], b.token] for a, b in zip(old, new, strict=True)]
        _, answers = await self.actor.call("reattach", self.actor.channel, who, "another epoch")
        for session, answer in zip(new, answers, strict=True):
            if isinstance(answer, list):
                self.world.sessions.append(session)

    async def take_over(self) -> None:
        """Take a session over."""
        session = self.world.session()
        secret, window = str(next(self.world.numbers)), self.random.choice((None, 2.0, 40.0))
        reply = await self.actor.call(
            *("take_over", session.node, session.number, secret, self.actor.channel, "", window)
        )
        if reply[0] == "ok":
            taken = session._replace(token=reply[1])
            self.world.sessions.append(taken)
            await self.actor.call("acknowledge", session.number, [session.token], "")
            await self.actor.call("begin_session", taken.number, taken.token, "")

    async def leave(self) -> None:
        """Close or detach a session."""
        session, detach = self.world.session(), self.random.random() < 0.3
        tokens = [session.token]
        await self.actor.call("leave", session.number, tokens, detach, self.actor.channel, False)

    async def look_after(self) -> None:
        """Expire, watch and remove rows."""
        session, (node, name) = self.world.session(), self.world.place()
        watched = [[*self.world.place(), "tenure_q"], [node, name, "tenure_q"]]
        places = [self.world.place() for _ in range(3)]
        await self.actor.call("watch", session.number, session.token, name, "tenure_q")
        await self.actor.call(
            "tick", self.actor.channel, places, self.random.choice((None, watched))
        )
        await self.actor.execute(
            "UPDATE SCHEMA.queues SET watched_until = 'epoch' WHERE id IN (SELECT id FROM "
            "SCHEMA.queues WHERE watched_until > 'epoch' FOR UPDATE SKIP LOCKED)"
        )
        await self.actor.call("tick", self.actor.channel, None, None)

    async def administrate(self) -> None:
        """Describe, evict, end sessions, create and drop a node."""
        node, name = self.world.place()
        await self.actor.call("describe", node, self.random.choice((None, name)), "all")
        await self.actor.call("describe_node", node)
        await self.actor.call("hello", False, False)
        token = self.world.highest.get((node, name), 1)
        await self.actor.call("evict", node, name, token, self.actor.channel)
        session = self.world.session()
        if self.random.random() < 0.3:
            await self.actor.call("end_session", session.node, session.number, self.actor.channel)
        if self.random.random() < 0.3:
            await self.actor.call("drop_node", "/other", True, self.actor.channel)
        await self.actor.call("create_node", "/other", "{}")

    async def guard(self) -> None:
        """Guard a lease in a transaction that takes a while."""
        if not self.world.highest:
            return
        (node, name), token = self.random.choice(list(self.world.highest.items()))
        level = self.random.choice(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"))
        await self.actor.execute(f"BEGIN ISOLATION LEVEL {level}")
        try:
            await self.actor.call("guard", node, name, token)
            await self.actor.execute("SELECT pg_sleep(0.002)")
        finally:
            await self.actor.execute("ROLLBACK")

    async def quarantine(self) -> None:
        """Begin a quarantine, which ends at once."""
        await self.actor.execute("SELECT SCHEMA.data_was_restored()")
        await self.actor.call("hello", False, False)
        for table in ("meta", "witness"):
            await self.actor.execute(f"UPDATE SCHEMA.{table} SET quarantined_until = 'epoch'")

    async def run(self, *, churn: bool, quarantines: bool) -> None:
        """Make random calls."""
        each: Callable[[], Coroutine[Any, Any, None]]
        choices = {
            self.attach: 2, self.operate: 8, self.acquire: 4, self.release: 3, self.change: 3,
            self.turn_over: 4, self.renew: 2, self.reattach: 1, self.take_over: 1, self.leave: 1,
            self.look_after: 2, self.administrate: 1, self.guard: 2,
        }  # fmt: skip
        if churn:
            choices = {self.churn: 1}
        if quarantines:
            choices[self.quarantine] = 1
        for _ in range(_CALLS):
            (each,) = self.random.choices(list(choices), list(choices.values()))
            try:
                await each()
            except psycopg.Error as error:
                code = error.sqlstate or ""
                if code not in _EXPECTED:
                    raise
                self.world.errors[code] = self.world.errors.get(code, 0) + 1


async def _watch(store: Store, world: _World, working: asyncio.Future[Any]) -> int:
    """Check the rows until the programs are done; return how often."""
    oracle = await store.actor(window=None)
    checks, latest = 0, dict[tuple[str, str], int]()
    while not working.done():
        assert await oracle.execute(_WRONG) == []
        for node, name, token in await oracle.execute(_LATEST):
            assert token >= latest.get((node, name), 0), f"a token of {name} fell to {token}"
            latest[node, name] = token
        checks += 1
    return checks


async def _maintain(store: Store, seed: int, working: asyncio.Future[Any]) -> int:
    """Rewrite and reindex the tables until the programs are done; return how often."""
    admin, choice = await store.actor(window=None), random.Random(seed).choice
    await admin.execute("SET deadlock_timeout = '20ms'")
    commands = 0
    while not working.done():
        await admin.execute(choice(maintenance("SCHEMA", choice(TABLES))))
        commands += 1
    return commands


@pytest.mark.parametrize("maintained", [False, True])
@pytest.mark.parametrize("churn", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_no_order_of_calls_breaks_the_rows(seed: int, churn: bool, maintained: bool) -> None:
    async with a_store() as store:
        world = _World(seed)
        actors = [await store.actor(window=None) for _ in range(_ACTORS)]
        for actor in actors:
            await actor.execute("SET statement_timeout = '20s'")  # none waits that long
            await actor.execute("SET deadlock_timeout = '20ms'")
        programs = [_Program(actor, world) for actor in actors]
        for program in programs:
            await program.attach_own()
        await actors[0].call("create_node", "/other", "{}")
        working = asyncio.gather(
            *(program.run(churn=churn, quarantines=not maintained) for program in programs)
        )
        checks, commands = await asyncio.gather(
            _watch(store, world, working),
            _maintain(store, seed, working) if maintained else asyncio.sleep(0, 0),
        )
        await working
        assert checks > 50
        assert commands > 10 or not maintained
        assert world.grants > 50
        assert world.errors.keys() <= _EXPECTED
        actor = actors[0]
        for ((number, token),) in [
            [each] for each in await actor.execute("SELECT id, token FROM SCHEMA.sessions")
        ]:
            await actor.call("leave", number, [token], False, actor.channel, False)
        assert await actor.execute(_WRONG) == []
        for table in ("requests", "removals", "former", "sessions"):
            assert await actor.execute(f"SELECT FROM SCHEMA.{table}") == []
