"""Engine of one PostgreSQL store: its connections, sessions, events and timers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import psycopg

from tenure.background import BackgroundQueue
from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands.engine import CommandEngine, CommandPages, TakenOver
from tenure.engines._kit.commands.pipeline import Operation, Statement, UnsentStatements
from tenure.engines._kit.commands.replies import first_word, repeated
from tenure.engines._kit.commands.session import SessionParameters
from tenure.engines._kit.quarantine import Quarantine
from tenure.engines._kit.reconnect import LONGEST_PAUSE, Reconnector
from tenure.engines._kit.url import selector_loop
from tenure.engines.contract import Attach, Finding, GuardStatement
from tenure.engines.postgresql import values
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.connecting import (
    OpenedConnections,
    SchemaDropped,
    greet,
    note_use,
    open_connections,
    reattach,
    unless_silent,
)
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.monitor import (
    WATCH_CHANNEL,
    PostgresHeartbeat,
    PostgresMonitor,
    PostgresWatches,
    look,
)
from tenure.engines.postgresql.session import PostgresSession, alive_in
from tenure.engines.postgresql.statements import DROPPED, Arguments, Call, Refusal, SingleCall, Sql
from tenure.engines.postgresql.url import PostgresUrl, explained
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.model import Capabilities

_REPORTING = frozenset({"drop_node", "end_session", "evict"})
"""Functions with the engine's channel as an argument, and with events in their replies."""


_log = logging.getLogger("tenure")

_MOST_KNOWN = 10_000
"""Names of which the engine remembers that they have a row."""
_PAUSE = 0.05
"""Seconds between two renewals of sessions, after `_AT_ONCE` of them."""
_AT_ONCE = 20


class PostgresEngine(CommandEngine[PostgresSession]):
    """The engine of one store, as the contract defines it.

    Attributes:
        channel: the channel of events for its sessions.
        epoch: at which the store had everything that this program knows.
        operate: sends an operation, with others, now or when there is a connection.
        refusal: the refusal of the latest renewal, as a clause, or empty.
        guarded: the tokens of leases that were guarded, while these are held.
    """

    channel: str

    heartbeat: PostgresHeartbeat
    reconnector: Reconnector[str, PostgresConnection]
    operate: Callable[[Operation[Any]], None]

    def __init__(self, address: PostgresUrl, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address
        self.guarded: set[int] = set()
        self.relaxed = address.relaxed
        self.capabilities = Capabilities(
            resume=True, durable=True, adopt=True, resize=True, rates=True
        )
        self.channel = ""
        self.epoch = self.refusal = ""
        self.connection: PostgresConnection | None = None
        self._waiting = UnsentStatements(self.new_batch)  # for a connection
        self.operate = self._waiting.operate
        self._sessions: dict[int, list[PostgresSession]] = {}
        self._watches = PostgresWatches(self.send, self.listen, address.schema, clock.now)
        self._listened: tuple[str, ...] = ()
        self._looks: dict[PostgresSession, dict[int, int]] = {}  # of this iteration of the loop
        self._renewals: dict[PostgresSession, float] = {}  # not sent yet, and their times
        self._renewals_from = 0.0  # when the next ones may be sent, if the pause is kept
        self._known: set[tuple[str, str]] = set()  # semaphores that have a row in the store
        self.quarantine = Quarantine(self.url, clock)

    # Attaching

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        words = (
            *(how.node, token, self.channel, how.recovery_window),
            *(values.to_text(how.description), how.liveness),
            *(how.key.hex(), rules.SESSIONS_PER_NODE),
        )
        self.send(Call("attach", words, answered))

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take a session over."""
        window = how.recovery_window if how.adopt else None
        place = (how.node, number, secret, self.channel, how.key.hex())
        self.send(Call("take_over", (*place, window), answered))

    def read_take_over(self, number: int, reply: Any) -> TakenOver:  # noqa: ARG002  it is in events
        """Decode the reply to a takeover that succeeded."""
        _, token, window, text, events = reply
        self.push_all(events)
        return TakenOver(token, window, values.from_text(text))

    # Administration

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Return the statement that guards a lease in a transaction of a caller."""
        self.guarded.add(token)
        return GuardStatement(
            f"SELECT {self._address.schema}.guard(?::text, ?::text, ?::bigint)",
            (values.to_text(node), values.to_text(name), token),
            "TN002",
        )

    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Call a function."""
        words = [values.to_text(each) if isinstance(each, str) else each for each in args]
        if command in _REPORTING:
            words.append(self.channel)
        elif command == "rate":
            words.append(self.relaxed)

        def replied(reply: Any) -> None:
            if command in _REPORTING and first_word(reply) == "ok":
                self.push_all(reply[-1])
            answered(repeated(command, reply) if call.may_have_run else reply)

        once = SingleCall if command == "rate" and args[2] == "refund" else Call
        call = once(command, (*words,), replied)
        self.send(call)

    def note_silence(self) -> TenureError | None:
        """Return the reason why the store does not answer, if it is known."""
        return self.trouble()

    def pages(self) -> CommandPages:
        """Return lists in pages."""
        self.check_open()
        return CommandPages(self)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        found: list[str] = await self.command("", "list_nodes")
        return found

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        return float(await self.command("", "store_time"))

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
            f"{durable}Grants are as durable as the database's commits. After a failover or the "
            "restore of a dump nothing is granted until every holder's recovery window has passed. "
            "A copied data directory that is started is not recognized: call data_was_restored(). "
            "Expiry follows the server's wall clock: a step forward ends sessions early, which "
            "their holders learn when they renew."
        )

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`."""
        from tenure.engines.postgresql.doctor import examine  # not needed by a program

        return examine(self._address)

    # Opening and closing

    def prepare_opening(self) -> None:
        """Make the reconnector, the heartbeat thread and the timers, for `loop`."""
        selector_loop("postgresql")
        self._name = secrets.token_hex(8)
        self.channel = f"tenure_{self._name}"
        self._pushes = BackgroundQueue(self.loop, self.clock.now, self._deliver, self.failures)
        self._monitor = PostgresMonitor(
            self, self._watches, self._address.socket_timeout, self.failures
        )
        self.heartbeat = PostgresHeartbeat(self._address, self.clock, self._monitor.examined)
        self.reconnector = Reconnector(self.url, [self.url], self)

    def stop(self) -> None:
        """Stop the timer, and drop all sessions and watches."""
        self._monitor.cancel()
        self._sessions.clear()
        self._watches.clear()

    async def closed(self) -> None:
        """Drop what waits for a connection."""
        self._waiting.take_all()

    # Sending

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""
        if self.connection is None:
            self._waiting.add(statement)
        else:
            self.connection.send(statement)

    def new_batch(self) -> Batch:
        """Return an empty batch."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        return Batch(
            self.channel, self.order_ids, self._known, relaxed=self.relaxed, pushed=self.push_all
        )

    def expire(self, sessions: list[int]) -> Statement:
        """Return the statement that ends sessions which have expired."""
        return Call("expire", (sessions, self.channel), self.push_all, alone=True)

    def look(self, session: PostgresSession, requests: dict[int, int]) -> None:
        """Look at requests of a session, with others of this iteration of the loop."""
        if not self._looks:
            self.loop.call_soon(self._send_looks)
        self._looks.setdefault(session, {}).update(requests)

    def _send_looks(self) -> None:
        looks, self._looks = self._looks, {}
        if looks := {each: requests for each, requests in looks.items() if not each.over}:
            self.send(look(looks))

    # Renewals

    def renew(self, session: PostgresSession) -> None:
        """Renew a session, with others of this iteration of the loop.

        Many sessions that are renewed one after the other wait for each other a little. A session
        is never renewed because another one is: its program may have died.

        Without a connection, and while a statement cannot complete, the heartbeat thread renews it.
        """
        if self.connection is None or self.connection.trouble:
            self.heartbeat.renew(session)
            return
        if not self._renewals:
            now = self.loop.time()
            self.loop.call_at(self._renewals_from - _AT_ONCE * _PAUSE, self._send_renewals)
            self._renewals_from = max(self._renewals_from, now) + _PAUSE
        self._renewals[session] = self.clock.now()

    def _send_renewals(self) -> None:
        due, self._renewals = self._renewals, {}
        sessions = {each.id: (each, at) for each, at in due.items() if not each.over}

        def args() -> Arguments:  # with the tokens as of the time of sending
            who = [[each.id, each.token, each.held()] for each, _ in sessions.values()]
            return self.relaxed, who, self.epoch

        if sessions:
            self.send(Call("renew", args, partial(self._renewed, sessions)))

    def _renewed(self, sessions: dict[int, tuple[PostgresSession, float]], reply: Any) -> None:
        refusal = ""
        if isinstance(reply, Refusal):
            refusal = f"{self.url} refuses to renew sessions: {reply}"
            if refusal != self.refusal:
                _log.warning("sessions could not be renewed: url=%s error=%s", self.url, reply)
        elif reply is None:
            self.lost_data()
        else:
            alive = dict(map(alive_in, reply))
            for number, (session, at) in sessions.items():
                missing = alive.get(number)
                if session.over:
                    continue
                if missing == []:
                    session.prove(at)
                else:
                    session.probe(missing or ())
        self.refusal = refusal

    # For the reconnector

    async def connect(self, host: str) -> PostgresConnection:  # noqa: ARG002  libpq knows them all
        """Open a connection, and attach every session again."""
        address = self._address
        try:
            opened = await open_connections(address)
            try:
                limit = address.connect_timeout * (1 if self.epoch else 2)
                await unless_silent(limit, self._prepare(opened), *opened.all)
            except BaseException:
                await opened.aclose()
                raise
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url} does not answer") from error
        except psycopg.Error as error:
            raise explained(address, error) from error
        options = address.schema, address.busy_poll
        direct = opened.notifications is opened.statements
        connection = PostgresConnection(opened.statements, self, *options, pooled=not direct)
        if direct:
            connection.listener = connection
        elif opened.notifications is not None:
            connection.listener = PostgresConnection(opened.notifications, self, *options)
        return connection

    async def _prepare(self, opened: OpenedConnections) -> None:
        try:
            greeting = await greet(opened, self._address, create=not self.epoch)
        except SchemaDropped as error:
            self._dropped(str(error))
            raise
        await note_use(opened, self._address.schema)
        self._known.clear()
        self.quarantined(greeting.left, greeting.reason)
        self.channel = f"{'poll' if opened.notifications is None else 'tenure'}_{self._name}"
        self._listened = tuple(self._watches)
        await opened.listen(self.channel, *self._listened)
        sessions = [each for each in self.all_sessions() if not each.over]
        epoch = greeting.epoch
        if sessions:
            place = self._address.schema, self.channel
            epoch = await reattach(opened, *place, sessions, self.epoch, self.clock.now)
        self.epoch = self.heartbeat.epoch = epoch

    def _dropped(self, why: str) -> None:
        """End the sessions of a store that was dropped, and what waits for a connection."""
        for session in self.all_sessions():
            session.end("the schema of the store was dropped")
        for statement in self._waiting.take_all():
            statement.answered(Refusal(DROPPED, why))

    def up(self, connection: PostgresConnection) -> None:
        """Send what waits for a connection, and look up what may have been missed."""
        self.connection = connection
        self.operate = connection.operate
        for channel in self._watches:
            if channel not in self._listened:  # watched since `_prepare`
                self._watches.listen_to(channel)
        for statement in self._waiting.take_all():
            connection.send(statement)
        self.report_attached()
        self._watches.report_all()
        self._monitor.note_waiter()

    def all_sessions(self) -> list[PostgresSession]:
        """Return the attached sessions."""
        return [each for group in self._sessions.values() for each in group]

    def down(self, connection: PostgresConnection, why: TenureError) -> None:
        """Keep the unanswered statements for the next connection."""
        self.connection = None
        self.refusal = ""
        self.operate = self._waiting.operate
        connection.drop(str(why))
        self._waiting.put_first(connection.take_unanswered())
        self.report_detached(why)

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts, in seconds."""
        return LONGEST_PAUSE

    # Reports of the connection

    def disconnected(self, connection: PostgresConnection, why: str) -> None:
        """Replace a connection that has ended."""
        current = self.connection
        if current is not None and connection is current.listener:
            current.drop(why)
        error = EngineUnavailable(f"{self.url}: {why or 'the server closed the connection'}")
        self.reconnector.lost(connection, error, first=None)

    def pushed(self, channel: str, event: str) -> None:
        """Handle a notification, later in this iteration of the loop."""
        self._pushes.put((event if channel == self.channel else f"{channel} {event}",))

    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle the events of a reply; there are none in a refusal.

        The operations that they lead to are one statement with those of the reply's receivers.
        """
        if not isinstance(events, Refusal):
            self._pushes.handle(events)

    def _deliver(self, event: str) -> None:
        kind, rest = event.split(" ", 1)
        if kind.startswith(WATCH_CHANNEL):
            self._watches.report(kind, rest)
            return
        number, _, rest = rest.partition(" ")
        for session in tuple(self._sessions.get(int(number), ())):
            if kind != "T" or rest in session.tokens:
                session.push(kind, rest)

    # Time

    def note_waiter(self) -> None:
        """Look soon for an expired session that holds a request up."""
        self._monitor.note_waiter()

    def note_ahead(self, ahead: int) -> None:
        """Note how many requests are ahead of one that waits."""
        self._monitor.note_ahead(ahead)

    def ticked(self, reply: dict[str, Any]) -> None:
        """Handle what a look has found."""
        self.push_all(reply["events"])
        self.quarantined(reply["quarantine"], reply["why"])
        if reply["epoch"] != self.epoch:
            self.lost_data()

    def lost_data(self) -> None:
        """Reattach all sessions, because the store has lost data since that was done."""
        if self.connection is not None:
            self.connection.drop("the store has lost data")

    def quarantined(self, left: float, reason: str = "") -> None:
        """Note the rest of a quarantine."""
        self.quarantine.update(left, reason)
        if left > 0:
            self._monitor.look_in(left + 0.01)

    # Sessions

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the reason why the store grants nothing at this moment, if it is known."""
        if self._open and self.connection is not None and self.connection.trouble:
            return EngineError(f"{self.url} {self.connection.trouble}")
        return super().trouble(name)

    def send_end(self, number: int, tokens: Sequence[str], answered: Callable[[Any], None]) -> None:
        """End a session that has one of these tokens."""

        def ended(reply: Any) -> None:
            if isinstance(reply, list):
                self.push_all(reply[1:])
                if reply[:1] == ["guarded"]:
                    reply = EngineError("a transaction that guards one of its leases has not ended")
            answered(reply)

        words = (number, list(tokens), False, self.channel, self.relaxed)
        self.send(Call("leave", words, ended))

    def new_session(self, given: SessionParameters) -> PostgresSession:
        """Create the object of the attached session."""
        return PostgresSession(self, given)

    def admit(self, session: PostgresSession) -> bool:
        """Add an attached session; false if the engine has been closed."""
        self._sessions.setdefault(session.id, []).append(session)
        self._monitor.begin()
        return self._open

    def forget(self, session: PostgresSession) -> None:
        """Remove a session that is over."""
        group = [each for each in self._sessions.pop(session.id, ()) if each is not session]
        if group:
            self._sessions[session.id] = group
        self._watches.forget(session)
        self.guarded.difference_update(session.handoff.order_ids.values())

    def watch(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        self._monitor.note_watch()
        return self._watches.begin(session, name, kinds, changed)

    def listen(self, sql: str, begun: Callable[[], None] | None = None) -> None:
        """Run ``LISTEN`` or ``UNLISTEN`` where notifications are received.

        Args:
            sql: the statement.
            begun: called afterwards if statements go another way, and may have overtaken it.
        """
        connection = self.connection
        if connection is not None and connection.listener is not None:
            apart = connection.listener is not connection
            connection.listener.send(Sql(sql, begun if apart else None))
