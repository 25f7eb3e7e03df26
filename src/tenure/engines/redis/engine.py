"""Engine of one namespace in one Redis, on one event loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis

from tenure.background import BackgroundQueue, BackgroundTimer
from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.commands.engine import CommandEngine, TakenOver, new_token
from tenure.engines._kit.commands.pipeline import WAITING
from tenure.engines._kit.commands.replies import config_from
from tenure.engines._kit.commands.session import SessionParameters
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.watchers import LocalWatches
from tenure.engines.contract import Attach, Finding
from tenure.engines.redis import values
from tenure.engines.redis.commands import (
    AttachedSession,
    Keys,
    LargeRead,
    ScriptCall,
    SingleCall,
    Word,
    keys_of,
    pack,
)
from tenure.engines.redis.confirming import Confirmer
from tenure.engines.redis.connecting import Server, moved_to
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.lua import SCRIPTS, Script
from tenure.engines.redis.namespace import NamespaceQuarantine, Witnesses, greet_namespace
from tenure.engines.redis.pages import RedisPages
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.engines.redis.session import ConfirmedSession, RedisSession
from tenure.engines.redis.url import RedisUrl
from tenure.errors import InvalidArgument, TenureError
from tenure.model import Capabilities, NodeDescription

_READS = frozenset({"names", "page", "queue"})
_CHANGES = frozenset({"create_node", "alter_node", "drop_node", "end_session", "evict"})


class _AttachCall(ScriptCall):
    """Call that attaches, with the engine's known epoch at the time of sending."""

    __slots__ = ("_epoch",)

    def __init__(
        self,
        epoch: Callable[[], str],
        script: Script,
        args: tuple[Word, ...],
        answered: Callable[[Any], None],
    ) -> None:
        super().__init__(script, None, args, answered)
        self._epoch = epoch

    def packed(self, keys: Keys) -> bytes:
        return pack(("EVALSHA", self.script.digest, *keys, *self.args, self._epoch()))


def _word(argument: Any) -> Word:
    if isinstance(argument, bool):
        return int(argument)
    if argument is None:
        return ""
    return argument if isinstance(argument, bytes) else str(argument)


_TIMEOUT = 2.0
_SCRIPT = SCRIPTS["renew"]
_NOTHING = object()


class RedisHeartbeat(HeartbeatThread[AttachedSession]):
    """The heartbeat thread of one engine."""

    expected = (OSError, hiredis.HiredisError)

    def __init__(self, address: RedisUrl, clock: Clock, witness: str) -> None:
        super().__init__("tenure-redis-heartbeat", clock.now, f"heartbeats to {address.url}")
        self._address = address
        self._witness = witness
        self._keys = keys_of(address.prefix)
        self._server: Server | None = None
        # The node that another one has named, in the thread, and the server of the loop then.
        self._moved: tuple[Server, Server] | None = None
        self._socket: socket.socket | None = None
        self._connected_to: Server | None = None
        self._reader: Any = None

    def serve(self, server: Server) -> None:
        """Use this server from now on. Called on the loop."""
        self._server = server

    def renew_now(self, requested: dict[AttachedSession, float]) -> None:
        """Renew these sessions, in the thread."""
        sessions = [each for each in requested if not each.over]
        if not sessions:
            return
        connection, server = self._connected()
        at = self._now()
        commands: list[tuple[Word, ...]] = [
            ("EVALSHA", _SCRIPT.digest, *self._keys, each.id, each.token, "", *each.held())
            for each in sessions
        ]
        connection.sendall(b"".join(map(pack, commands)))
        for session in sessions:
            reply = self._read(connection)
            if isinstance(reply, hiredis.ReplyError):
                there = moved_to(str(reply), server.place)
                if there is not None:
                    self._moved = server, server._replace(place=there)
                raise reply  # no script, no rights, no master: the loop's connection reports it
            if reply == 0 and not session.over:
                session.prove(at)

    def _connected(self) -> tuple[socket.socket, Server]:
        server = self._server
        assert server is not None
        if self._moved is not None and self._moved[0] is server:
            server = self._moved[1]
        if self._socket is not None and self._connected_to == server:
            return self._socket, server
        self.disconnect()
        tls, name = self._address.tls, self._address.server_name
        if isinstance(server.place, str):
            tls = None
        connection = self.connect(server.place, _TIMEOUT, tls, name or server.place[0])
        self._socket = connection
        self._connected_to = server
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        words: list[tuple[Word, ...]] = []
        if self._address.password:
            name = self._address.username
            words.append(("AUTH", *filter(None, (name, self._address.password))))
        if self._address.db:
            words.append(("SELECT", self._address.db))
        words += [("SCRIPT", "LOAD", text) for text in (self._witness, _SCRIPT.text)]
        connection.sendall(b"".join(map(pack, words)))
        for _ in words:
            reply = self._read(connection)
            if isinstance(reply, hiredis.ReplyError):
                raise reply
        return connection, server

    def _read(self, connection: socket.socket) -> Any:
        while (reply := self._reader.gets()) is _NOTHING:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply

    def disconnect(self) -> None:
        """Close the connection of the thread."""
        connection, self._socket = self._socket, None
        self._connected_to = None
        if connection is not None:
            self.drop(connection)


_POLL = 2.5
"""Longest time in seconds between two reads of state that a push should have reported."""
_SIGNS = 4
"""Checks of a silent connection before it is dropped."""


class RedisEngine(CommandEngine[RedisSession]):
    """The engine of one Redis namespace, as the contract defines it.

    Attributes:
        channel: the channel of pushes to its sessions.
        epoch: the epoch of the namespace, which changes with each loss of data.
        reconnector: the connection to the server.
        confirmer: the confirmation of grants by replicas; ``None`` without ``min_replicas``.
    """

    channel: str
    epoch: str
    reconnector: RedisReconnector

    heartbeat: RedisHeartbeat
    quarantine: NamespaceQuarantine

    def __init__(self, address: RedisUrl, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        timeout = address.connect_timeout + address.socket_timeout
        super().__init__(address.url, timeout, values, clock)
        self._address = address
        self.capabilities = Capabilities(
            resume=True,
            durable=True,
            longest_window=address.max_window,
            adopt=True,
            resize=True,
            rates=True,
        )
        self.confirmer: Confirmer | None = None
        self.channel = ""
        self.epoch = ""
        self.quarantine = NamespaceQuarantine(address, clock)
        self._pages = RedisPages(self)
        self._witnesses = Witnesses(address)
        self._channel = b""
        self._sessions: dict[str, RedisSession] = {}  # by each possible token
        self._missed_changes = False  # changes may have been made that the store did not publish
        self._published_until = 0  # by its clock, as far as this engine has seen to that
        self._polled = 0.0
        self._silent = 0
        self._proofs: list[tuple[RedisSession, float]] = []

    # Attaching

    def check_window(self, how: Attach) -> None:
        """Raise `InvalidArgument` if the window is invalid, or longer than the namespace allows."""
        super().check_window(how)
        longest = self._address.max_window
        if how.recovery_window > longest:
            raise InvalidArgument(
                f"{self.url}: a recovery window of {how.recovery_window:g} s is longer "
                f"than the longest one of the namespace, {longest:g} s. Write ?max_window="
                f"{how.recovery_window:g} in the URL of each program that uses the namespace",
                node=how.node,
            )

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        self._send_attach(
            "attach",
            (
                *(how.node, token, self.channel, int(how.recovery_window * 1e6)),
                *(how.description, how.liveness, how.key, rules.SESSIONS_PER_NODE),
            ),
            answered,
        )

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take over a session."""
        window = int(how.recovery_window * 1e6) if how.adopt else ""
        place = (how.node, number, secret, self.channel, how.key)
        self._send_attach("takeover", (*place, window), answered)

    def _send_attach(
        self, script: str, args: tuple[Word, ...], answered: Callable[[Any], None]
    ) -> None:
        self.reconnector.send(_AttachCall(lambda: self.epoch, SCRIPTS[script], args, answered))

    def read_take_over(self, number: int, reply: Any) -> TakenOver:  # noqa: ARG002
        """Decode the reply to a successful takeover."""
        return TakenOver(reply[1].decode(), reply[2] / 1e6, reply[3].decode())

    # Administration

    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Run a script."""
        if command == "describe":
            path, name, included = args
            words: tuple[Word, ...] = ("", path, included, *(() if name is None else (name,)))
            self.reconnector.send(LargeRead(SCRIPTS["describe"], None, words, answered))
            return
        words = tuple(map(_word, args))
        if command in _READS:
            self.reconnector.send(LargeRead(SCRIPTS[command], None, words, answered))
            return
        if command == "rate":
            once = SingleCall if args[2] == "refund" else ScriptCall
            self.reconnector.send(once(SCRIPTS["rate"], None, words, answered))
            return
        if command == "create_node":  # so that a repeated command recognises its own node
            words += (secrets.token_hex(8),)
        kind = ScriptCall if command in _CHANGES else LargeRead
        self.reconnector.send(kind(SCRIPTS["admin"], None, (command, *words), answered))

    def note_silence(self) -> TenureError | None:
        """Drop the connection; return the reason."""
        self.reconnector.drop("the server does not answer")
        return self.reconnector.failure

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        _, paths = await self.command("", "list_nodes", "")
        return sorted(path.decode() for path in paths)

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        _, config, sessions = await self.command(path, "describe_node", path)
        semaphores = len(await self._pages.all_names(path))
        return NodeDescription(path, config_from(config), sessions, semaphores)

    def pages(self) -> RedisPages:
        """Return the lists of the store in pages."""
        self.check_open()
        return self._pages

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        _, microseconds = await self.command("", "store_time", "")
        return int(microseconds) / 1e6

    @property
    def guarantees(self) -> str:
        """Limitations of this store, in a few sentences."""
        n = self._address.min_replicas
        confirmed = (
            f"Every grant is confirmed by {n} replica(s) before it is reported: it survives the "
            "loss of the master if one of those is promoted."
            if n
            else "Grants are not confirmed by replicas: a failover may lose the last ones, and "
            "grant them again to others while their holders still consider them held. Set "
            "min_replicas=N to have them confirmed."
        )
        return (
            f"{confirmed} Expiry follows Redis's wall clock: a step forward ends sessions early, "
            "which their holders learn when they renew. Fencing tokens rise through failovers and "
            "lost data as long as the clock is not set back."
        )

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`."""
        from tenure.engines.redis.doctor import examine  # not needed by a program

        return examine(self._address, self)

    # Opening and closing

    def prepare_opening(self) -> None:
        """Make the reconnector, the heartbeat thread and the timers, for `loop`."""
        self.channel = f"{self._address.prefix}p:{secrets.token_hex(8)}"
        self._channel = self.channel.encode()
        now = self.clock.now
        self._pushes = BackgroundQueue(self.loop, now, self._deliver, self.failures)
        self._timer = BackgroundTimer(self.loop, now, self._tick, self.failures)
        self.reconnector = RedisReconnector(self._address, self)
        self.heartbeat = RedisHeartbeat(self._address, self.clock, self._witnesses.mine)
        if self._address.min_replicas:
            self.confirmer = Confirmer(self._address, self._witnesses.mine)
        self.reconnector.subscribe(self.channel)
        reconnector = self.reconnector
        self._watches = LocalWatches[RedisSession](reconnector.subscribe, reconnector.unsubscribe)

    def stop(self) -> None:
        """Stop the timers, and drop all sessions and watches."""
        self._timer.cancel()
        self._sessions.clear()
        self._watches.clear()

    async def closed(self) -> None:
        """Close the connection of the confirmations."""
        if self.confirmer is not None:
            await self.confirmer.aclose()

    def all_sessions(self) -> set[RedisSession]:
        """Return the attached sessions."""
        return set(self._sessions.values())

    # Reports of the connections

    def pushed(self, channel: bytes, message: bytes) -> None:
        """Queue a published message for later in this iteration."""
        # Later in this turn: the answer that came before it has been handled by then.
        self._pushes.put(((channel, message),))

    def handle_push(self, message: bytes) -> None:
        """Handle a push that arrived with a reply."""
        if self._pushes.items:
            self._pushes.put(((self._channel, message),))
        else:
            self._deliver_own(message)

    def _deliver_own(self, message: bytes) -> None:
        kind, token, rest = message.decode().split(" ", 2)
        session = self._sessions.get(token)
        if session is not None:
            session.push(kind, rest)

    def _deliver(self, push: tuple[bytes, bytes]) -> None:
        channel, message = push
        if channel == self._channel:
            self._deliver_own(message)
        else:
            self._watches.report(channel.decode(), chr(message[0]))

    def lost(self, why: TenureError) -> None:
        """Report the loss of contact to the sessions."""
        if self.confirmer is not None:
            self.confirmer.disconnect()
        self.report_detached(why)

    async def prepare(self, connection: RedisConnection, server: Server) -> None:
        """Greet the namespace, and reattach every session."""
        greeting = await greet_namespace(
            connection, self._address, self._witnesses, server.run_id, self.epoch
        )
        self.epoch = greeting.epoch
        self.quarantine.greeted(greeting.left, greeting.reason, may_be_new=greeting.may_be_new)
        self.heartbeat.serve(server)
        if self.confirmer is not None:
            self.confirmer.serve(server)
        if self._watches:
            self._watched(await connection.run("watch"))
        self._proofs = []
        sessions = list(dict.fromkeys(self._sessions.values()))
        await asyncio.gather(*(self._reattach(connection, session) for session in sessions))
        self._set_timer(0.0 if greeting.left else _POLL)

    async def _reattach(self, connection: RedisConnection, session: RedisSession) -> None:
        token = new_token(session.attach_number + len(session.tokens))
        session.tokens.append(token)
        self._sessions[token] = session
        at = self.clock.now()
        renewed = session.awaits_proof
        args: tuple[str | int, ...] = (session.id, token, self.channel, int(renewed))
        reply = await connection.run("reattach", *args, *session.tokens[:-1])
        if session.reattached(reply):
            for former in session.tokens[:-1]:
                self._sessions.pop(former, None)
            session.tokens = [token]
            if renewed:
                self._proofs.append((session, at))

    def resumed(self) -> None:
        """Report to the sessions that contact is re-established."""
        for session, at in self._proofs:
            if not session.over:
                session.prove(at)
        self.report_attached()
        self._report_all()

    def _report_all(self) -> None:
        """Report changes to all watches, because some may have been missed."""
        self._missed_changes = False
        self._watches.report_all()

    # Time

    def expect(self, microseconds: int) -> None:
        """Check for expired sessions and requests after that time; never if it is negative."""
        if microseconds >= 0:
            self._set_timer(min(microseconds / 1e6 + 0.001, _POLL))

    def quarantined(self, left: float) -> None:
        """Record the remaining seconds of a quarantine; 0 outside of one."""
        if left > 0:
            self.quarantine.prolong(left)
        else:
            self.quarantine.end()

    def _set_timer(self, delay: float) -> None:
        self._timer.by(self.clock.now() + delay)

    def _tick(self) -> None:
        if not self._sessions and not self._watches:
            return
        now = self.clock.now()
        sessions = self.all_sessions()
        timeout = self.longest_silence(self._address.socket_timeout)
        if self.reconnector.is_up:
            self._silent = 0 if self.reconnector.check() else self._silent + 1
            if self._silent >= _SIGNS:
                self._silent = 0
                self.reconnector.drop("the server does not answer")
        if self.reconnector.is_up and not self._silent:
            watching = "1" if self._watches else "0"
            names: set[str] = set()
            if self.quarantine.left > -_POLL:
                names = {
                    f"{each.path}:{name}" for each in sessions for name in each.waiting_names()
                }
            self.reconnector.send(
                ScriptCall(SCRIPTS["tick"], None, (watching, *names), self._ticked)
            )
            if now >= self._polled + _POLL:
                self._polled = now
                for session in sessions:
                    session.look_up((WAITING,))
        self._set_timer(timeout / _SIGNS if self._silent or self.reconnector.is_up else _POLL)

    def _ticked(self, reply: Any) -> None:
        if isinstance(reply, list):
            _, epoch, due, quarantine, published, reason = reply
            if epoch.decode() != self.epoch:
                self.reconnector.drop("the server has lost its data")
                return
            self.quarantine.update(quarantine / 1e6, reason.decode())
            self.expect(due)
            if published:
                self._watched(published)
            if self._missed_changes:
                self._report_all()
        else:
            self._missed_changes = True

    # Sessions

    def send_end(self, number: int, tokens: Sequence[str], answered: Callable[[Any], None]) -> None:
        """End a session that has one of these tokens."""
        words: tuple[str | int, ...] = (number, tokens[0], "close", *tokens)
        self.reconnector.send(ScriptCall(SCRIPTS["leave"], None, words, answered))

    def new_session(self, given: SessionParameters) -> RedisSession:
        """Create the object of the attached session."""
        kind = RedisSession if self.confirmer is None else ConfirmedSession
        return kind(self, given)

    def admit(self, session: RedisSession) -> bool:
        """Add an attached session; return false if the engine has been closed."""
        self._sessions[session.token] = session
        if self._open:
            self.expect(int(session.window * 1e6))
        return self._open

    def forget(self, session: RedisSession) -> None:
        """Remove a session that has ended."""
        for token in session.tokens:
            self._sessions.pop(token, None)
        self._watches.forget(session)

    # Watches

    def watch(
        self, session: RedisSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; return a function that ends the watch."""
        channel = f"{self._address.prefix}c:{self.epoch}:{session.path}:{name}"
        end = self._watches.watch(channel, session, kinds, changed)
        self.reconnector.send(ScriptCall(SCRIPTS["watch"], None, (), self._watched))
        return end

    def _watched(self, reply: Any) -> None:
        if isinstance(reply, list):
            now, until = reply
            # Changes were not published after a pause of a minute, or a step of that clock.
            self._missed_changes = self._missed_changes or now > self._published_until > 0
            self._published_until = until
        else:
            self._missed_changes = True
