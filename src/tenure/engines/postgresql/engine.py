"""Engine of one PostgreSQL store: its connections, sessions, events and timers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from tenure.background import BackgroundQueue, BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.engines._kit.backoff import LONGEST_PAUSE
from tenure.engines._kit.reconnect import Reconnector
from tenure.engines._kit.session import close_sessions
from tenure.engines._kit.watchers import Watchers
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.postgresql import schema, values
from tenure.engines.postgresql.administration import Administration
from tenure.engines.postgresql.attaching import attach, new_token
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.heartbeat import PostgresHeartbeat
from tenure.engines.postgresql.session import OWNS, WAITING, PostgresSession
from tenure.engines.postgresql.statements import (
    Batch,
    Call,
    Operation,
    OrderIds,
    Refusal,
    SessionCall,
    Sql,
    Statement,
)
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import AuthenticationFailed, EngineError, EngineUnavailable, TenureError
from tenure.model import Capabilities

__all__ = ["PostgresEngine"]

_log = logging.getLogger("tenure")

_LOOK_SOON = 0.3
"""Seconds from a request that waits to the look for an owner that has expired."""
_LOOK = 10.0
"""Seconds between two looks at what an event should have reported, at the most."""
_SWEEP = 60.0
_MARGIN = 0.05
_MISSING = frozenset({"3F000", "42883"})  # schema, function
_CREATED_MEANWHILE = frozenset({"42P06", "23505"})


@dataclass(frozen=True, slots=True, eq=False)
class _LocalWatch:
    session: PostgresSession
    kinds: str
    changed: Callable[[], None]


class PostgresEngine(Administration):
    """The engine of one store, as the contract defines it.

    Attributes:
        order_ids: the highest order id that this program has seen.
        channel: the channel of events for its sessions.
        failures: of events and timers.
    """

    heartbeat: PostgresHeartbeat

    def __init__(self, address: PostgresUrl, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        super().__init__(address)
        self.clock = clock
        self.relaxed = address.relaxed
        self.capabilities = Capabilities(resume=True, durable=True, adopt=True)
        self.order_ids = OrderIds()
        self.channel = ""
        self.failures = Failures(f"looking after the sessions on {self.url}", _log)
        self._closing: asyncio.Task[None] | None = None
        self._thread = 0
        self._epoch = ""
        self._connection: PostgresConnection | None = None
        self._waiting: list[Statement] = []  # for a connection
        self._operations: list[Operation[Any]] = []
        self._sessions: dict[int, list[PostgresSession]] = {}
        self._watches: Watchers[str, PostgresSession, _LocalWatch] = Watchers()
        self._places: dict[str, tuple[str, str]] = {}  # node and name of each watched channel
        self._counters: dict[str, Any] = {}
        self._renewing: dict[PostgresSession, float] = {}
        self._looked = self._swept = 0.0
        self._quarantined_until = 0.0
        self._reason = ""

    @property
    def guarantees(self) -> str:
        """Risks that remain on this store, in a sentence or two."""
        durable = (
            "A crash of the server may lose the commits of the last second (durability=process); "
            "nothing is granted then until every holder has noticed. "
            if self.relaxed
            else ""
        )
        return (
            f"{durable}Grants are as durable as the database's commits. After a failover or a "
            "restored backup nothing is granted until every holder's recovery window has passed. "
            "Expiry follows the server's wall clock: a step forward ends sessions early, which "
            "their holders learn when they renew."
        )

    # Opening and closing

    async def open(self) -> None:
        """Connect to the store; create it if it does not exist."""
        if self._open:
            return
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.channel = f"tenure_{secrets.token_hex(8)}"
        self._closing = None
        now = self.clock.now
        self._pushes = BackgroundQueue(self.loop, now, self._deliver, self.failures)
        self._timer = BackgroundTimer(self.loop, now, self._tick, self.failures)
        self.heartbeat = PostgresHeartbeat(self._address, self.clock)
        self.reconnector = Reconnector(self.url, [self.url], self)
        try:
            await self.loop.create_task(self.reconnector.open())
        except BaseException:
            await self.reconnector.aclose()
            raise
        self._open = True

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self._open:
                return
            self._closing = self.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._open = False
        sessions = {each for group in self._sessions.values() for each in group}
        try:
            await close_sessions(sessions, self.url, lambda: self.reconnector.failure)
        finally:
            self._timer.cancel()
            self._sessions.clear()
            self._watches.clear()
            self.fail_awaited()
            await self.reconnector.aclose()
            self._waiting.clear()
            self._operations.clear()
            await self.heartbeat.aclose()

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        return threading.get_ident() == self._thread

    # Sending

    @property
    def is_up(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""
        if self._connection is None:
            self._queue_operations()
            self._waiting.append(statement)
        else:
            self._connection.send(statement)

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, with others."""
        if self._connection is None:
            self._operations.append(operation)
        else:
            self._connection.operate(operation)

    def _queue_operations(self) -> None:
        if self._operations:
            batch = self.new_batch()
            batch.operations, self._operations = self._operations, []
            self._waiting.append(batch)

    def new_batch(self) -> Batch:
        """Return an empty batch."""
        return Batch(self.channel, self.order_ids, relaxed=self.relaxed, pushed=self._push)

    def expire(self, sessions: list[int]) -> Statement:
        """Return the statement that ends sessions which have expired."""
        return Call("expire", (sessions, self.channel), self._expired)

    def _expired(self, reply: Any) -> None:
        if isinstance(reply, list):
            self.push_all(reply)

    def renew(self, session: PostgresSession) -> None:
        """Renew a session, with others that are renewed in the same iteration of the loop."""
        if not self._renewing:
            self.loop.call_soon(self._renew_all)
        self._renewing[session] = self.clock.now()

    def _renew_all(self) -> None:
        renewing, self._renewing = self._renewing, {}
        sessions = {each.id: each for each in renewing if not each.over}
        if sessions:
            at = min(renewing.values())
            who = [[each.id, each.token] for each in sessions.values()]
            renewed = partial(self._renewed, at, sessions)
            self.send(Call("renew", (self.relaxed, who), renewed))

    def _renewed(self, at: float, sessions: dict[int, PostgresSession], reply: Any) -> None:
        if isinstance(reply, Refusal):
            _log.warning("sessions could not be renewed: url=%s error=%s", self.url, reply)
            return
        alive = set(reply)
        for number, session in sessions.items():
            if session.over:
                continue
            if number in alive:
                session.prove(at)
            else:
                session.probe()

    def drop(self, why: str) -> None:
        """Drop the connection, and make another one."""
        if self._connection is not None:
            self._connection.drop(why)

    # For the reconnector

    async def connect(self, host: str) -> PostgresConnection:  # noqa: ARG002  libpq knows them all
        """Open a connection, and attach every session again."""
        address = self._address
        try:
            async with asyncio.timeout(address.connect_timeout * 2):
                opened = await psycopg.AsyncConnection.connect(
                    address.conninfo, autocommit=True, prepare_threshold=None
                )
                try:
                    await self._prepare(opened)
                except BaseException:
                    await opened.close()
                    raise
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url} does not answer") from error
        except psycopg.OperationalError as error:
            raise _unavailable(self.url, error) from error
        except psycopg.Error as error:
            raise EngineError(f"{self.url} cannot be used: {_line(error)}") from error
        return PostgresConnection(opened, address.schema, self, address.busy_poll)

    async def _prepare(self, connection: psycopg.AsyncConnection[Any]) -> None:
        version, epoch, left, reason = await self._greet(connection)
        if version != schema.VERSION:
            newer = "upgrade tenure here" if version > schema.VERSION else "upgrade the schema"
            raise EngineError(
                f"{self.url} has version {version} of the schema {self._address.schema}, and this "
                f"tenure needs {schema.VERSION}: {newer}"
            )
        if self._epoch not in ("", epoch):
            self._counters.clear()
        self._epoch = epoch
        self._reason = reason
        self.quarantined(left)
        await _execute(connection, f"LISTEN {self.channel}")
        for channel in list(self._watches):
            await _execute(connection, f"LISTEN {channel}")
        await self._reattach(connection)

    async def _greet(self, connection: psycopg.AsyncConnection[Any]) -> list[Any]:
        """Return what the store says of itself; create it if it does not exist."""
        hello = "hello"
        try:
            return await self._ask(connection, hello, self.relaxed)
        except psycopg.Error as error:
            if error.sqlstate not in _MISSING:
                raise
            if self._epoch:
                for session in [each for group in self._sessions.values() for each in group]:
                    session.end("the schema of the store was dropped")
                raise EngineError(
                    f"the schema {self._address.schema} of {self.url} was dropped: start the "
                    "programs that use it again"
                ) from error
        try:
            await _execute(connection, schema.creation(self._address.schema))
        except psycopg.Error as error:
            await _execute(connection, "ROLLBACK")
            if error.sqlstate == "42501":
                raise AuthenticationFailed(
                    f"{self.url} has no schema {self._address.schema}, and this account may not "
                    f"create it: {_line(error)}. Have an administrator run the SQL that "
                    "'tenure postgresql init --print-sql' prints"
                ) from error
            if error.sqlstate not in _CREATED_MEANWHILE:
                raise
        return await self._ask(connection, hello, self.relaxed)

    async def _ask(
        self, connection: psycopg.AsyncConnection[Any], function: str, *args: Any
    ) -> list[Any]:
        places = ",".join("%s" for _ in args)
        cursor = await connection.execute(
            f"SELECT {self._address.schema}.{function}({places})", args
        )
        row = await cursor.fetchone()
        assert row is not None
        found: list[Any] = json.loads(row[0])
        return found

    async def _reattach(self, connection: psycopg.AsyncConnection[Any]) -> None:
        sessions = [each for group in self._sessions.values() for each in group if not each.over]
        if not sessions:
            return
        who: list[Any] = []
        for session in sessions:
            token = new_token(session.attach_number)
            session.tokens.append(token)
            who.append([session.id, session.tokens[:-1], token])
        at = self.clock.now()
        answers = await self._ask(connection, "reattach", self.channel, json.dumps(who))
        for session, answer in zip(sessions, answers, strict=True):
            if session.over:
                continue
            if answer == "ok":
                session.token = session.tokens[-1]
                session.tokens = [session.token]
                session.prove(at)
            elif answer == "taken":
                session.superseded()
            else:
                session.end("the store does not know it any more")

    def up(self, connection: PostgresConnection) -> None:
        """Send what waits for a connection, and look up what may have been missed."""
        self._connection = connection
        self._queue_operations()
        waiting, self._waiting = self._waiting, []
        for statement in waiting:
            connection.send(statement)
        for session in self._all_sessions():
            session.events.attached()
            session.look_up((WAITING, OWNS))
        for channel in tuple(self._watches):
            self._changed(channel, "b")
        self._set_timer(1.0)

    def _all_sessions(self) -> list[PostgresSession]:
        return [each for group in self._sessions.values() for each in group]

    def down(self, connection: PostgresConnection, why: TenureError) -> None:
        """Keep the unanswered statements for the next connection."""
        self._connection = None
        connection.drop(str(why))
        self._waiting[:0] = connection.take_unanswered()
        for session in self._all_sessions():
            session.events.detached(why)

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts, in seconds."""
        return LONGEST_PAUSE

    # Reports of the connection

    def disconnected(self, connection: PostgresConnection, why: str) -> None:
        """Replace a connection that has ended."""
        error = EngineUnavailable(f"{self.url}: {why or 'the server closed the connection'}")
        self.reconnector.lost(connection, error, first=None)

    def pushed(self, channel: str, event: str) -> None:
        """Handle a notification, later in this iteration of the loop."""
        if channel == self.channel:
            self._pushes.put((event,))
        else:
            self._pushes.put((f"{channel} {event}",))

    def _push(self, event: str) -> None:
        self._pushes.put((event,))

    def push_all(self, events: Iterable[str]) -> None:
        """Handle events, later in this iteration of the loop."""
        self._pushes.put(events)

    def _deliver(self, event: str) -> None:
        kind, rest = event.split(" ", 1)
        if len(kind) > 1:
            self._changed(kind, rest)
            return
        number, _, rest = rest.partition(" ")
        for session in tuple(self._sessions.get(int(number), ())):
            session.push(kind, rest)

    # Time

    def note_waiter(self) -> None:
        """Look soon for an expired session that holds a request up."""
        self._looked = min(self._looked, self.clock.now() + _LOOK_SOON - _LOOK)
        self._set_timer(_LOOK_SOON)

    def quarantined(self, left: float) -> None:
        """Note the rest of a quarantine."""
        self._quarantined_until = self.clock.now() + left if left > 0 else 0.0
        if left > 0:
            self._set_timer(min(left, _LOOK_SOON))

    def _set_timer(self, delay: float) -> None:
        self._timer.by(self.clock.now() + delay)

    def _tick(self) -> None:
        sessions = self._all_sessions()
        if not sessions and not self._watches:
            return
        now = self.clock.now()
        connection = self._connection
        if connection is None:
            self._set_timer(1.0)
            return
        shortest = min((session.window for session in sessions), default=30.0)
        timeout = min(self._address.socket_timeout, max(shortest / 3, 0.3))
        if connection.silent_for > timeout:
            connection.drop("the server does not answer")
            return
        overdue = [each.id for each in sessions if now > each.proven_at + each.window + _MARGIN]
        if overdue and connection.silent_for == 0:
            self.send(self.expire(overdue))
        if now >= self._looked + _LOOK and connection.silent_for == 0:
            self._looked = now
            self._look(sessions)
        if now >= self._swept + _SWEEP and connection.silent_for == 0:
            if self._swept:
                self.send(Call("sweep", (self.channel,), partial(self._ticked, ())))
            self._swept = now
        self._set_timer(min(0.5, timeout / 2, max(self._looked + _LOOK - now, 0.01)))

    def _look(self, sessions: list[PostgresSession]) -> None:
        """Look for what has expired in the queues in which requests wait, and for changes."""
        places = {
            (session.path, values.to_text(session.names[request_id]))
            for session in sessions
            for request_id, state in session.requests.items()
            if state == WAITING
        }
        if places or self._watches:
            watched = [list(self._places[channel]) for channel in self._watches]
            asked = sorted(map(list, places.union(self._places.values())))
            ticked = partial(self._ticked, tuple(self._watches))
            self.send(Call("tick", (self.channel, asked, watched or None), ticked))
            for session in sessions:
                session.look_up((WAITING,))

    def _ticked(self, channels: tuple[str, ...], reply: Any) -> None:
        if not isinstance(reply, dict):
            return
        self.push_all(reply["events"])
        self._reason = reply["why"]
        self.quarantined(reply["quarantine"])
        if reply["due"] is not None:
            due = max(reply["due"], 0.0) + 0.01
            self._looked = min(self._looked, self.clock.now() + due - _LOOK)
            self._set_timer(due)
        for channel, counters in zip(channels, reply["seen"] or (), strict=False):
            if self._counters.get(channel) != counters:
                self._counters[channel] = counters
                self._changed(channel, "b")

    # Sessions

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store grants nothing at this moment, if it is known."""
        if not self._open:
            return None
        if self._connection is None:
            return self.reconnector.failure
        if self._connection.trouble:
            return EngineError(f"{self.url} refuses to commit: {self._connection.trouble}")
        left = self._quarantined_until - self.clock.now()
        if left > 0:
            return EngineError(f"{self.url} grants nothing for {left:.1f} s more: {self._reason}")
        return None

    async def attach(self, how: Attach, events: SessionEvents) -> PostgresSession:
        """Attach a session, or take one over."""
        self._opened()
        return await attach(self, how, events)

    def admit(self, session: PostgresSession) -> bool:
        """Add an attached session; false if the engine has been closed."""
        self._sessions.setdefault(session.id, []).append(session)
        if self._open:
            self._set_timer(1.0)
        return self._open

    def forget(self, session: PostgresSession) -> None:
        """Remove a session that is over."""
        group = self._sessions.get(session.id, [])
        if session in group:
            group.remove(session)
            if not group:
                del self._sessions[session.id]
        for channel, watch in self._watches.of(session):
            self._unwatch(channel, watch)

    # Watches

    def watch(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        place = f"{self._address.schema} {session.path} {name}"
        digest = hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()
        channel = f"tenure_q{digest}"
        watch = _LocalWatch(session, kinds, changed)
        if channel not in self._watches:
            self._places[channel] = (session.path, values.to_text(name))
            self.send(Sql(f"LISTEN {channel}"))
        self._watches.add(channel, session, watch)
        watched = partial(self._watched, channel)
        self.send(SessionCall("watch", session, (values.to_text(name), channel), watched))
        self._set_timer(1.0)
        return partial(self._unwatch, channel, watch)

    def _watched(self, channel: str, reply: Any) -> None:
        if isinstance(reply, list) and isinstance(reply[0], int):
            self._counters.setdefault(channel, reply)

    def _changed(self, channel: str, kind: str) -> None:
        for watch in self._watches.on(channel):
            if (kind == "b" or kind in watch.kinds) and not watch.session.over:
                watch.changed()

    def _unwatch(self, channel: str, watch: _LocalWatch) -> None:
        removed = self._watches.remove(channel, watch.session, watch)
        if removed and channel not in self._watches:
            self._places.pop(channel, None)
            self._counters.pop(channel, None)
            if self._connection is not None:
                self.send(Sql(f"UNLISTEN {channel}"))


async def _execute(connection: psycopg.AsyncConnection[Any], sql: str) -> None:
    await connection.execute(sql.encode())


def _line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())


def _unavailable(url: str, error: psycopg.OperationalError) -> TenureError:
    text = _line(error)
    if error.sqlstate in {"28000", "28P01"} or "password authentication failed" in text:
        return AuthenticationFailed(f"{url} refused the login: {text}")
    if "does not exist" in text and "database" in text:
        return EngineError(f"{url} cannot be used: {text}. Create the database first")
    return EngineUnavailable(f"{url}: {text}")
